"""Softmax over a window and the first tokens ("sinks"), HLA over all others, under one normaliser:

    out_t = (sum_near exp(s_tj - m_t) v_j + g n_t^(-1/2) sum_far (phi(q_t) . u_j) w_j) / (the same with v = w = 1)

s = scale q . k, m_t is the largest s_tj of the near tokens and n_t the number of far ones: the mass that softmax
attention gives to those grows much more slowly than a sum over them. It is three parts:

    local_softmax   near tokens: the output, and the weight of the largest score, which is all that joining needs
    the passes      the operator on tokens that have left the window (keys and values delayed by `window` tokens):
                    u = phi(k) for `linear` and `ahla`, else u = coefficient LA(e, phi(k), phi(k)) / LA(e, phi(k), 1)
                    + ridge e; w = v for `linear` and `hla2`, else w = (1 - value_mix) v + value_mix r, r being this
                    attention's own first-order output
    join            both under one normaliser

`windowed_attention` takes a sequence in blocks, `decode_step` one token. Between calls a head remembers its sinks, its
window as a ring and one state per pass: `LayerState`. With exact slots (`slots_hla`) those of the tokens that have left
the window are near too, and what the passes take are the tokens that are in neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .ops_hla import (
    OPERATORS,
    Block,
    Decay,
    Passes,
    accumulate,
    as_decays,
    block_weights,
    blocks_of,
    by_chunk,
    check,
    check_shapes,
    chunks_per_block,
    compute_dtype,
    document_runs,
    fold,
    is_one_graph,
    lengthen,
    no_autocast,
    of_heads,
    padding_of,
    passes_of,
    repeat_heads,
    run_blocks,
    safe_divide,
    shorten,
    split,
    unfold,
    use_fla,
)
from .slots_hla import SLOT_SCORES, Choice, Exchange, Slots, choose, compete, recall_error, received, stable_order, take


@dataclass(frozen=True)
class WindowSettings:
    """
    Args:
        window: the last tokens, itself included, that a token sees by softmax; at least 1.
        num_sinks: the first tokens that it sees by softmax.
        operator: what the others are seen by, one of `OPERATORS`.
        scale: of the softmax scores; default `d ** -0.5`.
        softcap: c in s = c tanh(scale q . k / c), for models that cap their scores; None leaves them.
        ridge: lambda in u, for `hla2` and `hla3`.
        chunk_size: tokens per chunk.
        signed: whether a mass may be negative. If not, it is at least 1 and nothing needs to keep it away from 0.
        slots: how many tokens that have left the window a key-value head still sees by softmax, those with the highest
            scores.
        slot_score: `attention`, what a token received from the queries that saw it in their window, by a softmax over
            window and sinks, all heads of the group together; or `recall`, the squared error of what a first-order
            state of all tokens from its document's first on gives back for its key.
    """

    window: int
    num_sinks: int = 0
    operator: str = "linear"
    scale: float | None = None
    softcap: float | None = None
    ridge: float = 0.0
    chunk_size: int = 64
    signed: bool = True
    slots: int = 0
    slot_score: str = "attention"

    def __post_init__(self):
        check(self.window >= 1, f"window must be at least 1, got {self.window}")
        check(self.num_sinks >= 0, f"num_sinks must be at least 0, got {self.num_sinks}")
        check(self.slots >= 0, f"slots must be at least 0, got {self.slots}")
        check(
            self.slot_score in SLOT_SCORES,
            f"slot_score {self.slot_score!r} is unknown; it must be one of {SLOT_SCORES}",
        )
        check(self.operator in OPERATORS, f"operator {self.operator!r} is unknown; it must be one of {OPERATORS}")

    @property
    def has_u(self) -> bool:
        return self.operator in ("hla2", "hla3")

    @property
    def has_r(self) -> bool:
        return self.operator in ("ahla", "hla3")

    @property
    def passes(self) -> list[str]:
        """The fields of `LayerState` that the operator's passes keep their state in, in their order."""
        return ["u"] * self.has_u + ["r"] * self.has_r + ["out"]


class FarParameters(NamedTuple):
    """What is learned of the far part.

    query_map, key_map: phi for q and for k, `[B, H, T, d] -> [B, H, T, f]`; gate: g, `[H]`; accumulator_map: e as a
    function of q, for `hla2` and `hla3`, None takes e = phi(k); coefficient: one per head of e, or a number; value_mix:
    one per query head, or a number; log_decay: as in the operators, per pass u, r, out as far as the operator has them;
    both_maps: phi of q and phi of k at once, if there is a faster way than two.
    """

    query_map: Callable[[Tensor], Tensor]
    key_map: Callable[[Tensor], Tensor]
    gate: Tensor
    accumulator_map: Callable[[Tensor], Tensor] | None = None
    coefficient: float | Tensor = 1.0
    value_mix: float | Tensor = 1.0
    log_decay: Decay | Sequence[Decay] = None
    both_maps: Callable[[Tensor, Tensor], Sequence[Tensor]] | None = None


