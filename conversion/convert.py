"""Convert a pretrained Llama-style checkpoint to an HLA model that loads anywhere.

    python -m conversion.convert SOURCE --output DIR

SOURCE is a Hub id, a local directory or a GGUF file. Its weights are kept; attention transfer trains the few new
parameters. DIR is complete: weights, config, tokenizer, generation config, the Python files and a model card. From
Python: `convert(Conversion(source=..., output=...))`.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hla_hf import softmax_attention, to_hla, to_softmax
from hla_hf.layer_hla import hla_attentions

from . import thread_report
from .card import model_card, origin_of
from .evaluate import agreement_with_base, perplexity, remembered_bytes
from .facts import DESCRIPTION, fact_rows
from .hub import check_upload, upload
from .interrupt import interruptible
from .keep import change_settings, keep_softmax, layer_costs, spread_slots
from .load import load_base, load_model, load_tokenizer, working_copy
from .progress import shown
from .recall import WORDINGS, recall
from .settings import Conversion, parse_arguments, without_folders
from .text import read_tokens, sample_tokens
from .transfer import Interrupted, hla_parameters, transfer_attention
from .write import RunStopped, try_writing, write_model, written_beside


__all__ = ["Conversion", "convert", "load_base", "main", "parse_arguments"]

RANKING_LENGTH = 512  # tokens of a held-out row by which slots are spread


class Texts(NamedTuple):
    """Rows of tokens `[N, T]`, and in words what those to train on are."""

    training: Tensor
    held_out: Tensor
    evaluation: Tensor | None
    description: str


def check_output(conversion: Conversion) -> None:
    """Raises ValueError if the output is taken."""
    output = Path(conversion.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {conversion.output!r} exists and is not an empty directory")


# ---- what a stopped conversion leaves ----------------------------------------


def _kept_file(conversion: Conversion) -> Path:
    output = Path(conversion.output)
    return output.with_name(f"{output.name}.interrupted")


def _recipe(conversion: Conversion) -> dict:
    names = ("source", "steps", "batch_size", "learning_rate", "fact_share", "dtype")
    return conversion.hla | {name: getattr(conversion, name) for name in names}


def read_kept(conversion: Conversion) -> dict | None:
    """What `keep` wrote, with `--resume`. Raises: ValueError if there is nothing, or of another conversion."""
    if not conversion.resume:
        return None
    path, recipe = _kept_file(conversion), _recipe(conversion)
    if not path.is_file():
        raise ValueError(f"--resume: there is no interrupted conversion {str(path)!r}")
    kept = torch.load(path, weights_only=True)
    if kept["recipe"] != recipe:
        changed = {name for name in recipe if kept["recipe"].get(name) != recipe[name]}
        raise ValueError(f"--resume: {', '.join(sorted(changed))} differ from the conversion that was interrupted")
    return kept


def keep(conversion: Conversion, state: dict, texts: Texts) -> None:
    """Writes a file beside the output that `--resume` goes on from."""
    path = _kept_file(conversion)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    kept = {"training": texts.training, "held_out": texts.held_out, "recipe": _recipe(conversion)}
    try:
        torch.save(state | kept, partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


# ---- text ----------------------------------------


def held_out_rows(rows: int) -> int:
    """A tenth, at least two."""
    return max(2, rows // 10)


def prepare_texts(
    conversion: Conversion, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, kept: dict | None
) -> Texts:
    """What to train and to measure on: the text of `data` with a share of rows of facts, its last `held_out_rows` held
    out, and `eval_file`."""
    length = conversion.seq_len
    rows = max(1, conversion.tokens // length)
    facts = int(rows * conversion.fact_share) if tokenizer is not None else 0
    num_held_out = held_out_rows(rows)
    description = "text that the base model sampled"
    if tokenizer is None:
        description = "random tokens, as the base model has no tokenizer"
    elif conversion.data != ["self"]:
        description = ", ".join(without_folders(conversion.data))
    if kept is not None:
        training, held_out = kept["training"], kept["held_out"]
    elif tokenizer is None:
        training, held_out = torch.randint(model.config.vocab_size, (rows + num_held_out, length)).split(rows)
    else:
        wanted = rows - facts + num_held_out
        tokens = read_text(conversion, model, tokenizer, wanted)
        if len(tokens) < wanted:
            num_held_out = min(num_held_out, held_out_rows(len(tokens) * 10 // 11))
        training, held_out = tokens[:-num_held_out], tokens[-num_held_out:]
        if facts:
            facts = max(1, round(len(training) * conversion.fact_share / (1 - conversion.fact_share)))
            try:
                told = fact_rows(training, tokenizer, facts, length, conversion.seed)
            except ValueError as error:
                raise ValueError(f"--seq-len {length}: {error}; --facts 0 trains without facts") from error
            training = torch.cat([training, told])
    if facts:
        description += f"; in {conversion.fact_share:.0%} of its rows {DESCRIPTION}"
    evaluation = None
    if conversion.eval_file:
        rows = conversion.eval_tokens // conversion.eval_len
        evaluation = read_tokens([conversion.eval_file], tokenizer, rows, conversion.eval_len, flag="--eval-file")
    texts = Texts(training, held_out, evaluation, description)
    if conversion.data == ["self"] and tokenizer is not None and not _kept_file(conversion).exists():
        keep(conversion, {}, texts)  # sampling is most of the work of a short conversion
    return texts


def read_text(
    conversion: Conversion, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_rows: int
) -> Tensor:
    """Up to `num_rows` rows of `data`, at least 3. Raises: ValueError if it has fewer."""
    if conversion.data == ["self"]:
        sampler = working_copy(model)
        with softmax_attention(sampler):
            return sample_tokens(sampler, tokenizer, num_rows, conversion.seq_len)
    tokens = read_tokens(conversion.data, tokenizer, num_rows, conversion.seq_len)
    if len(tokens) < 3:
        raise ValueError(
            f"the text has {len(tokens)} rows of {conversion.seq_len} tokens, fewer than 1 to train on and 2 to hold "
            "out; give more text or a smaller --seq-len"
        )
    return tokens


# ---- the conversion ----------------------------------------


def measure(model: PreTrainedModel, texts: Texts) -> dict[str, float]:
    """Agreement with the base on held-out text, and perplexity if there is a text for it."""
    result = agreement_with_base(model, texts.held_out)
    return result | ({} if texts.evaluation is None else {"perplexity": perplexity(model, texts.evaluation)})


def found_facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, texts: Texts) -> dict[str, float]:
    """`recall`: the share of facts found, three wordings at three depths of the first context of the text to evaluate
    on; nothing without such a text or if it is too short for them."""
    if texts.evaluation is None or tokenizer is None:
        return {}
    try:
        found, _ = recall(model, tokenizer, texts.evaluation[:1])
    except ValueError:
        return {}
    shares = [share for at in found.values() for share in at.values()]
    return {"recall": sum(shares) / len(shares)}


def train_parameters(conversion: Conversion, model: PreTrainedModel, texts: Texts, kept: dict | None) -> list[float]:
    """Attention transfer in float32. Returns each layer's loss; both what is stopped and what is finished is kept.

    Raises: Interrupted on Ctrl-C.
    """
    learner = working_copy(model)
    parameters = hla_parameters(learner)
    for name, parameter in hla_parameters(model).items():
        parameters[name].data = parameter.data.float()
    if kept is not None and "layer_losses" in kept:
        for name, parameter in parameters.items():
            parameter.data.copy_(kept["parameters"][name])
        losses = kept["layer_losses"]
    else:
        try:
            losses = transfer_attention(
                learner, texts.training, steps=conversion.steps, batch_size=conversion.batch_size,
                learning_rate=conversion.learning_rate, seed=conversion.seed,
                interrupted=kept if kept is not None and "history" in kept else None,
            )  # fmt: skip
        except Interrupted as error:
            keep(conversion, error.state, texts)
            raise
        trained = {name: parameter.detach() for name, parameter in parameters.items()}
        keep(conversion, {"parameters": trained, "layer_losses": losses}, texts)
    for name, parameter in hla_parameters(model).items():
        parameter.data = parameters[name].data.to(model.dtype)
    return losses


def convert(conversion: Conversion) -> dict:
    """Runs a conversion and returns its report.

    Raises: ValueError on bad input, before training and with nothing written; Interrupted on Ctrl-C while training and
    RunStopped if the result cannot be written, with what is trained in a file beside the output that `--resume` goes on
    from; KeyboardInterrupt on Ctrl-C at another time, with that file if text was sampled or something was trained.
    """
    with shown(conversion.quiet):
        return _convert(conversion)


def _convert(conversion: Conversion) -> dict:
    check_output(conversion)
    check_upload(conversion.push_to_hub)
    if conversion.to_softmax:
        return convert_back(conversion)
    if conversion.eval_file and not Path(conversion.eval_file).is_file():
        raise ValueError(f"--eval-file {conversion.eval_file!r} does not exist")
    kept = read_kept(conversion)
    torch.manual_seed(conversion.seed)
    reads_text = bool(
        conversion.steps
        or conversion.keep_softmax
        or conversion.slots_to_spread
        or conversion.eval_file
        or conversion.data != ["self"]
    )
    model, tokenizer = load_base(
        conversion.source, conversion.dtype, conversion.device, conversion.dequantize, needs_tokenizer=reads_text
    )
    to_hla(model, **conversion.hla | ({"hla_slots": 0} if conversion.slots_to_spread else {}))
    layers = [layer.layer_idx for layer in hla_attentions(model)]
    if conversion.keep_softmax and conversion.keep_softmax >= len(layers):
        raise ValueError(f"--keep-softmax auto:{conversion.keep_softmax} leaves none of {len(layers)} HLA layers")
    try_writing(model, tokenizer, Path(conversion.output))
    texts = prepare_texts(conversion, model, tokenizer, kept)
    if conversion.slots_to_spread and layers:
        slots = spread_slots(layer_costs(model, texts.held_out[:1, :RANKING_LENGTH]), conversion.slots_to_spread)
        change_settings(model, hla_slots=slots)

    print("evaluating before training", flush=True)
    before, base = measure(model, texts), {}
    if texts.evaluation is not None:
        with softmax_attention(model):
            base = {"perplexity": perplexity(model, texts.evaluation)} | found_facts(model, tokenizer, texts)
    losses = train_parameters(conversion, model, texts, kept) if conversion.steps and layers else []
    costs = keep_costly_layers(conversion, model, texts, layers) if conversion.keep_softmax else []
    after = before
    if conversion.steps or conversion.keep_softmax:
        print("evaluating after training", flush=True)
        after = measure(model, texts)
    after = after | found_facts(model, tokenizer, texts)
    report = {
        "name": Path(conversion.output).name,
        "source": without_folders(conversion.source),
        "command": conversion.command,
        "text": f"{texts.training.numel()} tokens of {texts.description}",
        "evaluation": describe_evaluation(conversion, texts),
        "eval_text": without_folders(conversion.eval_file),
        "hla": {name: getattr(model.config, name) for name in conversion.hla},
        "steps": conversion.steps,
        "base": base,
        "before": before,
        "after": after,
        "bytes": remembered_bytes(model),
        "layers": layers,
        "layer_losses": losses,
        "layer_costs": costs,
    }
    write(conversion, model, tokenizer, report)
    return report


def keep_costly_layers(
    conversion: Conversion, model: PreTrainedModel, texts: Texts, layers: list[int]
) -> list[list[float]]:
    """Gives the layers that cost most their softmax attention back. Returns the costs of all."""
    costs = layer_costs(model, texts.held_out[:2]).tolist()
    kept = sorted(range(len(layers)), key=lambda i: -sum(costs[i]))[: conversion.keep_softmax]
    keep_softmax(model, [layers[i] for i in kept])
    return costs


def describe_evaluation(conversion: Conversion, texts: Texts) -> str:
    """On what the report's measures were taken."""
    held_out = texts.held_out.numel()
    text = f"KL and agreement: {held_out} held-out tokens of the same text"
    if texts.evaluation is not None:
        name = without_folders(conversion.eval_file)
        text += f"; perplexity: {texts.evaluation.numel()} tokens of {name}, context {conversion.eval_len}"
        text += f"; recall: numbers stated in its first {conversion.eval_len} tokens and asked for at their end, "
        text += f"{len(WORDINGS)} wordings at 3 depths"
    return text


