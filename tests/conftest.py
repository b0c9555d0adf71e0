"""Fixtures of more than one test file."""

import importlib
import sys

import pytest


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