class Tokens(NamedTuple):
    """`[B, H or Hkv, T, .]`: q, k, v as softmax sees them, far_q, far_k as the feature maps do."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor
    far_k: Tensor


class LayerState(NamedTuple):
    """What an HLA layer remembers, batch first, of a size that does not depend on the context; all zeros is no token.

    seen: real tokens of the current document, `[B]`. u, r, out: the fp32 states of the passes that make keys, make
    values and answer. With a window of W tokens and S sinks, in the dtype of the inputs: k, v `[B, Hkv, S + W, .]`,
    token number p at slot p if it is a sink, else at S + (p - S) mod W; far_k `[B, Hkv, W, .]`, far_q `[B, H, W, .]`
    and past_r `[B, H, W, dv]` (fp32) at slot (p - S) mod W. With M exact slots these have M more places, filled in
    order, and so has score `[B, Hkv, W + M, 1]` (fp32); slot_place `[B, Hkv, M, 1]` are the numbers of the tokens in
    them, counted from 1, and recall is the fp32 state behind that score. None is what the operator does not need.
    """

    seen: Tensor
    u: Tensor | None = None
    r: Tensor | None = None
    out: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    far_k: Tensor | None = None
    far_q: Tensor | None = None
    past_r: Tensor | None = None
    score: Tensor | None = None
    slot_place: Tensor | None = None
    recall: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerState":
        return LayerState(*(x if x is None else function(x) for x in self))


# ---- near, and the join ----------------------------------------


def near_scores(
    q: Tensor, k: Tensor, sinks: Tensor | None, place: Tensor, settings: WindowSettings
) -> tuple[Tensor, Tensor]:
    """Scores of each token over its document's sinks and its window, for N chunks of C tokens, and which it sees.

    q `[N, H, C, d]`, scaled; k `[N, Hkv, W + C, d]`, the chunk after the W tokens before it; sinks `[N, Hkv, S, d]` or
    None; place `[N, C]`, each token's number in its document. Returns `[N, Hkv, group, C, S + W + C]` and
    `[N, C, S + W + C]`.
    """
    window, size, place = settings.window, q.shape[2], place[..., None]
    distance = torch.arange(size, device=q.device)[:, None] + window - torch.arange(window + size, device=q.device)
    visible = (distance >= 0) & (distance < window) & (distance <= place)
    if sinks is not None:  # those that have left the window
        visible = torch.cat([torch.arange(sinks.shape[2], device=q.device) <= place - window, visible], -1)
        k = torch.cat([sinks, k], 2)
    return _scores(q, k, settings), visible


def _scores(q: Tensor, k: Tensor, settings: WindowSettings) -> Tensor:
    """`[N, Hkv, group, C, columns]`"""
    group = q.shape[1] // k.shape[1], q.shape[2]
    scores = (q.unflatten(1, (k.shape[1], group[0])).flatten(2, 3) @ k.mT).unflatten(2, group)
    return scores if settings.softcap is None else settings.softcap * (scores / settings.softcap).tanh()


def local_softmax(scores: Tensor, visible: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out `[N, H, C, dv]` and the weight of the largest score, 1 / sum exp(s - m), `[N, H, C, 1]`, for scores
    `[N, Hkv, group, C, columns]`, what is visible `[N, 1 or Hkv, C, columns]` and v `[N, Hkv, columns, dv]`."""
    weights = scores.masked_fill(~visible[:, :, None], -torch.inf).softmax(-1)
    out = (weights.flatten(2, 3) @ v).unflatten(2, (-1, scores.shape[3])).flatten(1, 2)
    return out, weights.amax(-1).flatten(1, 2)[..., None]


def join(near: Tensor, far: Tensor, weight: Tensor, signed: bool = True) -> Tensor:
    """The near output and the far sums, the last column of which is their mass, under one normaliser; `weight` is that
    of a far token, relative to the near mass."""
    far = weight * far
    out, mass = near + far[..., :-1], far[..., -1:] + 1
    return safe_divide(out, mass) if signed else out / mass


# ---- a sequence ----------------------------------------


class _Layout(NamedTuple):
    """Where tokens stand, padding sorted to the end: each one's number in its document `place [B, T]`, the index of its
    document's first token `start [B, T or 1]`, negative if that came before; which are real, and their documents."""

    place: Tensor
    start: Tensor
    real: Tensor | None
    runs: Tensor | None


