"""The least time that a model can take on an H100, by arithmetic: HLA beside flash attention, nothing measured.

    python benchmarks/expect.py [--contexts 4096 32768 131072] [--slots 160] [--batch 16]
    python benchmarks/expect.py --measured models-cuda.json [--operators ops-cuda.json]

The default model is Llama-3.1-8B. A launch takes the greater of operations / 989 TFLOP/s (bfloat16, dense) and bytes
read and written / 3.35 TB/s. Those of an HLA layer are counted as its own code makes them, in bfloat16 on the meta
device, with `hla_hf`'s kernels and those of flash-linear-attention, for one row; of flash attention its products alone.
What the host takes to launch (`launches`, of all layers) and what a unit does not reach of its rate come on top, for
both. Training is forward and backward, HLA's layers and flash attention compute their forward pass twice. Decoding is a
token of each of `--batch` rows: weights, and each row's cache or state, read once; states are written.

With `--measured`, a file of benchmarks/models.py, each time measured stands as a multiple of its least, and with
`--operators`, a file of benchmarks/ops.py, the targets for one layer. Ends with an error where a measured time is less
than the least that is possible, or a target is missed.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch
from ops import layer_settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, PreTrainedConfig

from hla_hf import near_hla, ops_hla
from hla_hf.cache_hla import LayerTokens
from hla_hf.configuration_hla import config_class
from hla_hf.layer_hla import HLALayer, LayerSettings


LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
FLOPS, FLOAT32_FLOPS, BANDWIDTH = 989e12, 67e12, 3.35e12
TOKENS, CHUNK = 4096, 64  # that a layer is counted at, and of flash-linear-attention's kernels
MAC = 2  # operations of a multiplication with its addition
# (softmax / HLA, at least): near and far of one layer, forward and backward, by context; decoding with 16 rows
LAYER_TARGETS, DECODE_TARGET, DECODE_CONTEXT = {4096: 1 / 1.5, 65536: 1 / 0.25}, 2, 32768


class Machine(TorchDispatchMode):
    """Seconds and number of the launches of what runs under it."""

    def __init__(self):
        super().__init__()
        self.seconds, self.launches = 0.0, 0

    def add(self, operations: float, tensors: list[Tensor], rate: float = FLOPS) -> None:
        moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
        self.seconds += max(operations / rate, moved / BANDWIDTH)
        self.launches += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        name = function._opname
        if function.is_view or "empty" in name or name in ("detach", "_unsafe_view"):
            return out
        count = flop_registry.get(function._overloadpacket)
        operations = 0 if count is None else count(*args, **kwargs or {}, out_val=out)
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        rate = FLOAT32_FLOPS if any(x.dtype == torch.float32 for x in tensors) else FLOPS
        self.add(operations, tensors, rate)
        return out


class NearKernel:
    """A kernel of `near_hla`, of so many products per score."""

    def __init__(self, machine: Machine, products: int):
        self.machine, self.products = machine, products

    def __getitem__(self, grid):
        def launch(q: Tensor, k: Tensor, *others) -> None:
            operations = MAC * self.products * q.numel() * k.shape[2]
            self.machine.add(operations, [x for x in (q, k, *others) if isinstance(x, Tensor)])

        return launch


class FarKernels(torch.autograd.Function):
    """flash-linear-attention's kernels of `chunk_simple_gla` (0.6.0): states of each chunk, outputs; backward states,
    those of the gradient, gradients of q and k, of v."""

    @staticmethod
    def forward(ctx, machine: Machine, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None):
        chunks, (features, width) = -(-q.shape[1] // CHUNK), (q.shape[3], v.shape[3])
        states = q.new_empty(q.shape[0], chunks, q.shape[2], features, width)
        out, end = torch.empty_like(v), q.new_empty(q.shape[0], q.shape[2], features, width, dtype=torch.float32)
        rows = MAC * q.numel() // features
        given = [] if state is None else [state]
        machine.add(rows * features * width, [k, v, states, end, *given])
        machine.add(rows * (CHUNK * (features + width) + features * width), [q, k, v, states, out])
        ctx.machine, ctx.rows, ctx.goes_on = machine, rows, state is not None
        ctx.save_for_backward(q, k, v, torch.empty_like(states, dtype=torch.float32), end)  # made again in fp32
        return out, end

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        q, k, v, states, end = ctx.saved_tensors
        features, width = q.shape[3], v.shape[3]
        between, of_state, add = features * CHUNK, features * width, ctx.machine.add
        add(ctx.rows * of_state, [k, v, states])
        add(ctx.rows * of_state, [q, grad, states])
        add(ctx.rows * (CHUNK * width + 2 * of_state + 2 * between), [q, k, v, grad, states, states, q, k])
        add(ctx.rows * (between + CHUNK * width + of_state), [q, k, grad, states, v])
        return None, *(torch.empty_like(x) for x in (q, k, v)), torch.empty_like(end) if ctx.goes_on else None


def hla_layer(settings: LayerSettings, dim: int) -> dict[bool, tuple[float, float]]:
    """Seconds and launches per token of the context, with gradients and without."""
    heads, kv_heads = settings.heads, settings.key_value_heads
    layer, machine = HLALayer(settings, torch.device("meta"), torch.bfloat16), Machine()

    def far_kernel(q, k, v, g=None, scale=1.0, initial_state=None, output_final_state=True):
        return FarKernels.apply(machine, q, k, v, initial_state)

    found = {}
    with (
        patch.object(ops_hla, "BACKEND", "kernels"),
        patch.object(ops_hla, "_fla_kernels", lambda: (far_kernel, far_kernel)),
        patch("hla_hf.window_hla.use_triton", lambda q: True),
        patch.object(near_hla, "_near_forward", NearKernel(machine, 2)),
        patch.object(near_hla, "_near_backward_q", NearKernel(machine, 3)),
        patch.object(near_hla, "_near_backward_kv", NearKernel(machine, 4)),
    ):
        for training in (False, True):
            q, k, v, far_q, far_k = (
                torch.empty(1, n, TOKENS, dim, dtype=torch.bfloat16, device="meta", requires_grad=training)
                for n in (heads, kv_heads, kv_heads, heads, kv_heads)
            )
            machine.seconds, machine.launches = 0.0, 0
            with torch.set_grad_enabled(training), machine:
                out, _ = layer(LayerTokens(q, k, v, far_q, far_k))
                if training:
                    out.backward(torch.empty_like(out))
            found[training] = machine.seconds / TOKENS, machine.launches / TOKENS
    return found


class Model:
    """Of a base and its conversion: seconds of a pass, by arithmetic."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        attention = 2 * hidden * dim * (heads + config.num_key_value_heads)
        self.weights = config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)
        self.head = hidden * config.vocab_size
        self.settings = [layer_settings(config, index) for index in config.hla_layer_ids]
        counted = {settings: hla_layer(settings, dim) for settings in set(self.settings)}
        self.layers = [counted[settings] for settings in self.settings]

    def flash(self, context: int, training: bool, layers: int | None = None) -> float:
        """Seconds of attention per token, at a causal context; backward are five products instead of two."""
        layers = self.config.num_hidden_layers if layers is None else layers
        products = 2 + 5 * training
        return MAC * products * self.config.num_attention_heads * self.config.head_dim * context / 2 / FLOPS * layers

    def attention(self, context: int, training: bool, hla: bool) -> float:
        if not hla:
            return self.flash(context, training)
        others = self.config.num_hidden_layers - len(self.layers)
        return sum(x[training][0] for x in self.layers) + self.flash(context, training, others)

    def row(self, context: int, training: bool, hla: bool) -> float:
        """Seconds of one row: prefill, whose last token alone is answered, or training."""
        linear = MAC * (3 * (self.weights + self.head) if training else self.weights) / FLOPS
        return context * (linear + self.attention(context, training, hla))

    def launches(self, context: int, training: bool) -> float:
        """Of all HLA layers."""
        return context * sum(x[training][1] for x in self.layers)

    def decoding(self, context: int, batch: int, hla: bool) -> float:
        """Seconds of one token for each row."""
        kv = 2 * self.config.num_key_value_heads * self.config.head_dim * 2
        layers = self.settings if hla else []
        held = (self.config.num_hidden_layers - len(layers)) * kv * context
        for settings in layers:
            state = self.config.num_key_value_heads * 2 * self.config.head_dim * (self.config.head_dim + 1) * 4
            held += kv * settings.window.places * 3 // 2 + 2 * state  # k before its rotation too
        return (2 * (self.weights + self.head) + batch * held) / BANDWIDTH


