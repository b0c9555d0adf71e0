"""The softmax over window, sinks and slots as Triton kernels, forward and backward: `window_hla.local_softmax` and the
product before it, of which no score is written to memory. Products are in the dtype of their inputs, sums in fp32.

A program has a block of rows of one head of one chunk, in the backward pass of k and v a block of columns of one
key-value head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import ops_hla


try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # PyTorch for CPUs comes without
    triton = tl = constexpr = None


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function)


def use_triton(q: Tensor) -> bool:
    """Whether this package's kernels compute with q: on a GPU, and where Triton's interpreter runs them."""
    if triton is None or q.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if ops_hla.BACKEND == "auto":
        return q.is_cuda
    return ops_hla.BACKEND == "kernels" and (q.is_cuda or (q.device.type == "cpu" and triton.knobs.runtime.interpret))


def _tuned(function: Callable) -> Callable:
    """Blocks of M rows and N columns as the device is fastest with; what does not fit on it is left out."""
    if triton is None:
        return function
    shapes = (
        (64, 64, 4, 1),
        (64, 64, 8, 2),
        (64, 32, 4, 1),
        (64, 32, 8, 1),
        (64, 32, 8, 2),
        (32, 32, 8, 1),
        (32, 16, 8, 1),
    )
    configs = [triton.Config({"M": m, "N": n}, num_warps=warps, num_stages=x) for m, n, warps, x in shapes]
    return triton.autotune(configs, ["D", "DV"])(triton.jit(function))


def power_of_2(n: int) -> int:
    """That a block needs of n, at least 16 as its products do."""
    return max(16, 1 << (n - 1).bit_length())


@jit
def read(x, row, rows, columns, size, other=0.0) -> "tl.tensor":
    """Rows `row`, of which there are `rows`, of `x [., size]`."""
    inside = (row < rows)[:, None] & (columns < size)[None, :]
    return tl.load(x + row[:, None] * size + columns[None, :], mask=inside, other=other)


@jit
def write(x, value, row, rows, columns, size) -> None:
    inside = (row < rows)[:, None] & (columns < size)[None, :]
    tl.store(x + row[:, None] * size + columns[None, :], value.to(x.dtype.element_ty), mask=inside)


@jit
def capped(scores, softcap: constexpr) -> "tl.tensor":
    if softcap is not None:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@_tuned
def _near_forward(
    q, k, v, visible, out, largest, log_sum, index, heads, group, visible_per_head, length, columns,
    dim: constexpr, value_dim: constexpr, softcap: constexpr, D: constexpr, DV: constexpr, M: constexpr, N: constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    kv_head = head // group
    q, out = q + head * length * dim, out + head * length * value_dim
    k, v = k + kv_head * columns * dim, v + kv_head * columns * value_dim
    visible += (kv_head if visible_per_head else head // heads) * length * columns
    row, d, e = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    queries = read(q, row, length, d, dim)
    most, total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    at, sums = tl.zeros([M], tl.int32), tl.zeros([M, DV], tl.float32)
    for start in range(0, columns, N):
        column = start + tl.arange(0, N)
        scores = tl.dot(queries, tl.trans(read(k, column, columns, d, dim)), input_precision="ieee")
        seen = read(visible, row, length, column, columns, 0)
        scores = tl.where(seen != 0, capped(scores, softcap), -float("inf"))
        new = tl.max(scores, 1)
        at = tl.where(new > most, start + tl.argmax(scores, 1), at)
        new = tl.maximum(new, most)
        base = tl.where(new == -float("inf"), 0.0, new)  # of rows that have seen nothing yet
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(most - base)
        values = read(v, column, columns, e, value_dim)
        total, most = total * shrink + tl.sum(weights, 1), new
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    total = tl.where(row < length, total, 1.0)
    write(out, sums / total[:, None], row, length, e, value_dim)
    row_of_all = head * length + row
    tl.store(largest + row_of_all, 1 / total, mask=row < length)
    tl.store(log_sum + row_of_all, most + tl.log(total), mask=row < length)
    tl.store(index + row_of_all, at, mask=row < length)


@jit
def _near_gradient(
    queries, keys, values, grads, seen, column, at, log_sum, shift, extra, softcap: constexpr
):  # fmt: skip
    """The softmax weights and the gradient of the scores before their cap, `[M, N]`: with p the weights and w the
    largest of them, dL/ds = p (dp - sum p dp - w dL/dw) + w dL/dw where s is the largest; the sum is `shift`."""
    raw = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = capped(raw, softcap)
    weights = tl.where(seen != 0, tl.exp(scores - log_sum[:, None]), 0.0)
    back = tl.dot(grads, tl.trans(values), input_precision="ieee") - shift[:, None]
    back = weights * back + tl.where(column[None, :] == at[:, None], extra[:, None], 0.0)
    if softcap is not None:
        back *= 1 - (scores / softcap) * (scores / softcap)
    return weights, back


@_tuned
def _near_backward_q(
    q, k, v, visible, grad, log_sum, index, shift, extra, dq, heads, group, visible_per_head, length, columns,
    dim: constexpr, value_dim: constexpr, softcap: constexpr, D: constexpr, DV: constexpr, M: constexpr, N: constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    kv_head = head // group
    k, v = k + kv_head * columns * dim, v + kv_head * columns * value_dim
    visible += (kv_head if visible_per_head else head // heads) * length * columns
    row, d, e = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    inside, row_of_all = row < length, head * length + row
    queries = read(q + head * length * dim, row, length, d, dim)
    grads = read(grad + head * length * value_dim, row, length, e, value_dim)
    at, log_sum = (
        tl.load(index + row_of_all, mask=inside, other=-1),
        tl.load(log_sum + row_of_all, mask=inside, other=0),
    )
    shift, extra = tl.load(shift + row_of_all, mask=inside, other=0), tl.load(extra + row_of_all, mask=inside, other=0)
    sums = tl.zeros([M, D], tl.float32)
    for start in range(0, columns, N):
        column = start + tl.arange(0, N)
        keys, values = read(k, column, columns, d, dim), read(v, column, columns, e, value_dim)
        seen = read(visible, row, length, column, columns, 0)
        _, back = _near_gradient(queries, keys, values, grads, seen, column, at, log_sum, shift, extra, softcap)
        sums += tl.dot(back.to(keys.dtype), keys, input_precision="ieee")
    write(dq + head * length * dim, sums, row, length, d, dim)


@_tuned
def _near_backward_kv(
    q, k, v, visible, grad, log_sum, index, shift, extra, dk, dv, heads, group, visible_per_head, length, columns,
    dim: constexpr, value_dim: constexpr, softcap: constexpr, D: constexpr, DV: constexpr, M: constexpr, N: constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    visible += (kv_head if visible_per_head else kv_head * group // heads) * length * columns
    column, d, e = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, D), tl.arange(0, DV)
    keys = read(k + kv_head * columns * dim, column, columns, d, dim)
    values = read(v + kv_head * columns * value_dim, column, columns, e, value_dim)
    key_sums, value_sums = tl.zeros([N, D], tl.float32), tl.zeros([N, DV], tl.float32)
    for i in range(0, group):
        head = kv_head * group + i
        for start in range(0, length, M):
            row = start + tl.arange(0, M)
            inside, row_of_all = row < length, head * length + row
            queries = read(q + head * length * dim, row, length, d, dim)
            grads = read(grad + head * length * value_dim, row, length, e, value_dim)
            weights, back = _near_gradient(
                queries, keys, values, grads, read(visible, row, length, column, columns, 0), column,
                tl.load(index + row_of_all, mask=inside, other=-1), tl.load(log_sum + row_of_all, mask=inside, other=0),
                tl.load(shift + row_of_all, mask=inside, other=0), tl.load(extra + row_of_all, mask=inside, other=0),
                softcap,
            )  # fmt: skip
            value_sums += tl.dot(tl.trans(weights.to(grads.dtype)), grads, input_precision="ieee")
            key_sums += tl.dot(tl.trans(back.to(queries.dtype)), queries, input_precision="ieee")
    write(dk + kv_head * columns * dim, key_sums, column, columns, d, dim)
    write(dv + kv_head * columns * value_dim, value_sums, column, columns, e, value_dim)


def _grid(x: Tensor, block: str) -> Callable[[dict], tuple[int, int]]:
    """A program for each head of each chunk of x `[N, heads, n, .]` and each block of the n."""
    return lambda sizes: (x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], sizes[block]))


class _NearSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None):
        q, k, v, visible = q.contiguous(), k.contiguous(), v.contiguous(), visible.contiguous().view(torch.uint8)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype)
        largest, log_sum = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        index = q.new_empty(q.shape[:3], dtype=torch.int32)
        sizes = (
            q.shape[1], q.shape[1] // k.shape[1], visible.shape[1] > 1, q.shape[2], k.shape[2], q.shape[3], v.shape[3],
            softcap, power_of_2(q.shape[3]), power_of_2(v.shape[3]),
        )  # fmt: skip
        _near_forward[_grid(q, "M")](q, k, v, visible, out, largest, log_sum, index, *sizes)
        ctx.save_for_backward(q, k, v, visible, out, largest, log_sum, index)
        ctx.sizes = sizes
        return out, largest

    @staticmethod
    def backward(ctx, grad: Tensor, grad_largest: Tensor):
        q, k, v, visible, out, largest, log_sum, index = ctx.saved_tensors
        extra = (grad_largest * largest).contiguous()
        shift, grad = (grad.float() * out).sum(-1) + extra, grad.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        given = q, k, v, visible, grad, log_sum, index, shift, extra
        _near_backward_q[_grid(q, "M")](*given, dq, *ctx.sizes)
        _near_backward_kv[_grid(k, "N")](*given, dk, dv, *ctx.sizes)
        return dq, dk, dv, None, None


def near_softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """`window_hla.local_softmax` of scores q . k, capped: out `[N, H, C, dv]` in v's dtype, and the weight of the
    largest score `[N, H, C, 1]` in fp32, whose gradient goes to the first of scores that are equally large.

    q, scaled, `[N, H, C, d]`; k, v `[N, Hkv, columns, .]`; visible `[N, 1 or Hkv, C, columns]`, at least one column for
    each token."""
    out, largest = _NearSoftmax.apply(q, k, v, visible, softcap)
    return out, largest[..., None]