class _Past(NamedTuple):
    """What one block hands to the next: the window in order, `[B, ., W, .]`, the states of the passes, the slots."""

    k: Tensor
    v: Tensor
    far_k: Tensor
    far_q: Tensor | None
    r: Tensor | None
    score: Tensor | None
    states: Sequence[Tensor | None]
    slots: Slots | None
    recall: Tensor | None


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, parameters: FarParameters, settings: WindowSettings, *,
    far_q: Tensor | None = None, far_k: Tensor | None = None, attention_mask: Tensor | None = None,
    segment_ids: Tensor | None = None, slot_scores: Tensor | None = None, initial_state: LayerState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LayerState]:  # fmt: skip
    """Softmax over the last `window` and the first `num_sinks` real tokens and the exact slots, HLA over all others,
    one normaliser.

    Args:
        q, k, v: `[B, H, T, d]`, `[B, Hkv, T, d]`, `[B, Hkv, T, dv]`, as softmax attention takes them.
        far_q, far_k: what the feature maps take instead of q and k, such as q and k before their rotation.
        attention_mask, segment_ids: as in the operators; a document has its own window, sinks and slots.
        slot_scores: `[B, Hkv, T]`, scores in place of those of `settings.slot_score`; no gradient flows into them.
        initial_state, return_state: a `LayerState`.
    Returns: `[B, H, T, dv]`; the output of a padded token is 0.
    Raises: ValueError naming the argument, its value and what is allowed.
    """
    check_shapes(q, k, v, attention_mask, segment_ids, settings.chunk_size)
    tokens = Tokens(q, k, v, q if far_q is None else far_q, k if far_k is None else far_k)
    check(
        tokens.far_q.shape[:3] == q.shape[:3] and tokens.far_k.shape[:3] == k.shape[:3],
        f"far_q and far_k must be shaped as q and k but for head_dim, got {tuple(tokens.far_q.shape)} and "
        f"{tuple(tokens.far_k.shape)} for {tuple(q.shape)} and {tuple(k.shape)}",
    )
    check(
        slot_scores is None or slot_scores.shape == k.shape[:3],
        f"slot_scores must be [B, Hkv, T] = {tuple(k.shape[:3])}, got {getattr(slot_scores, 'shape', slot_scores)}",
    )
    decays = as_decays(parameters.log_decay, len(settings.passes), q, k)
    state = _no_tokens(tokens, parameters, settings) if initial_state is None else initial_state
    mask, order, longer = attention_mask, None, is_one_graph(q)
    if longer:
        extra = padding_of(q.shape[2], _chunk_size(q, segment_ids is not None, settings))
        mask = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        slot_scores = None if slot_scores is None else slot_scores.to(compute_dtype(q))  # ONNX pads no bf16
        mask, slot_scores, segment_ids = (lengthen(x, extra) for x in (mask, slot_scores, segment_ids))
        tokens, decays = Tokens(*(lengthen(x, extra) for x in tokens)), [lengthen(x, extra) for x in decays]
    if attention_mask is not None:
        # Each row's padding moves to its end, where a causal operator never sees it.
        destination, order = _partition(mask)
        tokens = Tokens(*(_gather(x, order) for x in tokens))
        slot_scores = None if slot_scores is None else _gather(slot_scores[..., None], order)[..., 0]
        decays = [x if x is None or x.shape[2] == 1 else _gather(x[..., None], order)[..., 0] for x in decays]
    layout = _layout(order, mask, segment_ids, state.seen, tokens.q.shape[2])
    if mask is not None:
        decays = [x if x is None else x.masked_fill(~layout.real[:, None], 0) for x in decays]
    call = _Call(tokens, layout, decays, state, parameters, settings)
    call.give_scores(slot_scores, q.shape[2])
    out, past = run_blocks(call.step, call.blocks, _past(state, settings), recompute=q.shape[2] > 1)
    if order is not None:
        destination = shorten(destination, q.shape[2], 1) if longer else destination
        out = _gather(out, destination).masked_fill(attention_mask[:, None, :, None] == 0, 0)
    elif longer:
        out = shorten(out, q.shape[2], 2)
    return (out, call.state_after(past)) if return_state else out


