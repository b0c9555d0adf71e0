"""Higher-order linear attention (Zhang et al., arXiv 2510.27258) from one primitive.

    LA(q, k, v; g)_t = sum_{j<=t} g^(t-j) (q_t . k_j) v_j          causal linear attention with decay g

    causal_linear_attention   LA(q, k, v)
    hla2  ((W W^T) . L) V     LA(q, u, v)    u = LA(e, k, k), e = q
    ahla  ((W W) . L) V       LA(q, k, r)    r = LA(q, k, v)
    hla3  ((W W^T) . L) W V   LA(q, u, r)

with W = L . (Q K^T) and L lower triangular. Each operator is written once, as that stack, over a function
`attend(i, q, k, v)` that evaluates pass i on a block of tokens and carries its state `S = sum k v^T` (fp32).
The chunk form runs the stack on blocks of `chunk_size` tokens, the recurrent form on blocks of one token;
the dense form is the definition above as T x T matrices.

`windowed_attention` joins the same operators, over tokens that have left a window, with softmax attention
over the window and the first tokens ("sinks") under one normaliser.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


FORMS = ("dense", "recurrent", "chunk", "scan")
OPERATORS = ("linear", "ahla", "hla2", "hla3")
FEATURE_MAPS = ("identity", "softmax", "elu", "relu", "hedgehog")
EPS = 1e-6
MAX_LOG_SIZE = 8.0

Decay = None | float | Tensor
State = tuple[Tensor, ...]


def feature_map(name: str, x: Tensor, weight: Tensor | None = None, size: Tensor | None = None) -> Tensor:
    """The features phi(x) of queries or keys.

    Args:
        name: one of `identity`, `softmax` (over head_dim), `elu` (elu(x) + 1), `relu`, or `hedgehog`: softmax of
            +y and of -y, y = x @ weight per head (Zhang et al., arXiv 2402.04347), computed in fp32. With `size` they
            are multiplied by exp(x . size), as softmax alone would give every key the same weight.
        x: `[B, H, T, d]`.
        weight, size: `[H, d, f]` and `[H, d]`, for `hedgehog` only.
    Returns: `[B, H, T, d]`, or `[B, H, T, 2 f]` for `hedgehog`.
    """
    if name == "identity":
        return x
    if name == "softmax":
        return x.softmax(-1, dtype=_compute_dtype(x))
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "relu":
        return x.relu()
    if name == "hedgehog":
        y = (x @ weight.to(x.dtype)).to(_compute_dtype(x))
        features = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
        if size is None:
            return features
        log_size = (x @ size.to(x.dtype)[..., None]).to(features.dtype)
        return features * log_size.clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp()
    raise ValueError(f"feature map {name!r} is unknown; it must be one of {FEATURE_MAPS}")


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, Hkv, ...]` to `[B, H, ...]`, each head repeated for its group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_heads(x: float | Tensor, heads: int) -> float | Tensor:
    """A number, or one per head `[Hkv or H]`, to be multiplied with `[B, H, T, d]`."""
    return _repeat_heads(x[None, :, None, None], heads) if isinstance(x, Tensor) and x.ndim == 1 else x


def safe_divide(x: Tensor, mass: Tensor) -> Tensor:
    """x / mass, with |mass| at least `EPS` and its sign kept: signed features give a mass of either sign."""
    return x / torch.where(mass < 0, mass.clamp(max=-EPS), mass.clamp(min=EPS))


# ---- the primitive on one block of tokens ----------------------------------------


class _Weights(NamedTuple):
    """What decays and document boundaries multiply within a chunk of C tokens; `heads` is that of the decay, or 1."""

    between: Tensor  # [N, heads, C, C]: from token j to token t, 0 for j > t
    from_start: Tensor  # [N, heads, C]: from the chunk's start to token t, t included
    to_end: Tensor  # [N, heads, C]: from token t, t not included, to the chunk's end
    across: Tensor  # [N, heads]: over the whole chunk


def _chunk_weights(log_decay: Tensor | None, length: int, runs: Tensor | None, before: Tensor | None):
    """log_decay None or `[N or 1, heads, C or 1]`; runs `[N, C]` number each token's document, before `[N]` is that of
    the state. None if nothing decays and there is one document. Every exponent is at most 0: nothing can overflow."""
    if log_decay is None and runs is None:
        return None
    if log_decay is None:
        log_decay = torch.zeros(1, 1, length, device=runs.device)
    total = log_decay.expand(*log_decay.shape[:2], length).cumsum(-1)
    above = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    weights = _Weights(
        (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp(),
        total.exp(),
        (total[..., -1:] - total).exp(),
        total[..., -1].exp(),
    )
    if runs is None:
        return weights
    last = runs[:, -1:]
    same = runs[:, :, None] == runs[:, None], runs == before[:, None], runs == last, last[:, 0] == before
    return _Weights(*(weight * mask.unsqueeze(1) for weight, mask in zip(weights, same, strict=True)))


def _attend_block(q: Tensor, k: Tensor, v: Tensor, weights: _Weights | None, state: Tensor | None, chunks: int = 1):
    """LA over a block of chunks folded into the batch, given the state of all that came before it.

    q `[B * chunks, H, C, d]`; k, v `[B * chunks, H or Hkv, C, .]`; state None or `[B, Hs, d, dv]`, Hs the most heads
    that k, v and the weights have. Returns out `[B * chunks, H, C, dv]` and the new state.
    """
    state_heads = max(k.shape[1], v.shape[1], 1 if weights is None else weights.across.shape[1])
    if weights is not None and weights.across.shape[1] > 1:
        weights = _Weights(*(_repeat_heads(x, state_heads) for x in weights))
    q = _repeat_heads(q, max(q.shape[1], state_heads))
    k, v = _repeat_heads(k, state_heads), _repeat_heads(v, state_heads)
    rows, heads, length, dim = q.shape
    q = q.reshape(rows, state_heads, -1, dim)  # the queries of one state head stand below each other: [group * C, d]
    if length == 1 and chunks == 1:  # one token of decoding: update the state, then read it
        update = k.mT @ v
        if state is not None:
            update = update + (state if weights is None else weights.across[..., None, None] * state)
        return (q @ update).reshape(rows, heads, 1, -1), update

    groups = (rows, state_heads, heads // state_heads, length, -1)
    scores = (q @ k.mT).view(groups)
    if weights is None:
        scores = (
            scores.tril() if scores.requires_grad else scores.tril_()
        )  # in place, a view's gradient is copied thrice
    else:
        scores = scores * weights.between[:, :, None]
    out = scores.flatten(2, 3) @ v
    update = (k if weights is None else k * weights.to_end[..., None]).mT @ v
    past, state = _chunk_states(update, weights, state, chunks)
    if past is not None:
        read = q @ past
        if weights is not None:
            read = (read.view(groups) * weights.from_start[:, :, None, :, None]).flatten(2, 3)
        out += read
    return out.view(rows, heads, length, -1), state


def _chunk_states(update: Tensor, weights: _Weights | None, state: Tensor | None, chunks: int):
    """The state before each chunk `[B * chunks, Hs, d, dv]` (None if there was nothing before the only one), and the
    state after the last."""
    across = None if weights is None else weights.across[..., None, None]
    if chunks == 1:
        kept = state if across is None or state is None else across * state
        return state, update if state is None else update + kept
    updates = update.unflatten(0, (-1, chunks))
    if across is not None:
        across = across.expand(update.shape[0], -1, 1, 1).unflatten(0, (-1, chunks)).unbind(1)
    states = [torch.zeros_like(updates[:, 0]) if state is None else state]
    for i, update in enumerate(updates.unbind(1)):
        states.append(states[-1] + update if across is None else torch.addcmul(update, across[i], states[-1]))
    return torch.stack(states[:-1], 1).flatten(0, 1), states[-1]


# ---- which code evaluates the primitive ----------------------------------------

BACKEND = "auto"  # or "torch", or "fla": the kernels of flash-linear-attention, wherever the tensors are


@cache
def _fla_kernels() -> tuple[Callable, Callable] | None:
    """The primitive over a chunked sequence and token by token, if flash-linear-attention is installed."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError:
        return None
    return chunk_simple_gla, fused_recurrent_simple_gla


