"""One token of decoding in one launch of a Triton kernel: `window_hla.decode_step` with all that comes before it, the
scores of slots and the feature maps. A program has one key-value head of one row; products and sums are in fp32.
"""

from torch import Tensor

from .near_hla import capped, constexpr, jit, power_of_2, read, tl, triton, write
from .ops_hla import MAX_LOG_SIZE
from .window_hla import STAYS, LayerState, StepTokens, Tokens, WindowSettings


MAX_PLACES, MAX_GROUP = 1024, 16  # all of a program's scores are held at once


@jit
def _hedgehog(y, log_size, d, dim: constexpr, max_log_size: constexpr):
    """Softmax of y and of -y, `[D]` each, times exp(log_size)."""
    size = tl.exp(tl.minimum(tl.maximum(log_size, -max_log_size), max_log_size))
    plus = tl.where(d < dim, tl.exp(y - tl.max(tl.where(d < dim, y, -float("inf")), 0)), 0.0)
    minus = tl.where(d < dim, tl.exp(tl.min(tl.where(d < dim, y, float("inf")), 0) - y), 0.0)
    return plus * (size / tl.sum(plus, 0)), minus * (size / tl.sum(minus, 0))


@jit
def _mapped(x, weight, size, d, dim: constexpr, T: constexpr):
    """y = x @ weight `[D]` and x . size, of one token x `[dim]`."""
    y, log_size = tl.zeros([d.shape[0]], tl.float32), 0.0
    for start in range(0, dim, T):
        part = start + tl.arange(0, T)
        some = tl.load(x + part, mask=part < dim, other=0).to(tl.float32)
        y += tl.sum(some[:, None] * read(weight, part, dim, d, dim).to(tl.float32), 0)
        log_size += tl.sum(some * tl.load(size + part, mask=part < dim, other=0).to(tl.float32), 0)
    return y, log_size


@jit
def _slot_score(k, v, weight, bias, out, units: constexpr, dim: constexpr, T: constexpr, U: constexpr):
    """The learned score of one token, rounded to bfloat16."""
    unit = tl.arange(0, U)
    hidden = tl.load(bias + unit, mask=unit < units, other=0).to(tl.float32)
    for start in range(0, dim, T):
        part = start + tl.arange(0, T)
        key = tl.load(k + part, mask=part < dim, other=0).to(tl.float32)
        value = tl.load(v + part, mask=part < dim, other=0).to(tl.float32)
        hidden += tl.sum(key[:, None] * read(weight, part, dim, unit, units).to(tl.float32), 0)
        hidden += tl.sum(value[:, None] * read(weight + dim * units, part, dim, unit, units).to(tl.float32), 0)
    hidden = 0.5 * hidden * (1 + tl.erf(hidden * 0.7071067811865476))
    score = tl.sum(hidden * tl.load(out + unit, mask=unit < units, other=0).to(tl.float32), 0)
    return score.to(tl.bfloat16)


