"""The scan form: segments of a sequence and their associative concatenation. No saved model carries this file."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .ops_hla import (
    FORMS,
    OPERATORS,
    STACKS,
    Block,
    OperatorCall,
    Passes,
    State,
    Weights,
    attend_block,
    block_weights,
    check,
    fold,
    no_autocast,
    of_heads,
    unfold,
)  # fmt: skip


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


class _SeenPasses(Passes):
    """Passes that also keep the keys and the output of each."""

    def __init__(self, passes: int, weights: Sequence[Weights | None]):
        super().__init__([None] * passes, weights)
        self.seen: list[tuple[Tensor, Tensor] | None] = [None] * passes

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().__call__(i, q, k, v)
        self.seen[i] = k, out
        return out


def segment_of(operator: str, features: list[Tensor], weights: list[Weights | None], settings: dict) -> Segment:
    """The segment of each row of `features`, none of which has a past."""
    stack, passes = STACKS[operator]
    attend = _SeenPasses(passes, weights)
    stack(attend, *features, **settings)
    q, k, v, *e = features
    starts, ends = ([None if w is None else w[n][..., None] for w in weights] for n in (1, 2))

    def cross(x, y, *weights):
        return _mm(_scaled(x, *(w for w in weights if w is not None)).mT, y)

    crosses = ()
    if e:
        e = e[0] * of_heads(settings["coefficient"], e[0].shape[1])
    if operator == "hla2":
        crosses = (cross(e, v, starts[0], ends[1]),)
    elif operator == "ahla":
        crosses = (cross(k, q, starts[0], ends[1]),)
    elif operator == "hla3":
        r, u = attend.seen[1][1], attend.seen[2][0]
        crosses = (
            cross(e, r, starts[0], ends[2]),
            cross(u, q, starts[1], ends[2]),
            cross(e, q, starts[0], starts[1], ends[2]),
        )
    one = q.new_ones(q.shape[0], 1, 1, 1)
    return Segment(
        tuple(attend.states), crosses, tuple(one if w is None else w.across[..., None, None] for w in weights)
    )


def _prefix(operator: str, elements: Segment) -> Segment:
    """The concatenation of all elements up to each, in log2(elements) concatenations of all at once."""
    step, prefix = 1, elements
    while step < elements.states[0].shape[1]:
        earlier, later = _each(lambda x, n=step: x[:, :-n], prefix), _each(lambda x, n=step: x[:, n:], prefix)
        joined = concatenate(operator, earlier, later)
        prefix, step = _each(lambda x, y, n=step: torch.cat([x[:, :n], y], 1), prefix, joined), 2 * step
    return prefix


def _each(function, *segments: Segment) -> Segment:
    return Segment(*(tuple(function(*x) for x in zip(*parts, strict=True)) for parts in zip(*segments, strict=True)))


class _PrefixPasses(Passes):
    """Passes whose states before every chunk are known."""

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_block(q, k, v, self.weights[i], self.states[i])[0]


def _scan(call: OperatorCall) -> tuple[Tensor, Sequence[Tensor]]:
    """The chunk form with the chunks' states from a parallel prefix."""
    check(call.operator in OPERATORS, f"form='scan' is for {OPERATORS}, not for {call.operator!r}")
    batch, _, length, _ = call.q.shape
    size = call.chunk_size
    chunks = -(-length // size)
    extra = chunks * size - length  # tokens that add nothing and decay nothing fill the last chunk
    with no_autocast(call.q):
        features, decays = call.prepare((call.q, call.k, call.v, call.e), call.attention_mask, call.decays)
        features = [fold(pad(x, (0, 0, 0, extra)), chunks) for x in features]
        decays = [None if x is None else pad(x.expand(batch, -1, length), (0, extra)) for x in decays]
        runs = call.runs
        runs = runs if runs is None else torch.cat([runs, runs[:, -1:].expand(-1, extra)], 1)
        weights = block_weights(decays, Block(0, chunks, size), runs)

        local = segment_of(call.operator, features, weights, call.settings)
        local = _each(lambda x: x.unflatten(0, (batch, chunks)), local)
        nothing = _each(lambda x: torch.zeros_like(x[:, :1]), local)
        before = Segment(  # what came before the first chunk is the first element
            nothing.states if call.initial_state is None else tuple(x[:, None] for x in call.initial_state),
            nothing.crosses,
            tuple(torch.ones_like(x[:, :1]) for x in local.decays),
        )
        prefix = _prefix(call.operator, _each(lambda x, y: torch.cat([x, y], 1), before, local))
        attend = _PrefixPasses([x[:, :-1].flatten(0, 1) for x in prefix.states], weights)
        out = unfold(call.stack(attend, *features, **call.settings), chunks)[:, :, :length]
    return call.finish(out), [x[:, -1] for x in prefix.states]


FORMS["scan"] = _scan
