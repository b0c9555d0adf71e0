"""What is left of a run: the complete model with its card and curves, and with LoRA the adapter."""

import json
import shutil
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conversion.card import Measure, describe_license, describe_memory, fill, front_matter, origin_of, settings_table
from conversion.evaluate import remembered_bytes
from conversion.load import file_beside, load_model
from conversion.settings import without_folders
from conversion.write import try_writing, write_model, written_beside

from .checkpoint import Progress
from .loop import Run
from .model import make_trainable, plain
from .recipe import Recipe


def check_export(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises: ValueError if what `export` does would fail now."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the curves of a run need matplotlib, which cannot be imported: {error}") from error
    try_writing(model, tokenizer, Path(recipe.output) / "model")


def export(run: Run, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    """Writes OUTPUT/adapter (with LoRA), OUTPUT/curves.png and the complete model, OUTPUT/model."""
    recipe, progress, output = run.recipe, run.progress, run.output
    model = _whole_model(run)
    if model is None:
        return
    model.eval()
    if isinstance(model, PeftModel):
        with written_beside(output / "adapter") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        model = model.merge_and_unload()
    model.to(dtype)
    plot(progress, output / "curves.png")
    with written_beside(output / "model") as partial:
        write_model(model, tokenizer, partial)
        private = ("output", "resume", "quiet", "push_to_hub", "private", "revision")
        published = {k: without_folders(v) for k, v in progress.recipe.items() if k not in private}
        (partial / "training.json").write_text(json.dumps(progress.as_dict() | {"recipe": published}, indent=1) + "\n")
        shutil.copy(output / "curves.png", partial)
        conversion = file_beside(recipe.model, "conversion.json")
        if conversion is not None:
            shutil.copyfile(conversion, partial / "conversion.json")
        (partial / "README.md").write_text(model_card(recipe, model, progress, published))
    print(f"wrote {output / 'model'}, the weights of step {progress.exported_step} of {run.steps}")


def _whole_model(run: Run) -> PreTrainedModel | PeftModel | None:
    """The trained model on the main process, gathered from all; None on the others."""
    accelerator = run.accelerator
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    weights = accelerator.get_state_dict(run.model) if sharded else None
    if not accelerator.is_main_process:
        return None
    if not sharded:
        return accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    model = make_trainable(load_model(run.recipe.model, "model", run.recipe.dtype), run.recipe)
    model.load_state_dict(weights, strict=False)  # tied weights appear once
    plain(model).tie_weights()
    return model


def plot(progress: Progress, path: Path) -> None:
    """The curves of the training loss and of each measure of the evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in progress.eval[0] if name != "step"]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.plot([x["step"] for x in progress.train], [x[name] for x in progress.train], lw=0.7, label="training")
        axis.plot([x["step"] for x in progress.eval], [x[name] for x in progress.eval], marker="o", label="held out")
        axis.set(xlabel="step", title=name)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def model_card(recipe: Recipe, model: PreTrainedModel, progress: Progress, published: dict) -> str:
    """The card of a fine-tuned model, from `model_cards/finetuned.md`, its run's progress and published recipe."""
    exported = next(x for x in progress.eval if x["step"] == progress.exported_step)
    tables = [("held-out rows", progress.eval[0], exported)]
    if progress.test_before is not None:
        tables.append(("test text", progress.test_before, progress.test_after))
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
    origin = origin_of(recipe.model)
    measures = [
        Measure(name, titles[name], after[name], where)
        for where, _, after in tables for name in titles if name in after and name != "loss"
    ]  # fmt: skip
    name = Path(recipe.output).resolve().name
    hla = {name: value for name, value in model.config.to_dict().items() if name.startswith("hla_")}
    return fill(
        "finetuned.md", front_matter=front_matter(name, origin, recipe.data, measures), name=name,
        base_model=published["model"], license=describe_license(origin),
        repository=recipe.push_to_hub or "PATH_OR_REPOSITORY",
        trained=trained[recipe.train], objective=" + ".join(objective), tokens=progress.tokens,
        data=", ".join(published["data"]), steps=progress.exported_step, skipped=progress.skipped,
        rows="\n".join(rows), recipe="\n".join(f"{k}: {json.dumps(v)}" for k, v in published.items()),
        settings=settings_table(hla), memory=describe_memory(remembered_bytes(model)),
    )  # fmt: skip
