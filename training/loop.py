"""The loop of a run: optimizer steps, evaluations with a checkpoint each, and stopping when it is told to."""

import math
import resource
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from conversion.progress import ProgressBar
from conversion.write import RunStopped

from .checkpoint import Progress, checkpoint_path, latest_checkpoint, save_checkpoint
from .data import Batch, ShuffledRows, StreamedRows, as_batch
from .objective import SUMS, Objective, Place, means
from .recipe import Recipe


MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class Run:
    """A recipe with everything that it needs in memory, and how far it has come."""

    recipe: Recipe
    accelerator: Accelerator
    place: Place
    model: nn.Module  # as prepared for several processes
    optimizer: Any
    scheduler: Any
    objective: Objective
    rows: ShuffledRows | StreamedRows
    eval_rows: list[dict]
    test_rows: list[dict] | None
    steps: int
    progress: Progress
    stop: Tensor = field(init=False)  # the signal that asked this process to stop, else 0

    def __post_init__(self) -> None:
        self.stop = torch.zeros(1, device=self.accelerator.device)

    @property
    def output(self) -> Path:
        return Path(self.recipe.output)

    @contextmanager
    def stopped_by(self, number: int) -> Iterator[None]:
        """Within this context a signal asks the run to stop after a step; a second one does what it does without it."""

        def ask_to_stop(number: int, frame: Any) -> None:
            self.stop.fill_(number)
            signal.signal(number, before)

        before = signal.signal(number, ask_to_stop)
        try:
            yield
        finally:
            signal.signal(number, before)

    def evaluate(self, rows: list[dict]) -> dict[str, float]:
        """The measures of `means` over rows that all processes share out."""
        place = self.place
        self.model.eval()
        mine = rows[place.rows :: place.num_rows]
        sums = torch.zeros(len(SUMS), device=self.accelerator.device)
        with torch.no_grad():
            for i in range(math.ceil(len(rows) / place.num_rows)):
                batch = as_batch([mine[i] if i < len(mine) else rows[0]])
                if i >= len(mine):  # every process must run the model equally often
                    batch["labels"].fill_(-100)
                sums += self.objective(place.share(batch))[1]
        self.model.train()
        return means(self.accelerator.reduce(sums), self.recipe)

    def save(self) -> None:
        """Writes a checkpoint."""
        save_checkpoint(self.accelerator, self.output, self.progress, self.rows)

    def evaluate_and_save(self) -> None:
        """Evaluates the model of this step, unless that was done, and writes a checkpoint."""
        progress = self.progress
        if not progress.eval or progress.eval[-1]["step"] < progress.step:
            result = self.evaluate(self.eval_rows)
            progress.eval.append({"step": progress.step} | result)
            self.accelerator.log({f"eval/{k}": v for k, v in result.items()}, step=progress.step)
            self.accelerator.print(f"step {progress.step}: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))
            best = progress.best
            if best is None or (math.isfinite(result["loss"]) and not best["loss"] <= result["loss"]):
                progress.best = {"step": progress.step, "loss": result["loss"]}
        self.save()

    def step(self) -> dict[str, float]:
        """One optimizer step, which is skipped if its loss or gradient is not finite. Returns its measures."""
        accelerator, progress, started = self.accelerator, self.progress, time.perf_counter()
        batches = [self.place.share(next(self.rows)) for _ in range(self.recipe.accumulation)]
        measures = means(self._backward(batches), self.recipe)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        norm = float("nan") if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # it has stepped in `backward`
        finite = math.isfinite(measures["loss"]) and (math.isfinite(norm) or deepspeed)
        if finite or accelerator.scaler is not None:  # a loss scaler skips the step itself and lowers its scale
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        tokens = accelerator.num_processes * sum(batch["input_ids"].numel() for batch in batches)
        progress.step += 1
        progress.tokens += tokens
        progress.skipped += not finite
        progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
        measures |= {"learning_rate": self.optimizer.param_groups[0]["lr"], "grad_norm": norm}
        seconds = time.perf_counter() - started
        measures |= {"tokens_per_second": tokens / seconds, "skipped": progress.skipped}
        progress.train.append({"step": progress.step} | measures)
        accelerator.log({f"train/{k}": v for k, v in measures.items()}, step=progress.step)
        return measures | {"seconds": seconds}

    def _backward(self, batches: list[Batch]) -> Tensor:
        """Adds the gradient of the mean loss over the targets of all processes and batches. Returns the sums."""
        accelerator = self.accelerator
        count = torch.stack([(batch["targets"] != -100).sum() for batch in batches]).sum()
        count = accelerator.reduce(count).clamp(min=1)
        # Accelerate divides the loss by `accumulation`, and gradients are averaged over processes.
        scale = accelerator.num_processes * self.recipe.accumulation / count
        sums = torch.zeros(len(SUMS), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss, batch_sums = self.objective(batch)
                accelerator.backward(loss * scale)
                sums += batch_sums
        return accelerator.reduce(sums)

    def train(self) -> bool:
        """The loop from `progress.step` to `steps`. Returns True if it got there, False if it was asked to stop.

        Raises: RunStopped if too many steps in a row are skipped.
        """
        progress, is_main = self.progress, self.accelerator.is_main_process
        self.model.train()
        seconds = []
        bar = ProgressBar(
            total=self.steps, initial=progress.step, desc="training", unit="steps", disable=not is_main
        )  # fmt: skip
        with bar:
            while progress.step < self.steps:
                if self.accelerator.reduce(self.stop.clone()):
                    return False
                measures = self.step()
                seconds.append(measures["seconds"])
                speed = f"{measures['tokens_per_second']:.0f} tokens/s"
                bar.set_postfix_str(f"loss {measures['loss']:.4f}, {speed}", refresh=False)
                bar.update()
                if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    raise RunStopped(
                        f"the loss or its gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, to step "
                        f"{progress.step}; the last good checkpoint is {latest_checkpoint(self.output)}: continue with "
                        "--resume and a lower learning_rate"
                    )
                is_due = progress.step % self.recipe.checkpoint_steps == 0 or progress.step == self.steps
                if is_due and not progress.skipped_in_a_row:
                    self.evaluate_and_save()
        if self.accelerator.reduce(self.stop.clone()):
            return False
        if seconds:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            if torch.cuda.is_available():
                peak = torch.cuda.max_memory_allocated() / 2**30
            self.accelerator.print(
                f"{statistics.median(seconds):.2f} seconds per step, peak memory {peak:.2f} GiB per process"
            )
        return True

    def save_stopped(self) -> str:
        """Writes a checkpoint of this step, unless there is one. Returns how to go on."""
        step = self.progress.step
        if not checkpoint_path(self.output, step).exists():
            self.save()
        command = self.recipe.command + ("" if self.recipe.resume else " --resume")
        return f"stopped at step {step} of {self.steps}, checkpoint written; continue with: {command}"
