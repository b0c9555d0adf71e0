"""Exact slots: beside its window, a key-value head keeps the M tokens with the highest scores that have left it.

A token's score is fixed when it leaves the window. It then competes with the slots, the earlier first among equals, and
the loser is absorbed into the states, never to come back: once the slots are full, exactly one token per step is.
So the far part is the operator over tokens in the order of their absorption, which each key-value head has of its own.

A sequence is decided chunk by chunk: the M slots and the C tokens that leave in a chunk are sorted once, and who is out
at which step follows from counting. No gradient flows through the choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .ops_hla import Weights, attend_block, repeat_heads, safe_divide


SLOT_SCORES = ("attention", "recall")


class Slots(NamedTuple):
    """The tokens in the slots, in order of age, empty slots last: `[B, H or Hkv, M, .]`. score: -inf where a slot is
    empty, and a token's number in its document, both `[B, Hkv, M, 1]`."""

    k: Tensor
    v: Tensor
    far_k: Tensor
    far_q: Tensor | None
    r: Tensor | None
    score: Tensor
    number: Tensor


class Choice(NamedTuple):
    """Who is in the slots in a block of chunks. Tokens are numbers in a pool: the M slots before the block, then its
    leaving tokens.

    absorbed: who enters the states at each step, `[B, Hkv, n]`; start: the slots before each chunk,
    `[B, Hkv, chunks, M]`; end: those after the block, `[B, Hkv, M]`, and empty: which of them hold nothing; alive:
    whether slots and leaving tokens are in a slot at step i of their chunk, `[B * chunks, Hkv, C, M + C]`.
    """

    absorbed: Tensor
    start: Tensor
    end: Tensor
    empty: Tensor
    alive: Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, N, d]`, index `[B, Hkv, n]`: `[B, H, n, d]`."""
    return take_by_chunk(x, repeat_heads(index, x.shape[1])[:, :, None]).squeeze(1)


def take_by_chunk(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, N, d]`, index `[B, H, chunks, n]`: `[B, chunks, H, n, d]`."""
    batch, heads, count, dim = x.shape
    rows = torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1) * count
    index = (index + rows).transpose(1, 2)
    return x.flatten(0, 2).index_select(0, index.flatten()).view(*index.shape, dim)


def stable_order(x: Tensor, descending: bool = False) -> Tensor:
    """Indices that sort the last dimension, the first among equals first."""
    if torch.onnx.is_in_onnx_export():  # ONNX has one sort, which is stable
        return x.sort(dim=-1, descending=descending).indices
    return x.sort(dim=-1, descending=descending, stable=True).indices


@torch.no_grad()
def choose(score: Tensor, kept: Tensor, slots: int, length: int = 0) -> Choice:
    """`score [B, Hkv, M + n]` of the pool, -inf where there is no token, empty slots behind full ones; `kept
    [B, chunks]`: whether the slots before a chunk are of the document that it begins with; length: the sequence's
    before it was padded, of which a graph for every length computes all sizes."""
    chunks = kept.shape[1]
    size = (score.shape[-1] - slots) // chunks
    first = torch.arange(chunks, device=score.device) * size + slots
    per_chunk = score[..., slots:].unflatten(2, (chunks, size)).movedim(2, 0), kept.mT, first
    index = torch.arange(slots, device=score.device).expand(*score.shape[:2], -1)
    carried = index.contiguous(), score[..., :slots].contiguous()
    step = torch.arange(size, device=score.device)
    begins = torch.cat([step.new_full((slots,), -1), step])
    if torch.compiler.is_compiling():
        index, held, *out = _scan_in_graph(carried, per_chunk, (step, begins), (len(score), length))
    else:
        index, held, *out = _scan(carried, per_chunk, (step, begins))
    absorbed, start, ends = (x.movedim(0, 2) for x in out)
    ends = ends.transpose(1, 2).flatten(0, 1)[..., None, :]
    alive = (begins <= step[:, None]) & (step[:, None] < ends)
    return Choice(absorbed.flatten(2), start, index, held == -torch.inf, alive)


def _choose_in_chunk(
    index: Tensor, held: Tensor, score: Tensor, kept: Tensor, first: Tensor, step: Tensor, begins: Tensor, *_: int
) -> tuple[Tensor, ...]:
    """The tokens in the slots before a chunk and their scores to those after it; who is absorbed, who was in the slots
    and at which step each token leaves.

    step: the C of a chunk; begins: at which of them each of its M + C tokens comes, -1 for those in the slots before.
    """
    slots, size = held.shape[-1], score.shape[-1]
    held = held.masked_fill(~kept[:, None, None], -torch.inf)
    tokens = torch.cat([index, (first + step).expand(*index.shape[:2], -1)], -1)
    scores = torch.cat([held, score], -1)
    order = stable_order(scores, descending=True)
    # the last of the best M + 1 that have come by each step leaves, or the newcomer if that is worse yet
    come = begins[order][..., None, :] <= step[:, None]
    worst = (come.cumsum(-1) <= slots).sum(-1)
    rank = order.scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    newcomer = rank[..., slots:]
    out_now = torch.where(newcomer < worst, order.gather(-1, worst), slots + step)
    ends = torch.full_like(tokens, size).scatter(-1, out_now, step.expand_as(out_now))
    none = scores == -torch.inf
    after = stable_order((ends < size) * 2 + none.long())[..., :slots]
    out = tokens.gather(-1, out_now), index.clone(), ends.masked_fill(none, -1)
    return tokens.gather(-1, after), scores.gather(-1, after), *out


def _scan(carried: tuple[Tensor, ...], per_chunk: tuple[Tensor, ...], same: tuple[Tensor, ...]) -> list[Tensor]:
    """`_choose_in_chunk` chunk by chunk: the last tokens and scores, and the rest of each chunk's result, stacked."""
    outs = []
    for chunk in zip(*(x.unbind(0) for x in per_chunk), strict=True):
        *carried, absorbed, start, ends = _choose_in_chunk(*carried, *chunk, *same)
        outs.append((absorbed, start, ends))
    return [*carried, *(torch.stack(x) for x in zip(*outs, strict=True))]


