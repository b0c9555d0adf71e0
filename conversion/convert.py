"""Convert a pretrained Llama-style checkpoint to an HLA model that loads anywhere.

    python -m conversion.convert SOURCE --output DIR

SOURCE is a Hub id, a local directory or a GGUF file. Its weights are kept; attention transfer trains the few new
parameters. DIR is complete: weights, config, tokenizer, generation config, the Python files and a model card.
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hla_hf import ARCHITECTURES, softmax_attention, to_hla, to_softmax
from hla_hf.configuration_hla import HLAConfigMixin

from .evaluate import agreement_with_base, perplexity
from .keep import keep_softmax, layer_costs
from .text import read_tokens, sample_tokens
from .transfer import Interrupted, hla_layers, hla_parameters, transfer_attention


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; each `hla_*` field of the configuration is an option of its own."""
    parser = argparse.ArgumentParser(prog="python -m conversion.convert", description=__doc__.split("\n\n")[0])
    parser.add_argument("source", metavar="SOURCE", help="Hub id, local directory or .gguf file of the base model")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory for the converted model")
    parser.add_argument(
        "--data", nargs="+", default=["self"], metavar="X",
        help="text for attention transfer: files, a dataset NAME or NAME:CONFIG, or `self`, text that the base model "
        "samples (default)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=20480, help="tokens of text to train on (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="training steps; 0 skips training (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="rows per step (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens per row (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="peak of one cycle (default %(default)s)")
    parser.add_argument(
        "--keep-softmax", type=_layers_to_keep, default=0, metavar="auto:K",
        help="keep softmax attention, and its cache, in the K layers that cost most when they alone are HLA: the KL to "
        "the base on held-out text and on a second reading of it; --hla-layers names the HLA layers instead",
    )  # fmt: skip
    parser.add_argument("--eval-file", metavar="FILE", help="text on which perplexity is reported before and after")
    parser.add_argument("--eval-tokens", type=int, default=6144, help="tokens of it to use (default %(default)s)")
    parser.add_argument("--eval-len", type=int, default=1024, help="context of its rows (default %(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype to load and save in (default: the checkpoint's)")
    parser.add_argument("--device", default="cpu", help="device to work on (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with a conversion to DIR that Ctrl-C stopped")
    parser.add_argument("--dequantize", action="store_true", help="accept a quantised base and restore its weights")
    parser.add_argument(
        "--to-softmax", action="store_true", help="the way back: SOURCE is a converted model, DIR its base architecture"
    )
    for field in dataclasses.fields(HLAConfigMixin):
        kind = {"type": _number_or_text}
        if field.name == "hla_layers":
            kind = {"type": int, "nargs": "*", "metavar": "LAYER"}
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, default=field.default, help=f"config field (default {field.default})", **kind)
    options = parser.parse_args(arguments)
    for name, least in (("steps", 0), ("tokens", 1), ("batch_size", 1), ("seq_len", 2), ("eval_len", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    return options


def _layers_to_keep(text: str) -> int:
    kind, _, count = text.partition(":")
    if kind != "auto" or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto:K, K a number of layers, got {text!r}")
    return int(count)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def load_base(
    source: str, dtype: str = "auto", device: str = "cpu", dequantize: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base model and tokenizer of a Hub id, a GGUF file or a directory: safetensors or `pytorch_model.bin`,
    sharded or not, or a PEFT adapter, which is merged into the base that it names.

    Raises: ValueError if the architecture is not supported, a weight is missing or unreadable, the weights are
    quantised and not to be restored, or the tokenizer has more tokens than the model.
    """
    if (Path(source) / "adapter_config.json").is_file():
        adapter = PeftConfig.from_pretrained(source)
        model, tokenizer = load_base(adapter.base_model_name_or_path, dtype, device, dequantize)
        try:
            model = PeftModel.from_pretrained(model, source).merge_and_unload()
        except Exception as error:
            raise ValueError(f"the adapter of SOURCE {source!r} cannot be read: {error}") from error
        if (Path(source) / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(source)
        return model.eval(), tokenizer

    options, name = {}, ""
    if source.endswith(".gguf"):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"SOURCE {source!r} does not exist")
        source, options, name = str(path.parent), {"gguf_file": path.name}, f", file {path.name!r},"
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"SOURCE {source!r}{name} has no configuration that can be read: {error}") from error
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"SOURCE {source!r} is a {config.model_type!r} model, which is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization and not options and not dequantize:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"SOURCE {source!r} is quantised ({method}); training and merging need its weights in full precision: "
            "take the checkpoint it was made from, or pass --dequantize to restore them with what the format has lost"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if options:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if device == "auto":
        options["device_map"] = "auto"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:
        raise ValueError(f"the weights of SOURCE {source!r} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ValueError(f"SOURCE {source!r} lacks {len(missing)} of the model's weights: {', '.join(missing[:5])} ...")
    if quantization and dequantize:
        model = model.dequantize()
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer of SOURCE {source!r} has {len(tokenizer)} tokens, the model only {rows}")
    return (model if device == "auto" else model.to(device)).eval(), tokenizer


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Yields a new directory, which becomes `target`, replacing it, if the block ends without an error."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        remove(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a directory if it exists."""
    if path.exists():  # renamed first: what is half deleted must not look complete
        removed = path.with_name(f".{path.name}.removed-{os.getpid()}")
        path.rename(removed)
        shutil.rmtree(removed)


def model_card(report: dict) -> str:
    """The model card of a conversion, from `model_cards/template.md` and its report."""
    rows = []
    for title, key in (
        ("KL to the base model (nats per token)", "kl"),
        ("top-1 agreement with the base model", "top1"),
        ("perplexity", "perplexity"),
    ):
        if key in report["after"]:
            base = report["base"].get(key, "")
            values = (base, report["before"][key], report["after"][key])
            rows.append(f"| {title} | " + " | ".join(f"{x:.4g}" if x != "" else "" for x in values) + " |")
    settings = "\n".join(f"| `{name}` | `{value}` |" for name, value in report["hla"].items())
    losses = ", ".join(f"{x:.3f}" for x in report["layer_losses"]) or "not trained"
    template = Template((files("model_cards") / "template.md").read_text())
    return template.substitute(
        name=report["name"], base_model=report["source"], command=report["command"], rows="\n".join(rows),
        settings=settings, losses=losses, text=report["text"], evaluation=report["evaluation"],
    )  # fmt: skip


def check_output(output: Path) -> None:
    """Raises ValueError if `output` is taken."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {str(output)!r} exists and is not an empty directory")


def prepare_text(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Rows of tokens `[N, seq_len]` to train on, and at the end `held_out_rows` more to measure on."""
    rows = max(1, options.tokens // options.seq_len)
    rows += held_out_rows(rows)
    if options.data == ["self"]:
        with softmax_attention(model):
            return sample_tokens(model, tokenizer, rows, options.seq_len)
    tokens = read_tokens(options.data, tokenizer, rows, options.seq_len)
    if len(tokens) < 3:
        raise ValueError(
            f"the text has {len(tokens)} rows of {options.seq_len} tokens, fewer than 1 to train on and 2 to hold out; "
            "give more text or a smaller --seq-len"
        )
    return tokens


def held_out_rows(rows: int) -> int:
    """A tenth, at least two."""
    return max(2, rows // 10)


def without_folder(argument: str) -> str:
    """A path without the folders of this machine, which a published model card should not tell; else as it is."""
    path = Path(argument)
    return path.name if path.exists() or path.parent.is_dir() else argument


def convert(options: argparse.Namespace) -> dict:
    """Runs the conversion and returns its report.

    Raises: ValueError on bad input, with nothing written; Interrupted on Ctrl-C while training, with what is trained
    in a file beside the output that `--resume` goes on from.
    """
    output = Path(options.output)
    check_output(output)
    if options.eval_file and not Path(options.eval_file).is_file():
        raise ValueError(f"--eval-file {options.eval_file!r} does not exist")
    stopped = output.with_name(f"{output.name}.interrupted")
    if options.resume and not stopped.is_file():
        raise ValueError(f"--resume: there is no interrupted conversion {str(stopped)!r}")
    hla = {f.name: getattr(options, f.name) for f in dataclasses.fields(HLAConfigMixin)}
    names = ("source", "steps", "batch_size", "learning_rate", "dtype")
    recipe = hla | {name: getattr(options, name) for name in names}
    interrupted = torch.load(stopped, weights_only=True) if options.resume else None
    if interrupted and interrupted["recipe"] != recipe:
        changed = {name for name in recipe if interrupted["recipe"].get(name) != recipe[name]}
        raise ValueError(f"--resume: {', '.join(sorted(changed))} differ from the conversion that was interrupted")

    torch.manual_seed(options.seed)
    model, tokenizer = load_base(options.source, options.dtype, options.device, options.dequantize)
    to_hla(model, **hla)
    dtype = model.dtype
    layers = [layer.layer_idx for layer in hla_layers(model)]
    if options.keep_softmax and options.keep_softmax >= len(layers):
        raise ValueError(f"--keep-softmax auto:{options.keep_softmax} leaves none of {len(layers)} HLA layers")
    tokens = interrupted["tokens"] if interrupted else prepare_text(options, model, tokenizer)
    held_out = held_out_rows(len(tokens) * 10 // 11)
    training, held_out_tokens = tokens[:-held_out], tokens[-held_out:]
    eval_tokens = None
    if options.eval_file:
        rows = options.eval_tokens // options.eval_len
        eval_tokens = read_tokens([options.eval_file], tokenizer, rows, options.eval_len)

    def measure() -> dict[str, float]:
        result = agreement_with_base(model, held_out_tokens)
        return result | ({} if eval_tokens is None else {"perplexity": perplexity(model, eval_tokens)})

    print("evaluating before training", flush=True)
    before = measure()
    base = {}
    if eval_tokens is not None:
        with softmax_attention(model):
            base["perplexity"] = perplexity(model, eval_tokens)
    layer_losses = []
    if options.steps and layers:
        for parameter in hla_parameters(model).values():
            parameter.data = parameter.data.float()
        try:
            layer_losses = transfer_attention(
                model, training, steps=options.steps, batch_size=options.batch_size,
                learning_rate=options.learning_rate, seed=options.seed, interrupted=interrupted,
            )  # fmt: skip
        except Interrupted as error:
            output.parent.mkdir(parents=True, exist_ok=True)
            partial = stopped.with_name(f".{stopped.name}-{os.getpid()}")
            torch.save(error.state | {"tokens": tokens, "recipe": recipe}, partial)
            partial.rename(stopped)
            raise
        for parameter in hla_parameters(model).values():
            parameter.data = parameter.data.to(dtype)
    costs = []
    if options.keep_softmax:
        costs = layer_costs(model, held_out_tokens[:2]).tolist()
        kept = sorted(range(len(layers)), key=lambda i: -sum(costs[i]))[: options.keep_softmax]
        keep_softmax(model, [layers[i] for i in kept])
        hla["hla_layers"] = model.config.hla_layers
    is_changed = bool(options.steps or options.keep_softmax)
    if is_changed:
        print("evaluating after training", flush=True)
    evaluation = f"KL and agreement: {held_out_tokens.numel()} held-out tokens of the same text"
    if base:
        name = without_folder(options.eval_file)
        evaluation += f"; perplexity: {eval_tokens.numel()} tokens of {name}, context {options.eval_len}"
    text = "text that the base model sampled"
    if options.data != ["self"]:
        text = ", ".join(map(without_folder, options.data))
    report = {
        "name": output.name,
        "source": without_folder(options.source),
        "command": "python -m conversion.convert " + shlex.join(map(without_folder, sys.argv[1:])),
        "text": f"{training.numel()} tokens of {text}",
        "evaluation": evaluation,
        "hla": hla,
        "steps": options.steps,
        "base": base,
        "before": before,
        "after": measure() if is_changed else before,
        "layers": layers,
        "layer_losses": layer_losses,
        "layer_costs": costs,
    }
    with written_beside(output) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / "conversion.json").write_text(json.dumps(report, indent=2) + "\n")
        (directory / "README.md").write_text(model_card(report))
    stopped.unlink(missing_ok=True)
    return report


def convert_back(options: argparse.Namespace) -> None:
    """Writes the base architecture of a converted model, with its q, k, v, o and all other weights as they are now."""
    output = Path(options.output)
    check_output(output)
    try:
        model = AutoModelForCausalLM.from_pretrained(options.source, dtype=options.dtype)
        tokenizer = AutoTokenizer.from_pretrained(options.source)
    except Exception as error:
        raise ValueError(f"SOURCE {options.source!r} cannot be read: {error}") from error
    to_softmax(model)
    with written_beside(output) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> None:
    """The command: prints the report's losses and measures; exits 2 with one line on bad input, 130 on Ctrl-C."""
    options = parse_arguments(arguments)
    try:
        if options.to_softmax:
            convert_back(options)
            print(f"wrote {options.output}")
            return
        report = convert(options)
    except (ValueError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"\n{error} of {options.steps}, which are saved; the same command with --resume goes on", file=sys.stderr)
        sys.exit(130)
    if report["layer_losses"]:
        print("\nlayer   normalised error of its output")
        for layer, loss in zip(report["layers"], report["layer_losses"], strict=True):
            print(f"{layer:5}   {loss:.4f}")
    if report["layer_costs"]:
        print("\nlayer   KL when it alone is HLA: on text, on a second reading of it")
        for layer, costs in zip(report["layers"], report["layer_costs"], strict=True):
            print(
                f"{layer:5}   {costs[0]:.5f}  {costs[1]:.5f}"
                + ("" if layer in report["hla"]["hla_layers"] else "  kept")
            )
    print(f"\n{'':14}{'before':>10}{'after':>10}{'base':>10}")
    for key in report["after"]:
        values = (report["before"][key], report["after"][key], report["base"].get(key))
        print(f"{key:14}" + "".join(f"{'':>10}" if x is None else f"{x:10.4f}" for x in values))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
