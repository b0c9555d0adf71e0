"""The operators by their literal definitions, token by token or as T x T matrices in float64, for one head at a time.

Nothing here shares code with hla_hf: what the tests compare with must be readable beside the paper.
"""

import torch


def decay_matrix(log_decay, length):
    """D[t, j] = product of the decays of tokens j+1..t for j <= t, else 0; `log_decay` None, a number or `[T]`."""
    log_decay = torch.as_tensor(0.0 if log_decay is None else log_decay, dtype=torch.float64).expand(length)
    rows, row = [], torch.zeros(length, dtype=torch.float64)
    for t in range(length):
        row = row * log_decay[t].exp() + (torch.arange(length) == t)
        rows.append(row)
    return torch.stack(rows)


def operator(name, q, k, v, *, decays=None, e=None, coefficient=1.0, ridge=0.0, normalize=False):
    """One head: q, k `[T, d]`, v `[T, dv]`, q already scaled; `decays` one log decay per pass, inner first."""
    length = len(q)
    lower = torch.ones(length, length, dtype=torch.float64).tril()
    e = q if e is None else e
    passes = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}[name]
    D = [decay_matrix(d, length) for d in (decays or [None] * passes)]
    W = [(q @ k.T) * lower * d for d in D]
    E = (e @ k.T) * lower * D[0]
    UU = coefficient * (q @ k.T) @ E.T + ridge * q @ e.T
    matrix = {
        "linear": lambda: W[0],
        "hla2": lambda: UU * lower * D[1],
        "ahla": lambda: W[1] @ W[0],
        "hla3": lambda: (UU * lower * D[2]) @ W[1],
    }[name]()
    out = matrix @ v
    if normalize:
        mass = matrix.sum(-1, keepdim=True)
        out = out / (torch.where(mass < 0, -1.0, 1.0) * mass.abs().clamp(min=1e-6))
    return out


def published_hla2(q, k, v, decay=1.0, corrected=True):
    """The paper's five-summary recurrence without its row mass: S, C and G. As printed, G is not decayed rightly."""
    S, C, G = (torch.zeros(len(a), len(b), dtype=q.dtype) for a, b in ((k[0], k[0]), (q[0], v[0]), (q[0], v[0])))
    out = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        kk = torch.outer(k_t, k_t)
        G = decay**2 * G + kk @ (decay * C) if corrected else decay * G + kk @ C
        S, C = decay * S + kk, decay * C + torch.outer(q_t, v_t)
        out.append(q_t @ (S @ C - G))
    return torch.stack(out)


def published_hla3(q, k, v):
    """The paper's Algorithm 3, token by token, one head."""
    d, dv = q.shape[1], v.shape[1]
    SK, SQ, P = (torch.zeros(d, n, dtype=q.dtype) for n in (d, d, dv))
    G1, G2, G3 = (torch.zeros(d, dv, dtype=q.dtype) for _ in range(3))
    out = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        kk, qq, kv = torch.outer(k_t, k_t), torch.outer(q_t, q_t), torch.outer(k_t, v_t)
        G1, G2, G3 = G1 + kk @ SQ @ P, G2 + SK @ qq @ P, G3 + SK @ SQ @ kv
        SK, SQ, P = SK + kk, SQ + qq, P + kv
        out.append(q_t @ (SK @ SQ @ P - G1 - G2 - G3))
    return torch.stack(out)


def windowed(
    name, q, k, v, phi_q, phi_k, *, window, sinks, gate, scale,
    decays=None, e=None, coefficient=1.0, ridge=0.0, value_mix=1.0,
):  # fmt: skip
    """One head, no padding: softmax near, HLA far, one normaliser, straight from the sums over pairs."""
    length = len(q)
    t, j = torch.arange(length)[:, None], torch.arange(length)[None]
    near = (j <= t) & ((j > t - window) | (j < sinks))
    far = (j <= t - window) & (j >= sinks)
    passes = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}[name]
    D = [decay_matrix(d, length) for d in (decays or [None] * passes)]
    stored = (torch.arange(length) >= sinks).double()[:, None]  # sinks never enter a state

    def delayed(D):  # token j enters a state at step j + window, and decays from there on
        out = torch.zeros(length, length, dtype=torch.float64)
        if length > window:
            out[window:, : length - window] = D[window:, window:]
        return out

    gate = gate / (t - (window + sinks - 1)).clamp(min=1).double().sqrt()
    s = (scale * q @ k.T).masked_fill(~near, -torch.inf)
    P = (s - s.amax(-1, keepdim=True)).exp()

    def attention(keys, values, D):
        A = gate * (phi_q @ keys.T) * far * delayed(D) + P
        return (A @ values) / A.sum(-1, keepdim=True)

    r = u = None
    keys, values = phi_k, v
    if name in ("hla2", "hla3"):
        e = phi_k if e is None else e
        # the inner state decays by the steps at which its tokens left the window
        inner = torch.zeros(length, length, dtype=torch.float64)
        n = length - window
        if n > 0:
            inner[:n, :n] = D[0][window:, window:]
        inner = (e * stored) @ (phi_k * stored).T * torch.ones(length, length).double().tril() * inner
        u = coefficient * (inner @ (phi_k * stored)) / inner.sum(-1, keepdim=True).clamp(min=1e-6)
        keys = u + ridge * e
    if name in ("ahla", "hla3"):
        r = attention(phi_k, v, D[passes - 2])
        values = (1 - value_mix) * v + value_mix * r
        A = gate * (phi_q @ keys.T) * far * delayed(D[-1])
        return (P @ v + A @ values) / (P.sum(-1, keepdim=True) + A.sum(-1, keepdim=True))
    return attention(keys, values, D[-1])


