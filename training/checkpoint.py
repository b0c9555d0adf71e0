"""Checkpoints of a run that are complete or do not exist: written beside, then renamed, with a list of their files."""

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from conversion.write import RunStopped, remove


WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what the writers raise on a full disk


@dataclass
class Progress:
    """Where a run stands and what it has measured: `state.json` of a checkpoint, `training.json` of the result."""

    recipe: dict[str, Any]
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, float] | None = None  # `step` and `loss` of the best evaluation
    train: list[dict[str, float]] = field(default_factory=list)
    eval: list[dict[str, float]] = field(default_factory=list)
    test_before: dict[str, float] | None = None
    test_after: dict[str, float] | None = None
    exported_step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """What is known so far, as JSON has it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def checkpoint_path(output: Path, step: int) -> Path:
    return output / f"checkpoint-{step:08d}"


def latest_checkpoint(output: Path) -> Path | None:
    """The last checkpoint of a run, or None. Raises: ValueError if it is damaged, with the one to continue from."""
    checkpoints = sorted(output.glob("checkpoint-*"), reverse=True)
    for i, path in enumerate(checkpoints):
        problem = _damage(path)
        if problem is None:
            return path
        others = [x for x in checkpoints[i + 1 :] if _damage(x) is None]
        hint = f"; remove it to continue from {others[0]}" if others else ", and there is no other one"
        raise ValueError(f"checkpoint {path} is damaged ({problem}){hint}")
    return None


def _damage(path: Path) -> str | None:
    try:
        files = json.loads((path / "files.json").read_text())
    except (OSError, ValueError) as error:
        return f"its list of files cannot be read: {error}"
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            return f"{name} has {found} bytes instead of {size}" if found is not None else f"{name} is missing"
    return None


def save_checkpoint(accelerator: Accelerator, output: Path, progress: Progress, rows) -> None:
    """Writes weights, optimizer, random states, `progress` and each process's place in the data as one checkpoint.

    Keeps it and the best one, `progress.best["step"]`. Raises: RunStopped if it cannot be written.
    """
    target = checkpoint_path(output, progress.step)
    partial = output / f".{target.name}.partial"
    main = accelerator.is_main_process

    def together(function) -> None:
        error = None
        try:
            function()
        except WRITE_ERRORS as caught:
            error = caught
        failed = accelerator.reduce(torch.tensor(float(error is not None), device=accelerator.device))
        if failed:
            kept = sorted(output.glob("checkpoint-*"))
            raise RunStopped(
                f"the checkpoint of step {progress.step} cannot be written: {error or 'another process failed'}; "
                + (
                    f"the last complete one is {kept[-1]}, continue with --resume"
                    if kept
                    else "there is no earlier one"
                )
            ) from error

    def write() -> None:
        accelerator.save_state(str(partial))
        (partial / f"data_{accelerator.process_index}.json").write_text(json.dumps(rows.state_dict()))
        if main:
            (partial / "state.json").write_text(json.dumps(progress.as_dict()))

    def finish() -> None:
        if main:
            files = {str(x.relative_to(partial)): x.stat().st_size for x in partial.rglob("*") if x.is_file()}
            (partial / "files.json").write_text(json.dumps(files))
            remove(target)
            partial.rename(target)
            keep = {target, checkpoint_path(output, progress.best["step"] if progress.best else progress.step)}
            for path in set(output.glob("checkpoint-*")) - keep:
                remove(path)

    if main:
        for left in [*output.glob(".*.partial*"), *output.glob(".*.removed*")]:  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        together(write)
        together(finish)
    except BaseException:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _forget_first_step(accelerator, progress)


def _forget_first_step(accelerator: Accelerator, progress: Progress) -> None:
    # Reading or loading the state of an unused optimizer under FSDP2 makes one step, which Adam's correction counts.
    if progress.step == 0 and accelerator.is_fsdp2:
        for optimizer in accelerator._optimizers:
            optimizer.optimizer.state.clear()


def load_checkpoint(accelerator: Accelerator, path: Path, rows=None) -> Progress:
    """Restores what `save_checkpoint` wrote and returns its `progress`.

    Raises: ValueError if it does not fit the run.
    """
    try:
        # Frozen weights are not in it. DeepSpeed has an option of its own for that.
        accelerator.load_state(str(path), **({} if accelerator.distributed_type == "DEEPSPEED" else {"strict": False}))
        if rows is not None:
            rows.load_state_dict(json.loads((path / f"data_{accelerator.process_index}.json").read_text()))
        progress = Progress(**json.loads((path / "state.json").read_text()))
        _forget_first_step(accelerator, progress)
        return progress
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} cannot be loaded into this run: {error}") from error