def table(model: Model, contexts: list[int], batch: int) -> None:
    print(f"{'context':>8}  {'':22}{'flash':>12}{'HLA':>12}{'flash/HLA':>11}  {'':8}{'launches':>10}")
    for context in contexts:
        layers = model.config.num_hidden_layers
        for what, unit, (base, hla), launches in (
            *(
                (f"attention, {what}", "us/token", [1e6 * model.attention(context, t, x) / layers for x in (0, 1)], "")
                for what, t in (("forward", False), ("training", True))
            ),
            ("prefill", "s", [model.row(context, False, x) for x in (0, 1)], model.launches(context, False)),
            ("training step", "s", [model.row(context, True, x) for x in (0, 1)], model.launches(context, True)),
            (
                f"decoding, {batch} rows",
                "ms",
                [1e3 * model.decoding(context, batch, x) for x in (0, 1)],
                len(model.layers),
            ),
        ):
            launches = launches and f"{launches:10,.0f}"
            print(f"{context:8,}  {what:22}{base:12.3g}{hla:12.3g}{base / hla:11.2f}  {unit:8}{launches}")


def check(model: Model, measured: dict, operators: list[dict]) -> list[str]:
    """Prints what was measured beside the least; what cannot be or misses its target."""
    wrong = []
    print(f"{'context':>8}  {'':18}{'base':>10}{'HLA':>10}  times the least;{'HLA/base':>10}{'expected':>10}")
    for found in measured["results"]:
        context, what, batch = found["context"], found["what"].removesuffix(" tokens/s"), measured["batch"]
        if what in ("prefill", "training"):
            least = [model.row(context, what == "training", x) / context for x in (False, True)]
        elif what in ("decode", "decode, compiled"):
            least = [model.decoding(context, batch, x) / batch for x in (False, True)]
        else:
            continue
        times = [1 / found[x] / y for x, y in zip(("base", "HLA"), least, strict=True)]
        ratio = least[0] / least[1]
        print(f"{context:8,}  {what:18}{times[0]:10.2f}{times[1]:10.2f}{'':17}{found['ratio']:10.2f}{ratio:10.2f}")
        wrong += [f"{what} at {context}: {x:.2f} of the least time" for x in times if x < 1]
        if what == "decode" and context == DECODE_CONTEXT and batch == 16:
            wrong += target(f"decode at {context} with 16 rows", found["ratio"], DECODE_TARGET)
    for found in operators:
        kind = found["what"], found.get("operator"), tuple(found["shape"])
        if kind == ("forward+backward", "window", (32, 8, 128)) and found["length"] in LAYER_TARGETS:
            wrong += target(f"layer at {found['length']}", found["softmax / ours"] or 0, LAYER_TARGETS[found["length"]])
    return wrong


def target(what: str, ratio: float, least: float) -> list[str]:
    said = f"{what}: {ratio:.2f} times as fast as softmax attention, target {least:.2f}"
    print(said)
    return [] if ratio >= least else [said]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--slots", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16, help="rows of decoding (default %(default)s)")
    parser.add_argument("--measured", metavar="FILE", help="JSON of benchmarks/models.py, on an H100")
    parser.add_argument("--operators", metavar="FILE", help="JSON of benchmarks/ops.py, on an H100")
    options = parser.parse_args()
    if options.measured is None:
        slots = {"hla_slots": options.slots, "hla_slot_score": "learned"} if options.slots else {}
        config = config_class("llama")(**LLAMA, **slots)
        return table(Model(config), options.contexts, options.batch)
    measured = json.loads(Path(options.measured).read_text())
    operators = json.loads(Path(options.operators).read_text()) if options.operators else []
    if wrong := check(Model(AutoConfig.from_pretrained(measured["hla"])), measured, operators):
        raise SystemExit("\n".join(["not as expected:", *wrong]))


if __name__ == "__main__":
    main()