def write(
    conversion: Conversion, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, report: dict | None
) -> None:
    """Writes the output, with its card if there is a report, and uploads it.

    Raises: RunStopped if one of these fails.
    """
    kept = _kept_file(conversion)
    try:
        with written_beside(Path(conversion.output)) as directory:
            write_model(model, tokenizer, directory)
            if report is not None:
                (directory / "conversion.json").write_text(json.dumps(report, indent=2) + "\n")
                card = model_card(report, origin_of(conversion.source), conversion.data, conversion.push_to_hub)
                (directory / "README.md").write_text(card)
    except Exception as error:  # each writer has errors of its own
        hint = (
            f"; what was trained is kept in {kept}: the same command with --resume writes it" if kept.exists() else ""
        )
        raise RunStopped(f"the converted model cannot be written: {error}{hint}") from error
    kept.unlink(missing_ok=True)
    upload(Path(conversion.output), conversion.push_to_hub, conversion.private, conversion.revision)


def convert_back(conversion: Conversion) -> dict:
    """Writes the base architecture of a converted model, with its q, k, v, o and all other weights as they are now."""
    model = load_model(conversion.source, "SOURCE", conversion.dtype)
    tokenizer = load_tokenizer(conversion.source, "SOURCE", model, required=False)
    to_softmax(model)
    write(conversion, model, tokenizer, report=None)
    return {"name": Path(conversion.output).name, "source": without_folders(conversion.source)}