def _use_fla(q: Tensor) -> bool:
    if BACKEND == "auto":
        return q.is_cuda and not torch.compiler.is_compiling() and _fla_kernels() is not None
    return BACKEND == "fla"


def _attend_fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, form: str):
    """`_attend_block` over a whole sequence, by a kernel. log_decay None or `[B or 1, heads, T or 1]`."""
    heads, length = q.shape[1:3]
    state_heads = max(k.shape[1], v.shape[1], 1 if log_decay is None else log_decay.shape[1])
    q, k, v = (_repeat_heads(x, max(heads, state_heads)).transpose(1, 2).contiguous() for x in (q, k, v))
    if log_decay is not None:
        log_decay = _repeat_heads(log_decay, q.shape[2]).expand(q.shape[0], -1, length).transpose(1, 2).contiguous()
    state = None if state is None else _repeat_heads(state, q.shape[2]).contiguous()
    kernel = _fla_kernels()[form == "recurrent"]
    out, state = kernel(q, k, v, g=log_decay, scale=1.0, initial_state=state, output_final_state=True)
    return out.transpose(1, 2), state[:, :: q.shape[2] // state_heads]


# ---- a sequence as blocks of chunks ----------------------------------------


def _chunks_per_block(q: Tensor, chunk_size: int) -> int:
    """So many that what a block computes stays in the cache of a CPU, or fills a GPU."""
    return max(1, (2**24 if q.is_cuda else 2**18) // q[:, :, :chunk_size].numel())


class _Block(NamedTuple):
    start: int
    chunks: int
    chunk_size: int

    @property
    def length(self) -> int:
        return self.chunks * self.chunk_size


def _blocks_of(length: int, chunk_size: int, chunks: int) -> list[_Block]:
    """Blocks of at most `chunks` chunks; what is left of a chunk is a block of its own."""
    blocks, start = [], 0
    while start < length:
        size = min(chunk_size, length - start)
        blocks.append(_Block(start, min(chunks, (length - start) // size), size))
        start += blocks[-1].length
    return blocks


def _split(x: Tensor | None, blocks: list[_Block], dim: int) -> Sequence[Tensor | None]:
    """One piece per block; the gradient of a split is one concatenation, that of slices a full tensor each."""
    if x is None or len(blocks) == 1 or x.shape[dim] == 1:
        return [x] * len(blocks)
    return x.split([block.length for block in blocks], dim)


def _fold(x: Tensor | None, chunks: int) -> Tensor | None:
    """`[B, H, chunks * C, ...]` to `[B * chunks, H, C, ...]`."""
    if x is None or chunks == 1:
        return x
    return x.unflatten(2, (chunks, -1)).transpose(1, 2).contiguous().flatten(0, 1)


def _unfold(x: Tensor, chunks: int) -> Tensor:
    return x if chunks == 1 else x.unflatten(0, (-1, chunks)).transpose(1, 2).flatten(2, 3)


def _run_blocks(step: Callable, blocks: list[_Block], state: Sequence, recompute: bool) -> tuple[Tensor, Sequence]:
    """Concatenates `out, state = step(i, state)`. With `recompute`, what the backward pass keeps of a step is its
    inputs: the step is run again there."""
    eager = not torch.compiler.is_compiling()
    outs, whole = [], None
    for i, block in enumerate(blocks):
        if recompute and torch.is_grad_enabled() and eager:
            out, state = checkpoint(step, i, state, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = step(i, state)
        if len(blocks) == 1:
            return out, state
        if torch.is_grad_enabled() or not eager:
            outs.append(out)
        else:  # written at once, so that the next block finds this one's memory still in the cache
            if whole is None:
                whole = out.new_empty(*out.shape[:2], blocks[-1].start + blocks[-1].length, out.shape[3])
            whole[:, :, block.start : block.start + block.length] = out
    return torch.cat(outs, 2) if whole is None else whole, state


def _document_runs(segment_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """`[B, T]`: 0 for the first document and 1 more at each change of `segment_ids` between real tokens; a padded
    token counts to the document before it."""
    if segment_ids is None:
        return None
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    real = torch.ones_like(index, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    last_real = index.masked_fill(~real, -1).cummax(1).values
    previous = pad(last_real[:, :-1], (1, 0), value=-1)
    starts = real & (previous >= 0) & (segment_ids != segment_ids.gather(1, previous.clamp(min=0)))
    return starts.cumsum(1)


def tokens_seen(segment_ids: Tensor, attention_mask: Tensor | None, seen: Tensor) -> Tensor:
    """`[B, T]`: real tokens of each token's document so far, itself included; the first document had `seen [B]`."""
    runs = _document_runs(segment_ids, attention_mask)
    real = torch.ones_like(runs) if attention_mask is None else (attention_mask != 0).long()
    before = real.cumsum(1) - real  # in the row
    begins = runs.diff(dim=1, prepend=runs[:, :1]) > 0
    first = torch.where(begins, before, -seen[:, None]).cummax(1).values
    return before + real - first


def _block_weights(decays: Sequence[Tensor | None], block: _Block, runs: Tensor | None) -> list[_Weights | None]:
    """Per pass, for the block's chunks; passes that decay alike share them."""
    before = None
    if runs is not None:
        previous = pad(runs, (1, 0))  # the carried state belongs to the first document, number 0
        part = slice(block.start, block.start + block.length)
        runs = runs[:, part].reshape(-1, block.chunk_size)
        before = previous[:, part].reshape(-1, block.chunk_size)[:, 0]
    made = {}
    for x in decays:
        if id(x) not in made:
            folded = x if x is None or x.shape[2] == 1 else _fold(x, block.chunks)
            made[id(x)] = _chunk_weights(folded, block.chunk_size, runs, before)
    return [made[id(x)] for x in decays]


def _no_autocast(x: Tensor):
    """States and what is summed into them keep their dtype under autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# ---- the operators, each once, as a stack over `attend` ----------------------------------------


def _linear(attend, q, k, v):
    return attend(0, q, k, v)


def _accumulate(attend, e, k, coefficient, ridge, normalize=False):
    """u = coefficient LA(e, k, k) + ridge e: the keys of the outer pass; `normalize` divides LA by its own mass."""
    u = attend(0, e, k, pad(k, (0, 1), value=1.0) if normalize else k)
    if normalize:
        u = safe_divide(u[..., :-1], u[..., -1:])
    if isinstance(coefficient, Tensor) or coefficient != 1:
        u = _of_heads(coefficient, u.shape[1]) * u
    return u + ridge * _repeat_heads(e, u.shape[1]) if ridge else u


def _hla2(attend, q, k, v, e, coefficient, ridge):
    return attend(1, q, _accumulate(attend, e, k, coefficient, ridge), v)


def _ahla(attend, q, k, v):
    return attend(1, q, k, attend(0, q, k, v))


def _hla3(attend, q, k, v, e, coefficient, ridge):
    return attend(2, q, _accumulate(attend, e, k, coefficient, ridge), attend(1, q, k, v))


def _hla3_published(attend, q, k, v):
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    qk = (q * k).sum(-1, keepdim=True)
    u = attend(0, q, k, k) - qk * k
    r = attend(1, q, k, v) - qk * v
    w = (k * (attend(2, k, q, q) - qk * q)).sum(-1, keepdim=True)
    return attend(3, q, u, qk * v) + attend(4, q, k, (w + qk * qk) * v + qk * r)


def _dense_pairs(q: Tensor, k: Tensor, log_decay: Tensor | None, runs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Q K^T and the lower triangle of decays g^(t-j) within a document that belongs to it, `[B or 1, H, T, T]`."""
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if runs is not None:
        lower = lower & (runs[:, None, :, None] == runs[:, None, None])
    if log_decay is None:
        return q @ k.mT, lower.to(q.dtype)
    log_decay = _repeat_heads(log_decay, q.shape[1])
    total = log_decay.expand(*log_decay.shape[:2], q.shape[2]).cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    return q @ k.mT, between.masked_fill(~lower, -torch.inf).exp()


def _dense_linear(q, k, v, decays, runs):
    scores, lower = _dense_pairs(q, k, decays[0], runs)
    return (scores * lower) @ v


def _dense_keys(q, k, e, coefficient, ridge, inner, outer, runs):
    """((c (Q K^T)(L . E K^T)^T + ridge Q E^T) . L: row t, column j holds q_t . u_j for j <= t."""
    scores, lower = _dense_pairs(e, k, inner, runs)
    pairs = (q @ k.mT) @ (_of_heads(coefficient, q.shape[1]) * scores * lower).mT + ridge * (q @ e.mT)
    return pairs * _dense_pairs(q, k, outer, runs)[1]


def _dense_hla2(q, k, v, e, decays, runs, coefficient, ridge):
    return _dense_keys(q, k, e, coefficient, ridge, *decays, runs) @ v


def _dense_ahla(q, k, v, decays, runs):
    return _dense_linear(q, k, _dense_linear(q, k, v, decays[:1], runs), decays[1:], runs)


def _dense_hla3(q, k, v, e, decays, runs, coefficient, ridge):
    r = _dense_linear(q, k, v, decays[1:2], runs)
    return _dense_keys(q, k, e, coefficient, ridge, decays[0], decays[2], runs) @ r


def _dense_hla3_published(q, k, v, decays, runs):
    return _hla3_published(lambda i, q, k, v: _dense_linear(q, k, v, decays[i:], runs), q, k, v)


# name: (the stack, the definition, how many passes it has)
_OPERATORS = {
    "linear": (_linear, _dense_linear, 1),
    "hla2": (_hla2, _dense_hla2, 2),
    "ahla": (_ahla, _dense_ahla, 2),
    "hla3": (_hla3, _dense_hla3, 3),
    "hla3_published": (_hla3_published, _dense_hla3_published, 5),
}


# ---- segments of a sequence, and their concatenation ----------------------------------------


class Segment(NamedTuple):
    """What a segment of tokens, seen alone, does to the states of an operator; heads stand at dimension -3.

    states: one per pass, as the operator returns them; crosses: what the states before it meet in it; decays: the
    product of its tokens' decays, one `[..., heads or 1, 1, 1]` per pass.
    """

    states: State
    crosses: State
    decays: State


def _match_heads(*tensors: Tensor) -> list[Tensor]:
    heads = max(x.shape[-3] for x in tensors)
    return [x if x.shape[-3] in (1, heads) else x.repeat_interleave(heads // x.shape[-3], -3) for x in tensors]


def _mm(x: Tensor, y: Tensor) -> Tensor:
    x, y = _match_heads(x, y)
    return x @ y


def _scaled(x: Tensor, *decays: Tensor) -> Tensor:
    for decay in decays:
        x, decay = _match_heads(x, decay)
        x = x * decay
    return x


def concatenate(operator: str, a: Segment, b: Segment) -> Segment:
    """The segment a followed by b, of `linear`, `hla2`, `ahla` or `hla3`. It is associative, decays included.

    With rho the decays of b (of a for what b meets first), per pass:
        hla2  C = sum e v^T                                  F = rho F_a + F_b + S_a C_b
        ahla  R = sum k q^T                                  E = rho E_a + E_b + R_b P_a
        hla3  X = sum e r^T, Y = sum u q^T, Z = sum e q^T    F = rho F_a + F_b + S_a X_b + Y_b P_a + S_a Z_b P_a
    """
    states = [_scaled(x, rho) + y for x, y, rho in zip(a.states, b.states, b.decays, strict=True)]
    decays = tuple(x * y for x, y in zip(a.decays, b.decays, strict=True))
    crosses = ()
    if operator in ("hla2", "ahla"):
        (cross_a,), (cross_b,) = a.crosses, b.crosses
        first = a.states[0]
        states[1] = states[1] + (_mm(first, cross_b) if operator == "hla2" else _mm(cross_b, first))
        crosses = (_scaled(cross_a, b.decays[1]) + _scaled(cross_b, a.decays[0]),)
    elif operator == "hla3":
        s, p, _ = a.states
        x, y, z = b.crosses
        x, y = x + _mm(z, p), y + _mm(s, z)
        states[2] = states[2] + _mm(s, x) + _mm(b.crosses[1], p)
        met = _scaled(x, a.decays[0]), _scaled(y, a.decays[1]), _scaled(z, *a.decays[:2])
        crosses = tuple(_scaled(old, b.decays[2]) + new for old, new in zip(a.crosses, met, strict=True))
    return Segment(tuple(states), crosses, decays)


def _segment(operator: str, features: list[Tensor], weights: list[_Weights | None], settings: dict) -> Segment:
    """Of each row of `features`, none of which has a past."""
    stack, _, passes = _OPERATORS[operator]
    states, seen = [None] * passes, {}

    def attend(i, q, k, v):
        out, states[i] = _attend_block(q, k, v, weights[i], None)
        seen[i] = k, out
        return out

    stack(attend, *features, **settings)
    q, k, v, *e = features
    starts, ends = ([None if w is None else w[n][..., None] for w in weights] for n in (1, 2))

    def cross(x, y, *weights):
        return _mm(_scaled(x, *(w for w in weights if w is not None)).mT, y)

    crosses = ()
    if e:
        e = e[0] * _of_heads(settings["coefficient"], e[0].shape[1])
    if operator == "hla2":
        crosses = (cross(e, v, starts[0], ends[1]),)
    elif operator == "ahla":
        crosses = (cross(k, q, starts[0], ends[1]),)
    elif operator == "hla3":
        r, u = seen[1][1], seen[2][0]
        crosses = (
            cross(e, r, starts[0], ends[2]),
            cross(u, q, starts[1], ends[2]),
            cross(e, q, starts[0], starts[1], ends[2]),
        )
    one = q.new_ones(q.shape[0], 1, 1, 1)
    return Segment(tuple(states), crosses, tuple(one if w is None else w.across[..., None, None] for w in weights))


def _scan(operator: str, features: list[Tensor], decays, runs, initial_state: State | None, size: int, settings: dict):
    """The chunk form with the chunks' states from a parallel prefix: log2(chunks) concatenations of all at once."""
    stack = _OPERATORS[operator][0]
    batch, _, length, _ = features[0].shape
    chunks = -(-length // size)
    extra = chunks * size - length  # tokens that add nothing and decay nothing fill the last chunk
    features = [_fold(pad(x, (0, 0, 0, extra)), chunks) for x in features]
    decays = [None if x is None else pad(x.expand(batch, -1, length), (0, extra)) for x in decays]
    runs = runs if runs is None else torch.cat([runs, runs[:, -1:].expand(-1, extra)], 1)
    weights = _block_weights(decays, _Block(0, chunks, size), runs)

    local = _segment(operator, features, weights, settings)
    local = Segment(*([x.unflatten(0, (batch, chunks)) for x in part] for part in local))
    before = Segment(  # what came before the first chunk is the first element
        [torch.zeros_like(x[:, :1]) for x in local.states]
        if initial_state is None
        else [x[:, None] for x in initial_state],
        [torch.zeros_like(x[:, :1]) for x in local.crosses],
        [torch.ones_like(x[:, :1]) for x in local.decays],
    )

    def each(function, *segments):
        return Segment(*([function(*x) for x in zip(*parts, strict=True)] for parts in zip(*segments, strict=True)))

    prefix, step = each(lambda x, y: torch.cat([x, y], 1), before, local), 1
    while step <= chunks:
        joined = concatenate(
            operator, each(lambda x, n=step: x[:, :-n], prefix), each(lambda x, n=step: x[:, n:], prefix)
        )
        prefix, step = each(lambda x, y, n=step: torch.cat([x[:, :n], y], 1), prefix, joined), 2 * step

    def attend(i, q, k, v):
        return _attend_block(q, k, v, weights[i], prefix.states[i][:, :-1].flatten(0, 1))[0]

    out = _unfold(stack(attend, *features, **settings), chunks)[:, :, :length]
    return out, [x[:, -1] for x in prefix.states]


# ---- arguments ----------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, segment_ids: Tensor | None, chunk_size: int
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    _check(q.ndim == k.ndim == v.ndim == 4, f"q, k and v must be [B, heads, T, dim], got {shapes}")
    _check(
        q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] > 0,
        f"q, k and v must have the same batch size and the same length of at least 1, got {shapes}",
    )
    _check(q.shape[3] == k.shape[3], f"q and k must have the same head_dim, got {shapes}")
    _check(
        k.shape[1] == v.shape[1] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"k and v must have the same number of heads, and q a multiple of it, got {shapes}",
    )
    for name, x in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
        _check(
            x is None or x.shape == (q.shape[0], q.shape[2]),
            f"{name} must be [B, T] = {(q.shape[0], q.shape[2])}, got {x if x is None else tuple(x.shape)}",
        )
    _check(chunk_size >= 1, f"chunk_size must be at least 1, got {chunk_size}")


def _as_decays(log_decay: Decay | Sequence[Decay], passes: int, q: Tensor, k: Tensor) -> list[Tensor | None]:
    """One entry per pass: None, `[B, H or Hkv, T]`, or `[1, H or Hkv or 1, 1]` if it is the same for all tokens."""
    if not isinstance(log_decay, tuple | list):
        log_decay = (log_decay,) * passes
    _check(len(log_decay) == passes, f"log_decay has {len(log_decay)} entries, the operator has {passes} passes")
    batch, heads, length = q.shape[:3]
    decays = []
    for entry in log_decay:
        if entry is None:
            decays.append(None)
            continue
        entry = torch.as_tensor(entry, dtype=_compute_dtype(q), device=q.device)
        shape = tuple(entry.shape)
        heads_allowed = (heads, k.shape[1])
        _check(
            shape == ()
            or (len(shape) == 1 and shape[0] in heads_allowed)
            or (len(shape) == 3 and shape[0] == batch and shape[1] in heads_allowed and shape[2] == length),
            f"log_decay must be a number, [H] or [B, H, T] with H one of {heads_allowed}, B {batch}, T {length}, "
            f"got shape {shape}",
        )
        if not torch.compiler.is_compiling():
            _check(not bool((entry > 0).any()), f"log_decay must be at most 0, got a value of {entry.max().item():.4g}")
        decays.append(entry if len(shape) == 3 else entry.reshape(1, -1, 1))
    return decays


def _run(
    operator, q, k, v, *, scale, log_decay, attention_mask, segment_ids, normalize, initial_state, return_state, form,
    chunk_size, e=None, **settings,
):  # fmt: skip
    stack, dense, passes = _OPERATORS[operator]
    _check_shapes(q, k, v, attention_mask, segment_ids, chunk_size)
    _check(form in FORMS, f"form {form!r} is unknown; it must be one of {FORMS}")
    _check(
        e is None
        or (e.shape[0] == q.shape[0] and e.shape[1] in (q.shape[1], k.shape[1]) and e.shape[2:] == q.shape[2:]),
        f"e must be shaped as q {tuple(q.shape)} or as k {tuple(k.shape)}, got {None if e is None else tuple(e.shape)}",
    )
    _check(
        form != "dense" or (initial_state is None and not return_state),
        "form='dense' takes whole sequences: it has no state",
    )
    _check(
        initial_state is None or len(initial_state) == passes,
        f"initial_state must have {passes} tensors, got {0 if initial_state is None else len(initial_state)}",
    )
    decays = _as_decays(log_decay, passes, q, k)
    runs = _document_runs(segment_ids, attention_mask)
    dtype, compute_dtype = v.dtype, _compute_dtype(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def prepare(q, k, v, e, mask, decays):
        """Features in the compute dtype; a padded token adds nothing, decays nothing and reads nothing."""
        features = [q.to(compute_dtype) * scale, k.to(compute_dtype), v.to(compute_dtype)]
        if normalize:
            features[2] = pad(features[2], (0, 1), value=1.0)  # the row mass is the same stack run on ones
        if settings:
            features.append(features[0] if e is None else e.to(compute_dtype))
        if mask is not None:
            padding = mask[:, None, :, None] == 0
            features = [x.masked_fill(padding, 0) for x in features]
            decays = [None if x is None else x.masked_fill(padding[..., 0], 0) for x in decays]
        return features, decays

    def finish(out):
        return (safe_divide(out[..., :-1], out[..., -1:]) if normalize else out).to(dtype)

    if form == "dense":
        features, decays = prepare(q, k, v, e, attention_mask, decays)
        features = (_repeat_heads(x, q.shape[1]) for x in features)
        with _no_autocast(q):
            return finish(dense(*features, decays, runs, **settings))

    if form == "scan":
        _check(operator in OPERATORS, f"form='scan' is for {OPERATORS}, not for {operator!r}")
        with _no_autocast(q):
            features, decays = prepare(q, k, v, e, attention_mask, decays)
            out, states = _scan(operator, features, decays, runs, initial_state, chunk_size, settings)
        return (finish(out), tuple(states)) if return_state else finish(out)

    use_fla = q.shape[2] > 1 and runs is None and _use_fla(q)
    if use_fla:
        blocks = [_Block(0, 1, q.shape[2])]
    else:
        blocks = _blocks_of(
            q.shape[2], *((1, 1) if form == "recurrent" else (chunk_size, _chunks_per_block(q, chunk_size)))
        )
    pieces = zip(*(_split(x, blocks, 2) for x in (q, k, v, e)), _split(attention_mask, blocks, 1), strict=True)
    pieces, decays = list(pieces), list(zip(*(_split(x, blocks, 2) for x in decays), strict=True))

    def step(i, states):
        block, states = blocks[i], list(states)
        with _no_autocast(q):
            features, decay = prepare(*pieces[i], decays[i])
            weights = None if use_fla else _block_weights(decay, block, runs)

            def attend(i, q, k, v):
                if use_fla:
                    out, states[i] = _attend_fla(q, k, v, decay[i], states[i], form)
                else:
                    out, states[i] = _attend_block(q, k, v, weights[i], states[i], block.chunks)
                return out

            out = stack(attend, *(_fold(x, block.chunks) for x in features), **settings)
            return finish(_unfold(out, block.chunks)), states

    states = [None] * passes if initial_state is None else initial_state
    out, states = _run_blocks(step, blocks, states, recompute=form == "chunk")
    return (out, tuple(states)) if return_state else out


_ARGUMENTS = """
    Args:
        q: `[B, H, T, d]`.
        k: `[B, Hkv, T, d]`, H a multiple of Hkv.
        v: `[B, Hkv, T, dv]`.
        scale: multiplies q wherever q appears; default `d ** -0.5`, the paper's is 1.0.
        log_decay: log of the decay g per token, at most 0: None, a float, `[H]` or `[B, H, T]` (H may be Hkv, which
            keeps key-only states per key-value head), the same for every pass, or a tuple with one entry per pass,
            inner first. The paper's decayed second order is `(log g, 2 log g)`.
        attention_mask: `[B, T]`, 0 at padded tokens, wherever they stand: they change nothing and their output is 0.
        segment_ids: `[B, T]`, a number per token: where it changes a new document begins, which sees nothing of those
            before it. `initial_state` belongs to the first document, the returned state to the last.
        normalize: divide by the row mass (the operator run on v = 1), its sign kept and its size at least 1e-6.
        initial_state: the state that an earlier call returned.
        return_state: also return the state after the last token.
        form: `chunk` (matrix products, memory linear in T), `recurrent` (token by token), `scan` (chunks side by side,
            their states from a parallel prefix) or `dense` (T x T).
        chunk_size: tokens per block of the chunk form.
    Returns: out `[B, H, T, dv]` in v's dtype, and with `return_state` the state, a tuple of fp32 tensors with the
        batch first: {state}.
    Raises: ValueError naming the argument, its value and what is allowed.
"""


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, log_decay: Decay = None,
    attention_mask: Tensor | None = None, segment_ids: Tensor | None = None, normalize: bool = False,
    initial_state: State | None = None, return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """First order, the primitive: `out_t = sum_{j<=t} g^(t-j) (q_t . k_j) v_j`."""
    return _run("linear", **locals())


def hla2(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0,
    ridge: float = 0.0, scale: float | None = None, log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, segment_ids: Tensor | None = None, normalize: bool = False,
    initial_state: State | None = None, return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Symmetric second order, `((W W^T) . L) V` (eq. 3.3 of the paper, masked): `LA(q, u, v)`,
    `u = coefficient LA(e, k, k) + ridge e`.

    `e` `[B, H or Hkv, T, d]` are the features under which values are accumulated, the scaled q by default; `e` is not
    scaled. `coefficient` is a number or one per head of e. `e=k, ridge=1` is first-order attention with a second-order
    correction of its keys.
    """
    return _run("hla2", **locals())


def ahla(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, segment_ids: Tensor | None = None, normalize: bool = False,
    initial_state: State | None = None, return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Asymmetric second order, `((W W) . L) V`: `LA(q, k, r)`, `r = LA(q, k, v)`."""
    return _run("ahla", **locals())


def hla3(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0,
    ridge: float = 0.0, scale: float | None = None, log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, segment_ids: Tensor | None = None, normalize: bool = False,
    initial_state: State | None = None, return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Third order, `((W W^T) . L) W V`: `LA(q, u, r)`, `u` as in `hla2` and `r = LA(q, k, v)`."""
    return _run("hla3", **locals())


def hla3_published(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, attention_mask: Tensor | None = None,
    segment_ids: Tensor | None = None, normalize: bool = False, initial_state: State | None = None,
    return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Third order as the paper's Algorithm 3 computes it, which is not `hla3`: of the triples of tokens it keeps those
    whose largest index is reached at least twice. Arguments and result as those of `hla3`, without decays and the
    `scan` form; the state is five tensors.
    """
    return _run("hla3_published", log_decay=None, **locals())


for _function, _state in (
    (causal_linear_attention, "`S [B, Hkv, d, dv]`"),
    (hla2, "`S [B, Hkv, d, d]`, `F [B, H, d, dv]`"),
    (ahla, "`P [B, Hkv, d, dv]`, `E [B, H, d, dv]`"),
    (hla3, "`S [B, Hkv, d, d]`, `P [B, Hkv, d, dv]`, `F [B, H, d, dv]`"),
):
    _function.__doc__ += _ARGUMENTS.replace("{state}", _state + " (dv + 1 with `normalize`)")


# ---- window + sinks + HLA under one normaliser ----------------------------------------


def _gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, N, d]`, index `[B, T]` of tokens: `[B, H, T, d]`."""
    index = index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, num_sinks: int = 0, operator: str = "linear",
    query_map: Callable[[Tensor], Tensor], key_map: Callable[[Tensor], Tensor], gate: Tensor,
    accumulator_map: Callable[[Tensor], Tensor] | None = None, coefficient: float | Tensor = 1.0, ridge: float = 0.0,
    value_mix: float | Tensor = 1.0, near_dim: int | None = None, scale: float | None = None,
    softcap: float | None = None, log_decay: Decay | Sequence[Decay] = None, attention_mask: Tensor | None = None,
    segment_ids: Tensor | None = None, initial_state: State | None = None, return_state: bool = False,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Softmax over the last `window` and the first `num_sinks` real tokens, HLA over all others, one normaliser:

        out_t = (sum_near exp(s_tj - m_t) v_j + g n_t^(-1/2) sum_far (phi(q_t) . u_j) w_j) / (the same with v = w = 1)

    s = scale q . k, m_t is the largest s_tj of the near tokens and n_t the number of far ones: the mass that softmax
    attention gives to those grows much more slowly than a sum over them. What lies beyond the window is the operator on
    keys and values delayed by `window` tokens: u = phi(k) for `linear` and `ahla`, else
    u = coefficient LA(e, phi(k), phi(k)) / LA(e, phi(k), 1) + ridge e; w = v for `linear` and `hla2`, else
    w = (1 - value_mix) v + value_mix r, r being this attention's own first-order output.

    Args:
        q, k, v: `[B, H, T, d]`, `[B, Hkv, T, d]`, `[B, Hkv, T, dv]`, as softmax attention takes them.
        near_dim: softmax takes the first `near_dim` entries of q and k only (default: all), the maps take all, so that
            the far part can be given what softmax does not see, such as q and k before their rotation.
        query_map, key_map: phi for q and for k, `[B, H, T, d] -> [B, H, T, f]`.
        accumulator_map: e as a function of q, for `hla2` and `hla3`; None takes e = phi(k).
        gate: g, one per query head, `[H]`.
        coefficient: one per head of e; value_mix: one per query head; or numbers.
        log_decay: as in the operators, per pass: u (if any), r (if any), out.
        softcap: c in s = c tanh(scale q . k / c), for models that cap their scores; None leaves them.
        scale, attention_mask, segment_ids, chunk_size: as in the operators; a document has its own window and sinks.
        initial_state, return_state: a tuple with the batch first: the document's real tokens seen `[B]`, then the
            sinks' and the window's k, v (in their dtype), the window's r (fp32) or q where the operator needs them,
            then the fp32 states of the passes. Its size does not depend on T.
    Returns: `[B, H, T, dv]`; the output of a padded token is 0.
    """
    _check_shapes(q, k, v, attention_mask, segment_ids, chunk_size)
    _check(window >= 1, f"window must be at least 1, got {window}")
    _check(num_sinks >= 0, f"num_sinks must be at least 0, got {num_sinks}")
    _check(operator in OPERATORS, f"operator {operator!r} is unknown; it must be one of {OPERATORS}")
    has_u, has_r = operator in ("hla2", "hla3"), operator in ("ahla", "hla3")
    buffers_q = has_u and accumulator_map is not None
    passes = 1 + has_u + has_r
    decays = _as_decays(log_decay, passes, q, k)
    batch, heads, length, head_dim = q.shape
    kv_heads, value_dim, dtype = k.shape[1], v.shape[-1], _compute_dtype(q)
    near_dim = head_dim if near_dim is None else near_dim
    _check(1 <= near_dim <= head_dim, f"near_dim must be in 1..{head_dim}, the size of q and k, got {near_dim}")
    scale = near_dim**-0.5 if scale is None else scale
    gate, value_mix = _of_heads(gate.to(dtype), heads), _of_heads(value_mix, heads)
    index = torch.arange(length, device=q.device)
    runs = _document_runs(segment_ids, attention_mask)

    is_real = None
    if attention_mask is not None:
        # A stable sort moves each row's padding to its end, where a causal operator never sees it.
        lengths = attention_mask.bool().sum(1)
        is_real = index < lengths[:, None]
        order = attention_mask.bool().logical_not().long().argsort(dim=1, stable=True)
        q, k, v = (_gather_tokens(x, order) for x in (q, k, v))
        decays = [x if x is None or x.shape[2] == 1 else _gather_tokens(x[..., None], order)[..., 0] for x in decays]
        decays = [x if x is None else x.masked_fill(~is_real[:, None], 0) for x in decays]
        runs = runs if runs is None else runs.gather(1, order).cummax(1).values

    if initial_state is None:
        seen = torch.zeros(batch, dtype=torch.long, device=q.device)
        old_sinks = [x.new_zeros(batch, kv_heads, num_sinks, x.shape[3]) for x in (k[..., :near_dim], v)]
        buffers = [x.new_zeros(batch, x.shape[1], window, x.shape[3]) for x in ([k, v, q] if buffers_q else [k, v])]
        if has_r:
            buffers.insert(2, q.new_zeros(batch, heads, window, value_dim, dtype=dtype))
        states = [None] * passes
    else:
        seen, sink_k, sink_v, *rest = initial_state
        old_sinks, count = (sink_k, sink_v), 2 + has_r + buffers_q
        buffers, states = rest[:count], rest[count:]

    starts = -seen[:, None]  # index of the first token of each token's document
    if runs is not None:
        begins = runs.diff(dim=1, prepend=runs[:, :1]) > 0
        starts = torch.where(begins, index, starts).cummax(1).values
        chunk_size = min(chunk_size, window)  # then one document of a chunk at most has sinks beyond the window
    places = (index - starts).expand(batch, -1)  # of each token in its document

    def sinks_of(starts):
        """The first tokens of the documents that start at `starts [B, M]`: k and v, `[B, Hkv, M, sinks, .]`."""
        source = starts[..., None] + torch.arange(num_sinks, device=q.device)
        old = (source < 0)[:, None, ..., None]
        source = source.clamp(0, length - 1).flatten(1)
        new = (_gather_tokens(x, source).unflatten(2, (-1, num_sinks)) for x in (k[..., :near_dim], v))
        return [torch.where(old, x[:, :, None], y) for x, y in zip(old_sinks, new, strict=True)]

    blocks = _blocks_of(length, chunk_size, _chunks_per_block(q, chunk_size))
    pieces = list(zip(*(_split(x, blocks, 2) for x in (q, k, v)), strict=True))
    decays = list(zip(*(_split(x, blocks, 2) for x in decays), strict=True))
    sinks = sinks_of(starts[:, :1]) if num_sinks and runs is None else None

    def step(i, state):
        block, (q, k, v) = blocks[i], pieces[i]
        buffers, states = list(state[: len(state) - passes]), list(state[len(state) - passes :])
        part = slice(block.start, block.start + block.length)
        chunks, size = block.chunks, block.chunk_size

        def fold(x):
            return _fold(x, chunks)

        def delayed(i, new):
            """Slot i holds the token that leaves the window when the i-th new one comes; that one is slot W + i."""
            slots = torch.cat([buffers[i], new], 2)
            if is_real is None:
                buffers[i] = slots[:, :, block.length :].clone()  # a view would keep all slots
            else:
                kept = is_real[:, part].sum(1, keepdim=True) + torch.arange(window, device=q.device)
                buffers[i] = _gather_tokens(slots, kept)
            return slots

        slots_k, slots_v = delayed(0, k), delayed(1, v)
        slots_q = delayed(2 + has_r, q) if buffers_q else None
        place = places[:, part].reshape(-1, size)  # [N, C], N = B * chunks
        far_count = (place - (window + num_sinks - 1)).clamp(min=1)[:, None, :, None]
        far = place >= window + num_sinks
        if is_real is not None:
            far = far & is_real[:, part].reshape(-1, size)
        far = far[:, None, :, None]

        # near: sinks that have left the window, then the window of each token, as one product
        distance = torch.arange(size, device=q.device)[:, None] + window - torch.arange(window + size, device=q.device)
        visible = (distance >= 0) & (distance < window) & (distance <= place[..., None])
        near_k, near_v = (
            x.unfold(2, window + size, size).permute(0, 2, 1, 4, 3) for x in (slots_k[..., :near_dim], slots_v)
        )
        if num_sinks:
            visible = torch.cat([torch.arange(num_sinks, device=q.device) <= place[..., None] - window, visible], -1)
            block_sinks = sinks_of(starts[:, part][:, ::size]) if sinks is None else sinks
            near_k, near_v = (
                torch.cat([x.transpose(1, 2).expand(-1, chunks, -1, -1, -1), y], 3)
                for x, y in zip(block_sinks, (near_k, near_v), strict=True)
            )
        near_k, near_v = (x.flatten(0, 1).to(dtype) for x in (near_k, near_v))
        near_q = fold(q[..., :near_dim].to(dtype) * scale).reshape(near_k.shape[0], kv_heads, -1, near_dim)
        far_q, far_k = (fold(x.to(dtype)) for x in (query_map(q), key_map(slots_k[:, :, : block.length])))
        far_k = far_k.masked_fill(~far, 0)
        far_v = pad(fold(slots_v[:, :, : block.length].to(dtype)), (0, 1), value=1.0).masked_fill(~far, 0)
        if has_u:
            far_e = far_k
            if accumulator_map is not None:
                far_e = fold(accumulator_map(slots_q[:, :, : block.length]).to(dtype)).masked_fill(~far, 0)

        with _no_autocast(q):
            weights = _block_weights(decays[i], block, runs)
            scores = (near_q @ near_k.mT).unflatten(2, (-1, size))
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            near = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
            largest = near.amax(-1).flatten(1, 2)[..., None]  # 1 / sum of exp(s - m)
            far_weight = gate * largest * far_count.to(dtype).rsqrt()
            near = (near.flatten(2, 3) @ near_v).view(-1, heads, size, value_dim)

            def attend(i, q, k, v):
                out, states[i] = _attend_block(q, k, v, weights[i], states[i], chunks)
                return out

            def join(far):
                far = far_weight * far
                return safe_divide(near + far[..., :-1], 1 + far[..., -1:])

            if has_r:
                r = _unfold(join(attend(int(has_u), far_q, far_k, far_v)), chunks)
                r = fold(delayed(2, r)[:, :, : block.length])
                mixed = (1 - value_mix) * _repeat_heads(far_v[..., :-1], heads) + value_mix * r
                far_v = pad(mixed, (0, 1), value=1.0).masked_fill(~far, 0)
            if has_u:
                far_k = _accumulate(attend, far_e, far_k, coefficient, ridge, normalize=True)
            out = join(attend(passes - 1, far_q, far_k, far_v))
        return _unfold(out, chunks).to(v.dtype), [*buffers, *states]

    out, state = _run_blocks(step, blocks, [*buffers, *states], recompute=length > 1)
    if attention_mask is not None:
        out = _gather_tokens(out, order.argsort(1)).masked_fill(attention_mask[:, None, :, None] == 0, 0)
    if not return_state:
        return out
    sink_k, sink_v = (x[:, :, 0] for x in sinks_of(starts[:, -1:])) if num_sinks else old_sinks
    seen = (length if attention_mask is None else lengths) - starts[:, -1]
    return out, (seen, sink_k, sink_v, *state)
