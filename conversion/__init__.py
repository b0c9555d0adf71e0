"""Checkpoint -> HLA checkpoint."""

import os
import sys
from pathlib import Path


# Threads that spin while they wait for each other make everything ten times slower beside another job. OpenMP reads
# this once, when torch is first imported, so it stands before any import of it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def thread_report() -> str:
    """What the commands say of the threads that they use."""
    import torch

    return f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}"


def program_name(script: str, module: str) -> str:
    """How this process was started: as the console script, or as `python -m` the module."""
    return script if Path(sys.argv[0]).stem == script else f"python -m {module}"
