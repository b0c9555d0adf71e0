"""What a conversion is told: one dataclass, filled by the command line or by a caller from Python."""

import argparse
import dataclasses
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hla_hf.configuration_hla import HLAConfigMixin

from . import program_name


# ruff: noqa: RUF009 -- `_option` is `dataclasses.field`


def _option(default: Any, help: str, **argument) -> Any:
    """A field with what its command line argument needs besides its name and default."""
    metadata = {"help": help, **argument}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _layers_to_keep(text: str) -> int:
    kind, _, count = text.partition(":")
    if kind != "auto" or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto:K, K a number of layers, got {text!r}")
    return int(count)


def _hla_option(name: str, default: Any) -> Any:
    if name == "hla_slots":
        return _option(
            None,
            f"config field (default {SLOTS} if its scores are trained, else 0): slots of every HLA layer, a number for "
            "each, or auto:N, N per layer on average, more where the model loses more when that layer alone is HLA",
            type=_number_or_text, nargs="+", metavar="N",
        )  # fmt: skip
    if name == "hla_slot_score":
        return _option(None, f"config field (default learned if it is trained, else {default})", type=str)
    kind = {"type": int, "nargs": "*", "metavar": "LAYER"} if name == "hla_layers" else {"type": _number_or_text}
    return _option(default, f"config field (default {default})", **kind)


SLOTS = "auto:160"  # measured in docs/conversion.md, "Exact slots"

if TYPE_CHECKING:
    HLASettings = HLAConfigMixin
else:
    HLASettings = dataclasses.make_dataclass(
        "HLASettings",
        [
            (f.name, f.type, _hla_option(f.name, f.default))
            for f in fields(HLAConfigMixin)
            if f.name != "hla_code_version"  # of the code, not for a caller to choose
        ],
        kw_only=True,
    )