def with_slots(
    name, q, k, v, phi_q, phi_k, score, *, window, sinks, slots, gate, scale,
    decays=None, e=None, coefficient=1.0, ridge=0.0, value_mix=1.0,
):  # fmt: skip
    """One head, no padding, token by token: what leaves the window competes for a slot with its score `[T]`, the loser
    is absorbed into the states."""
    length, dim, dv = len(q), phi_k.shape[1], v.shape[1]
    passes = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}[name]
    decays = [torch.as_tensor(0.0 if x is None else x).double().expand(length).exp() for x in decays or [None] * passes]
    states = {"u": torch.zeros(dim, dim + 1), "r": torch.zeros(dim, dv + 1), "out": torch.zeros(dim, dv + 1)}
    states = {
        n: x.double()
        for n, x in states.items()
        if n == "out" or n in {"hla2": "u", "ahla": "r", "hla3": "ur"}.get(name, "")
    }
    one, kept, absorbed, outs, rs = torch.ones(1).double(), [], 0, [], []
    e = phi_k if e is None else e
    for t in range(length):
        lost = None
        if t - window >= sinks:
            kept.append(t - window)
            if len(kept) > slots:
                lost = min(kept, key=lambda j: (score[j].item(), -j))
                kept.remove(lost)
                absorbed += 1
        near = sorted({*range(max(0, t - window + 1), t + 1), *range(min(sinks, t + 1)), *kept})
        s = scale * k[near] @ q[t]
        p = (s - s.max()).exp()
        weight = gate * max(absorbed, 1) ** -0.5
        states = {n: decay[t] * x for (n, x), decay in zip(states.items(), decays, strict=True)}

        def read(state, weight=weight, p=p, near=near, t=t):
            far = weight * phi_q[t] @ state
            return (p @ v[near] + far[:-1]) / (p.sum() + far[-1])

        if "r" in states:
            if lost is not None:
                states["r"] = states["r"] + torch.outer(phi_k[lost], torch.cat([v[lost], one]))
            rs.append(read(states["r"]))
        if lost is not None:
            key, value = phi_k[lost], v[lost]
            if "u" in states:
                states["u"] = states["u"] + torch.outer(key, torch.cat([key, one]))
                u = e[lost] @ states["u"]
                key = coefficient * u[:-1] / u[-1].clamp(min=1e-6) + ridge * e[lost]
            if "r" in states:
                value = (1 - value_mix) * value + value_mix * rs[lost]
            states["out"] = states["out"] + torch.outer(key, torch.cat([value, one]))
        outs.append(read(states["out"]))
    return torch.stack(outs)


def received_attention(q, k, *, window, sinks, scale):
    """The queries `[G, T, d]` of a group over one head's keys `[T, d]`: what each token gets while it is in the window,
    by softmax over window and sinks."""
    length = len(k)
    t, j = torch.arange(length)[:, None], torch.arange(length)[None]
    window = (j <= t) & (j > t - window)
    near = window | ((j <= t) & (j < sinks))
    weights = (scale * q @ k.T).masked_fill(~near, -torch.inf).softmax(-1)
    return (weights * window).sum((0, 1))


def recall_error(phi_k, v, *, sinks):
    """|v_j - sum_i (phi(k_j) . phi(k_i)) v_i / mass|^2 over S <= i <= j."""
    errors = [torch.zeros(()).double()] * min(sinks, len(v))
    for j in range(sinks, len(v)):
        weights = phi_k[sinks : j + 1] @ phi_k[j]
        errors.append(((v[j] - weights @ v[sinks : j + 1] / weights.sum()) ** 2).sum())
    return torch.stack(errors)
