"""Checkpoint -> HLA checkpoint."""

import os
import signal
import sys
from pathlib import Path
from typing import Any


# Threads that spin while they wait for each other make everything ten times slower beside another job. OpenMP reads
# this once, when torch is first imported, so it stands before any import of it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def stop_while_importing(number: int, frame: Any) -> None:
    """Ctrl-C while a command is still importing what it needs: there is nothing to clean up."""
    print("\nstopped before anything was done; the same command begins again", file=sys.stderr, flush=True)
    os._exit(130)


# Not where a program imports this: `python -m` says "-m" until it has found the module, a console script its own name.
if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).stem in ("hla-convert", "hla-finetune"):
    signal.signal(signal.SIGINT, stop_while_importing)


def thread_report() -> str:
    """What the commands say of the threads that they use."""
    import torch

    return f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}"


def program_name(script: str, module: str) -> str:
    """How this process was started: as the console script, or as `python -m` the module."""
    return script if Path(sys.argv[0]).stem == script else f"python -m {module}"