@jit
def _step(
    q, k, v, far_q, far_k, count, real, out, seen, kept_k, kept_v, kept_far_k, state, score,
    number, q_map, k_map, q_size, k_size, gate, score_in, score_bias, score_out, scale, window, sinks, places,
    kv_heads, group: constexpr, slots: constexpr, units: constexpr, dim: constexpr, value_dim: constexpr,
    softcap: constexpr, max_log_size: constexpr, stays: constexpr,
    G: constexpr, P: constexpr, D: constexpr, T: constexpr, DV: constexpr, U: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of batch * kv_heads
    batch, kv_head = row // kv_heads, row % kv_heads
    first_head = row * group  # of batch * heads
    at, member, d = tl.arange(0, P), tl.arange(0, G), tl.arange(0, D)
    now = tl.load(count + batch)
    is_real = now >= 0 if real is None else tl.load(real + batch) != 0

    place = tl.where(now < sinks, now, sinks + (now - sinks + window) % window)
    far_place = (now - sinks + window * sinks) % window
    if slots:  # the newest of those with the lowest score that have left the window makes place, once all are taken
        numbers = tl.load(number + row * places + at, mask=at < places, other=stays)
        scores = tl.load(score + row * places + at, mask=at < places, other=float("inf"))
        scores = tl.where(numbers > now - window, float("inf"), scores)
        newest = tl.argmax(tl.where(scores == tl.min(scores, 0), numbers, -1), 0)
        place = tl.where(now >= places, newest, now)
        far_place = tl.maximum(place - sinks, 0)
    is_far = (now >= places) & is_real
    stored, value_stored = tl.where(is_real, dim, 0), tl.where(is_real, value_dim, 0)  # of a padded token nothing

    old = kept_far_k + (row * (places - sinks) + far_place) * dim
    y, log_size = _mapped(old, k_map + kv_head * dim * dim, k_size + kv_head * dim, d, dim, T)
    key_plus, key_minus = _hedgehog(y, log_size, d, dim, max_log_size)
    key_plus, key_minus = tl.where(is_far, key_plus, 0.0), tl.where(is_far, key_minus, 0.0)
    plus, minus = tl.zeros([G, D], tl.float32), tl.zeros([G, D], tl.float32)
    gates = tl.zeros([G], tl.float32)
    for i in tl.static_range(group):
        head = kv_head * group + i
        y, log_size = _mapped(far_q + (first_head + i) * dim, q_map + head * dim * dim, q_size + head * dim, d, dim, T)
        query_plus, query_minus = _hedgehog(y, log_size, d, dim, max_log_size)
        mine = tl.where(member == i, 1.0, 0.0)[:, None]
        plus += mine * query_plus[None, :]
        minus += mine * query_minus[None, :]
        gates += tl.where(member == i, 1.0, 0.0) * tl.exp(tl.load(gate + head).to(tl.float32))

    near = tl.zeros([G, P], tl.float32)
    for start in range(0, dim, T):
        part = start + tl.arange(0, T)
        coming = tl.load(k + row * dim + part, mask=part < dim, other=0)
        keys = tl.where(
            (at == place)[:, None], coming[None, :], read(kept_k + row * places * dim, at, places, part, dim)
        )
        for i in tl.static_range(group):
            query = tl.load(q + (first_head + i) * dim + part, mask=part < dim, other=0).to(tl.float32)
            mine = tl.where(member == i, 1.0, 0.0)[:, None]
            near += mine * tl.sum(keys.to(tl.float32) * query[None, :], 1)[None, :]
    near = tl.where((at <= now) & (at < places), capped(near * scale, softcap), -float("inf"))
    near = tl.exp(near - tl.max(near, 1)[:, None])
    largest = 1 / tl.sum(near, 1)
    near = near * largest[:, None]

    # a state's row is a feature, its last column the mass
    state += row * 2 * dim * (value_dim + 1)
    width, below = value_dim + 1, dim * (value_dim + 1)
    mass_plus = tl.load(state + d * width + value_dim, mask=d < dim, other=0) + key_plus
    mass_minus = tl.load(state + below + d * width + value_dim, mask=d < dim, other=0) + key_minus
    tl.store(state + d * width + value_dim, mass_plus, mask=d < stored)
    tl.store(state + below + d * width + value_dim, mass_minus, mask=d < stored)
    weight = gates * largest * tl.rsqrt(tl.maximum(now - places + 1, 1).to(tl.float32))
    mass = 1 + weight * tl.sum(plus * mass_plus[None, :] + minus * mass_minus[None, :], 1)
    for start in range(0, value_dim, DV):
        e = start + tl.arange(0, DV)
        inside = (d < dim)[:, None] & (e < value_dim)[None, :]
        cell = state + d[:, None] * width + e[None, :]
        leaving = tl.load(kept_v + (row * places + place) * value_dim + e, mask=e < value_dim, other=0).to(tl.float32)
        state_plus = tl.load(cell, mask=inside, other=0) + key_plus[:, None] * leaving[None, :]
        state_minus = tl.load(cell + below, mask=inside, other=0) + key_minus[:, None] * leaving[None, :]
        written = (d < stored)[:, None] & (e < value_dim)[None, :]
        tl.store(cell, state_plus, mask=written)
        tl.store(cell + below, state_minus, mask=written)
        new = tl.load(v + row * value_dim + e, mask=e < value_dim, other=0)
        values = read(kept_v + row * places * value_dim, at, places, e, value_dim)
        values = tl.where((at == place)[:, None], new[None, :], values).to(tl.float32)
        sums = tl.zeros([G, DV], tl.float32)
        for i in tl.static_range(group):
            mine = tl.where(member == i, 1.0, 0.0)[:, None]
            far = tl.sum(plus * mine, 0)[:, None] * state_plus + tl.sum(minus * mine, 0)[:, None] * state_minus
            of_near = tl.sum(tl.sum(near * mine, 0)[:, None] * values, 0)
            sums += mine * (of_near[None, :] + weight[:, None] * tl.sum(far, 0)[None, :])
        sums = tl.where(is_real, sums / mass[:, None], 0.0)
        write(out + first_head * value_dim, sums, member, group, e, value_dim)

    tl.debug_barrier()  # what leaves has been read
    if slots:
        worth = _slot_score(
            far_k + row * dim, v + row * value_dim, score_in + kv_head * 2 * dim * units, score_bias + kv_head * units,
            score_out + kv_head * units, units, dim, T, U,
        )  # fmt: skip
        tl.store(score + row * places + place, worth.to(tl.float32), mask=is_real)
        tl.store(number + row * places + place, tl.where(now < sinks, stays, now).to(tl.int32), mask=is_real)
    tl.store(kept_k + (row * places + place) * dim + d, tl.load(k + row * dim + d, mask=d < dim), mask=d < stored)
    tl.store(old + d, tl.load(far_k + row * dim + d, mask=d < dim), mask=d < stored)
    for start in range(0, value_dim, DV):
        e = start + tl.arange(0, DV)
        new = tl.load(v + row * value_dim + e, mask=e < value_dim)
        tl.store(kept_v + (row * places + place) * value_dim + e, new, mask=e < value_stored)
    tl.store(seen + batch, now + 1, mask=is_real & (kv_head == 0))


def fused_step(
    tokens: Tokens, state: LayerState, own: dict[str, Tensor], settings: WindowSettings, token: StepTokens
) -> Tensor:
    """`window_hla.decode_step` of the operator `linear` with `hedgehog` features, without decay, with learned slots or
    none: out `[B, H, 1, dv]`. `state`, all of it contiguous, is updated in place; `own` are the layer's parameters by
    name."""
    q, k, v, far_q, far_k = (x.contiguous() for x in tokens)
    names = ("q_map", "k_map", "q_size", "k_size", "gate", "score_in", "score_bias", "score_out")
    weights = [own[name].contiguous() if name in own else None for name in names]
    dim, value_dim, kv_heads = q.shape[3], v.shape[3], k.shape[1]
    group, units = q.shape[1] // kv_heads, own["score_out"].shape[1] if settings.slots else 1
    scale = dim**-0.5 if settings.scale is None else settings.scale
    out, block = q.new_empty(*q.shape[:3], value_dim, dtype=v.dtype), power_of_2(dim)
    _step[(k.shape[0] * kv_heads,)](
        q, k, v, far_q, far_k, token.number, token.real, out, state.seen, state.k, state.v, state.far_k, state.out,
        state.score, state.number, *weights, scale, settings.window, settings.num_sinks, settings.places, kv_heads,
        group=group, slots=settings.slots > 0, units=units, dim=dim, value_dim=value_dim, softcap=settings.softcap,
        max_log_size=MAX_LOG_SIZE, stays=STAYS, G=triton.next_power_of_2(group), P=power_of_2(settings.places), D=block,
        T=min(block, 32), DV=16, U=power_of_2(units), num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
