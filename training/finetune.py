"""Fine-tune a converted model, or distil its base model's softmax attention into it.

    accelerate launch [--config_file training/configs/X.yaml] -m training.finetune --config training/recipes/Y.yaml \
        [--FIELD VALUE ...]

OUTPUT/model is then a complete directory, ready to upload; with LoRA, OUTPUT/adapter is the adapter alone. SIGTERM and
Ctrl-C write a checkpoint and end the run; `--resume` continues it.
"""

import copy
import dataclasses
import json
import math
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from itertools import islice
from pathlib import Path
from string import Template

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
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from conversion.convert import written_beside
from conversion.transfer import hla_layers, hla_parameters
from hla_hf import softmax_attention

from .checkpoint import (
    WRITE_ERRORS,
    RunStopped,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from .context_parallel import context_parallel
from .data import Batch, ShuffledRows, StreamedRows, as_batch, packed_rows
from .recipe import Recipe, parse_recipe


MAX_SKIPPED_IN_A_ROW = 10
# What a checkpoint was made with and a resumed run must have too.
FIXED_FIELDS = ("model", "train", "lora_rank", "lora_targets", "data", "streaming", "seq_len", "batch_size", "seed")


# ---- model, teacher, objective ----------------------------------------


def load_model(source: str, dtype: str, name: str = "model") -> PreTrainedModel:
    """Raises: ValueError naming the field if `source` cannot be read or lacks weights."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"{name} {source!r} cannot be read: {error}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        missing = ", ".join(sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))[:5])
        raise ValueError(f"{name} {source!r} lacks weights of its model: {missing}")
    return model.eval()


def load_student(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The converted model and its tokenizer. Raises: ValueError if they cannot be trained by this recipe."""
    model = load_model(recipe.model, recipe.dtype)
    if not hla_layers(model):
        raise ValueError(
            f"model {recipe.model!r} is a {model.config.model_type!r} model without HLA layers: convert it first"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    except Exception as error:
        raise ValueError(f"model {recipe.model!r} has no tokenizer that can be read: {error}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer of model {recipe.model!r} has {len(tokenizer)} tokens, the model only {rows}")
    positions = getattr(model.config, "max_position_embeddings", None)
    for name in ("seq_len", "eval_seq_len"):
        if positions and (getattr(recipe, name) or 0) > positions:
            raise ValueError(f"{name}={getattr(recipe, name)} is longer than the model's {positions} positions")
    return model, tokenizer


def make_trainable(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """Leaves a gradient only to what the recipe trains, in float32; with LoRA the result is a `PeftModel`."""
    if recipe.train == "lora":
        layers = hla_layers(model)
        projections = {name for layer in layers for name, x in layer.named_children() if isinstance(x, nn.Linear)}
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=recipe.lora_rank, lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
            lora_dropout=recipe.lora_dropout, target_modules=recipe.lora_targets or sorted(projections),
            modules_to_save=["hla"] if hla_parameters(model) else None,
        )  # fmt: skip
        model = get_peft_model(model, settings)
    elif recipe.train == "hla":
        model.requires_grad_(False)
        for parameter in hla_parameters(model).values():
            parameter.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"train={recipe.train!r} leaves nothing to train: the model's HLA layers have no parameters")
    return model


def plain(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def as_base_model(model: nn.Module) -> Iterator[None]:
    """Within this context a model whose LoRA and HLA parameters alone were trained computes exactly what its base model
    does, with the same weights in memory: adapters off, softmax attention on, no dropout.
    """
    adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    training = model.training
    model.eval()
    # Not `disable_adapter()`: it also takes the gradient from the adapters and gives it back, which FSDP2 does not see.
    for module in adapters:
        module._disable_adapters = True
    try:
        with softmax_attention(plain(model)):
            yield
    finally:
        for module in adapters:
            module._disable_adapters = False
        model.train(training)


def load_teacher(recipe: Recipe, model: PreTrainedModel) -> nn.Module | None:
    """None if `model`, before it is made trainable, will still hold the teacher's weights; else a frozen model.

    Raises: ValueError if the model's own weights are to be the teacher but were trained away from their base, or the
    vocabularies differ.
    """
    history = Path(recipe.model) / "training.json"
    if recipe.kl_weight and recipe.teacher is None and history.is_file():
        kind = json.loads(history.read_text())["recipe"]["train"]
        if kind != "hla":
            raise ValueError(
                f"model {recipe.model!r} was fine-tuned with train={kind!r}: its weights with softmax attention are no "
                "longer its base model; name that one as teacher"
            )
    if not recipe.kl_weight or (recipe.teacher is None and recipe.train != "full"):
        return None
    if recipe.teacher is None:
        return copy.deepcopy(model).requires_grad_(False)  # whole on every process, also under FSDP
    teacher = load_model(recipe.teacher, "auto", "teacher").requires_grad_(False)
    theirs, ours = teacher.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        raise ValueError(f"teacher {recipe.teacher!r} has a vocabulary of {theirs}, the model one of {ours}")
    return teacher


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


# ---- the run ----------------------------------------


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Raises: ValueError if a tracker is unknown or not installed."""
    for name in recipe.trackers:
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
        log_with=recipe.trackers or None,
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


def make_rows(recipe: Recipe, tokenizer, accelerator: Accelerator, place: Place) -> tuple:
    """The endless training batches, the rows of evaluation and of test, and the steps that the recipe asks for."""
    with accelerator.main_process_first():  # which fills the cache
        options = {"streaming": recipe.streaming, "num_proc": recipe.num_proc}
        rows = packed_rows(recipe.data, tokenizer, recipe.seq_len, **options)
        eval_len = recipe.eval_seq_len or recipe.seq_len
        if recipe.eval_data:
            evaluation = _first(packed_rows(recipe.eval_data, tokenizer, eval_len, **options), recipe.eval_rows)
        else:
            # Held out are the first rows of data, cut anew if evaluation has another length.
            taken = math.ceil(recipe.eval_rows * eval_len / recipe.seq_len)
            evaluation = _first(packed_rows(recipe.data, tokenizer, eval_len, **options), recipe.eval_rows)
            if not recipe.streaming and len(rows) <= taken:
                raise ValueError(
                    f"data has {len(rows)} rows of seq_len={recipe.seq_len} tokens, of which {taken} are held out for "
                    f"eval_rows={recipe.eval_rows}: none is left; give more data, a smaller eval_rows or eval_data"
                )
            rows = rows.skip(taken)
        test = None
        if recipe.test_data:
            test = _first(packed_rows(recipe.test_data, tokenizer, eval_len, **options), recipe.eval_rows)
    if recipe.streaming:
        return StreamedRows(rows, recipe.batch_size, place.rows, place.num_rows), evaluation, test, recipe.steps
    per_step = recipe.batch_size * recipe.accumulation * place.num_rows
    steps = recipe.steps or max(1, math.ceil(recipe.epochs * len(rows) / per_step))
    return ShuffledRows(rows, recipe.batch_size, recipe.seed, place.rows, place.num_rows), evaluation, test, steps


def _first(rows, count: int) -> list[dict]:
    rows = list(islice(iter(rows), count))
    if not rows:
        raise ValueError("the evaluation data does not fill one row")
    return rows


def run(recipe: Recipe) -> None:
    """Runs a recipe to its end, or to a checkpoint if it is told to stop.

    Raises: ValueError on bad input, before anything is written; RunStopped if the run cannot go on.
    """
    with ExitStack() as at_exit:
        _run(recipe, at_exit)


def _run(recipe: Recipe, at_exit: ExitStack) -> None:
    output = Path(recipe.output)
    last = latest_checkpoint(output) if output.is_dir() else None
    if last is not None and not recipe.resume:
        raise ValueError(f"output {recipe.output!r} has {last.name}: give --resume to continue it, or another output")
    if last is None and recipe.resume:
        raise ValueError(f"--resume: output {recipe.output!r} has no checkpoint to continue from")
    if last is None and output.exists() and (not output.is_dir() or (output / "model").exists()):
        raise ValueError(f"output {recipe.output!r} exists and is not the directory of a run that can be continued")
    accelerator = make_accelerator(recipe)
    set_seed(recipe.seed)
    model, tokenizer = load_student(recipe)
    dtype = model.dtype
    place = Place(accelerator, recipe.context_parallel)
    rows, eval_rows, test_rows, steps = make_rows(recipe, tokenizer, accelerator, place)
    teacher = load_teacher(recipe, model)
    if teacher is not None:
        teacher.to(accelerator.device)
    model = make_trainable(model, recipe)
    if recipe.gradient_checkpointing:
        plain(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    new = hla_parameters(model).keys()
    groups = (
        ([p for name, p in trained.items() if name not in new], recipe.learning_rate),
        ([p for name, p in trained.items() if name in new], recipe.hla_learning_rate or recipe.learning_rate),
    )
    optimizer = torch.optim.AdamW(
        [{"params": params, "lr": lr} for params, lr in groups if params], weight_decay=recipe.weight_decay
    )
    warmup = round(recipe.warmup * steps)
    scheduler = get_scheduler(recipe.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)

    def drop_frozen(models, weights, directory) -> None:
        for state in weights:
            for name in [x for x in state if x.removeprefix("module.") not in trained]:
                del state[name]

    if recipe.train != "full":
        accelerator.register_save_state_pre_hook(drop_frozen)
    objective = Objective(recipe, model, accelerator.unwrap_model(model), teacher)
    if place.group is not None:
        at_exit.enter_context(context_parallel(plain(objective.student), place.group))

    state = {"step": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0, "best": None, "train": [], "eval": []}
    state["recipe"] = dataclasses.asdict(recipe)
    if last is not None:
        made_with = json.loads((last / "state.json").read_text())["recipe"]
        for name in FIXED_FIELDS:
            if made_with[name] != getattr(recipe, name):
                raise ValueError(
                    f"--resume: {last} was made with {name}={made_with[name]!r}, not {getattr(recipe, name)!r}"
                )
        state = load_checkpoint(accelerator, last, rows) | {"recipe": state["recipe"]}
    output.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers("finetune", {k: str(v) for k, v in state["recipe"].items()})

    def evaluate(rows: list[dict]) -> dict[str, float]:
        model.eval()
        mine = rows[place.rows :: place.num_rows]
        sums = torch.zeros(len(SUMS), device=accelerator.device)
        with torch.no_grad():
            for i in range(math.ceil(len(rows) / place.num_rows)):
                batch = as_batch([mine[i] if i < len(mine) else rows[0]])
                if i >= len(mine):  # every process must run the model equally often
                    batch["labels"].fill_(-100)
                sums += objective(place.share(batch))[1]
        model.train()
        return means(accelerator.reduce(sums), recipe)

    def evaluate_and_save() -> None:
        if not state["eval"] or state["eval"][-1]["step"] < state["step"]:
            result = evaluate(eval_rows)
            state["eval"].append({"step": state["step"]} | result)
            accelerator.log({f"eval/{k}": v for k, v in result.items()}, step=state["step"])
            accelerator.print(f"step {state['step']}: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))
            best = state["best"]
            if best is None or (math.isfinite(result["loss"]) and not best["loss"] <= result["loss"]):
                state["best"] = {"step": state["step"], "loss": result["loss"]}
        save_checkpoint(accelerator, output, state, rows)

    stop = torch.zeros(1, device=accelerator.device)

    def ask_to_stop(number, frame) -> None:
        stop.fill_(1)
        signal.signal(number, signal.default_int_handler)  # a second signal ends the run at once

    for number in (signal.SIGINT, signal.SIGTERM):
        at_exit.callback(signal.signal, number, signal.signal(number, ask_to_stop))
    if state["step"] == 0 and not state["eval"]:
        if test_rows:
            state["test_before"] = evaluate(test_rows)
        evaluate_and_save()
    finished = train(
        recipe, accelerator, model, optimizer, scheduler, objective, lambda: place.share(next(rows)), state, steps,
        stop, evaluate_and_save,
    )  # fmt: skip
    if not finished:
        if not checkpoint_path(output, state["step"]).exists():
            save_checkpoint(accelerator, output, state, rows)
        accelerator.print(
            f"\nstopped at step {state['step']} of {steps}, checkpoint written; continue with the same command and "
            f"--resume:\n  python -m training.finetune {' '.join(sys.argv[1:])} --resume"
        )
        accelerator.end_training()
        return
    if recipe.load_best and state["best"]["step"] != state["step"]:
        load_checkpoint(accelerator, checkpoint_path(output, state["best"]["step"]))
    state["exported_step"] = state["best"]["step"] if recipe.load_best else state["step"]
    if test_rows:
        state["test_after"] = evaluate(test_rows)
    try:
        export(recipe, accelerator, model, tokenizer, state, dtype, steps)
    except WRITE_ERRORS as error:
        raise RunStopped(
            f"the trained model cannot be written: {error}; its checkpoint is {latest_checkpoint(output)}, "
            "continue with --resume"
        ) from error
    accelerator.end_training()


def train(
    recipe, accelerator, model, optimizer, scheduler, objective, next_batch, state, steps, stop, evaluate_and_save
) -> bool:
    """The loop from `state["step"]` to `steps`; True if it got there, False if it was asked to stop."""
    progress = tqdm(
        total=steps, initial=state["step"], desc="training", unit="step", disable=not accelerator.is_main_process
    )
    model.train()
    times = []
    while state["step"] < steps:
        if accelerator.reduce(stop.clone()):
            progress.close()
            return False
        started = time.perf_counter()
        batches = [next_batch() for _ in range(recipe.accumulation)]
        count = torch.stack([(batch["targets"] != -100).sum() for batch in batches]).sum()
        count = accelerator.reduce(count).clamp(min=1)
        # Accelerate divides the loss by `accumulation`, and gradients are averaged over processes.
        scale = accelerator.num_processes * recipe.accumulation / count
        sums = torch.zeros(len(SUMS), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(model):
                loss, batch_sums = objective(batch)
                accelerator.backward(loss * scale)
                sums += batch_sums
        norm = accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        norm = float("nan") if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        measures = means(accelerator.reduce(sums), recipe)

        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # it has stepped in `backward`
        finite = math.isfinite(measures["loss"]) and (math.isfinite(norm) or deepspeed)
        if finite or accelerator.scaler is not None:  # a loss scaler skips the step itself and lowers its scale
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        state["skipped"] += not finite
        state["skipped_in_a_row"] = 0 if finite else state["skipped_in_a_row"] + 1
        tokens = accelerator.num_processes * sum(batch["input_ids"].numel() for batch in batches)
        state["tokens"] += tokens
        times.append(time.perf_counter() - started)
        measures |= {"learning_rate": optimizer.param_groups[0]["lr"], "grad_norm": norm}
        measures |= {"tokens_per_second": tokens / times[-1], "skipped": state["skipped"]}
        state["train"].append({"step": state["step"]} | measures)
        accelerator.log({f"train/{k}": v for k, v in measures.items()}, step=state["step"])
        progress.set_postfix_str(
            f"loss {measures['loss']:.4f}, {measures['tokens_per_second']:.0f} tokens/s", refresh=False
        )
        progress.update()
        if state["skipped_in_a_row"] >= MAX_SKIPPED_IN_A_ROW:
            progress.close()
            kept = latest_checkpoint(Path(recipe.output))
            raise RunStopped(
                f"the loss or its gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, to step "
                f"{state['step']}; the last good checkpoint is {kept}: continue with --resume and a lower learning_rate"
            )
        if (state["step"] % recipe.checkpoint_steps == 0 or state["step"] == steps) and not state["skipped_in_a_row"]:
            evaluate_and_save()
    progress.close()
    if times:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**30
        accelerator.print(f"{statistics.median(times):.2f} seconds per step, peak memory {peak:.2f} GiB per process")
    return True


# ---- what is left of a run ----------------------------------------


def export(recipe, accelerator, model, tokenizer, state: dict, dtype: torch.dtype, steps: int) -> None:
    """Writes OUTPUT/adapter (with LoRA), OUTPUT/curves.png and the complete model, OUTPUT/model."""
    output = Path(recipe.output)
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    weights = accelerator.get_state_dict(model) if sharded else None
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if not accelerator.is_main_process:
        return
    if sharded:  # a whole model again, to put the gathered weights into
        model = make_trainable(load_model(recipe.model, recipe.dtype), recipe)
        model.load_state_dict(weights, strict=False)  # tied weights appear once
        plain(model).tie_weights()
    model.eval()
    if isinstance(model, PeftModel):
        with written_beside(output / "adapter") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        model = model.merge_and_unload()
    model.to(dtype)
    plot(state, output / "curves.png")
    with written_beside(output / "model") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        published = {k: _without_paths(v) for k, v in state["recipe"].items() if k not in ("output", "resume")}
        (partial / "training.json").write_text(json.dumps(state | {"recipe": published}, indent=1) + "\n")
        shutil.copy(output / "curves.png", partial)
        conversion = Path(recipe.model) / "conversion.json"
        if conversion.is_file():
            shutil.copy(conversion, partial)
        (partial / "README.md").write_text(model_card(recipe, model, state, published))
    print(f"wrote {output / 'model'}, the weights of step {state['exported_step']} of {steps}")


def plot(state: dict, path: Path) -> None:
    """The curves of the training loss and of each measure of the evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in state["eval"][0] if name != "step"]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.plot([x["step"] for x in state["train"]], [x[name] for x in state["train"]], lw=0.7, label="training")
        axis.plot([x["step"] for x in state["eval"]], [x[name] for x in state["eval"]], marker="o", label="held out")
        axis.set(xlabel="step", title=name)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _without_paths(value):
    """What of a recipe may be published: of a local path only its name."""
    if isinstance(value, list):
        return [_without_paths(x) for x in value]
    return Path(value).resolve().name if isinstance(value, str) and Path(value).exists() else value


def model_card(recipe: Recipe, model: PreTrainedModel, state: dict, published: dict) -> str:
    """The card of a fine-tuned model, from `model_cards/finetuned.md`, its run's state and published recipe."""
    exported = next(x for x in state["eval"] if x["step"] == state["exported_step"])
    tables = [("held-out rows", state["eval"][0], exported)]
    if "test_before" in state:
        tables.append(("test text", state["test_before"], state["test_after"]))
    titles = {
        "loss": "loss",
        "perplexity": "perplexity",
        "kl": "KL to the teacher (nats per token)",
        "top1": "top-1 agreement with the teacher",
    }
    rows = [
        f"| {titles[name]}, {where} | {before[name]:.4g} | {after[name]:.4g} |"
        for where, before, after in tables for name in titles if name in before
    ]  # fmt: skip
    trained = {
        "lora": "LoRA adapters, merged, and the HLA parameters",
        "hla": "the HLA parameters",
        "full": "all weights",
    }
    objective = [f"{recipe.ce_weight:g} x next-token loss"] if recipe.ce_weight else []
    if recipe.kl_weight:
        teacher = published["teacher"] or "the same weights with softmax attention"
        objective.append(f"{recipe.kl_weight:g} x KL to {teacher} at temperature {recipe.temperature:g}")
    hla = {name: value for name, value in model.config.to_dict().items() if name.startswith("hla_")}
    return Template((files("model_cards") / "finetuned.md").read_text()).substitute(
        name=Path(recipe.output).resolve().name, base_model=published["model"], trained=trained[recipe.train],
        objective=" + ".join(objective), tokens=state["tokens"], data=", ".join(published["data"]),
        steps=state["exported_step"], skipped=state["skipped"], rows="\n".join(rows),
        recipe="\n".join(f"{k}: {json.dumps(v)}" for k, v in published.items()),
        settings="\n".join(f"| `{name}` | `{value}` |" for name, value in hla.items()),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """The command: exits 2 with one line on bad input, 1 with one line if the run cannot go on, 0 if it was stopped."""
    try:
        run(parse_recipe(arguments))
    except (ValueError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
