"""Fixtures of more than one test file, and Triton's interpreter (`make test-kernels`)."""

import importlib
import importlib.util
import os
import sys

import pytest


def interpret_kernels():
    """What Triton's interpreter lacks for flash-linear-attention's kernels: a device to time configurations on (the
    first is taken), and loops that count in tensors, as those of a compiled kernel do."""
    import triton.language as tl
    from fla.ops.common import chunk_h
    from triton.runtime.autotuner import Autotuner

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
