"""The operators as T x T matrices, which is what the paper defines, and its published third order. No saved model
carries this file."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from .ops_hla import (
    FORMS,
    STACKS,
    OperatorCall,
    OperatorOptions,
    Passes,
    State,
    check,
    no_autocast,
    of_heads,
    repeat_heads,
)  # fmt: skip


def _dense_pairs(q: Tensor, k: Tensor, log_decay: Tensor | None, runs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Q K^T and the lower triangle of decays g^(t-j) within a document that belongs to it, `[B or 1, H, T, T]`."""
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if runs is not None:
        lower = lower & (runs[:, None, :, None] == runs[:, None, None])
    if log_decay is None:
        return q @ k.mT, lower.to(q.dtype)
    log_decay = repeat_heads(log_decay, q.shape[1])
    total = log_decay.expand(*log_decay.shape[:2], q.shape[2]).cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    return q @ k.mT, between.masked_fill(~lower, -torch.inf).exp()


def _dense_linear(q, k, v, decays, runs):
    scores, lower = _dense_pairs(q, k, decays[0], runs)
    return (scores * lower) @ v


def _dense_keys(q, k, e, coefficient, ridge, inner, outer, runs):
    """((c (Q K^T)(L . E K^T)^T + ridge Q E^T) . L: row t, column j holds q_t . u_j for j <= t."""
    scores, lower = _dense_pairs(e, k, inner, runs)
    pairs = (q @ k.mT) @ (of_heads(coefficient, q.shape[1]) * scores * lower).mT + ridge * (q @ e.mT)
    return pairs * _dense_pairs(q, k, outer, runs)[1]


def _dense_hla2(q, k, v, e, decays, runs, coefficient, ridge):
    return _dense_keys(q, k, e, coefficient, ridge, *decays, runs) @ v


def _dense_ahla(q, k, v, decays, runs):
    return _dense_linear(q, k, _dense_linear(q, k, v, decays[:1], runs), decays[1:], runs)


def _dense_hla3(q, k, v, e, decays, runs, coefficient, ridge):
    r = _dense_linear(q, k, v, decays[1:2], runs)
    return _dense_keys(q, k, e, coefficient, ridge, decays[0], decays[2], runs) @ r


_DENSE = {"linear": _dense_linear, "hla2": _dense_hla2, "ahla": _dense_ahla, "hla3": _dense_hla3}


class _DensePasses(Passes):
    """`attend` as T x T matrices; `weights` are the decays, `runs` the documents."""

    runs: Tensor | None = None

    def __call__(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _dense_linear(q, k, v, self.weights[i:], self.runs)


def _dense(call: OperatorCall) -> tuple[Tensor, Sequence[Tensor]]:
    check(call.initial_state is None and not call.return_state, "form='dense' takes whole sequences: it has no state")
    features, decays = call.prepare((call.q, call.k, call.v, call.e), call.attention_mask, call.decays)
    features = [repeat_heads(x, call.q.shape[1]) for x in features]
    with no_autocast(call.q):
        if call.operator in _DENSE:
            return call.finish(_DENSE[call.operator](*features, decays=decays, runs=call.runs, **call.settings)), []
        attend = _DensePasses([None] * call.passes, decays)
        attend.runs = call.runs
        return call.finish(call.stack(attend, *features, **call.settings)), []


FORMS["dense"] = _dense


def _hla3_published(attend, q, k, v):
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    qk = (q * k).sum(-1, keepdim=True)
    u = attend(0, q, k, k) - qk * k
    r = attend(1, q, k, v) - qk * v
    w = (k * (attend(2, k, q, q) - qk * q)).sum(-1, keepdim=True)
    return attend(3, q, u, qk * v) + attend(4, q, k, (w + qk * qk) * v + qk * r)


STACKS["hla3_published"] = (_hla3_published, 5)


def hla3_published(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[OperatorOptions]
) -> Tensor | tuple[Tensor, State]:
    """Third order as the paper's Algorithm 3 computes it, which is not `hla3`: of the triples of tokens it keeps those
    whose largest index is reached at least twice.

    Arguments and result: `OperatorOptions`, without `log_decay` and the `scan` form; the state is five tensors.
    """
    check(options.get("log_decay") is None, "hla3_published has no decays: log_decay must be None")
    return OperatorCall("hla3_published", q, k, v, **options).run()
