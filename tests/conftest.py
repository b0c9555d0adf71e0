"""Fixtures of more than one test file, and Triton's interpreter (`make test-kernels`)."""

import importlib
import importlib.util
import os
import sys

import numpy as np
import pytest
import torch


def interpret_kernels():
    """What Triton's interpreter lacks: arithmetic of bfloat16, which it does with the integers that it keeps them in,
    and rounding to the nearest of these, as it cuts off; a device to time configurations on (the first is taken); and
    for flash-linear-attention's kernels loops that count in tensors, as those of a compiled kernel do."""
    import triton.language as tl
    from fla.ops.common import chunk_h
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder

    dot, binary_op, convert = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op, interpreter._convert_float

    def rounded(x, old, new, mode):
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(x, old, new, mode)
        return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()

    def wide(self, x):
        return self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def wide_dot(self, a, b, *others):
        return dot(self, wide(self, a), wide(self, b), *others)

    def wide_binary_op(self, a, b, op):
        result = binary_op(self, wide(self, a), wide(self, b), op)
        narrow = a.dtype.scalar == tl.bfloat16 and result.data.dtype == np.float32
        return self.create_fp_trunc(result, tl.bfloat16) if narrow else result

    InterpreterBuilder.create_dot, InterpreterBuilder.binary_op = wide_dot, wide_binary_op
    interpreter._convert_float = rounded
    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]
    chunk_h.range = lambda *bounds: (tl.full((), i, tl.int32) for i in range(*map(int, bounds)))


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("fla") is not None:
    interpret_kernels()


@pytest.fixture
def benchmark(monkeypatch):
    """A script of `benchmarks/` as a module, and its command with arguments."""
    monkeypatch.syspath_prepend("benchmarks")

    def load(name):
        script = importlib.import_module(name)

        def run(*arguments):
            monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
            script.main()

        return script, run

    return load