def _partition(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token goes as the padding of its row moves to the end, and which token then stands where: `[B, T]`."""
    real = mask != 0
    before, index = real.cumsum(1), torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    destination = torch.where(real, before - 1, before[:, -1:] + index - before)
    return destination, index.scatter(1, destination, index)


def _chunk_size(q: Tensor, documents: bool, settings: WindowSettings) -> int:
    size = settings.chunk_size
    if not q.is_cuda:  # of the W + C keys that a chunk multiplies a token sees W
        size = min(size, max(16, settings.window // 2))
    # with documents, so that one of a chunk at most has sinks beyond the window
    return min(size, settings.window) if documents else size


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, N, d]`, index `[B, T]` of tokens: `[B, H, T, d]`."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _no_tokens(tokens: Tokens, parameters: FarParameters, settings: WindowSettings) -> LayerState:
    def empty(x: Tensor, slots: int, **options) -> Tensor:
        return x.new_zeros(x.shape[0], x.shape[1], slots, x.shape[3], **options)

    window, slots, dtype = settings.window, settings.slots, compute_dtype(tokens.q)
    keeps_q = settings.has_u and parameters.accumulator_map is not None
    state = LayerState(
        tokens.q.new_zeros(tokens.q.shape[0], dtype=torch.long),
        k=empty(tokens.k, settings.num_sinks + window + slots), v=empty(tokens.v, settings.num_sinks + window + slots),
        far_k=empty(tokens.far_k, window + slots), far_q=empty(tokens.far_q, window + slots) if keeps_q else None,
    )  # fmt: skip
    if settings.has_r:
        like = tokens.q[..., :1].expand(-1, -1, -1, tokens.v.shape[3])
        state = state._replace(past_r=empty(like, window + slots, dtype=dtype))
    if slots:
        like = tokens.k[..., :1]
        state = state._replace(
            score=empty(like, window + slots, dtype=dtype), slot_place=empty(like, slots, dtype=torch.long)
        )
    return state


def _layout(
    order: Tensor | None, mask: Tensor | None, segment_ids: Tensor | None, seen: Tensor, length: int
) -> _Layout:
    index = torch.arange(length, device=seen.device)
    runs, start, real = document_runs(segment_ids, mask), -seen[:, None], None
    if mask is not None:
        real = index < mask.bool().sum(1, keepdim=True)
    if order is not None and runs is not None:
        runs = runs.gather(1, order).cummax(1).values
    if runs is not None:
        begins = runs.diff(dim=1, prepend=runs[:, :1]) > 0
        start = torch.where(begins, index, start).cummax(1).values
    return _Layout((index - start).expand(len(seen), -1), start, real, runs)


def _past(state: LayerState, settings: WindowSettings) -> _Past:
    """The ring in order; what stands before a document's first token is never looked at."""
    window, sinks = settings.window, settings.num_sinks
    place = state.seen[:, None] - window + torch.arange(window, device=state.seen.device)
    ring = (place - sinks) % window
    slot = torch.where(place < sinks, place.clamp(min=0), sinks + ring)
    far = (x if x is None else _gather(x, ring) for x in (state.far_k, state.far_q, state.past_r, state.score))
    states = [getattr(state, x) for x in settings.passes]
    slots = _slots(state, settings) if settings.slots else None
    return _Past(_gather(state.k, slot), _gather(state.v, slot), *far, states, slots, state.recall)


def _slots(state: LayerState, settings: WindowSettings) -> Slots:
    """In order of age, as a sequence needs them."""
    count, place = settings.slots, state.slot_place
    full = (state.seen - settings.window - settings.num_sinks)[:, None, None, None]
    empty = torch.arange(count, device=place.device)[:, None] >= full
    order = stable_order(place.masked_fill(empty, torch.iinfo(place.dtype).max)[..., 0])
    kept = (state.k, state.v, state.far_k, state.far_q, state.past_r)
    kept = (x if x is None else take(x[:, :, -count:], order) for x in kept)
    score = state.score[:, :, -count:].masked_fill(empty, -torch.inf)
    return Slots(*kept, take(score, order), take(place, order))


class _Call:
    """One call of `windowed_attention`, cut into blocks; `step` is what is done for each."""

    def __init__(
        self, tokens: Tokens, layout: _Layout, decays: list[Tensor | None], state: LayerState,
        parameters: FarParameters, settings: WindowSettings,
    ):  # fmt: skip
        self.all_tokens, self.layout, self.state, self.settings = tokens, layout, state, settings
        q, dtype = tokens.q, compute_dtype(tokens.q)
        size = _chunk_size(q, layout.runs is not None, settings)
        self.dtype, self.parameters, self.by_fla = dtype, parameters, use_fla(q)
        self.scale = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
        self.gate = of_heads(parameters.gate.to(dtype), q.shape[1])
        self.blocks = blocks_of(q.shape[2], size, chunks_per_block(q, size))
        self.tokens = [Tokens(*x) for x in zip(*(split(x, self.blocks, 2) for x in tokens), strict=True)]
        self.decays = list(zip(*(split(x, self.blocks, 2) for x in decays), strict=True))
        self.sinks = self._sinks_of_blocks() if settings.num_sinks else [None] * len(self.blocks)

    def _sinks(self, start: Tensor) -> list[Tensor]:
        """The first tokens of the documents that start at `start [B, M]`: k and v, `[B, M, Hkv, S, .]`."""
        count = self.settings.num_sinks
        source = start[..., None] + torch.arange(count, device=start.device)
        old = (source < 0)[:, None, ..., None]
        source = source.clamp(0, self.all_tokens.k.shape[2] - 1).flatten(1)
        return [
            torch.where(old, kept[:, :, None, :count], _gather(new, source).unflatten(2, (-1, count))).transpose(1, 2)
            for kept, new in ((self.state.k, self.all_tokens.k), (self.state.v, self.all_tokens.v))
        ]

    def _sinks_of_blocks(self) -> list[list[Tensor]]:
        """Those of each chunk, `[B * chunks, Hkv, S, .]` per block."""
        if self.layout.runs is None:
            sinks = self._sinks(self.layout.start)
            return [[x.expand(-1, b.chunks, -1, -1, -1).flatten(0, 1) for x in sinks] for b in self.blocks]
        starts = (self.layout.start[:, b.start : b.start + b.length : b.chunk_size] for b in self.blocks)
        return [[x.flatten(0, 1) for x in self._sinks(start)] for start in starts]

    def give_scores(self, score: Tensor | None, length: int) -> None:
        self.scores, self.length = split(score, self.blocks, 2), length

    def _last(self, held: Tensor, real: Tensor | None) -> Tensor:
        """The next block's past: the last W of `[B, ., W + n, .]`, slot i of which holds the token that leaves the
        window when the i-th new one comes."""
        window = self.settings.window
        if real is None:
            return held[:, :, -window:].clone()  # a view would keep all slots
        return _gather(held, real.sum(1, keepdim=True) + torch.arange(window, device=held.device))

    def step(self, i: int, past: _Past) -> tuple[Tensor, _Past]:
        """Out `[B, H, n, dv]` of block i."""
        block, tokens, settings, parameters = self.blocks[i], self.tokens[i], self.settings, self.parameters
        far = Block(block.start, 1, block.length) if self.by_fla else block  # kernels make their own chunks
        part = slice(block.start, block.start + block.length)
        place = self.layout.place[:, part]
        real = None if self.layout.real is None else self.layout.real[:, part]
        far_tokens = place - (settings.window + settings.num_sinks + settings.slots - 1)  # n_t
        is_far = far_tokens > 0 if real is None else (far_tokens > 0) & real
        is_far, far_tokens = (by_chunk(x, far)[:, None, :, None] for x in (is_far, far_tokens))

        k, v, far_k = (torch.cat(pair, 2) for pair in zip(past[:3], (tokens.k, tokens.v, tokens.far_k), strict=True))
        far_q, pasts = None, [self._last(x, real) for x in (k, v, far_k)]
        near, choice, score, recall = self._near(i, past, k, v)
        near, largest = (unfold(x, block.chunks) for x in near) if self.by_fla else near

        def entering(held: Tensor, slots: Tensor | None) -> Tensor:
            """Of the tokens held, those that enter the states at each step."""
            held = held[:, :, : block.length]
            return held if choice is None else take(torch.cat([slots, held], 2), choice.absorbed)

        old = past.slots or Slots(*[None] * 7)
        query = parameters.query_map(tokens.far_q).to(self.dtype)
        key = parameters.key_map(entering(far_k, old.far_k)).to(self.dtype)
        query, key = fold(query, far.chunks), fold(key, far.chunks).masked_fill(~is_far, 0)
        accumulator, past_far_q = key, past.far_q
        if past.far_q is not None:
            far_q = torch.cat([past.far_q, tokens.far_q], 2)
            past_far_q = self._last(far_q, real)
            accumulator = parameters.accumulator_map(entering(far_q, old.far_q)).to(self.dtype)
            accumulator = fold(accumulator, far.chunks).masked_fill(~is_far, 0)
        value = fold(entering(v, old.v).to(self.dtype), far.chunks)

        with no_autocast(tokens.q):
            attend = passes_of(past.states, self.decays[i], far, self.layout.runs, self.by_fla)
            weight = self.gate * largest * far_tokens.clamp(min=1).to(self.dtype).rsqrt()
            r, past_r = None, past.r
            if settings.has_r:
                r = attend(int(settings.has_u), query, key, _with_mass(value, is_far))
                r = torch.cat([past.r, unfold(join(near, r, weight, settings.signed), far.chunks)], 2)
                past_r = self._last(r, real)
                value = _mix(value, fold(entering(r, old.r), far.chunks), parameters.value_mix)
            if settings.has_u:
                key = accumulate(attend, accumulator, key, parameters.coefficient, settings.ridge, normalize=True)
            out = attend(len(attend.states) - 1, query, key, _with_mass(value, is_far))
            out = join(near, out, weight, settings.signed)
        slots = None
        if choice is not None:
            slots = self._slots_after(past.slots, choice, Slots(k, v, far_k, far_q, r, score, place))
            score = self._last(score, real)
        out = unfold(out, far.chunks).to(v.dtype)
        return out, _Past(*pasts, past_far_q, past_r, score, attend.states, slots, recall)

    def _near(
        self, i: int, past: _Past, k: Tensor, v: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Choice | None, Tensor | None, Tensor | None]:
        """`local_softmax` of block i, who is in the slots, and what follows for the scores of the tokens held and the
        state behind them."""
        block, settings = self.blocks[i], self.settings
        size, chunks = block.chunk_size, block.chunks
        place = by_chunk(self.layout.place[:, block.start : block.start + block.length], block)
        sinks = self.sinks[i] and [x.to(self.dtype) for x in self.sinks[i]]
        near_k, near_v = (
            x.unfold(2, settings.window + size, size).permute(0, 2, 1, 4, 3).flatten(0, 1).to(self.dtype)
            for x in (k, v)
        )
        with no_autocast(k):
            q = fold(self.tokens[i].q.to(self.dtype) * self.scale, chunks)
            scores, visible = near_scores(q, near_k, sinks and sinks[0], place, settings)
            near_v = torch.cat([sinks[1], near_v], 2) if sinks else near_v
            if not settings.slots:
                return local_softmax(scores, visible[:, None], near_v), None, None, None
        score, recall = self._scores_held(i, past, scores, visible)
        with no_autocast(k):
            choice = self._choose(i, past.slots.score, score)
            slot_k, slot_v = (
                fold(take(torch.cat([old, x[:, :, : block.length]], 2), choice.start.flatten(2)), chunks)
                for old, x in ((past.slots.k, k), (past.slots.v, v))
            )
            alive = choice.alive & (place >= settings.window + settings.num_sinks)[:, None, :, None]
            in_slots, left = alive.split([settings.slots, size], -1)
            visible = visible[:, None] | pad(left, (settings.num_sinks, settings.window))
            scores = torch.cat([_scores(q, slot_k.to(self.dtype), settings), scores], -1)
            visible, near_v = torch.cat([in_slots, visible], -1), torch.cat([slot_v.to(self.dtype), near_v], 2)
            return local_softmax(scores, visible, near_v), choice, score, recall

    def _scores_held(self, i: int, past: _Past, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores of the tokens held, `[B, Hkv, W + n, 1]`, and the state behind `recall`."""
        block, settings, recall = self.blocks[i], self.settings, past.recall
        part = slice(block.start, block.start + block.length)
        real = None if self.layout.real is None else self.layout.real[:, part]
        if self.scores[i] is not None:
            new = self.scores[i].detach().to(self.dtype)[..., None]
        elif settings.slot_score == "recall":
            stored = self.layout.place[:, part] >= settings.num_sinks
            stored = by_chunk(stored if real is None else stored & real, block)[:, None, :, None]
            tokens, (weights,) = self.tokens[i], block_weights([None], block, self.layout.runs)
            with torch.no_grad():
                key = fold(self.parameters.key_map(tokens.far_k).to(self.dtype), block.chunks)
                value = fold(tokens.v.to(self.dtype), block.chunks)
                with no_autocast(key):
                    key, value = key.masked_fill(~stored, 0), _with_mass(value, stored)
                    new, recall = recall_error(key, value, weights, recall, block.chunks)
            new = unfold(new, block.chunks)
        else:
            new = past.score.new_zeros(*past.score.shape[:2], block.length, 1)
        held = torch.cat([past.score, new], 2)
        if self.scores[i] is None and settings.slot_score == "attention":
            real = None if real is None else by_chunk(real, block)
            held = held + received(scores.detach(), visible, real, settings.window, block.chunks)
        return held, recall

    def _choose(self, i: int, slot_score: Tensor, score: Tensor) -> Choice:
        block, settings = self.blocks[i], self.settings
        part = slice(block.start, block.start + block.length)
        place = self.layout.place[:, part]
        leaves = place >= settings.window + settings.num_sinks
        leaves = leaves if self.layout.real is None else leaves & self.layout.real[:, part]
        score = score[:, :, : block.length, 0].clamp(min=torch.finfo(score.dtype).min)
        score = score.masked_fill(~leaves[:, None], -torch.inf)
        kept = place[:, :: block.chunk_size] > settings.window + settings.num_sinks
        return choose(torch.cat([slot_score[..., 0], score], -1), kept, settings.slots, self.length)

    def _slots_after(self, old: Slots, choice: Choice, held: Slots) -> Slots:
        """`held`: the tokens of the window and the block, as `Slots`, but for the place of the latter."""
        kv_heads, length = held.k.shape[1], held.place.shape[1]
        place = held.place[:, None, :, None].expand(-1, kv_heads, -1, -1) - (self.settings.window - 1)
        kept = [
            x if x is None else take(torch.cat([before, x[:, :, :length]], 2), choice.end)
            for before, x in zip(old, held._replace(place=place), strict=True)
        ]
        kept = Slots(*kept)
        return kept._replace(score=kept.score.masked_fill(choice.empty[..., None], -torch.inf))

    def state_after(self, past: _Past) -> LayerState:
        """The window put back into its ring."""
        layout, window, sinks = self.layout, self.settings.window, self.settings.num_sinks
        length = layout.place.shape[1] if layout.real is None else layout.real.sum(1)
        seen = length - layout.start[:, -1]
        slots = torch.arange(window, device=seen.device)
        index = window - 1 - (seen[:, None] - 1 - sinks - slots) % window
        k, v, *far = (x if x is None else _gather(x, index) for x in past[:6])
        if sinks:
            firsts = self._sinks(layout.start[:, -1:])
            k, v = (torch.cat([x[:, 0], y], 2) for x, y in zip(firsts, (k, v), strict=True))
        states, window_state = dict(zip(self.settings.passes, past.states, strict=True)), [k, v, *far]
        if past.slots is not None:
            score = past.slots.score.clamp(min=torch.finfo(past.slots.score.dtype).min)
            kept = [*past.slots[:5], score]
            window_state = [
                x if x is None else torch.cat([x, y.to(x.dtype)], 2) for x, y in zip(window_state, kept, strict=True)
            ]
            states |= {"slot_place": past.slots.place, "recall": past.recall}
        names = ("k", "v", "far_k", "far_q", "past_r", "score")
        return LayerState(seen, **dict(zip(names, window_state, strict=True)), **states)


def _with_mass(value: Tensor, is_far: Tensor) -> Tensor:
    """Values of far tokens with a column of ones, whose sums are the mass."""
    return pad(value, (0, 1), value=1.0).masked_fill(~is_far, 0)


def _mix(value: Tensor, r: Tensor, value_mix: float | Tensor) -> Tensor:
    value_mix = of_heads(value_mix, r.shape[1])
    return (1 - value_mix) * repeat_heads(value, r.shape[1]) + value_mix * r


# ---- one token ----------------------------------------


class StepPlaces(NamedTuple):
    """Where the next token of each row goes: the same for all layers of a model that have the same window.

    slot, ring: of `LayerState`, `[B, 1, 1, 1]`; hidden: what is added to the scores, -inf where a slot is empty,
    `[B * Hkv, 1, S + W + M]`; is_far: 1 if a token enters the states, else 0, and far_weight: n_t^(-1/2),
    `[B, 1, 1, 1]`; left: how many tokens have left the window, `[B, 1, 1, 1]`; real: None, or `[B, 1, 1, 1]`, False at
    padding.
    """

    slot: Tensor
    ring: Tensor
    hidden: Tensor
    is_far: Tensor
    far_weight: Tensor
    one: Tensor
    left: Tensor
    real: Tensor | None


def step_places(state: LayerState, mask: Tensor | None, settings: WindowSettings) -> StepPlaces:
    """`mask [B, 1]`, None if no row is padding."""
    window, sinks, place = settings.window, settings.num_sinks, state.seen[:, None, None, None]
    dtype = compute_dtype(state.k)
    ring = (place - sinks) % window
    left = place - (window + sinks - 1)
    empty = torch.arange(sinks + window, device=place.device) > place
    if settings.slots:
        empty = torch.cat([empty, torch.arange(settings.slots, device=place.device) >= left], -1)
    hidden = torch.zeros(empty.shape, dtype=dtype, device=place.device).masked_fill_(empty, -torch.inf)
    far_tokens = left - settings.slots
    is_far, real = far_tokens > 0, None
    if mask is not None:
        real = mask[:, :, None, None] != 0
        is_far = is_far & real
    return StepPlaces(
        torch.where(place < sinks, place, sinks + ring), ring,
        hidden.expand(-1, state.k.shape[1], -1, -1).reshape(-1, 1, empty.shape[-1]),
        is_far.to(dtype), far_tokens.clamp(min=1).to(dtype).rsqrt(), torch.ones_like(left, dtype=dtype), left, real,
    )  # fmt: skip


class _StepPasses(Passes):
    """`attend` for one token; the states are written in place."""

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, decay = self.states[i], self.weights[i]
        heads = state.shape[1]
        if decay is not None:
            state.mul_(repeat_heads(decay.exp(), heads)[..., None])
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        state.flatten(0, 1).baddbmm_(k.flatten(0, 1).mT, v.flatten(0, 1))
        q = repeat_heads(q, max(q.shape[1], heads))
        return (q.reshape(len(q), heads, -1, q.shape[3]) @ state).reshape(*q.shape[:3], -1)


def _put(slots: Tensor, index: Tensor, new: Tensor, real: Tensor | None) -> None:
    """Writes one token per row into its slot, unless it is padding."""
    index = index.expand(-1, slots.shape[1], -1, slots.shape[3])
    slots.scatter_(2, index, new if real is None else torch.where(real, new, slots.gather(2, index)))


def _swap(slots: Tensor, index: Tensor, new: Tensor, real: Tensor | None) -> Tensor:
    """The same; returns what stood there."""
    old = slots.gather(2, index.expand(-1, slots.shape[1], -1, slots.shape[3]))
    _put(slots, index, new, real)
    return old


def _new_score(tokens: Tokens, state: LayerState, parameters: FarParameters, settings: WindowSettings, real) -> Tensor:
    """A token's score as it comes, `[B, Hkv, 1, 1]`; what it receives is added to it later."""
    if settings.slot_score == "attention":
        return torch.zeros_like(state.score[:, :, :1])
    dtype = state.score.dtype
    key = parameters.key_map(tokens.far_k).to(dtype)
    stored = state.seen[:, None, None, None] >= settings.num_sinks
    stored = stored if real is None else stored & real
    value = pad(tokens.v.to(dtype), (0, 1), value=1.0) * stored
    with no_autocast(key):
        score, recall = recall_error(key, value, None, state.recall, 1)
    state.recall.copy_(recall)
    return score


def decode_step(
    tokens: Tokens, state: LayerState, parameters: FarParameters, settings: WindowSettings, places: StepPlaces,
    slot_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`windowed_attention` of one token per row: out `[B, H, 1, dv]`. `state` is updated in place."""
    q, k, v, far_q, far_k = tokens
    batch, heads, dtype, real = q.shape[0], q.shape[1], places.is_far.dtype, places.real
    decays = as_decays(parameters.log_decay, len(settings.passes), q, k)
    if real is not None:
        decays = [x if x is None else x.masked_fill(~real[..., 0], 0) for x in decays]
    exchange = None
    if settings.slots:
        score = (
            slot_scores[..., None] if slot_scores is not None else _new_score(tokens, state, parameters, settings, real)
        )
        exchange = _exchange(state, score.to(dtype), settings, places)
    value = _leave(state.v, places.slot, v, real, exchange).to(dtype)
    if exchange is None:
        _put(state.k, places.slot, k, real)
    else:
        _leave(state.k, places.slot, k, real, exchange)
    far_k = _leave(state.far_k, places.ring, far_k, real, exchange)
    if parameters.both_maps is None:
        query, key = parameters.query_map(far_q).to(dtype), parameters.key_map(far_k).to(dtype)
    else:
        query, key = parameters.both_maps(far_q, far_k)
    key = accumulator = key * places.is_far
    if state.far_q is not None:
        far_q = _leave(state.far_q, places.ring, far_q, real, exchange)
        accumulator = parameters.accumulator_map(far_q).to(dtype) * places.is_far
    one = places.one.expand(-1, k.shape[1], -1, -1)

    with no_autocast(q):
        attend = _StepPasses([getattr(state, name) for name in settings.passes], decays)
        scores = _step_scores(q.to(dtype), state.k.to(dtype), places.hidden, settings)
        near, largest = _step_softmax(scores, state.v.to(dtype), heads)
        if exchange is not None and slot_scores is None and settings.slot_score == "attention":
            _receive(scores, state.score, real, settings)
        weight = of_heads(parameters.gate.to(dtype), heads) * largest * places.far_weight
        if settings.has_r:
            r = join(
                near, attend(int(settings.has_u), query, key, torch.cat([value, one], -1)), weight, settings.signed
            )
            r = _leave(state.past_r, places.ring, r, real, exchange)
            value, one = _mix(value, r, parameters.value_mix), places.one.expand(-1, heads, -1, -1)
        value = torch.cat([value, one], -1)
        if settings.has_u:
            key = accumulate(attend, accumulator, key, parameters.coefficient, settings.ridge, normalize=True)
            value = value * places.is_far
        out = join(near, attend(len(attend.states) - 1, query, key, value), weight, settings.signed)
        state.seen.add_(1 if real is None else real.view(batch))
    return (out if real is None else out * real).to(v.dtype)


def _leave(kept: Tensor, index: Tensor, new: Tensor, real: Tensor | None, exchange: Exchange | None) -> Tensor:
    """The new token takes the place of the one that leaves the window; returns what is absorbed then."""
    left = _swap(kept, index, new, real)
    return left if exchange is None else exchange(kept, left)


def _exchange(state: LayerState, score: Tensor, settings: WindowSettings, places: StepPlaces) -> Exchange:
    """Who of the slots and the token that leaves is absorbed; the new token's score and the leaving one's place are
    written."""
    left, real = places.left, places.real
    leaves = left > 0 if real is None else (left > 0) & real
    token_score = _swap(state.score, places.ring, score, real)
    exchange = compete(state.score[:, :, -settings.slots :], state.slot_place, token_score, left, leaves)
    exchange(state.score, token_score)
    exchange(state.slot_place, (left + settings.num_sinks).expand_as(exchange.slot))
    return exchange


def _step_scores(q: Tensor, k: Tensor, hidden: Tensor, settings: WindowSettings) -> Tensor:
    """`[B * Hkv, group, columns]`, of one token per row over all places."""
    dim, k = q.shape[-1], k.flatten(0, 1)
    scale = dim**-0.5 if settings.scale is None else settings.scale
    q = q.reshape(k.shape[0], -1, dim)
    if settings.softcap is None:
        return torch.baddbmm(hidden, q, k.mT, alpha=scale)
    return settings.softcap * (scale / settings.softcap * (q @ k.mT)).tanh() + hidden


def _step_softmax(scores: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`local_softmax` of one token per row."""
    weights, batch = scores.softmax(-1), v.shape[0]
    return (weights @ v.flatten(0, 1)).view(batch, heads, 1, -1), weights.amax(-1).view(batch, heads, 1, 1)


def _receive(scores: Tensor, kept: Tensor, real: Tensor | None, settings: WindowSettings) -> None:
    """Adds what the tokens of the window receive from one token's query to their scores."""
    sinks, window = settings.num_sinks, settings.window
    weights = scores[..., : sinks + window].softmax(-1)[..., sinks:].sum(1).view(*kept.shape[:2], window, 1)
    kept[:, :, :window] += weights if real is None else weights * real
