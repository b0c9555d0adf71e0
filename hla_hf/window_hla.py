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

`windowed_attention` takes a sequence in blocks, `decode_step` one token. Between calls a head remembers its sinks and
its window, each token in a place, and one state per pass: `LayerState`. With exact slots (`slots_hla`) those of the
tokens that have left the window are near too, and what the passes take are the tokens that are in neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .near_hla import near_softmax, use_triton
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
    product_dtype,
    repeat_heads,
    run_blocks,
    safe_divide,
    shorten,
    split,
    unfold,
    use_fla,
)
from .slots_hla import SLOT_SCORES, Choice, Slots, choose, recall_error, received, stable_order, take, take_by_chunk


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
    def places(self) -> int:
        """Of tokens that a token can see by softmax."""
        return self.num_sinks + self.window + self.slots

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


STAYS = torch.iinfo(torch.int32).max  # the number of a sink among others': never old enough to leave


class LayerState(NamedTuple):
    """What an HLA layer remembers, batch first, of a size that does not depend on the context; all zeros is no token.

    seen: real tokens of the current document, `[B]`. u, r, out: the fp32 states of the passes that make keys, make
    values and answer. With S sinks, a window of W tokens and M exact slots there are P = S + W + M places: k, v
    `[B, Hkv, P, .]`, and as sinks are not absorbed far_k `[B, Hkv, P - S, .]` and far_q `[B, H, P - S, .]`, all in the
    dtype of the inputs, past_r `[B, H, P - S, dv]` and score `[B, Hkv, P, 1]` in fp32. Token number p is at place p
    while there are such, later at that of the token which was absorbed as it came; so without slots at
    S + (p - S) mod W. number `[B, Hkv, P, 1]` says who is where, if there are slots; sinks, which stay, have `STAYS`.
    recall is the fp32 state behind that score. None is what the operator does not need.
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
    number: Tensor | None = None
    recall: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerState":
        return LayerState(*(x if x is None else function(x) for x in self))


# ---- near, and the join ----------------------------------------


def near_visible(place: Tensor, settings: WindowSettings) -> Tensor:
    """Which of its document's sinks, of the W tokens before its chunk of C and of the chunk a token sees, for N chunks:
    `[N, C, S + W + C]`; place `[N, C]`, each token's number in its document."""
    window, size, place = settings.window, place.shape[1], place[..., None]
    distance = (
        torch.arange(size, device=place.device)[:, None] + window - torch.arange(window + size, device=place.device)
    )
    visible = (distance >= 0) & (distance < window) & (distance <= place)
    if not settings.num_sinks:
        return visible
    sinks = torch.arange(settings.num_sinks, device=place.device) <= place - window  # those that have left the window
    return torch.cat([sinks, visible], -1)


def capped(scores: Tensor, settings: WindowSettings) -> Tensor:
    cap = settings.softcap
    return scores if cap is None else cap * (scores / cap).tanh()