# ---- the command ----------------------------------------


def print_report(report: dict) -> None:
    """Prints the losses and measures of a conversion."""
    if report["layer_losses"]:
        print("\nlayer   normalised error of its output")
        for layer, loss in zip(report["layers"], report["layer_losses"], strict=True):
            print(f"{layer:5}   {loss:.4f}")
    if report["layer_costs"]:
        print("\nlayer   KL when it alone is HLA: on text, on a second reading of it")
        for layer, costs in zip(report["layers"], report["layer_costs"], strict=True):
            kept = "" if layer in report["hla"]["hla_layers"] else "  kept"
            print(f"{layer:5}   {costs[0]:.5f}  {costs[1]:.5f}{kept}")
    print(f"\n{'':14}{'before':>10}{'after':>10}{'base':>10}")
    for key in report["after"]:
        values = (report[when].get(key) for when in ("before", "after", "base"))
        print(f"{key:14}" + "".join(f"{'':>10}" if x is None else f"{x:10.4f}" for x in values))
    size = report["bytes"]
    print(f"\nremembered of {size['context']:,} tokens: {size['model']:,} bytes, by the base {size['base']:,}")


def how_to_go_on(conversion: Conversion | None) -> str:
    """What a conversion that Ctrl-C stopped has left, and what to do now."""
    if conversion is not None and any(Path(conversion.output).glob("*")):
        return f"stopped; {conversion.output} is complete"
    if conversion is not None and _kept_file(conversion).exists():
        return f"stopped; {_kept_file(conversion)} has what was done: the same command with --resume goes on"
    return "stopped, nothing was written; the same command begins again"


def main(arguments: list[str] | None = None) -> None:
    """The command: exits 2 with one line on bad input, 1 if its result cannot be written or uploaded, 130 on Ctrl-C."""
    conversion = None
    with interruptible():
        try:
            conversion = parse_arguments(arguments)
            with shown(conversion.quiet):
                print(thread_report(), flush=True)
                report = convert(conversion)
                if not conversion.to_softmax:
                    print_report(report)
                print(f"\nwrote {conversion.output}")
        except (ValueError, StrictDataclassError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except RunStopped as error:
            print(f"stopped: {error}", file=sys.stderr)
            sys.exit(1)
        except Interrupted as error:
            saved = f"{error} of {conversion.steps}, which are saved; the same command with --resume goes on"
            print(f"\n{saved}", file=sys.stderr)
            sys.exit(130)
        except KeyboardInterrupt as error:
            print(f"\n{error if error.args else how_to_go_on(conversion)}", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
