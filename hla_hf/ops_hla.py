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

import torch
from torch import Tensor
from torch.nn.functional import pad


FORMS = ("dense", "recurrent", "chunk")
OPERATORS = ("linear", "ahla", "hla2", "hla3")
FEATURE_MAPS = ("identity", "softmax", "elu", "relu", "hedgehog")
EPS = 1e-6

Decay = None | float | Tensor
State = tuple[Tensor, ...]


def feature_map(name: str, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The features phi(x) of queries or keys.

    Args:
        name: one of `identity`, `softmax` (over head_dim), `elu` (elu(x) + 1), `relu`, or `hedgehog`: softmax of
            +y and of -y, y = x @ weight per head (Zhang et al., arXiv 2402.04347), computed in fp32.
        x: `[B, H, T, d]`.
        weight: `[H, d, f]`, for `hedgehog` only.
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
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    raise ValueError(f"feature map {name!r} is unknown; it must be one of {FEATURE_MAPS}")


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, Hkv, ...]` to `[B, H, ...]`, each head repeated for its group of queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _per_head(x: float | Tensor) -> float | Tensor:
    return x[:, None, None] if isinstance(x, Tensor) and x.ndim == 1 else x


def safe_divide(x: Tensor, mass: Tensor) -> Tensor:
    """x / mass, with |mass| at least `EPS` and its sign kept: signed features give a mass of either sign."""
    return x / torch.where(mass < 0, mass.clamp(max=-EPS), mass.clamp(min=EPS))


# ---- the primitive on one block of tokens ----------------------------------------


def _attend_block(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None):
    """LA over one block, given the state of all that came before it.

    q `[B, H, C, d]`; k, v `[B, H or Hkv, C, .]`; log_decay None or `[B or 1, H, Hkv or 1, C]`;
    state None or `[B, Hs, d, dv]`, Hs the most heads that k, v and log_decay have.
    Returns out `[B, H, C, dv]` and the new state. Every exponent is at most 0, so nothing can overflow.
    """
    state_heads = max(k.shape[1], v.shape[1], 1 if log_decay is None else log_decay.shape[1])
    q = _repeat_heads(q, max(q.shape[1], state_heads))
    if log_decay is not None and log_decay.shape[1] > 1:
        log_decay = _repeat_heads(log_decay, state_heads)
    batch, heads, length, dim = q.shape
    k, v = _repeat_heads(k, state_heads), _repeat_heads(v, state_heads)
    q = q.reshape(batch, state_heads, -1, dim)  # the queries of one state head stand below each other: [group * C, d]
    if length == 1:  # one token of decoding: update the state, then read it
        update = k.mT @ v
        if state is not None:
            update = update + (state if log_decay is None else log_decay[..., None].exp() * state)
        return (q @ update).reshape(batch, heads, 1, -1), update

    groups = (batch, state_heads, heads // state_heads, length, -1)
    scores = (q @ k.mT).view(groups)
    if log_decay is None:
        scores = scores.tril()
        past = None if state is None else q @ state
        update = k.mT @ v
        new_state = update if state is None else state + update
    else:
        total = log_decay.cumsum(-1)  # log of the decay from the block's start to each token, itself included
        above = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
        scores = scores * between[:, :, None]
        past = None if state is None else ((q @ state).view(groups) * total.exp()[:, :, None, :, None]).flatten(2, 3)
        new_state = (k * (total[..., -1:] - total).exp()[..., None]).mT @ v
        if state is not None:
            new_state = new_state + total[..., -1].exp()[..., None, None] * state
    out = scores.flatten(2, 3) @ v
    if past is not None:
        out = out + past
    return out.view(batch, heads, length, -1), new_state


# ---- the operators, each once, as a stack over `attend` ----------------------------------------


def _linear(attend, q, k, v):
    return attend(0, q, k, v)


def _accumulate(attend, e, k, coefficient, ridge):
    """u = coefficient LA(e, k, k) + ridge e: the keys of the outer pass."""
    u = attend(0, e, k, k)
    if isinstance(coefficient, Tensor) and coefficient.ndim == 1:
        coefficient = _repeat_heads(coefficient[None, :, None, None], u.shape[1])
    u = coefficient * u
    return u + ridge * _repeat_heads(e, u.shape[1]) if ridge else u


def _hla2(attend, q, k, v, e, coefficient, ridge):
    return attend(1, q, _accumulate(attend, e, k, coefficient, ridge), v)


def _ahla(attend, q, k, v):
    return attend(1, q, k, attend(0, q, k, v))


def _hla3(attend, q, k, v, e, coefficient, ridge):
    return attend(2, q, _accumulate(attend, e, k, coefficient, ridge), attend(1, q, k, v))


def _dense_pairs(q: Tensor, k: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Q K^T and the lower triangle of decays g^(t-j) that belongs to it, both `[B or 1, H, T, T]`."""
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if log_decay is None:
        return q @ k.mT, lower.to(q.dtype)
    total = _repeat_heads(log_decay, q.shape[1]).cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    return q @ k.mT, between.masked_fill(~lower, -torch.inf).exp()


def _dense_linear(q, k, v, decays):
    scores, lower = _dense_pairs(q, k, decays[0])
    return (scores * lower) @ v


def _dense_keys(q, k, e, coefficient, ridge, inner, outer):
    """((c (Q K^T)(L . E K^T)^T + ridge Q E^T) . L: row t, column j holds q_t . u_j for j <= t."""
    e = _repeat_heads(e, q.shape[1])
    scores, lower = _dense_pairs(e, k, inner)
    if isinstance(coefficient, Tensor) and coefficient.ndim == 1:
        coefficient = _repeat_heads(coefficient[None, :, None, None], q.shape[1])
    pairs = (q @ k.mT) @ (coefficient * scores * lower).mT + ridge * (q @ e.mT)
    return pairs * _dense_pairs(q, k, outer)[1]


def _dense_hla2(q, k, v, decays, e, coefficient, ridge):
    return _dense_keys(q, k, e, coefficient, ridge, *decays) @ v


def _dense_ahla(q, k, v, decays):
    return _dense_linear(q, k, _dense_linear(q, k, v, decays[:1]), decays[1:])


def _dense_hla3(q, k, v, decays, e, coefficient, ridge):
    return _dense_keys(q, k, e, coefficient, ridge, decays[0], decays[2]) @ _dense_linear(q, k, v, decays[1:2])


# name: (the stack, the definition, how many passes it has)
_OPERATORS = {
    "linear": (_linear, _dense_linear, 1),
    "hla2": (_hla2, _dense_hla2, 2),
    "ahla": (_ahla, _dense_ahla, 2),
    "hla3": (_hla3, _dense_hla3, 3),
}


# ---- arguments ----------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> None:
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
    if attention_mask is not None:
        _check(
            attention_mask.shape == (q.shape[0], q.shape[2]),
            f"attention_mask must be [B, T] = {(q.shape[0], q.shape[2])}, got {tuple(attention_mask.shape)}",
        )


def _as_decays(log_decay: Decay | Sequence[Decay], passes: int, q: Tensor, k: Tensor) -> list[Tensor | None]:
    """One entry per pass, each None or `[B or 1, H, Hkv or 1, T]`."""
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
        decays.append(entry if len(shape) == 3 else entry.reshape(1, -1, 1).expand(1, -1, length))
    return decays


def _run(
    operator, q, k, v, *, scale, log_decay, attention_mask, normalize, initial_state, return_state, form, chunk_size,
    e=None, **settings,
):  # fmt: skip
    stack, dense, passes = _OPERATORS[operator]
    _check_shapes(q, k, v, attention_mask)
    _check(form in FORMS, f"form {form!r} is unknown; it must be one of {FORMS}")
    _check(chunk_size >= 1, f"chunk_size must be at least 1, got {chunk_size}")
    decays = _as_decays(log_decay, passes, q, k)
    dtype, compute_dtype, length = v.dtype, _compute_dtype(q), q.shape[2]
    q = q.to(compute_dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if normalize:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the row mass is the same stack run on ones
    features = [q, k, v]
    if settings:
        e = q if e is None else e
        _check(
            e.shape[0] == q.shape[0] and e.shape[1] in (q.shape[1], k.shape[1]) and e.shape[2:] == q.shape[2:],
            f"e must be shaped as q {tuple(q.shape)} or as k {tuple(k.shape)}, got {tuple(e.shape)}",
        )
        features.append(e)
    if attention_mask is not None:  # a padded token adds nothing, decays nothing and reads nothing
        padding = attention_mask[:, None, :, None] == 0
        features = [x.masked_fill(padding, 0) for x in features]
        decays = [None if x is None else x.masked_fill(padding[..., 0], 0) for x in decays]

    if form == "dense":
        _check(initial_state is None and not return_state, "form='dense' takes whole sequences: it has no state")
        heads = q.shape[1]
        q, k, v, *rest = (_repeat_heads(x.to(compute_dtype), heads) for x in features)
        out, state = dense(q, k, v, decays, *rest, **settings), None
    else:
        _check(
            initial_state is None or len(initial_state) == passes,
            f"initial_state must have {passes} tensors, got {0 if initial_state is None else len(initial_state)}",
        )
        state = [None] * passes if initial_state is None else list(initial_state)
        block = 1 if form == "recurrent" else chunk_size
        blocks = []
        for start in range(0, length, block):

            def attend(i, q, k, v, start=start):
                decay = None if decays[i] is None else decays[i][..., start : start + block]
                out, state[i] = _attend_block(q, k, v, decay, state[i])
                return out

            part = (x[:, :, start : start + block].to(compute_dtype) for x in features)
            blocks.append(stack(attend, *part, **settings))
        out = torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
    if normalize:
        out = safe_divide(out[..., :-1], out[..., -1:])
    out = out.to(dtype)
    return (out, tuple(state)) if return_state else out


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
        normalize: divide by the row mass (the operator run on v = 1), its sign kept and its size at least 1e-6.
        initial_state: the state that an earlier call returned.
        return_state: also return the state after the last token.
        form: `chunk` (matrix products, memory linear in T), `recurrent` (token by token) or `dense` (T x T).
        chunk_size: tokens per block of the chunk form.
    Returns: out `[B, H, T, dv]` in v's dtype, and with `return_state` the state, a tuple of fp32 tensors with the
        batch first: {state}.
    Raises: ValueError naming the argument, its value and what is allowed.
"""


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, log_decay: Decay = None,
    attention_mask: Tensor | None = None, normalize: bool = False, initial_state: State | None = None,
    return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """First order, the primitive: `out_t = sum_{j<=t} g^(t-j) (q_t . k_j) v_j`."""
    return _run("linear", **locals())


def hla2(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0,
    ridge: float = 0.0, scale: float | None = None, log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, normalize: bool = False, initial_state: State | None = None,
    return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
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
    attention_mask: Tensor | None = None, normalize: bool = False, initial_state: State | None = None,
    return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Asymmetric second order, `((W W) . L) V`: `LA(q, k, r)`, `r = LA(q, k, v)`."""
    return _run("ahla", **locals())


def hla3(
    q: Tensor, k: Tensor, v: Tensor, *, e: Tensor | None = None, coefficient: float | Tensor = 1.0,
    ridge: float = 0.0, scale: float | None = None, log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, normalize: bool = False, initial_state: State | None = None,
    return_state: bool = False, form: str = "chunk", chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Third order, `((W W^T) . L) W V`: `LA(q, u, r)`, `u` as in `hla2` and `r = LA(q, k, v)`."""
    return _run("hla3", **locals())


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
    value_mix: float | Tensor = 1.0, scale: float | None = None, softcap: float | None = None,
    log_decay: Decay | Sequence[Decay] = None,
    attention_mask: Tensor | None = None, initial_state: State | None = None, return_state: bool = False,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Softmax over the last `window` and the first `num_sinks` real tokens, HLA over all others, one normaliser:

        out_t = (sum_near exp(s_tj - m_t) v_j + g sum_far (phi(q_t) . u_j) w_j) / (the same sums with v = w = 1)

    s = scale q . k and m_t is the largest s_tj of the near tokens. What lies beyond the window is the operator on keys
    and values delayed by `window` tokens: u = phi(k) for `linear` and `ahla`, else
    u = coefficient LA(e, phi(k), phi(k)) + ridge e; w = v for `linear` and `hla2`, else
    w = (1 - value_mix) v + value_mix r, r being this attention's own first-order output.

    Args:
        q, k, v: `[B, H, T, d]`, `[B, Hkv, T, d]`, `[B, Hkv, T, dv]`, as softmax attention takes them.
        query_map, key_map: phi for q and for k, `[B, H, T, d] -> [B, H, T, f]`.
        accumulator_map: e as a function of q, for `hla2` and `hla3`; None takes e = phi(k).
        gate: g, one per query head, `[H]`.
        coefficient: one per head of e; value_mix: one per query head; or numbers.
        log_decay: as in the operators, per pass: u (if any), r (if any), out.
        softcap: c in s = c tanh(scale q . k / c), for models that cap their scores; None leaves them.
        scale, attention_mask, chunk_size: as in the operators.
        initial_state, return_state: a tuple with the batch first: the number of real tokens seen `[B]`, then the
            sinks' and the window's k, v (in their dtype), the window's r (fp32) or q where the operator needs them,
            then the fp32 states of the passes. Its size does not depend on T.
    Returns: `[B, H, T, dv]`; the output of a padded token is 0.
    """
    _check_shapes(q, k, v, attention_mask)
    _check(window >= 1, f"window must be at least 1, got {window}")
    _check(num_sinks >= 0, f"num_sinks must be at least 0, got {num_sinks}")
    _check(operator in OPERATORS, f"operator {operator!r} is unknown; it must be one of {OPERATORS}")
    has_u, has_r = operator in ("hla2", "hla3"), operator in ("ahla", "hla3")
    buffers_q = has_u and accumulator_map is not None
    passes = 1 + has_u + has_r
    decays = _as_decays(log_decay, passes, q, k)
    batch, heads, length, head_dim = q.shape
    kv_heads, value_dim, dtype = k.shape[1], v.shape[-1], _compute_dtype(q)
    scale = head_dim**-0.5 if scale is None else scale

    if attention_mask is not None:
        # A stable sort moves each row's padding to its end, where a causal operator never sees it.
        lengths = attention_mask.bool().sum(1)
        order = attention_mask.bool().logical_not().long().argsort(dim=1, stable=True)
        q, k, v = (_gather_tokens(x, order) for x in (q, k, v))
        decays = [x if x is None or x.shape[0] == 1 else _gather_tokens(x[..., None], order)[..., 0] for x in decays]
        is_real = torch.arange(length, device=q.device) < lengths[:, None]

    if initial_state is None:
        empty = [k.new_zeros(batch, kv_heads, n, head_dim) for n in (num_sinks, window)]
        empty_v = [v.new_zeros(batch, kv_heads, n, value_dim) for n in (num_sinks, window)]
        seen = torch.zeros(batch, dtype=torch.long, device=q.device)
        sink_k, window_k, sink_v, window_v = *empty, *empty_v
        window_r = q.new_zeros(batch, heads, window, value_dim, dtype=dtype) if has_r else None
        window_q = q.new_zeros(batch, heads, window, head_dim) if buffers_q else None
        states = [None] * passes
    else:
        seen, sink_k, sink_v, window_k, window_v, *rest = initial_state
        window_r = rest.pop(0) if has_r else None
        window_q = rest.pop(0) if buffers_q else None
        states = rest

    # Slot i of these holds the token that leaves the window when the i-th new token comes; new token i is slot W + i.
    all_k, all_v = torch.cat([window_k, k], 2), torch.cat([window_v, v], 2)
    all_q = torch.cat([window_q, q], 2) if buffers_q else None
    all_r = [window_r]
    if num_sinks:
        place = torch.arange(num_sinks, device=q.device)
        source = (place - seen[:, None]).clamp(0, length - 1)
        is_old = (place < seen[:, None])[:, None, :, None]
        sink_k = torch.where(is_old, sink_k, _gather_tokens(k, source))
        sink_v = torch.where(is_old, sink_v, _gather_tokens(v, source))

    position = seen[:, None] - window + torch.arange(window + length, device=q.device)  # of each slot, < 0 if empty
    is_far = position[:, :length] >= num_sinks
    if attention_mask is not None:
        is_far = is_far & is_real
    far_mask = is_far[:, None, :, None]
    far_q = query_map(q).to(dtype)
    far_k = key_map(all_k[:, :, :length]).to(dtype).masked_fill(~far_mask, 0)
    far_v = pad(all_v[:, :, :length].to(dtype), (0, 1), value=1.0).masked_fill(~far_mask, 0)
    if has_u:
        far_e = far_k if accumulator_map is None else accumulator_map(all_q[:, :, :length]).to(dtype)
        far_e = far_e.masked_fill(~far_mask, 0)
    gate, value_mix = gate.to(dtype)[:, None, None], _per_head(value_mix)

    blocks = []
    for start in range(0, length, chunk_size):
        end = min(start + chunk_size, length)
        part = slice(start, end)

        def attend(i, q, k, v, part=part):
            decay = None if decays[i] is None else decays[i][..., part]
            if decay is not None and attention_mask is not None:
                decay = decay.masked_fill(~is_real[:, None, part], 0)
            out, states[i] = _attend_block(q, k, v, decay, states[i])
            return out

        # near: sinks that have left the window, then the window of each token, as one product
        columns = torch.arange(end - start + window, device=q.device)
        rows = torch.arange(end - start, device=q.device)[:, None]
        in_window = (columns > rows) & (columns <= rows + window) & (position[:, None, start : end + window] >= 0)
        is_sink = torch.arange(num_sinks, device=q.device) <= position[:, part, None]
        visible = torch.cat([is_sink, in_window], -1)[:, None, None]  # [B, 1, 1, C, sinks + C + W]
        block_k, block_v = (
            torch.cat([a, b[:, :, start : end + window]], 2) for a, b in ((sink_k, all_k), (sink_v, all_v))
        )
        block_q = (q[:, :, part].to(dtype) * scale).reshape(batch, kv_heads, -1, head_dim)
        scores = (block_q @ block_k.to(dtype).mT).view(batch, kv_heads, heads // kv_heads, end - start, -1)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        near = (weights.flatten(2, 3) @ block_v.to(dtype)).view(batch, heads, end - start, -1)
        near = torch.cat([near, weights.sum(-1).view(batch, heads, -1, 1)], -1)

        def join(far, near=near):
            both = near + gate * far
            return safe_divide(both[..., :-1], both[..., -1:])

        block_q, block_k, block_v = far_q[:, :, part], far_k[:, :, part], far_v[:, :, part]
        if has_r:
            r = join(attend(int(has_u), block_q, block_k, block_v))
            all_r.append(r)
            all_r = [torch.cat(all_r, 2)]
            mixed = (1 - value_mix) * _repeat_heads(block_v[..., :-1], heads) + value_mix * all_r[0][:, :, part]
            block_v = pad(mixed, (0, 1), value=1.0).masked_fill(~far_mask[:, :, part], 0)
        if has_u:
            block_k = _accumulate(attend, far_e[:, :, part], block_k, coefficient, ridge)
        blocks.append(join(attend(passes - 1, block_q, block_k, block_v)))
    out = torch.cat(blocks, 2).to(v.dtype)

    def last(x):  # the window of the next call
        if attention_mask is None:
            return x[:, :, length:]
        return _gather_tokens(x, lengths[:, None] + torch.arange(window, device=q.device))

    if attention_mask is not None:
        out = _gather_tokens(out, order.argsort(1)).masked_fill(attention_mask[:, None, :, None] == 0, 0)
    if not return_state:
        return out
    seen = seen + (length if attention_mask is None else lengths)
    buffers = [all_k, all_v] + ([all_r[0]] if has_r else []) + ([all_q] if buffers_q else [])
    return out, (seen, sink_k, sink_v, *map(last, buffers), *states)