def local_softmax(scores: Tensor, visible: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out `[N, H, C, dv]` and the weight of the largest score, 1 / sum exp(s - m), `[N, H, C, 1]`, for scores
    `[N, Hkv, group, C, columns]`, what is visible `[N, 1 or Hkv, C, columns]` and v `[N, Hkv, columns, dv]`."""
    hide = scores.masked_fill if scores.requires_grad else scores.masked_fill_  # in place where nothing is kept
    weights = hide(~visible[:, :, None], -torch.inf).softmax(-1)
    out = (weights.flatten(2, 3).to(v.dtype) @ v).unflatten(2, (-1, scores.shape[3])).flatten(1, 2)
    return out.to(weights.dtype), weights.amax(-1).flatten(1, 2)[..., None]


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
    if q.device.type == "cpu" and not settings.slots:  # of the W + C keys that a chunk multiplies a token sees W
        size = min(size, max(16, settings.window // 2))
    # with documents, so that one of a chunk at most has sinks beyond the window
    return min(size, settings.window) if documents else size


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, N, d]`, index `[B, T]` of tokens: `[B, H, T, d]`."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _no_tokens(tokens: Tokens, parameters: FarParameters, settings: WindowSettings) -> LayerState:
    places, far_places = settings.places, settings.places - settings.num_sinks

    def empty(x: Tensor, places: int, dtype: torch.dtype | None = None) -> Tensor:
        return x.new_zeros(x.shape[0], x.shape[1], places, x.shape[3], dtype=dtype)

    state = LayerState(
        tokens.q.new_zeros(tokens.q.shape[0], dtype=torch.long),
        k=empty(tokens.k, places), v=empty(tokens.v, places), far_k=empty(tokens.far_k, far_places),
    )  # fmt: skip
    if settings.has_u and parameters.accumulator_map is not None:
        state = state._replace(far_q=empty(tokens.far_q, far_places))
    if settings.has_r:
        like = tokens.q[..., :1].expand(-1, -1, -1, tokens.v.shape[3])
        state = state._replace(past_r=empty(like, far_places, compute_dtype(like)))
    if settings.slots:
        like, dtype = tokens.k[..., :1], compute_dtype(tokens.k)
        state = state._replace(score=empty(like, places, dtype), number=empty(like, places, torch.int32))
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
    """The window in order; what stands before a document's first token is never looked at."""
    sinks, window, slots, seen = settings.num_sinks, settings.window, settings.slots, state.seen[:, None, None]
    number = seen - window + torch.arange(window, device=seen.device)
    place, kept = sinks + (number - sinks) % window, None
    if slots:
        numbers, empty = state.number[..., 0].long(), torch.arange(settings.places, device=seen.device) >= seen
        # those in the slots by age, then empty places, then the window: by a number that rises in this order
        order = torch.where(numbers < seen - window, numbers, numbers + 2 * STAYS).masked_fill(empty, STAYS)
        held, place = (sinks + stable_order(order[..., sinks:])).split([slots, window], -1)
        kept = Slots(*_take(state, held, sinks))
        empty = torch.arange(slots, device=seen.device) >= seen - window - sinks
        kept = kept._replace(score=kept.score.masked_fill(empty[..., None], -torch.inf))
    tokens = _take(state, torch.where(number < sinks, number.clamp(min=0), place), sinks)
    return _Past(*tokens[:-1], [getattr(state, x) for x in settings.passes], kept, state.recall)


def _take(state: LayerState, place: Tensor, sinks: int) -> list[Tensor | None]:
    """k, v, far_k, far_q, past_r, score, number of the tokens at `place [B, 1 or Hkv, n]`."""
    far_place, fields = (place - sinks).clamp(min=0), (state.k, state.v, state.score, state.number)
    k, v, score, number = (x if x is None else take(x, place) for x in fields)
    far = (x if x is None else take(x, far_place) for x in (state.far_k, state.far_q, state.past_r))
    return [k, v, *far, score, number]


class _Call:
    """One call of `windowed_attention`, cut into blocks; `step` is what is done for each."""

    def __init__(
        self, tokens: Tokens, layout: _Layout, decays: list[Tensor | None], state: LayerState,
        parameters: FarParameters, settings: WindowSettings,
    ):  # fmt: skip
        self.all_tokens, self.layout, self.state, self.settings = tokens, layout, state, settings
        q, dtype = tokens.q, compute_dtype(tokens.q)
        size = _chunk_size(q, layout.runs is not None, settings)
        self.dtype, self.parameters, self.by_fla, self.by_triton = dtype, parameters, use_fla(q), use_triton(q)
        self.near_dtype = product_dtype(q)
        # sums of sums need more, float16 has too small a range
        narrow = settings.operator == "linear" and self.near_dtype == torch.bfloat16
        self.far_dtype = torch.bfloat16 if narrow else dtype
        self.scale = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
        self.gate = of_heads(parameters.gate.to(dtype), q.shape[1])
        self.blocks = blocks_of(q.shape[2], size, chunks_per_block(q, size))
        self.tokens = [Tokens(*x) for x in zip(*(split(x, self.blocks, 2) for x in tokens), strict=True)]
        self.decays = list(zip(*(split(x, self.blocks, 2) for x in decays), strict=True))
        self.place, self.real = split(layout.place, self.blocks, 1), split(layout.real, self.blocks, 1)
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
        """Those of each chunk, `[B, chunks, Hkv, S, .]` per block."""
        if self.layout.runs is None:
            sinks = self._sinks(self.layout.start)
            return [[x.expand(-1, b.chunks, -1, -1, -1) for x in sinks] for b in self.blocks]
        return [self._sinks(self.layout.start[:, b.start : b.start + b.length : b.chunk_size]) for b in self.blocks]

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
        place, real = self.place[i], self.real[i]
        far_tokens = place - (settings.places - 1)  # n_t
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
        query = parameters.query_map(tokens.far_q).to(self.far_dtype)
        key = parameters.key_map(entering(far_k, old.far_k)).to(self.far_dtype)
        query, key = fold(query, far.chunks), fold(key, far.chunks).masked_fill(~is_far, 0)
        accumulator, past_far_q = key, past.far_q
        if past.far_q is not None:
            far_q = torch.cat([past.far_q, tokens.far_q], 2)
            past_far_q = self._last(far_q, real)
            accumulator = parameters.accumulator_map(entering(far_q, old.far_q)).to(self.far_dtype)
            accumulator = fold(accumulator, far.chunks).masked_fill(~is_far, 0)
        value = fold(entering(v, old.v).to(self.far_dtype), far.chunks)

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
        size, columns = block.chunk_size, settings.num_sinks + settings.window
        place = by_chunk(self.place[i], block)
        visible = near_visible(place, settings)
        window = ([x.unfold(2, settings.window + size, size).permute(0, 2, 1, 4, 3)] for x in (k, v))
        near_k, near_v = (
            window if self.sinks[i] is None else ([x, *y] for x, y in zip(self.sinks[i], window, strict=True))
        )
        with no_autocast(k):
            q = fold((self.tokens[i].q.to(self.dtype) * self.scale).to(self.near_dtype), block.chunks)
            if not settings.slots:
                return self._softmax(q, near_k, near_v, visible[:, None]), None, None, None
            scores = self._scores(q, near_k) if self._by_attention(i) else None
        score, recall = self._scores_held(i, past, scores, visible)
        choice = self._choose(i, past.slots.score, score)
        slot_k, slot_v = (
            take_by_chunk(torch.cat([old, x[:, :, : block.length]], 2), choice.start)
            for old, x in ((past.slots.k, k), (past.slots.v, v))
        )
        alive = choice.alive & (place >= columns)[:, None, :, None]
        in_slots, left = alive.split([settings.slots, size], -1)
        visible = torch.cat([in_slots, visible[:, None] | pad(left, (settings.num_sinks, settings.window))], -1)
        with no_autocast(k):
            if scores is not None:
                scores = torch.cat([self._scores(q, [slot_k]), scores], -1)
            return self._softmax(q, [slot_k, *near_k], [slot_v, *near_v], visible, scores), choice, score, recall

    def _softmax(
        self, q: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        v = self._joined(values)
        if scores is None and self.by_triton:
            out, largest = near_softmax(q, self._joined(keys), v, visible, self.settings.softcap)
            return out.to(self.dtype), largest
        return local_softmax(self._scores(q, keys) if scores is None else scores, visible, v)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Of `[B, chunks, Hkv, ., d]` each, `[B * chunks, Hkv, columns, d]`."""
        return torch.cat(parts, 3).flatten(0, 1).to(self.near_dtype)

    def _scores(self, q: Tensor, keys: list[Tensor]) -> Tensor:
        """`[B * chunks, Hkv, group, C, columns]`, of q `[B * chunks, H, C, d]`, scaled."""
        k = self._joined(keys)
        group = q.shape[1] // k.shape[1], q.shape[2]
        scores = (q.unflatten(1, (k.shape[1], group[0])).flatten(2, 3) @ k.mT).unflatten(2, group)
        return capped(scores.to(self.dtype), self.settings)

    def _by_attention(self, i: int) -> bool:
        return self.scores[i] is None and self.settings.slot_score == "attention"

    def _scores_held(self, i: int, past: _Past, scores: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores of the tokens held, `[B, Hkv, W + n, 1]`, and the state behind `recall`."""
        block, settings, real, recall = self.blocks[i], self.settings, self.real[i], past.recall
        if self.scores[i] is not None:
            new = self.scores[i].detach().to(self.dtype)[..., None]
        elif settings.slot_score == "recall":
            stored = self.place[i] >= settings.num_sinks
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
        if self._by_attention(i):
            real = None if real is None else by_chunk(real, block)
            held = held + received(scores.detach(), visible, real, settings.window, block.chunks)
        return held, recall

    def _choose(self, i: int, slot_score: Tensor, score: Tensor) -> Choice:
        block, settings, place, real = self.blocks[i], self.settings, self.place[i], self.real[i]
        leaves = place >= settings.window + settings.num_sinks
        leaves = leaves if real is None else leaves & real
        score = score[:, :, : block.length, 0].clamp(min=torch.finfo(score.dtype).min)
        score = score.masked_fill(~leaves[:, None], -torch.inf)
        kept = place[:, :: block.chunk_size] > settings.window + settings.num_sinks
        return choose(torch.cat([slot_score[..., 0], score], -1), kept, settings.slots, self.length)

    def _slots_after(self, old: Slots, choice: Choice, held: Slots) -> Slots:
        """`held`: the tokens of the window and the block, as `Slots`, but for the numbers, those of the block."""
        kv_heads, length = held.k.shape[1], held.number.shape[1]
        number = held.number[:, None, :, None].expand(-1, kv_heads, -1, -1) - self.settings.window
        kept = [
            x if x is None else take(torch.cat([before, x[:, :, :length]], 2), choice.end)
            for before, x in zip(old, held._replace(number=number), strict=True)
        ]
        kept = Slots(*kept)
        return kept._replace(score=kept.score.masked_fill(choice.empty[..., None], -torch.inf))

    def state_after(self, past: _Past) -> LayerState:
        """All tokens held put back into their places."""
        layout, (window, sinks) = self.layout, (self.settings.window, self.settings.num_sinks)
        length = layout.place.shape[1] if layout.real is None else layout.real.sum(1)
        seen = length - layout.start[:, -1]
        index = torch.arange(window, device=seen.device)
        held, states = past[:6], dict(zip(self.settings.passes, past.states, strict=True))
        if past.slots is None:
            order = (window - 1 - (seen[:, None] - 1 - sinks - index) % window)[:, None]
        else:
            number = seen[:, None, None] - window + index
            empty = [past.slots.score[..., 0] == -torch.inf, (number < sinks).expand(-1, past.score.shape[1], -1)]
            order = stable_order(torch.cat(empty, -1).long())
            held = [
                x if x is None else torch.cat([y.to(x.dtype), x], 2) for x, y in zip(held, past.slots, strict=False)
            ]
            number = torch.cat([past.slots.number, number[..., None].expand_as(past.score)], 2)
            states |= {"number": pad(take(number, order), (0, 0, sinks, 0), value=STAYS).int(), "recall": past.recall}
        k, v, *far = (x if x is None else take(x, order) for x in held)
        if sinks:
            firsts = self._sinks(layout.start[:, -1:])
            k, v = (torch.cat([x[:, 0], y], 2) for x, y in zip(firsts, (k, v), strict=True))
        if far[-1] is not None:
            far[-1] = pad(far[-1].clamp(min=torch.finfo(far[-1].dtype).min), (0, 0, sinks, 0))
        names = ("k", "v", "far_k", "far_q", "past_r", "score")
        return LayerState(seen, **dict(zip(names, (k, v, *far), strict=True)), **states)


def _with_mass(value: Tensor, is_far: Tensor) -> Tensor:
    """Values of far tokens with a column of ones, whose sums are the mass."""
    return pad(value, (0, 1), value=1.0).masked_fill(~is_far, 0)


def _mix(value: Tensor, r: Tensor, value_mix: float | Tensor) -> Tensor:
    value_mix = of_heads(value_mix, r.shape[1])
    return (1 - value_mix) * repeat_heads(value, r.shape[1]) + value_mix * r


# ---- one token ----------------------------------------


class StepTokens(NamedTuple):
    """The next token of each row, `[B, 1, 1, 1]`: the same for all layers that have the same window and sinks.

    number: its own, and as a float, `count`; kept_number: the same, `STAYS` for a sink; newest_left: that of the token
    that leaves the window; ring: its place without slots, far_ring: the same without sinks. hidden: what is added to
    the scores, -inf where a place is empty, `[B * Hkv, 1, most places]`; real: None, or False at padding.
    """

    number: Tensor
    count: Tensor
    kept_number: Tensor
    newest_left: Tensor
    ring: Tensor
    far_ring: Tensor
    one: Tensor
    hidden: Tensor
    real: Tensor | None


class StepPlaces(NamedTuple):
    """The same for all layers that have as many slots too. full: whether a token is absorbed, is_far: 1 or 0 for the
    same, far_weight: n_t^(-1/2), `[B, 1, 1, 1]`; hidden of as many places as there are."""

    token: StepTokens
    full: Tensor
    is_far: Tensor
    far_weight: Tensor
    hidden: Tensor


def step_tokens(state: LayerState, mask: Tensor | None, settings: WindowSettings, places: int) -> StepTokens:
    """`mask [B, 1]`, None if no row is padding; `places`: the most that a layer has."""
    sinks, dtype = settings.num_sinks, compute_dtype(state.k)
    number = state.seen.clone()[:, None, None, None]  # the first layer counts on before the second looks
    hidden = torch.zeros(len(number), 1, 1, places, dtype=dtype, device=number.device)
    hidden.masked_fill_(torch.arange(places, device=number.device) > number, -torch.inf)
    is_sink, far_ring = number < sinks, (number - sinks) % settings.window
    return StepTokens(
        number, number.to(dtype), number.masked_fill(is_sink, STAYS).int(), (number - settings.window).int(),
        torch.where(is_sink, number, sinks + far_ring), far_ring, torch.ones_like(number, dtype=dtype),
        hidden.expand(-1, state.k.shape[1], -1, -1).flatten(0, 1),
        None if mask is None else mask[:, :, None, None] != 0,
    )  # fmt: skip


def step_places(token: StepTokens, settings: WindowSettings) -> StepPlaces:
    far_tokens = token.count - (settings.places - 1)
    full = far_tokens > 0
    is_far = full if token.real is None else full & token.real
    hidden = token.hidden[..., : settings.places]
    return StepPlaces(token, full, is_far.to(token.one.dtype), far_tokens.clamp(min=1).rsqrt(), hidden)


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


def _put(kept: Tensor, place: Tensor, new: Tensor, real: Tensor | None) -> None:
    """Writes one token per row into its place `[B, 1 or Hkv, 1, 1]`, unless it is padding."""
    place = _expand(place, kept)
    kept.scatter_(2, place, new if real is None else torch.where(real, new, kept.gather(2, place)))


def _swap(kept: Tensor, place: Tensor, new: Tensor, real: Tensor | None) -> Tensor:
    """The same; returns what stood there."""
    old = kept.gather(2, _expand(place, kept))
    _put(kept, place, new, real)
    return old


def _expand(place: Tensor, kept: Tensor) -> Tensor:
    heads = kept.shape[1]
    return (place if place.shape[1] == 1 else repeat_heads(place, heads)).expand(-1, heads, -1, kept.shape[3])


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


def _absorbed(state: LayerState, places: StepPlaces) -> Tensor:
    """The place of the token that is absorbed: of those that have left the window with the lowest score the newest."""
    score = state.score.masked_fill(state.number > places.token.newest_left, torch.inf)
    newest = state.number.masked_fill(score != score.amin(2, keepdim=True), -1).argmax(2, keepdim=True)
    return torch.where(places.full, newest, places.token.number)


def decode_step(
    tokens: Tokens, state: LayerState, parameters: FarParameters, settings: WindowSettings, places: StepPlaces,
    slot_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`windowed_attention` of one token per row: out `[B, H, 1, dv]`. `state` is updated in place."""
    q, k, v, far_q, far_k = tokens
    batch, heads, dtype, real = *q.shape[:2], places.is_far.dtype, places.token.real
    place, far_place = places.token.ring, places.token.far_ring
    decays = as_decays(parameters.log_decay, len(settings.passes), q, k)
    if real is not None:
        decays = [x if x is None else x.masked_fill(~real[..., 0], 0) for x in decays]
    if settings.slots:
        place = _absorbed(state, places)
        far_place = (place - settings.num_sinks).clamp_(min=0)
        score = _new_score(tokens, state, parameters, settings, real) if slot_scores is None else slot_scores[..., None]
        _put(state.score, place, score.to(dtype), real)
        _put(state.number, place, places.token.kept_number.expand_as(place), real)
    value = _swap(state.v, place, v, real).to(dtype)
    _put(state.k, place, k, real)
    far_k = _swap(state.far_k, far_place, far_k, real)
    if parameters.both_maps is None:
        query, key = parameters.query_map(far_q).to(dtype), parameters.key_map(far_k).to(dtype)
    else:
        query, key = parameters.both_maps(far_q, far_k)
    key = accumulator = key * places.is_far
    if state.far_q is not None:
        far_q = _swap(state.far_q, far_place, far_q, real)
        accumulator = parameters.accumulator_map(far_q).to(dtype) * places.is_far
    one = places.token.one.expand(-1, k.shape[1], -1, -1)

    with no_autocast(q):
        attend = _StepPasses([getattr(state, name) for name in settings.passes], decays)
        near_dtype = product_dtype(q)
        scores = _step_scores(q.to(near_dtype), state.k.to(near_dtype), places.hidden, settings)
        near, largest = _step_softmax(scores, state.v.to(near_dtype), heads)
        if settings.slots and slot_scores is None and settings.slot_score == "attention":
            _receive(scores, state, places.token)
        weight = of_heads(parameters.gate.to(dtype), heads) * largest * places.far_weight
        if settings.has_r:
            r = join(
                near, attend(int(settings.has_u), query, key, torch.cat([value, one], -1)), weight, settings.signed
            )
            r = _swap(state.past_r, far_place, r, real)
            value, one = _mix(value, r, parameters.value_mix), places.token.one.expand(-1, heads, -1, -1)
        value = torch.cat([value, one], -1)
        if settings.has_u:
            key = accumulate(attend, accumulator, key, parameters.coefficient, settings.ridge, normalize=True)
            value = value * places.is_far
        out = join(near, attend(len(attend.states) - 1, query, key, value), weight, settings.signed)
        state.seen.add_(1 if real is None else real.view(batch))
    return (out if real is None else out * real).to(v.dtype)


def _step_scores(q: Tensor, k: Tensor, hidden: Tensor, settings: WindowSettings) -> Tensor:
    """`[B * Hkv, group, columns]`, of one token per row over all places."""
    dim, k = q.shape[-1], k.flatten(0, 1)
    scale = dim**-0.5 if settings.scale is None else settings.scale
    q = q.reshape(k.shape[0], -1, dim)
    if settings.softcap is None and q.dtype == hidden.dtype:
        return torch.baddbmm(hidden, q, k.mT, alpha=scale)
    return capped(scale * (q @ k.mT).to(hidden.dtype), settings) + hidden


def _step_softmax(scores: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`local_softmax` of one token per row."""
    weights, batch = scores.softmax(-1), v.shape[0]
    out = (weights.to(v.dtype) @ v.flatten(0, 1)).to(weights.dtype)
    return out.view(batch, heads, 1, -1), weights.amax(-1).view(batch, heads, 1, 1)


def _receive(scores: Tensor, state: LayerState, token: StepTokens) -> None:
    """Adds what the tokens of the window receive from one token's query to their scores."""
    left = (state.number <= token.newest_left).flatten(0, 1).mT
    weights = scores.masked_fill(left, -torch.inf).softmax(-1).sum(1).view_as(state.score)
    state.score.add_(weights if token.real is None else weights * token.real)