@dataclass(kw_only=True)
class Conversion(HLASettings):
    """A conversion of `source` to the new directory `output`; every `hla_*` field of the config is a field here too.

    Raises: ValueError naming the field, its value and what is allowed.
    """

    source: str = _option(dataclasses.MISSING, "Hub id, local directory or .gguf file of the base model")
    output: str = _option(dataclasses.MISSING, "new directory for the converted model", metavar="DIR")
    data: list[str] = _option(
        ["self"],
        "text for attention transfer: files, directories, a dataset NAME or NAME:CONFIG, or `self`, text that the base "
        "model samples (default)",
        metavar="X",
    )
    facts: float | None = _option(
        None,
        "share of the rows to train on in which facts are stated in the text and asked for later (default: 0.5 where "
        "learned scores of slots need them or the base model samples the text, else 0)",
        type=float,
    )
    tokens: int = _option(20480, "tokens of text to train on (default %(default)s)")
    steps: int = _option(100, "training steps; 0 skips training (default %(default)s)")
    batch_size: int = _option(2, "rows per step (default %(default)s)")
    seq_len: int = _option(512, "tokens per row (default %(default)s)")
    learning_rate: float = _option(1e-2, "peak of one cycle (default %(default)s)")
    keep_softmax: int = _option(
        0,
        "keep softmax attention, and its cache, in the K layers that cost most when they alone are HLA: the KL to the "
        "base on held-out text and on a second reading of it; --hla-layers names the HLA layers instead",
        type=_layers_to_keep,
        metavar="auto:K",
    )
    eval_file: str | None = _option(
        None, "text on which perplexity is reported before and after", type=str, metavar="FILE"
    )
    eval_tokens: int = _option(6144, "tokens of it to use (default %(default)s)")
    eval_len: int = _option(1024, "context of its rows (default %(default)s)")
    dtype: str = _option("auto", "dtype to load and save in (default: the checkpoint's)")
    device: str = _option("cpu", "device to work on (default %(default)s)")
    seed: int = _option(0, "of what is sampled and of the order of rows")
    resume: bool = _option(False, "go on with a conversion to DIR that was stopped, or whose result was not written")
    dequantize: bool = _option(False, "accept a quantised base and restore its weights")
    to_softmax: bool = _option(False, "the way back: SOURCE is a converted model, DIR its base architecture")
    quiet: bool = _option(False, "print nothing but errors and warnings")
    push_to_hub: str | None = _option(
        None, "upload DIR to this repository of the Hub when it is complete", type=str, metavar="USER/NAME"
    )
    private: bool = _option(False, "make the repository a private one, if it is new")
    revision: str | None = _option(None, "branch of it to upload to (default: main)", type=str)

    def __post_init__(self) -> None:
        check_upload_options(self)
        if isinstance(self.hla_slots, list) and len(self.hla_slots) == 1:
            self.hla_slots = self.hla_slots[0]
        if self.hla_slots is None:
            self.hla_slots = SLOTS if self.steps and self.hla_window else 0
        if self.hla_slot_score is None:
            self.hla_slot_score = "learned" if self.steps and self.hla_slots != 0 else "attention"
        if isinstance(self.hla_slots, str) and not self.slots_to_spread:
            raise ValueError(f"--hla-slots must be numbers or auto:N, N at least 1, got {self.hla_slots!r}")
        if self.slots_to_spread and self.hla_window == 0:
            raise ValueError(f"--hla-slots {self.hla_slots} needs a window that tokens leave, got --hla-window 0")
        for name, least in (("steps", 0), ("tokens", 1), ("batch_size", 1), ("seq_len", 2), ("eval_len", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.fact_share < 1:
            raise ValueError(f"--facts must be at least 0 and below 1, got {self.facts}")
        if self.eval_file and self.eval_tokens < self.eval_len:
            raise ValueError(f"--eval-tokens must be at least --eval-len={self.eval_len}, got {self.eval_tokens}")

    @property
    def hla(self) -> dict[str, Any]:
        """The `hla_*` settings alone."""
        return {f.name: getattr(self, f.name) for f in fields(HLASettings)}

    @property
    def fact_share(self) -> float:
        if self.facts is not None:
            return self.facts
        return 0.5 if self.data == ["self"] or (self.hla_slots != 0 and self.hla_slot_score == "learned") else 0.0

    @property
    def slots_to_spread(self) -> int:
        """N of `auto:N`, 0 if the slots are numbers."""
        kind, _, count = str(self.hla_slots).partition(":")
        return int(count) if kind == "auto" and count.isdecimal() else 0

    @property
    def command(self) -> str:
        """The command of this conversion as it may be published: what is not default, no folders of this machine."""
        published = dataclasses.replace(self, output=Path(os.path.abspath(self.output)).name, quiet=False)
        return command_line("python -m conversion.convert", published, without_folders, positional="source")


def check_upload_options(settings: Any) -> None:
    """Raises ValueError if `private` or `revision` is given without `push_to_hub`."""
    for name in ("private", "revision"):
        if getattr(settings, name) and settings.push_to_hub is None:
            raise ValueError(f"--{name} needs --push-to-hub USER/NAME")


def parse_arguments(arguments: list[str] | None = None) -> Conversion:
    """The command line; each `hla_*` field of the configuration is an option of its own."""
    parser = argparse.ArgumentParser(
        prog=program_name("hla-convert", "conversion.convert"),
        description="Convert a pretrained Llama-style checkpoint to an HLA model that loads anywhere.",
    )
    for f in sorted(fields(Conversion), key=lambda f: f.name.startswith("hla_")):
        options = dict(f.metadata)
        if f.name == "source":
            parser.add_argument("source", metavar="SOURCE", **options)
            continue
        default = f.default
        if f.default_factory is not dataclasses.MISSING:
            default, options["nargs"] = f.default_factory(), "+"
        if f.type is bool:
            options["action"] = "store_true"
        elif default is dataclasses.MISSING:
            options["required"] = True
        else:
            options |= {"default": default} | ({"type": f.type} if f.type in (int, float) else {}) | options
        parser.add_argument(_flag(f.name), **options)
    return Conversion(**vars(parser.parse_args(arguments)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def without_folders(value: Any) -> Any:
    """Of a path on this machine its name alone, which a published file may tell; else the value as it is."""
    if isinstance(value, list):
        return [without_folders(x) for x in value]
    if isinstance(value, str) and (Path(value).exists() or os.path.isabs(value) or value.startswith(("./", "../"))):
        return Path(os.path.abspath(value)).name
    return value


def command_line(
    program: str, settings: Any, published: Callable[[Any], Any] = lambda x: x, positional: str | None = None
) -> str:
    """The command that fills a dataclass of settings with these values: what is not default, quoted for a shell."""
    words = [] if positional is None else [str(published(getattr(settings, positional)))]
    for f in fields(settings):
        value = published(getattr(settings, f.name))
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.name == positional or value is None or value == default:
            continue
        if isinstance(value, bool):
            words.append(_flag(f.name if value else f"no_{f.name}"))
        elif f.metadata.get("type") is _layers_to_keep:
            words += [_flag(f.name), f"auto:{value}"]
        else:
            words += [_flag(f.name), *map(str, value if isinstance(value, list) else [value])]
    return f"{program} {shlex.join(words)}"
