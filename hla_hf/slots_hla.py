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
    batch, heads, count, dim = x.shape
    rows = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * count
    index = repeat_heads(index, heads) + rows
    return x.reshape(-1, dim).index_select(0, index.flatten()).view(batch, heads, -1, dim)


def take_by_chunk(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, Hkv, N, d]`, index `[B, Hkv, chunks, n]`: `[B, chunks, Hkv, n, d]`."""
    batch, heads, count, dim = x.shape
    rows = torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1) * count
    index = (index + rows).transpose(1, 2)
    return x.reshape(-1, dim).index_select(0, index.flatten()).view(*index.shape, dim)


@torch.no_grad()
def choose(score: Tensor, kept: Tensor, slots: int) -> Choice:
    """`score [B, Hkv, M + n]` of the pool, -inf where there is no token, empty slots behind full ones; `kept
    [B, chunks]`: whether the slots before a chunk are of the document that it begins with."""
    chunks = kept.shape[1]
    size = (score.shape[-1] - slots) // chunks
    step = torch.arange(size, device=score.device)
    begins = torch.cat([step.new_full((slots,), -1), step])
    index = torch.arange(slots, device=score.device).expand(*score.shape[:2], -1)
    held, out = score[..., :slots], []
    for c in range(chunks):
        held = held.masked_fill(~kept[:, c, None, None], -torch.inf)
        first = slots + c * size
        tokens = torch.cat([index, (first + step).expand(*index.shape[:2], -1)], -1)
        scores = torch.cat([held, score[..., first : first + size]], -1)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        # the last of the best M + 1 that have come by each step leaves, or the newcomer if that is worse yet
        come = begins[order][..., None, :] <= step[:, None]
        worst = (come.cumsum(-1) <= slots).sum(-1)
        newcomer = order.argsort(-1)[..., slots:]
        out_now = torch.where(newcomer < worst, order.gather(-1, worst), slots + step)
        ends = torch.full_like(tokens, size).scatter(-1, out_now, step.expand_as(out_now))
        none = scores == -torch.inf
        after = ((ends < size) * 2 + none).sort(dim=-1, stable=True).indices[..., :slots]
        out.append((tokens.gather(-1, out_now), index, ends.masked_fill(none, -1)))
        index, held = tokens.gather(-1, after), scores.gather(-1, after)
    absorbed, start, ends = (torch.stack(x, 2) for x in zip(*out, strict=True))
    ends = ends.transpose(1, 2).flatten(0, 1)[..., None, :]
    alive = (begins <= step[:, None]) & (step[:, None] < ends)
    return Choice(absorbed.flatten(2), start, index, held == -torch.inf, alive)


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
    parts = weights[..., -window - size :].sum((2, 3)).unflatten(0, (-1, chunks))
    total = parts.new_zeros(parts.shape[0], parts.shape[2], window + chunks * size)
    for c in range(chunks):
        total[..., c * size : c * size + window + size] += parts[:, c]
    return total[..., None]


@torch.no_grad()
def recall_error(
    key: Tensor, value: Tensor, weights: Weights | None, state: Tensor | None, chunks: int
) -> tuple[Tensor, Tensor]:
    """|v_j - LA(phi(k), phi(k), v)_j / mass|^2 of each token, `[B * chunks, Hkv, C, 1]`, and the state of that LA.

    key, value: features, and values with a column of ones, zero where a token is not stored."""
    out, state = attend_block(key, key, value, weights, state, chunks)
    out = safe_divide(out[..., :-1], out[..., -1:])
    return (value[..., :-1] - out).square().sum(-1, keepdim=True), state