@torch.compiler.allow_in_graph
def _scan_in_graph(
    carried: tuple[Tensor, ...], per_chunk: tuple[Tensor, ...], same: tuple[Tensor, ...], symbols: tuple[int, ...]
) -> list[Tensor]:
    """The same, its body compiled once; `symbols` are the sizes from which Inductor computes those of the result.
    Allowed in a graph, as attributes set after `scan` are lost in one that TorchDynamo traces."""
    from torch._higher_order_ops.scan import scan_op

    same += tuple(x for x in symbols if isinstance(x, torch.SymInt))
    with torch.no_grad():
        return list(scan_op(_choose_in_chunk, list(carried), list(per_chunk), additional_inputs=same))


@torch.no_grad()
def received(scores: Tensor, visible: Tensor, real: Tensor | None, window: int, chunks: int) -> Tensor:
    """The attention that the tokens of the window receive from a block's queries, summed over these and the heads of a
    group: `[B, Hkv, W + n, 1]`.

    scores `[B * chunks, Hkv, group, C, S + W + C]` and visible, `[B * chunks, C, S + W + C]`: sinks and window, as what
    is in the slots must not count before it is chosen. real `[B * chunks, C]` or None.
    """
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    if real is not None:
        weights = weights * real[:, None, None, :, None]
    size = scores.shape[3]
    parts = weights[..., -window - size :].sum((2, 3)).unflatten(0, (weights.shape[0] // chunks, chunks))
    # each chunk's W + C sums stand beside those of the chunk before it, C further: so many pieces of C overlap
    count = -(-window // size) + 1
    pieces = pad(parts.transpose(1, 2), (0, count * size - window - size)).unflatten(3, (count, size)).unbind(3)
    total = sum(pad(piece, (0, 0, i, count - 1 - i)) for i, piece in reversed(list(enumerate(pieces))))
    return total.flatten(2)[..., : window + chunks * size, None]


@torch.no_grad()
def recall_error(
    key: Tensor, value: Tensor, weights: Weights | None, state: Tensor | None, chunks: int
) -> tuple[Tensor, Tensor]:
    """|v_j - LA(phi(k), phi(k), v)_j / mass|^2 of each token, `[B * chunks, Hkv, C, 1]`, and the state of that LA.

    key, value: features, and values with a column of ones, zero where a token is not stored."""
    out, state = attend_block(key, key, value, weights, state, chunks)
    out = safe_divide(out[..., :-1], out[..., -1:])
    return (value[..., :-1] - out).square().sum(-1, keepdim=True), state
