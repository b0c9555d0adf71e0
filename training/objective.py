"""Which rows a process gets, the loss of a batch, and what is reported of it."""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Batch
from .model import as_base_model
from .recipe import Recipe


class Place:
    """Which rows a process gets, and which slice of them."""

    def __init__(self, accelerator: Accelerator, context_parallel: int):
        world = accelerator.num_processes
        if world % context_parallel:
            raise ValueError(f"context_parallel={context_parallel} must divide the number of processes, {world}")
        self.rows, self.slice = divmod(accelerator.process_index, context_parallel)
        self.num_rows, self.num_slices = world // context_parallel, context_parallel
        self.device, self.group = accelerator.device, None
        if context_parallel > 1:
            for first in range(0, world, context_parallel):  # every process must make every group
                group = torch.distributed.new_group(list(range(first, first + context_parallel)))
                self.group = group if first == self.rows * context_parallel else self.group

    def share(self, batch: Batch) -> Batch:
        """This process's part of a batch on its device: `input_ids`, `position_ids` and `targets`, the next tokens."""
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        batch = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "targets": targets}
        return {name: x.chunk(self.num_slices, 1)[self.slice].to(self.device) for name, x in batch.items()}


SUMS = ("count", "loss", "kl", "ce", "top1")


class Objective:
    """The loss of a batch and what is reported of it."""

    def __init__(self, recipe: Recipe, model: nn.Module, student: nn.Module, teacher: nn.Module | None):
        self.recipe, self.model, self.student, self.teacher = recipe, model, student, teacher

    @torch.no_grad()
    def teacher_logits(self, inputs: Batch) -> Tensor:
        if self.recipe.teacher is not None:
            return self.teacher(**inputs, use_cache=False).logits
        with as_base_model(self.teacher or self.student):
            return (self.teacher or self.student)(**inputs, use_cache=False).logits

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed loss over the targets of a `Place.share`, and `SUMS` without gradient, `[5]`."""
        recipe = self.recipe
        inputs = {name: x for name, x in batch.items() if name != "targets"}
        has_loss = batch["targets"] != -100
        targets = batch["targets"][has_loss]
        teacher = self.teacher_logits(inputs)[has_loss].float() if recipe.kl_weight else None
        logits = self.model(**inputs, use_cache=False).logits[has_loss].float()
        with torch.set_grad_enabled(recipe.ce_weight > 0 and torch.is_grad_enabled()):
            ce = F.cross_entropy(logits, targets, reduction="sum")
        loss, kl, top1 = recipe.ce_weight * ce, torch.zeros_like(ce), torch.zeros_like(ce)
        if teacher is not None:
            scale = 1 / recipe.temperature
            kl = F.kl_div(
                (logits * scale).log_softmax(-1), (teacher * scale).log_softmax(-1), reduction="sum", log_target=True
            )
            loss = loss + recipe.kl_weight * recipe.temperature**2 * kl
            top1 = (logits.argmax(-1) == teacher.argmax(-1)).sum()
        return loss, torch.stack([x.detach().float() for x in (has_loss.sum(), loss, kl, ce, top1)])


def means(sums: Tensor, recipe: Recipe) -> dict[str, float]:
    """Per target: `loss`, `perplexity`, and with a teacher `kl` (at the temperature) and `top1` agreement."""
    count, loss, kl, ce, top1 = sums.double().tolist()
    count = max(count, 1)
    perplexity = math.exp(min(ce / count, 700)) if math.isfinite(ce) else math.nan
    result = {"loss": loss / count, "perplexity": perplexity}
    return result | ({"kl": kl / count, "top1": top1 / count} if recipe.kl_weight else {})
