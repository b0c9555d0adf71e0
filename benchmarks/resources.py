"""What the kernels need of a GPU, compiled for it without one.

    python benchmarks/resources.py [--targets sm_80 sm_90 gfx942] [--head-dims 64 128] [--json FILE]

The kernels of a default layer with slots in bf16, as `hla_hf` calls them: flash-linear-attention's of the part beyond
the window, forward and backward (features of 2 head_dim, values of head_dim, a column of ones and one to make their
number even), and our own of the window and of a token of decoding. Every configuration that Triton's autotuner would
time is compiled. Per kernel: how many there are, how many fit (shared memory of a block within the target's, no
register spilled), and what the leanest needs: registers and spilled bytes per thread, bytes of shared memory per block.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from fla.ops.simple_gla import chunk_simple_gla  # before a device is made up, whose name it would ask for
from ops import default_settings
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import HLALayer
from hla_hf.near_hla import near_softmax


# and the bytes of shared memory that a block can have
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}


class NoDevice:
    """What Triton asks its driver for when nothing is launched."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable:
        def compile_only(call: Callable, **_) -> list[float]:
            call()
            return [0.0, 0.0, 0.0]

        return compile_only


class Needs(NamedTuple):
    spilled: int
    shared: int
    registers: int


def needs(kernel: CompiledKernel) -> Needs:
    """By the assembler's own count."""
    if "amdgcn" in kernel.asm:
        found = (re.search(rf"\.vgpr_{x}:\s*(\d+)", kernel.asm["amdgcn"]) for x in ("count", "spill_count"))
        registers, spilled = (int(x[1]) for x in found)
        return Needs(4 * spilled, kernel.metadata.shared, registers)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{x}:(\d+)", usage)[1]) for x in ("REG", "STACK", "LOCAL"))
    return Needs(stack + local, kernel.metadata.shared, registers)


def compiled(target: GPUTarget, head_dim: int) -> dict[str, list[Needs]]:
    """By name, in each configuration. Once per process: an autotuner would remember its choice for another target."""
    kernels: dict[str, dict[str, Needs]] = {}
    launch = JITFunction.run

    def compile_only(function: JITFunction, *arguments, warmup: bool, **options) -> CompiledKernel:
        kernel = launch(function, *arguments, warmup=True, **options)
        kernels.setdefault(function.fn.__name__, {})[kernel.hash] = needs(kernel)
        return kernel

    driver.set_active(NoDevice(target))
    with patch.object(JITFunction, "run", compile_only):
        features, values = 2 * head_dim, head_dim + 2
        q, k, v = (
            torch.zeros(1, 128, 4, size, dtype=torch.bfloat16, requires_grad=True)
            for size in (features, features, values)
        )
        state = torch.zeros(1, 4, features, values)
        out, _ = chunk_simple_gla(q, k, v, scale=1.0, initial_state=state, output_final_state=True)
        out.sum().backward()
        near_and_step(head_dim)
    return {name: list(x.values()) for name, x in kernels.items()}


def near_and_step(head_dim: int) -> None:
    """This package's own kernels, of a default layer with slots in bf16: a chunk, and a token of decoding."""
    heads, kv_heads = 8, 2
    settings = default_settings(heads, kv_heads, head_dim, hla_slots=160, hla_slot_score="learned")
    layer = HLALayer(settings, dtype=torch.bfloat16)
    window = layer.settings.window

    def tokens(heads: int, count: int) -> torch.Tensor:
        return torch.zeros(1, heads, count, head_dim, dtype=torch.bfloat16, requires_grad=True)

    columns = window.places + window.chunk_size
    visible = torch.ones(1, kv_heads, window.chunk_size, columns, dtype=torch.bool)
    k, v = (tokens(kv_heads, columns) for _ in range(2))
    out, largest = near_softmax(tokens(heads, window.chunk_size), k, v, visible, None)
    (out.sum() + largest.sum()).backward()

    with torch.no_grad():
        one = LayerTokens(*(tokens(n, 1) for n in (heads, kv_heads, kv_heads, heads, kv_heads)))
        _, state = layer(one)
        with patch("hla_hf.layer_hla.use_triton", lambda _: True):
            layer(one, state)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args()
    rows = []
    columns = "".join(f"{x:>9}" for x in ("head_dim", "configs", "fit", "regs", "spilled", "shared"))
    print(f"{'target':8}{'kernel':24}{columns}")
    for name, head_dim in product(options.targets, options.head_dims):
        target, limit = TARGETS[name]
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            for kernel, all_needs in process.submit(compiled, target, head_dim).result().items():
                all_needs = sorted(all_needs)
                fitting = [x for x in all_needs if x.spilled == 0 and x.shared <= limit]
                best = (fitting or all_needs)[0]
                row = {"target": name, "head_dim": head_dim, "kernel": kernel, "configurations": len(all_needs)}
                rows.append(row | {"fit": len(fitting)} | best._asdict())
                numbers = head_dim, len(all_needs), len(fitting), best.registers, best.spilled, best.shared
                print(f"{name:8}{kernel:24}{''.join(f'{x:9,}' for x in numbers)}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
