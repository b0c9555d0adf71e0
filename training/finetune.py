"""Fine-tune a converted model, or distil its base model's softmax attention into it.

    accelerate launch [--config_file training/configs/X.yaml] -m training.finetune --config training/recipes/Y.yaml \
        [--FIELD VALUE ...]

OUTPUT/model is then a complete directory, ready to upload; with LoRA, OUTPUT/adapter is the adapter alone. SIGTERM and
Ctrl-C write a checkpoint and end the run; `--resume` continues it. From Python: `run(Recipe(model=..., ...))`.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import filter_trackers
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    set_seed,
)
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, get_scheduler

from conversion import thread_report
from conversion.hub import check_upload, upload
from conversion.interrupt import interruptible
from conversion.progress import shown
from conversion.transfer import hla_parameters
from conversion.write import RunStopped, remove

from .checkpoint import Progress, checkpoint_path, latest_checkpoint, load_checkpoint
from .context_parallel import context_parallel
from .data import make_rows
from .export import check_export, export
from .loop import Run
from .model import load_student, load_teacher, make_trainable, plain
from .objective import Objective, Place
from .recipe import Recipe, parse_recipe


# What a checkpoint was made with and a resumed run must have too.
FIXED_FIELDS = ("model", "train", "lora_rank", "lora_targets", "data", "streaming", "seq_len", "batch_size", "seed")


def find_checkpoint(recipe: Recipe) -> Path | None:
    """What the run continues from. Raises: ValueError if that is not what the recipe asks for."""
    output = Path(recipe.output)
    last = latest_checkpoint(output) if output.is_dir() else None
    if last is not None and not recipe.resume:
        raise ValueError(f"output {recipe.output!r} has {last.name}: give --resume to continue it, or another output")
    if last is None and recipe.resume:
        raise ValueError(f"--resume: output {recipe.output!r} has no checkpoint to continue from")
    if last is None and output.exists() and (not output.is_dir() or (output / "model").exists()):
        raise ValueError(f"output {recipe.output!r} exists and is not the directory of a run that can be continued")
    if last is not None:
        made_with = json.loads((last / "state.json").read_text())["recipe"]
        for name in FIXED_FIELDS:
            if made_with[name] != getattr(recipe, name):
                raise ValueError(
                    f"--resume: {last} was made with {name}={made_with[name]!r}, not {getattr(recipe, name)!r}"
                )
    return last


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Raises: ValueError if a tracker is unknown or not installed."""
    for name in recipe.tracker_names:
        try:
            found = filter_trackers([name], recipe.output)
        except ValueError as error:
            raise ValueError(f"trackers has {name!r}, which Accelerate does not know: {error}") from error
        if not found:
            raise ValueError(f"trackers has {name!r}, which is not installed: install it or give --trackers none")
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # gloo then, whatever launched the processes
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=recipe.accumulation, sync_with_dataloader=False
        ),
        log_with=recipe.tracker_names or None,
        project_config=ProjectConfiguration(project_dir=recipe.output, logging_dir=str(Path(recipe.output) / "logs")),
    )
    state = accelerator.state
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate has FSDP for accelerators only; FSDP2 itself runs on CPU and gloo too.
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        state.deepspeed_plugin.deepspeed_config |= {  # what Accelerate would read from a data loader and the optimizer
            "train_micro_batch_size_per_gpu": recipe.batch_size,
            "gradient_accumulation_steps": recipe.accumulation,
            "gradient_clipping": recipe.max_grad_norm,
        }
    return accelerator


def make_optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained, HLA parameters at their own rate."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    new = hla_parameters(model).keys()
    groups = (
        ([p for name, p in trained.items() if name not in new], recipe.learning_rate),
        ([p for name, p in trained.items() if name in new], recipe.hla_learning_rate or recipe.learning_rate),
    )
    params = [{"params": params, "lr": lr} for params, lr in groups if params]
    return torch.optim.AdamW(params, weight_decay=recipe.weight_decay)


