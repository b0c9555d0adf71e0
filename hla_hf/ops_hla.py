"""Higher-order linear attention (Zhang et al., arXiv 2510.27258) from one primitive.

    LA(q, k, v; g)_t = sum_{j<=t} g^(t-j) (q_t . k_j) v_j          causal linear attention with decay g

    causal_linear_attention   LA(q, k, v)
    hla2  ((W W^T) . L) V     LA(q, u, v)    u = LA(e, k, k), e = q
    ahla  ((W W) . L) V       LA(q, k, r)    r = LA(q, k, v)
    hla3  ((W W^T) . L) W V   LA(q, u, r)

with W = L . (Q K^T) and L lower triangular. Each operator is written once, as that stack, over a function
`attend(i, q, k, v)` that evaluates pass i on a block of tokens and carries its state `S = sum k v^T` (fp32).
The chunk form runs the stack on blocks of `chunk_size` tokens, the recurrent form on blocks of one token. What proves
them, and the forms and operators that no model runs, stand in `definitions.py` and `scan.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


OPERATORS = ("linear", "ahla", "hla2", "hla3")
FEATURE_MAPS = ("identity", "softmax", "elu", "relu", "hedgehog")
EPS = 1e-6
MAX_LOG_SIZE = 8.0
FORGET = -110.0  # exp of it is 0 in fp32

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
        return x.softmax(-1, dtype=compute_dtype(x))
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "relu":
        return x.relu()
    if name == "hedgehog":
        y = (x @ weight.to(x.dtype)).to(compute_dtype(x))
        return hedgehog(y, None if size is None else (x @ size.to(x.dtype)[..., None]).to(y.dtype))
    raise ValueError(f"feature map {name!r} is unknown; it must be one of {FEATURE_MAPS}")


def hedgehog(y: Tensor, log_size: Tensor | None) -> Tensor:
    """softmax of +y and of -y, times exp(log_size): `[..., f]` and `[..., 1]` to `[..., 2 f]`."""
    features = torch.cat([y, -y], -1).unflatten(-1, (2, -1)).softmax(-1).flatten(-2)
    return features if log_size is None else features * log_size.clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp()


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """What products of tokens with tokens run in: x's own dtype, where the device has units for it."""
    if x.device.type != "cpu" or (x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
        return x.dtype
    return compute_dtype(x)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, Hkv, ...]` to `[B, H, ...]`, each head repeated for its group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def of_heads(x: float | Tensor, heads: int) -> float | Tensor:
    """A number, or one per head `[Hkv or H]`, to be multiplied with `[B, H, T, d]`."""
    return repeat_heads(x[None, :, None, None], heads) if isinstance(x, Tensor) and x.ndim == 1 else x


def safe_divide(x: Tensor, mass: Tensor) -> Tensor:
    """x / mass, with |mass| at least `EPS` and its sign kept: signed features give a mass of either sign."""
    return x / torch.where(mass < 0, mass.clamp(max=-EPS), mass.clamp(min=EPS))


# ---- the primitive on one block of tokens ----------------------------------------


class Weights(NamedTuple):
    """What decays and document boundaries multiply within a chunk of C tokens; `heads` is that of the decay, or 1."""

    between: Tensor  # [N, heads, C, C]: from token j to token t, 0 for j > t
    from_start: Tensor  # [N, heads, C]: from the chunk's start to token t, t included
    to_end: Tensor  # [N, heads, C]: from token t, t not included, to the chunk's end
    across: Tensor  # [N, heads]: over the whole chunk


def chunk_weights(log_decay: Tensor | None, length: int, runs: Tensor | None, before: Tensor | None) -> Weights | None:
    """log_decay None or `[N or 1, heads, C or 1]`; runs `[N, C]` number each token's document, before `[N]` is that of
    the state. None if nothing decays and there is one document. Every exponent is at most 0: nothing can overflow."""
    if log_decay is None and runs is None:
        return None
    if log_decay is None:
        log_decay = torch.zeros(1, 1, length, device=runs.device)
    total = log_decay.expand(*log_decay.shape[:2], length).cumsum(-1)
    above = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    weights = Weights(
        (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp(),
        total.exp(),
        (total[..., -1:] - total).exp(),
        total[..., -1].exp(),
    )
    if runs is None:
        return weights
    last = runs[:, -1:]
    same = runs[:, :, None] == runs[:, None], runs == before[:, None], runs == last, last[:, 0] == before
    return Weights(*(weight * mask.unsqueeze(1) for weight, mask in zip(weights, same, strict=True)))


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, weights: Weights | None, state: Tensor | None, chunks: int = 1
) -> tuple[Tensor, Tensor]:
    """LA over a block of chunks folded into the batch, given the state of all that came before it.

    q `[B * chunks, H, C, d]`; k, v `[B * chunks, H or Hkv, C, .]`; state None or `[B, Hs, d, dv]`, Hs the most heads
    that k, v and the weights have. Returns out `[B * chunks, H, C, dv]` and the new state, which is fp32 also if q, k
    and v are not.
    """
    state_heads = max(k.shape[1], v.shape[1], 1 if weights is None else weights.across.shape[1])
    if weights is not None and weights.across.shape[1] > 1:
        weights = Weights(*(repeat_heads(x, state_heads) for x in weights))
    q = repeat_heads(q, max(q.shape[1], state_heads))
    k, v = repeat_heads(k, state_heads), repeat_heads(v, state_heads)
    rows, heads, length, dim = q.shape
    group = heads // state_heads
    q = q.reshape(rows, state_heads, group * length, dim)  # one state head's queries stand below each other
    exact = compute_dtype(v)
    if length == 1 and chunks == 1:  # one token of decoding: update the state, then read it
        q, k, v = (x.to(exact) for x in (q, k, v))
        update = k.mT @ v
        if state is not None:
            update = update + (state if weights is None else weights.across[..., None, None] * state)
        return (q @ update).reshape(rows, heads, 1, -1), update

    groups = (group, length)
    scores = (q @ k.mT).unflatten(2, groups)
    if weights is None:
        scores = (
            scores.tril() if scores.requires_grad else scores.tril_()
        )  # in place, a view's gradient is copied thrice
    else:
        scores = (scores * weights.between[:, :, None]).to(v.dtype)
    out = scores.flatten(2, 3) @ v
    update = (k.to(exact) if weights is None else k.to(exact) * weights.to_end[..., None]).mT @ v.to(exact)
    past, state = _chunk_states(update, weights, state, chunks)
    if past is not None:
        read = q @ past.to(q.dtype)
        if weights is not None:
            read = (read.unflatten(2, groups) * weights.from_start[:, :, None, :, None]).flatten(2, 3)
        out += read
    return out.view(rows, heads, length, v.shape[3]), state


def _chunk_states(update: Tensor, weights: Weights | None, state: Tensor | None, chunks: int):
    """The state before each chunk `[B * chunks, Hs, d, dv]` (None if there was nothing before the only one), and the
    state after the last."""
    if torch.compiler.is_compiling():
        return _all_chunk_states(update, None if weights is None else weights.across, state, chunks)
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


def _all_chunk_states(
    update: Tensor, across: Tensor | None, state: Tensor | None, chunks: int
) -> tuple[Tensor, Tensor]:
    """The same without a loop, so that the graph is one for every number of chunks."""
    updates = update.unflatten(0, (update.shape[0] // chunks, chunks))
    first = torch.zeros_like(updates[:, :1]) if state is None else state[:, None]
    states = torch.cat([first, updates], 1)
    if across is None:
        states = states.cumsum(1)
    else:
        # rows and heads are one dimension from here on: of a view, Inductor divides sizes of which one is a square
        across = across.expand(update.shape[:2]).unflatten(0, updates.shape[:2]).transpose(1, 2).flatten(0, 1)
        states = torch.bmm(_products(across).to(states.dtype), states.transpose(1, 2).flatten(0, 1).flatten(2))
        states = (
            states.unflatten(2, updates.shape[3:]).unflatten(0, (updates.shape[0], updates.shape[2])).transpose(1, 2)
        )
    return states[:, :-1].flatten(0, 1), states[:, -1]


def _products(x: Tensor) -> Tensor:
    """x `[..., N]`, at least 0: the products of its entries j + 1 to i at i, j `[..., N + 1, N + 1]`, 0 for j > i."""
    cut = x < torch.finfo(x.dtype).tiny  # no logarithm of these
    logs, cuts = pad(x.masked_fill(cut, 1).log(), (1, 0)), pad(cut, (1, 0)).cumsum(-1)
    index = torch.arange(logs.shape[-1], device=x.device)
    after = index[:, None] > index
    sums = torch.where(after, logs[..., None], 0).cumsum(-2)  # sums of their own: a difference of two would be inexact
    kept = (index[:, None] >= index) & (cuts[..., None] == cuts[..., None, :])
    return sums.exp() * kept


# ---- which code evaluates the primitive ----------------------------------------

BACKEND = "auto"  # or "torch", or "kernels", wherever the tensors are


@cache
def _fla_kernels() -> tuple[Callable, Callable] | None:
    """The primitive over a chunked sequence and token by token, if flash-linear-attention is installed."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError:
        return None
    return chunk_simple_gla, fused_recurrent_simple_gla


def use_fla(q: Tensor) -> bool:
    """Whether kernels evaluate the primitive over a sequence q `[B, H, T, d]`; one token has nothing to gain."""
    if q.shape[2] == 1:
        return False
    if BACKEND == "auto":
        eager = not torch.compiler.is_compiling()
        return eager and q.is_cuda and q.dtype != torch.float64 and _fla_kernels() is not None
    return BACKEND == "kernels"


def _attend_fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, form: str):
    """`attend_block` over a whole sequence, by a kernel. log_decay None or `[B or 1, heads, T or 1]`."""
    heads, length = q.shape[1:3]
    state_heads = max(k.shape[1], v.shape[1], 1 if log_decay is None else log_decay.shape[1])
    q, k, v = (repeat_heads(x, max(heads, state_heads)).transpose(1, 2).contiguous() for x in (q, k, v))
    if log_decay is not None:
        log_decay = repeat_heads(log_decay, q.shape[2]).expand(q.shape[0], -1, length).transpose(1, 2).contiguous()
    state = None if state is None else repeat_heads(state, q.shape[2]).contiguous()
    kernel, width = _fla_kernels()[form == "recurrent"], v.shape[3]
    if width % 2 and v.element_size() == 2:  # which their backward pass refuses
        v, state = pad(v, (0, 1)), None if state is None else pad(state, (0, 1))
    out, state = kernel(q, k, v, g=log_decay, scale=1.0, initial_state=state, output_final_state=True)
    # a view would keep all heads
    return out[..., :width].transpose(1, 2), state[:, :: q.shape[2] // state_heads, :, :width].contiguous()


# ---- a sequence as blocks of chunks ----------------------------------------


def chunks_per_block(q: Tensor, chunk_size: int) -> int:
    """So many that what a block computes stays in the cache of a CPU, or fills a GPU."""
    return max(1, (2**18 if q.device.type == "cpu" else 2**24) // q[:, :, :chunk_size].numel())


class Block(NamedTuple):
    start: int
    chunks: int
    chunk_size: int

    @property
    def length(self) -> int:
        return self.chunks * self.chunk_size


def is_one_graph(q: Tensor) -> bool:
    """Whether a sequence q `[B, H, T, d]` is being compiled or exported: then one graph must do for every length, so it
    is padded to whole chunks, and these are one block."""
    return torch.compiler.is_compiling() and q.shape[2] > 1


def padding_of(length: int, chunk_size: int) -> int:
    """How many masked tokens make of `length` at least two whole chunks: one would be a graph of its own. There is at
    least one chunk of them, as no branch can then depend on whether there are any."""
    return (length + 2 * chunk_size - 1) // chunk_size * chunk_size - length


def lengthen(x: Tensor | None, extra: int) -> Tensor | None:
    """Zeros at the end of the tokens of `[B, H, T, d]`, `[B, H, T]` or `[B, T]`; what is the same for all stays."""
    if x is None or (x.ndim == 3 and x.shape[2] == 1):
        return x
    return pad(x, (0, 0) * (x.ndim == 4) + (0, extra))


def shorten(x: Tensor, length: int, dim: int) -> Tensor:
    """The first tokens. Not a slice: an export cannot know that there are so many."""
    return x.index_select(dim, torch.arange(length, device=x.device))


def blocks_of(length: int, chunk_size: int, chunks: int) -> list[Block]:
    """Blocks of at most `chunks` chunks; what is left of a chunk is a block of its own."""
    if torch.compiler.is_compiling() and length > 1:  # padded to whole chunks
        return [Block(0, length // chunk_size, chunk_size)]
    blocks, start = [], 0
    while start < length:
        size = min(chunk_size, length - start)
        blocks.append(Block(start, min(chunks, (length - start) // size), size))
        start += blocks[-1].length
    return blocks


def split(x: Tensor | None, blocks: list[Block], dim: int) -> Sequence[Tensor | None]:
    """One piece per block; the gradient of a split is one concatenation, that of slices a full tensor each."""
    if x is None or len(blocks) == 1 or x.shape[dim] == 1:
        return [x] * len(blocks)
    return x.split([block.length for block in blocks], dim)


def fold(x: Tensor | None, chunks: int) -> Tensor | None:
    """`[B, H, chunks * C, ...]` to `[B * chunks, H, C, ...]`."""
    if x is None or (not torch.compiler.is_compiling() and chunks == 1):
        return x
    return x.unflatten(2, (chunks, x.shape[2] // chunks)).transpose(1, 2).contiguous().flatten(0, 1)


def unfold(x: Tensor, chunks: int) -> Tensor:
    if not torch.compiler.is_compiling() and chunks == 1:
        return x
    return x.unflatten(0, (x.shape[0] // chunks, chunks)).transpose(1, 2).flatten(2, 3)


def by_chunk(x: Tensor, block: Block) -> Tensor:
    """`[B, chunks * C]` to `[B * chunks, C]`; no size is left to be found, as a symbol would have to be divided."""
    return x.unflatten(1, (block.chunks, block.chunk_size)).flatten(0, 1)


def run_blocks(step: Callable, blocks: list[Block], state: Sequence, recompute: bool) -> tuple[Tensor, Sequence]:
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


def document_runs(segment_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
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
    runs = document_runs(segment_ids, attention_mask)
    real = torch.ones_like(runs) if attention_mask is None else (attention_mask != 0).long()
    before = real.cumsum(1) - real  # in the row
    begins = runs.diff(dim=1, prepend=runs[:, :1]) > 0
    first = torch.where(begins, before, -seen[:, None]).cummax(1).values
    return before + real - first


def block_weights(decays: Sequence[Tensor | None], block: Block, runs: Tensor | None) -> list[Weights | None]:
    """Per pass, for the block's chunks; passes that decay alike share them."""
    before = None
    if runs is not None:
        previous = pad(runs, (1, 0))  # the carried state belongs to the first document, number 0
        part = slice(block.start, block.start + block.length)
        runs, before = by_chunk(runs[:, part], block), by_chunk(previous[:, part], block)[:, 0]
    made = {}
    for x in decays:
        if id(x) not in made:
            folded = x if x is None or x.shape[2] == 1 else fold(x, block.chunks)
            made[id(x)] = chunk_weights(folded, block.chunk_size, runs, before)
    return [made[id(x)] for x in decays]


def document_decays(decays: Sequence[Tensor | None], block: Block, runs: Tensor | None) -> Sequence[Tensor | None]:
    """Kernels know no documents: at the first token of each everything decays, down to 0."""
    if runs is None:
        return decays
    part = slice(block.start, block.start + block.length)
    begins = (runs[:, part] != pad(runs, (1, 0))[:, part])[:, None]
    return [begins * FORGET if x is None else torch.where(begins, FORGET, x) for x in decays]


def no_autocast(x: Tensor) -> AbstractContextManager:
    """States and what is summed into them keep their dtype under autocast."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


# ---- the operators, each once, as a stack over `attend` ----------------------------------------


class Passes:
    """`attend` for one block: evaluates pass i and keeps its state in `states[i]`."""

    def __init__(self, states: Sequence[Tensor | None], weights: Sequence[Weights | None], chunks: int = 1):
        self.states, self.weights, self.chunks = list(states), weights, chunks

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, self.states[i] = attend_block(q, k, v, self.weights[i], self.states[i], self.chunks)
        return out


class FlaPasses(Passes):
    """The same by kernels, over tokens that are not folded; `weights` are the decays."""

    form = "chunk"

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, self.states[i] = _attend_fla(q, k, v, self.weights[i], self.states[i], self.form)
        return out


def passes_of(
    states: Sequence[Tensor | None], decays: Sequence[Tensor | None], block: Block, runs: Tensor | None, by_fla: bool
) -> Passes:
    """`attend` for a block, of one chunk if `by_fla`: the choice that `use_fla` made."""
    if by_fla:
        return FlaPasses(states, document_decays(decays, block, runs))
    return Passes(states, block_weights(decays, block, runs), block.chunks)


def _linear(attend, q, k, v):
    return attend(0, q, k, v)


def accumulate(
    attend: Callable, e: Tensor, k: Tensor, coefficient: float | Tensor, ridge: float, normalize: bool = False
) -> Tensor:
    """u = coefficient LA(e, k, k) + ridge e: the keys of the outer pass; `normalize` divides LA by its own mass."""
    u = attend(0, e, k, pad(k, (0, 1), value=1.0) if normalize else k)
    if normalize:
        u = safe_divide(u[..., :-1], u[..., -1:])
    if isinstance(coefficient, Tensor) or coefficient != 1:
        u = of_heads(coefficient, u.shape[1]) * u
    return u + ridge * repeat_heads(e, u.shape[1]) if ridge else u


def _hla2(attend, q, k, v, e, coefficient, ridge):
    return attend(1, q, accumulate(attend, e, k, coefficient, ridge), v)


def _ahla(attend, q, k, v):
    return attend(1, q, k, attend(0, q, k, v))


def _hla3(attend, q, k, v, e, coefficient, ridge):
    return attend(2, q, accumulate(attend, e, k, coefficient, ridge), attend(1, q, k, v))


# name: (the stack, how many passes it has)
STACKS: dict[str, tuple[Callable, int]] = {
    "linear": (_linear, 1),
    "hla2": (_hla2, 2),
    "ahla": (_ahla, 2),
    "hla3": (_hla3, 3),
}


# ---- arguments ----------------------------------------


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, segment_ids: Tensor | None, chunk_size: int
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    check(q.ndim == k.ndim == v.ndim == 4, f"q, k and v must be [B, heads, T, dim], got {shapes}")
    check(
        q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] > 0,
        f"q, k and v must have the same batch size and the same length of at least 1, got {shapes}",
    )
    check(q.shape[3] == k.shape[3], f"q and k must have the same head_dim, got {shapes}")
    check(
        k.shape[1] == v.shape[1] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"k and v must have the same number of heads, and q a multiple of it, got {shapes}",
    )
    for name, x in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
        check(
            x is None or x.shape == (q.shape[0], q.shape[2]),
            f"{name} must be [B, T] = {(q.shape[0], q.shape[2])}, got {x if x is None else tuple(x.shape)}",
        )
    check(chunk_size >= 1, f"chunk_size must be at least 1, got {chunk_size}")


def as_decays(log_decay: Decay | Sequence[Decay], passes: int, q: Tensor, k: Tensor) -> list[Tensor | None]:
    """One entry per pass: None, `[B, H or Hkv, T]`, or `[1, H or Hkv or 1, 1]` if it is the same for all tokens."""
    if not isinstance(log_decay, tuple | list):
        log_decay = (log_decay,) * passes
    check(len(log_decay) == passes, f"log_decay has {len(log_decay)} entries, the operator has {passes} passes")
    batch, heads, length = q.shape[:3]
    decays = []
    for entry in log_decay:
        if entry is None:
            decays.append(None)
            continue
        if not isinstance(entry, Tensor):  # a number is filled in on its device, not copied there
            check(entry <= 0, f"log_decay must be at most 0, got a value of {entry:.4g}")
            entry = torch.full((), entry, dtype=compute_dtype(q), device=q.device)
        entry = entry.to(q.device, compute_dtype(q))
        shape = tuple(entry.shape)
        heads_allowed = (heads, k.shape[1])
        if not (
            shape == ()
            or (len(shape) == 1 and shape[0] in heads_allowed)
            or (len(shape) == 3 and shape[0] == batch and shape[1] in heads_allowed and shape[2] == length)
        ):  # not by `check`: a compiler that makes the message takes T for a constant
            raise ValueError(
                f"log_decay must be a number, [H] or [B, H, T] with H one of {heads_allowed}, B {batch}, T {length}, "
                f"got shape {shape}"
            )
        if entry.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere a look at values is a wait
            check(not bool((entry > 0).any()), f"log_decay must be at most 0, got a value of {entry.max().item():.4g}")
        decays.append(entry if len(shape) == 3 else entry.reshape(1, -1, 1))
    return decays


class OperatorOptions(TypedDict, total=False):
    """What every operator takes beside q `[B, H, T, d]`, k `[B, Hkv, T, d]`, v `[B, Hkv, T, dv]`, H a multiple of Hkv.

    scale: multiplies q wherever q appears; default `d ** -0.5`, the paper's is 1.0.
    log_decay: log of the decay g per token, at most 0: None, a float, `[H]` or `[B, H, T]` (H may be Hkv, which keeps
        key-only states per key-value head), the same for every pass, or a tuple with one entry per pass, inner first.
        The paper's decayed second order is `(log g, 2 log g)`. The values of a tensor are checked on the CPU only, as
        a look at them elsewhere is a wait.
    attention_mask: `[B, T]`, 0 at padded tokens, wherever they stand: they change nothing and their output is 0.
    segment_ids: `[B, T]`, a number per token: where it changes a new document begins, which sees nothing of those
        before it. `initial_state` belongs to the first document, the returned state to the last.
    normalize: divide by the row mass (the operator run on v = 1), its sign kept and its size at least 1e-6.
    initial_state: the state that an earlier call returned.
    return_state: also return the state after the last token, a tuple of fp32 tensors, batch first, one per pass (dv + 1
        values with `normalize`).
    form: `chunk` (matrix products, memory linear in T) or `recurrent` (token by token); with the package installed also
        `scan` (chunks side by side, their states from a parallel prefix) and `dense` (T x T).
    chunk_size: tokens per block of the chunk form.

    The operators return out `[B, H, T, dv]` in v's dtype, and with `return_state` the state; they raise ValueError
    naming the argument, its value and what is allowed.
    """

    scale: float | None
    log_decay: Decay | Sequence[Decay]
    attention_mask: Tensor | None
    segment_ids: Tensor | None
    normalize: bool
    initial_state: State | None
    return_state: bool
    form: str
    chunk_size: int


@dataclass
class OperatorCall:
    """One call of an operator, its arguments checked; a form is a function of it that returns out and the states."""

    operator: str
    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    e: Tensor | None = None
    settings: dict = field(default_factory=dict)  # of the stack: coefficient and ridge, where it has them
    scale: float | None = None
    log_decay: Decay | Sequence[Decay] = None
    attention_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    normalize: bool = False
    initial_state: State | None = None
    return_state: bool = False
    form: str = "chunk"
    chunk_size: int = 64

    def __post_init__(self):
        q, k, e = self.q, self.k, self.e
        self.stack, self.passes = STACKS[self.operator]
        check_shapes(q, k, self.v, self.attention_mask, self.segment_ids, self.chunk_size)
        if self.form not in FORMS:
            where = f" ({self.form!r} needs hla_hf installed and imported)" if self.form in ("scan", "dense") else ""
            raise ValueError(f"form {self.form!r} is unknown; it must be one of {tuple(FORMS)}{where}")
        check(
            e is None
            or (e.shape[0] == q.shape[0] and e.shape[1] in (q.shape[1], k.shape[1]) and e.shape[2:] == q.shape[2:]),
            f"e must be shaped as q {tuple(q.shape)} or k {tuple(k.shape)}, got {e if e is None else tuple(e.shape)}",
        )
        check(
            self.initial_state is None or len(self.initial_state) == self.passes,
            f"initial_state must have {self.passes} tensors, "
            f"got {0 if self.initial_state is None else len(self.initial_state)}",
        )
        self.decays, self.length = as_decays(self.log_decay, self.passes, q, k), q.shape[2]
        if self.form == "chunk" and is_one_graph(q):
            self._lengthen()
        self.runs = document_runs(self.segment_ids, self.attention_mask)
        self.scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _lengthen(self) -> None:
        extra = padding_of(self.length, self.chunk_size)
        if self.attention_mask is None:
            self.attention_mask = torch.ones_like(self.q[:, 0, :, 0], dtype=torch.bool)
        for name in ("q", "k", "v", "e", "attention_mask", "segment_ids"):
            setattr(self, name, lengthen(getattr(self, name), extra))
        self.decays = [lengthen(x, extra) for x in self.decays]

    def run(self) -> Tensor | tuple[Tensor, State]:
        out, states = FORMS[self.form](self)
        out = shorten(out, self.length, 2) if self.form == "chunk" and is_one_graph(self.q) else out
        return (out, tuple(states)) if self.return_state else out

    def prepare(
        self, tokens: Sequence[Tensor | None], mask: Tensor | None, decays: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """The features of tokens q, k, v, e in the compute dtype, and the decays: a padded token adds nothing, decays
        nothing and reads nothing."""
        q, k, v, e = tokens
        dtype = compute_dtype(q)
        features = [q.to(dtype) * self.scale, k.to(dtype), v.to(dtype)]
        if self.normalize:
            features[2] = pad(features[2], (0, 1), value=1.0)  # the row mass is the same stack run on ones
        if self.settings:
            features.append(features[0] if e is None else e.to(dtype))
        if mask is not None:
            padding = mask[:, None, :, None] == 0
            features = [x.masked_fill(padding, 0) for x in features]
            decays = [None if x is None else x.masked_fill(padding[..., 0], 0) for x in decays]
        return features, decays

    def finish(self, out: Tensor) -> Tensor:
        return (safe_divide(out[..., :-1], out[..., -1:]) if self.normalize else out).to(self.v.dtype)


def _blockwise(call: OperatorCall) -> tuple[Tensor, Sequence[Tensor]]:
    """The chunk and the recurrent form."""
    q, length = call.q, call.q.shape[2]
    by_fla = use_fla(q)
    if by_fla:
        blocks = [Block(0, 1, length)]
    elif call.form == "recurrent":
        blocks = blocks_of(length, 1, 1)
    else:
        blocks = blocks_of(length, call.chunk_size, chunks_per_block(q, call.chunk_size))
    tokens = list(zip(*(split(x, blocks, 2) for x in (q, call.k, call.v, call.e)), strict=True))
    masks = split(call.attention_mask, blocks, 1)
    decays = list(zip(*(split(x, blocks, 2) for x in call.decays), strict=True))

    def step(i: int, states: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        block = blocks[i]
        with no_autocast(q):
            features, decay = call.prepare(tokens[i], masks[i], decays[i])
            attend = passes_of(states, decay, block, call.runs, by_fla)
            attend.form = call.form
            out = call.stack(attend, *(fold(x, block.chunks) for x in features), **call.settings)
            return call.finish(unfold(out, block.chunks)), attend.states

    states = [None] * call.passes if call.initial_state is None else call.initial_state
    return run_blocks(step, blocks, states, recompute=call.form == "chunk")


FORMS: dict[str, Callable[[OperatorCall], tuple[Tensor, Sequence[Tensor]]]] = {
    "recurrent": _blockwise,
    "chunk": _blockwise,
}


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[OperatorOptions]
) -> Tensor | tuple[Tensor, State]:
    """First order, the primitive: `out_t = sum_{j<=t} g^(t-j) (q_t . k_j) v_j`.

    Arguments and result: `OperatorOptions`. State: `S [B, Hkv, d, dv]`.
    """
    return OperatorCall("linear", q, k, v, **options).run()


def hla2(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0, ridge: float = 0.0,
    **options: Unpack[OperatorOptions],
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Symmetric second order, `((W W^T) . L) V` (eq. 3.3 of the paper, masked): `LA(q, u, v)`,
    `u = coefficient LA(e, k, k) + ridge e`.

    `e` `[B, H or Hkv, T, d]` are the features under which values are accumulated, the scaled q by default; `e` is not
    scaled. `coefficient` is a number or one per head of e. `e=k, ridge=1` is first-order attention with a second-order
    correction of its keys. Other arguments and result: `OperatorOptions`. State: `S [B, Hkv, d, d]`, `F [B, H, d, dv]`.
    """
    return OperatorCall("hla2", q, k, v, e=e, settings={"coefficient": coefficient, "ridge": ridge}, **options).run()


def ahla(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[OperatorOptions]) -> Tensor | tuple[Tensor, State]:
    """Asymmetric second order, `((W W) . L) V`: `LA(q, k, r)`, `r = LA(q, k, v)`.

    Arguments and result: `OperatorOptions`. State: `P [B, Hkv, d, dv]`, `E [B, H, d, dv]`.
    """
    return OperatorCall("ahla", q, k, v, **options).run()


def hla3(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0, ridge: float = 0.0,
    **options: Unpack[OperatorOptions],
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Third order, `((W W^T) . L) W V`: `LA(q, u, r)`, `u` as in `hla2` and `r = LA(q, k, v)`.

    Arguments and result as those of `hla2`. State: `S [B, Hkv, d, d]`, `P [B, Hkv, d, dv]`, `F [B, H, d, dv]`.
    """
    return OperatorCall("hla3", q, k, v, e=e, settings={"coefficient": coefficient, "ridge": ridge}, **options).run()
