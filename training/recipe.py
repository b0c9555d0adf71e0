"""The recipe of a run: one dataclass, read from a YAML file and the command line."""

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from transformers import HfArgumentParser
from transformers.trainer_utils import SchedulerType

from conversion import program_name
from conversion.settings import check_upload_options, command_line


# ruff: noqa: RUF009 -- `_option` is `dataclasses.field`


def _option(default, help: str):
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class Recipe:
    model: str = _option("", "converted model: a directory or Hub id (required)")
    output: str = _option("", "directory of the run (required)")
    resume: bool = _option(False, "continue from the last complete checkpoint in output")
    dtype: str = _option("auto", "dtype of frozen weights (auto: the checkpoint's); what is trained is float32")

    kl_weight: float = _option(0.0, "weight of KL(teacher || model), nats per token, times temperature^2")
    ce_weight: float = _option(1.0, "weight of the next-token loss, nats per token")
    temperature: float = _option(1.0, "divides the logits of teacher and model in the KL")
    teacher: str | None = _option(
        None, "teacher of the KL: a directory or Hub id; by default the model's own weights with softmax attention"
    )

    train: str = _option("lora", "what is trained: lora (adapters and the HLA parameters), hla (only these) or full")
    lora_rank: int = _option(16, "rank of the adapters")
    lora_alpha: float | None = _option(None, "scale of the adapters times rank; default 2 * rank")
    lora_dropout: float = _option(0.0, "dropout before the adapters")
    lora_targets: list[str] | None = _option(None, "modules with adapters; default: the attention's projections")

    data: list[str] = _option([], "training text: files, directories, datasets NAME or NAME:CONFIG (required)")
    eval_data: list[str] | None = _option(None, "held-out text, as data; default: the first eval_rows rows of data")
    test_data: list[str] | None = _option(None, "text measured once before and once after training, for the model card")
    eval_rows: int = _option(8, "rows of eval_data and of test_data to evaluate on")
    eval_seq_len: int | None = _option(None, "tokens per row of evaluation and test; default seq_len")
    streaming: bool = _option(False, "read the data while training, in its own order, instead of preparing it first")
    num_proc: int | None = _option(None, "processes that tokenise")
    seq_len: int = _option(512, "tokens per row")

    steps: int | None = _option(None, "optimizer steps; default: epochs")
    epochs: float = _option(1.0, "passes over the data if steps is not given")
    batch_size: int = _option(1, "rows per device and forward pass")
    accumulation: int = _option(1, "forward passes per step")
    learning_rate: float = _option(1e-3, "peak learning rate of AdamW")
    hla_learning_rate: float | None = _option(None, "that of the HLA parameters; default learning_rate")
    weight_decay: float = _option(0.0, "weight decay of AdamW")
    schedule: str = _option("cosine", "transformers' name of the learning rate schedule")
    warmup: float = _option(0.1, "share of the steps in which the learning rate rises")
    max_grad_norm: float = _option(1.0, "gradients are clipped to this norm")
    gradient_checkpointing: bool = _option(False, "recompute activations in the backward pass")
    context_parallel: int = _option(1, "processes that share each row, a slice of it each")
    seed: int = _option(0, "of the order of rows and of what is initialised at random")

    checkpoint_steps: int = _option(100, "steps between evaluations, each with a checkpoint")
    load_best: bool = _option(True, "export the checkpoint with the lowest evaluation loss instead of the last")
    trackers: list[str] = _option(["tensorboard"], "Accelerate trackers by name, or none")
    quiet: bool = _option(False, "print nothing but errors and warnings")
    push_to_hub: str | None = _option(None, "USER/NAME of a repository of the Hub to upload output/model to")
    private: bool = _option(False, "make the repository a private one, if it is new")
    revision: str | None = _option(None, "branch of it to upload to; default main")

    def __post_init__(self):
        check_upload_options(self)
        for name in ("model", "output", "data"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is required")
        if self.train not in ("lora", "hla", "full"):
            raise ValueError(f"train must be lora, hla or full, got {self.train!r}")
        allowed = [x.value for x in SchedulerType]
        if self.schedule not in allowed:
            raise ValueError(f"schedule must be one of {', '.join(allowed)}, got {self.schedule!r}")
        for name, least in (
            ("kl_weight", 0), ("ce_weight", 0), ("lora_rank", 1), ("eval_rows", 1), ("seq_len", 2), ("batch_size", 1),
            ("eval_seq_len", 2), ("accumulation", 1), ("steps", 1), ("checkpoint_steps", 1), ("num_proc", 1),
            ("context_parallel", 1), ("warmup", 0), ("learning_rate", 0), ("hla_learning_rate", 0), ("weight_decay", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("temperature", "max_grad_norm", "epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.warmup > 1:
            raise ValueError(f"warmup is a share of the steps and must be at most 1, got {self.warmup}")
        if self.kl_weight == self.ce_weight == 0:
            raise ValueError("kl_weight and ce_weight are both 0: there is nothing to train on")
        if self.teacher and not self.kl_weight:
            raise ValueError(f"teacher={self.teacher!r} is not used, since kl_weight is 0")
        if self.context_parallel > 1 and self.kl_weight:
            raise ValueError(
                "context_parallel slices HLA states, not the teacher's softmax attention: set kl_weight to 0"
            )
        for name in ("seq_len", "eval_seq_len"):
            if (getattr(self, name) or 0) % self.context_parallel:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of context_parallel={self.context_parallel}"
                )
        if self.streaming and self.steps is None:
            raise ValueError("streaming data has no known length: give steps")

    @property
    def tracker_names(self) -> list[str]:
        """`trackers`, of which `none` means there are none."""
        return [] if self.trackers == ["none"] else self.trackers

    @property
    def command(self) -> str:
        """The command of this recipe: what is not default."""
        return command_line("python -m training.finetune", self)


def parse_recipe(arguments: list[str] | None = None) -> Recipe:
    """The recipe of a command line `[--config FILE] [--FIELD VALUE ...]`; the command line wins over the file.

    Raises: ValueError if the file cannot be read, has an unknown field, or a value is not allowed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = HfArgumentParser(Recipe, prog=program_name("hla-finetune", "training.finetune"))
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these fields")
    known = parser.parse_known_args(arguments)[0]
    settings = []
    if known.config:
        try:
            recipe = yaml.safe_load(Path(known.config).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config {known.config!r} cannot be read: {error}") from error
        names = [f.name for f in dataclasses.fields(Recipe)]
        for name, value in recipe.items():
            if name not in names:
                raise ValueError(
                    f"--config {known.config!r} has an unknown field {name!r}; fields are {', '.join(names)}"
                )
            if value is not None:
                settings += [f"--{name}", *(str(x) for x in (value if isinstance(value, list) else [value]))]
    namespace = vars(parser.parse_args(settings + arguments))
    namespace.pop("config")
    return Recipe(**namespace)