def leave_out_frozen(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Checkpoints will hold only what is trained."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}

    def drop_frozen(models: list, weights: list[dict], directory: str) -> None:
        for state in weights:
            for name in [x for x in state if x.removeprefix("module.") not in trained]:
                del state[name]

    accelerator.register_save_state_pre_hook(drop_frozen)


def load(recipe: Recipe, at_exit: ExitStack) -> tuple[Run, PreTrainedTokenizerBase, torch.dtype]:
    """Everything that a run needs, as its last checkpoint left it, the tokenizer and the dtype to export in.

    Raises: ValueError on bad input.
    """
    last = find_checkpoint(recipe)
    check_upload(recipe.push_to_hub)
    accelerator = make_accelerator(recipe)
    accelerator.print(thread_report())
    set_seed(recipe.seed)
    model, tokenizer = load_student(recipe)
    dtype = model.dtype
    place = Place(accelerator, recipe.context_parallel)
    with accelerator.main_process_first():  # which fills the cache
        rows, eval_rows, test_rows, steps = make_rows(recipe, tokenizer, place.rows, place.num_rows)
    teacher = load_teacher(recipe, model)
    if teacher is not None:
        teacher.to(accelerator.device)
    if accelerator.is_main_process:
        check_export(recipe, model, tokenizer)
    model = make_trainable(model, recipe)
    if recipe.gradient_checkpointing:
        plain(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_optimizer(recipe, model)
    warmup = round(recipe.warmup * steps)
    scheduler = get_scheduler(recipe.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    if recipe.train != "full":
        leave_out_frozen(accelerator, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    objective = Objective(recipe, model, accelerator.unwrap_model(model), teacher)
    if place.group is not None:
        at_exit.enter_context(context_parallel(plain(objective.student), place.group))
    settings = dataclasses.asdict(recipe)
    progress = Progress(recipe=settings)
    if last is not None:
        progress = dataclasses.replace(load_checkpoint(accelerator, last, rows), recipe=settings)
    run = Run(
        recipe, accelerator, place, model, optimizer, scheduler, objective, rows, eval_rows, test_rows, steps, progress
    )
    return run, tokenizer, dtype


@contextmanager
def kept_with_a_checkpoint(output: Path, is_main: bool) -> Iterator[None]:
    """Within this context the directory of a run is made, and removed if an error or Ctrl-C ends it without one."""
    is_new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        if is_new and is_main and not any(output.glob("checkpoint-*")):
            remove(output)
        raise


def run(recipe: Recipe) -> dict | None:
    """Runs a recipe to its end, or to a checkpoint if it is told to stop.

    Returns: the report, `training.json` of the exported model, but with the recipe as it is; None on SIGTERM.
    Raises: ValueError on bad input, before anything is written; RunStopped if the run cannot go on; KeyboardInterrupt
    on Ctrl-C, while training after a checkpoint and with the command that continues it.
    """
    with shown(recipe.quiet), ExitStack() as at_exit:
        current, tokenizer, dtype = load(recipe, at_exit)
        accelerator, progress, output = current.accelerator, current.progress, current.output
        at_exit.enter_context(kept_with_a_checkpoint(output, accelerator.is_main_process))
        accelerator.init_trackers("finetune", {k: str(v) for k, v in progress.recipe.items()})
        at_exit.enter_context(current.stopped_by(signal.SIGTERM))
        if progress.step == 0 and not progress.eval:
            if current.test_rows:
                progress.test_before = current.evaluate(current.test_rows)
            current.evaluate_and_save()
        with current.stopped_by(signal.SIGINT):
            finished = current.train()
            message = None if finished else current.save_stopped()
        if finished:
            finish(current, tokenizer, dtype)
        accelerator.end_training()
        if current.stop == signal.SIGINT:
            raise KeyboardInterrupt(message)
        if not finished:
            accelerator.print(message, file=sys.stderr)
    return progress.as_dict() if finished else None


def finish(current: Run, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    """Tests, exports and uploads the best model, or the last.

    Raises: RunStopped if it cannot be written or uploaded.
    """
    progress, output = current.progress, current.output
    progress.exported_step = progress.best["step"] if current.recipe.load_best else progress.step
    if progress.exported_step != progress.step:
        load_checkpoint(current.accelerator, checkpoint_path(output, progress.exported_step))
    if current.test_rows:
        progress.test_after = current.evaluate(current.test_rows)
    try:
        export(current, tokenizer, dtype)
    except Exception as error:  # each writer has errors of its own
        raise RunStopped(
            f"the trained model cannot be written: {error}; its checkpoint is {latest_checkpoint(output)}, "
            "continue with --resume"
        ) from error
    current.accelerator.wait_for_everyone()  # a process that leaves while the main one writes can take it along
    if current.accelerator.is_main_process:
        upload(output / "model", current.recipe.push_to_hub, current.recipe.private, current.recipe.revision)


def how_to_go_on(recipe: Recipe | None) -> str:
    """What a run that Ctrl-C stopped between its steps has left, and what to do now."""
    if recipe is not None and any(Path(recipe.output).glob("checkpoint-*")):
        return f"stopped; {recipe.output} has a checkpoint: the same command with --resume goes on"
    return "stopped before the first checkpoint; the same command begins again"


def main(arguments: list[str] | None = None) -> None:
    """The command: exits 2 with one line on bad input, 1 with one line if the run cannot go on, 130 on Ctrl-C, 0 if
    SIGTERM stopped it."""
    recipe = None
    with interruptible():
        try:
            recipe = parse_recipe(arguments)
            run(recipe)
        except (ValueError, StrictDataclassError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except RunStopped as error:
            print(f"stopped: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt as error:
            if os.environ.get("RANK", "0") == "0":
                print(f"\n{error if error.args else how_to_go_on(recipe)}", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
