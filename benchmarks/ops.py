"""Speed and memory of the operators and of a model's default layer (`window`), beside causal softmax attention and the
paper's five-summary token loop.

    python benchmarks/ops.py --device cpu --threads 2
    python benchmarks/ops.py --device cuda --dtype bfloat16 [--backend torch]

Prints tables and writes ops-DEVICE.json and ops-DEVICE.png to --output. Times are medians of runs that take turns, so
that a busy machine slows all of them. Products within a chunk are counted by their causal half.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

from hla_hf import ops_hla
from hla_hf.cache_hla import LayerTokens
from hla_hf.configuration_hla import config_class
from hla_hf.layer_hla import HLALayer, LayerSettings
from hla_hf.ops_hla import ahla, causal_linear_attention, hla2, hla3
from hla_hf.window_hla import LayerState


CHUNK_SIZE = 64
LOOP_LENGTH = 2048  # the token loop is timed up to here


def layer_settings(config: PreTrainedConfig, index: int = 0) -> LayerSettings:
    dim = config.head_dim
    return LayerSettings.of(config, SimpleNamespace(layer_idx=index, head_dim=dim, scaling=dim**-0.5))


def default_settings(heads: int, kv_heads: int, dim: int, **settings) -> LayerSettings:
    return layer_settings(
        config_class("llama")(
            num_hidden_layers=1, hidden_size=heads * dim, num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=dim, **settings,
        )
    )  # fmt: skip


@cache
def default_layer(heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> HLALayer:
    layer = HLALayer(default_settings(heads, kv_heads, dim), device, dtype)
    layer.reset()
    return layer


def default_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: LayerState | None = None,
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, LayerState]:  # fmt: skip
    layer = default_layer(q.shape[1], k.shape[1], q.shape[3], q.device, q.dtype)
    out, state = layer(LayerTokens(q, k, v, q, k), initial_state, in_place=True)
    return (out, state) if return_state else out


OPERATORS = {"window": default_attention, "linear": causal_linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}


def five_summaries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Symmetric second order as the paper streams it, token by token: S, C, m, G, h."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q * q.shape[-1] ** -0.5, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch, heads, length, dim = q.shape
    S, C, G = (q.new_zeros(batch, heads, dim, n) for n in (dim, v.shape[-1], v.shape[-1]))
    m, h = (q.new_zeros(batch, heads, dim, 1) for _ in range(2))
    out = torch.empty_like(q[..., :1]).expand_as(v).clone()
    for t in range(length):
        q_t, k_t, v_t = (x[:, :, t, :, None] for x in (q, k, v))
        G, h = G + k_t @ (k_t.mT @ C), h + k_t @ (k_t.mT @ m)
        S, C, m = S + k_t @ k_t.mT, C + q_t @ v_t.mT, m + q_t
        row = q_t.mT @ S
        out[:, :, t] = (row @ C - q_t.mT @ G)[:, :, 0]
        _mass = row @ m - q_t.mT @ h
    return out


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def flops(name: str, heads: int, kv_heads: int, length: int, dim: int) -> float:
    """Of a forward pass, multiplications and additions."""
    if name == "softmax":
        return 2 * 2 * heads * dim * length**2 / 2
    if name == "window":  # features of 2 dim, their products, and those of what a token sees by softmax
        window = default_settings(heads, kv_heads, dim).window
        features = (heads + kv_heads) * dim**2 + heads * CHUNK_SIZE / 2 * 3 * dim + (heads + kv_heads) * 2 * dim**2
        return 2 * length * (features + 2 * heads * dim * min(window.window + window.num_sinks, length))
    state_heads = {"linear": [kv_heads], "hla2": [kv_heads, heads], "ahla": [kv_heads, heads]}.get(
        name, [kv_heads, kv_heads, heads]
    )
    chunk = min(CHUNK_SIZE, length)
    return sum(2 * length * dim * (heads * 2 * chunk / 2 + heads * dim + n * dim) for n in state_heads)


class Device:
    def __init__(self, name: str):
        self.name, self.is_cuda = name, name.startswith("cuda")

    def time(self, function: Callable) -> float:
        """Seconds of one call."""
        if self.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def memory(self, function: Callable) -> tuple[int, int]:
        """Bytes that `function()` allocates: at its peak, and still held while its result lives."""
        if self.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = function()
            held = torch.cuda.memory_allocated() - before
            del result
            return torch.cuda.max_memory_allocated() - before, held
        with torch.profiler.profile(profile_memory=True) as profile:
            result = function()
        del result
        events = (x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]")
        held = peak = 0
        for event in sorted(events, key=lambda x: x.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return peak, held


def medians(device: Device, functions: dict[str, Callable], repeats: int, limit: float) -> dict[str, float]:
    """Seconds per call by name, of runs that take turns; one call only of what takes longer than `limit`."""
    times = {name: [device.time(function)] for name, function in functions.items()}  # the warm-up
    for name in functions:
        if times[name][0] < limit:
            times[name] = []
    for _ in range(repeats):
        for name, function in functions.items():
            if not times[name] or times[name][0] < limit:
                times[name].append(device.time(function))
    return {name: statistics.median(x) for name, x in times.items()}


def make_inputs(args, shape, length, grad=False) -> list[torch.Tensor]:
    heads, kv_heads, dim = shape
    sizes = ((1, n, length, dim) for n in (heads, kv_heads, kv_heads))
    return [torch.randn(size, device=args.device, dtype=args.dtype).requires_grad_(grad) for size in sizes]


def passes(args, device, shape, backward: bool) -> list[dict]:
    rows, slow = [], set()
    square = torch.randn(1024 if not device.is_cuda else 8192, device=args.device, dtype=args.dtype)
    square = square[:, None] * square
    for length in args.lengths:
        inputs = make_inputs(args, shape, length, backward)
        functions = {"softmax": softmax_attention} | {name: OPERATORS[name] for name in args.operators}
        if length <= LOOP_LENGTH and not backward:
            functions["five summaries"] = five_summaries

        gradient = torch.randn_like(inputs[0])

        def call(function, inputs=inputs, gradient=gradient):
            if not backward:
                with torch.no_grad():
                    return function(*inputs)
            return torch.autograd.grad(function(*inputs), inputs, gradient)

        calls = {name: lambda f=f: call(f) for name, f in functions.items() if name not in slow}
        calls["matrix product"] = lambda: square @ square
        times = medians(device, calls, args.repeats, args.limit)
        rate = 2 * len(square) ** 3 / times.pop("matrix product")
        for name, seconds in times.items():
            count = flops(name, *shape[:2], length, shape[2]) * (3 if backward else 1)
            row = {"what": "forward+backward" if backward else "forward", "shape": shape, "length": length}
            row |= {"operator": name, "ms": 1e3 * seconds, "rate of a matrix product, GFLOP/s": rate / 1e9}
            row["fraction"] = None if name == "five summaries" else count / seconds / rate
            row["softmax / ours"] = times["softmax"] / seconds if "softmax" in times else None
            rows.append(row)
            if seconds > args.limit:
                slow.add(name)  # longer ones would take too long
        print_row(shape, length, "fwd+bwd" if backward else "fwd", times, rows[-len(times) :])
    return rows


def print_row(shape, length, what, times, rows) -> None:
    cells = [f"{row['operator']} {row['ms']:.4g} ms" for row in rows]
    for i, row in enumerate(rows):
        if row["operator"] in OPERATORS:
            ratio = "" if row["softmax / ours"] is None else f"{row['softmax / ours']:.2f}x, "
            cells[i] += f" ({ratio}{row['fraction']:.2f})"
    print(f"H={shape[0]}/{shape[1]} d={shape[2]} T={length:<6} {what:8} " + " | ".join(cells), flush=True)


def decoding(args, device, shape) -> list[dict]:
    """One token after contexts of the shortest and the longest length."""
    contexts = min(args.lengths), max(args.lengths)
    new = make_inputs(args, shape, 1)
    calls = {}
    with torch.no_grad():
        for context in contexts:
            inputs = make_inputs(args, shape, context)
            for name in args.operators:
                _, state = OPERATORS[name](*inputs, return_state=True)
                calls[name, context] = lambda f=OPERATORS[name], s=state: f(*new, initial_state=s, return_state=True)
            calls["softmax", context] = lambda x=inputs: softmax_attention(new[0], *x[1:])
        # ten steps in a row: the cache of the one before in turn does not count
        calls = {key: lambda step=step: [step() for _ in range(10)] for key, step in calls.items()}
        times = {key: x / 10 for key, x in medians(device, calls, 3 * args.repeats, args.limit).items()}
    rows = []
    for name in ["softmax", *args.operators]:
        short, long = (times[name, context] for context in contexts)
        row = {"what": "decoding step", "shape": shape, "operator": name, "contexts": contexts}
        rows.append(row | {"ms": [1e3 * short, 1e3 * long], "long / short": long / short})
        print(
            f"H={shape[0]}/{shape[1]} d={shape[2]} step     {name:8} {1e3 * short:.3f} ms after {contexts[0]} tokens, "
            f"{1e3 * long:.3f} ms after {contexts[1]}: {long / short:.2f}x",
            flush=True,
        )
    return rows


def memory(args, device, shape) -> list[dict]:
    rows, length = [], max(args.lengths)
    for name in args.operators:
        inputs = make_inputs(args, shape, length)
        size = inputs[0].nbytes
        with torch.no_grad():
            peak, held = device.memory(lambda f=OPERATORS[name], x=inputs: f(*x))
        inputs = [x.requires_grad_() for x in inputs]
        _, graph = device.memory(lambda f=OPERATORS[name], x=inputs: f(*x))
        kept = (graph - held + sum(x.nbytes for x in inputs)) / size
        rows.append({"what": "memory / size of q", "shape": shape, "operator": name, "length": length})
        rows[-1] |= {"forward peak": (peak - held) / size, "kept for backward": kept}
        print(
            f"H={shape[0]}/{shape[1]} d={shape[2]} T={length} memory {name:8} forward peak above inputs and outputs "
            f"{(peak - held) / size:.2f} x q, kept for backward, inputs included, {kept:.2f} x q",
            flush=True,
        )
    return rows


def draw(points: Iterable[tuple[str, str, float, float]], path: str | Path, ylabel: str) -> None:
    """Each point is the title of its plot, the name of its line, tokens and value."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots: dict[str, dict[str, list]] = {}
    for title, name, *point in points:
        plots.setdefault(title, {}).setdefault(name, []).append(point)
    figure, axes = plt.subplots(1, len(plots), figsize=(5 * len(plots), 4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], plots.items(), strict=True):
        for name, line in lines.items():
            axis.loglog(*zip(*line, strict=True), "o-", label=name)
        axis.set(title=title, xlabel="tokens", ylabel=ylabel)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot(rows, path) -> None:
    titles = "{what}, H={shape[0]}/{shape[1]}, d={shape[2]}"
    timed = (row for row in rows if "fraction" in row)
    draw(((titles.format(**row), row["operator"], row["length"], row["ms"]) for row in timed), path, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    parser.add_argument("--threads", type=int, help="CPU threads (default: what torch takes)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 4096, 8192, 32768, 65536])
    parser.add_argument("--shapes", nargs="+", default=["9,3,64", "9,3,128", "32,8,64", "32,8,128"], help="H,Hkv,d")
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS), choices=list(OPERATORS))
    parser.add_argument(
        "--backend", default="auto", choices=["auto", "torch", "kernels"], help="default: as models choose"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--limit", type=float, default=10, help="seconds: what takes longer is not timed at more tokens"
    )
    parser.add_argument("--output", type=Path, default=Path("out"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ops_hla.BACKEND = args.backend
    device, rows = Device(args.device), []
    print(
        f"torch {torch.__version__}, {args.device}, {args.dtype}, {torch.get_num_threads()} threads, "
        f"backend {args.backend}"
    )
    print("after a time: softmax attention's time / this time, fraction of the rate of a large matrix product")
    for shape in (tuple(int(x) for x in text.split(",")) for text in args.shapes):
        rows += passes(args, device, shape, backward=False) + passes(args, device, shape, backward=True)
        rows += decoding(args, device, shape) + memory(args, device, shape)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"ops-{args.device.replace(':', '')}"
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    plot(rows, path.with_suffix(".png"))
    print(f"written: {path}.json and {path}.png")


if __name__ == "__main__":
    main()
