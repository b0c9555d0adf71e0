"""Configurations: each architecture's own, with the fields of its HLA layers.

`ARCHITECTURES` is the one table of what is supported. A new architecture is a new line, as long as its attention
projects, rotates, updates the cache and calls the attention function that its config names, as decoders in
Transformers 5 do.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Self

import transformers
from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from .ops_hla import FEATURE_MAPS, OPERATORS
from .slots_hla import SLOT_SCORES


if TYPE_CHECKING:
    # Transformers reads this line too. It names a saved directory's copy of this file by what the files that this one
    # names hold, and runs the model class that was first registered for a config: two directories that differ in any
    # file must not share it.
    from .modeling_hla import HLAModelMixin  # noqa: F401


# The `model_type` of each supported architecture, with what is special about its attention. Layers with a local
# ("sliding") attention of their own keep it by default, since their cache is bounded already.
ARCHITECTURES = (
    "llama",
    "mistral",
    "ministral",  # local layers between global ones
    "qwen2",
    "qwen3",  # normed q and k
    "smollm3",  # every fourth layer without rotation
    "olmo2",  # normed q and k, norms after the blocks
    "olmo3",  # as olmo2, with local layers
    "granite",  # a scale of its own, multipliers on embeddings, residuals and logits
    "phi3",  # one fused projection, partial rotation
    "helium",
    "starcoder2",  # biases, LayerNorm
    "arcee",
    "seed_oss",
    "cohere",  # attention and MLP side by side
    "glm4",  # partial rotation, norms after the blocks
    "gemma2",  # soft-capped scores, local layers, a scale of its own
    "gemma3_text",  # local layers with a rotation of their own
    "mixtral",  # mixture of experts: only its attention changes
    "qwen3_moe",  # mixture of experts
)
# Raised whenever a config may mean what older code would not compute: 2 has slots. 1 is also that of configs from
# before there was the field.
CODE_VERSION = 2
# The classes that each architecture has in Transformers, as far as it has them, become HLA classes.
_CLASS_NAMES = {
    "AutoConfig": CONFIG_MAPPING_NAMES,
    "AutoModel": MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
NORMALIZERS = ("none", "mass", "count", "rms")
ACCUMULATORS = ("query", "key", "softmax_query")


@dataclasses.dataclass(kw_only=True)
class HLAConfigMixin:
    """
    Fields of an HLA model beside those of its base architecture.

    Args:
        hla_operator (`str`, defaults to `"linear"`):
            `linear` (first order), `ahla`, `hla2` (second order) or `hla3` (third order).
        hla_feature_map (`str`, defaults to `"hedgehog"`):
            The features of queries and keys: `identity`, `softmax`, `elu`, `relu`, or `hedgehog`, a learned map per
            head followed by the softmax of +x and of -x, times a learned size exp(m . x). Queries of `identity`,
            `elu` and `relu` are also multiplied by the attention scale.
        hla_normalizer (`str`, defaults to `"mass"`):
            What the output is divided by: `mass` (the operator's row mass), `count` (the number of tokens so far),
            `rms` (its root mean square per head), or `none`. With a window it is `mass`.
        hla_decay (`float` or `str`, *optional*):
            None, the decay per token as a number in (0, 1], or `learned`, one per key-value head.
        hla_accumulator (`str`, defaults to `"query"`):
            For `hla2` and `hla3`, the features under which values are stored: `query` is the paper's e = phi(q);
            `key` takes u = phi(k) + b LA(phi(k), phi(k), phi(k)) with a learned b per key-value head that starts at
            0: first order with a second-order correction of its keys; `softmax_query` is e = softmax(scale q). With
            a window the LA in u is divided by its own mass.
        hla_ridge (`float`, defaults to 0.0):
            lambda in u = LA(e, k, k) + lambda e, for `hla2` and `hla3`.
        hla_chunk_size (`int`, defaults to 64):
            Tokens per block in training and prefill.
        hla_layers (`list[int]`, *optional*):
            The layers that are HLA; by default all, or those of full attention where the architecture has local ones
            too. The others keep softmax attention and its cache.
        hla_window (`int`, defaults to 64):
            The last tokens, itself included, that a token attends to by softmax under the normaliser that it shares
            with HLA. 0 is HLA alone. With a window, `ahla` and `hla3` mix values, (1 - b) v + b r, r the first-order
            output and b learned per head from 0.
        hla_num_sinks (`int`, defaults to 4):
            The first tokens that a token attends to by softmax, if there is a window.
        hla_slots (`int` or `list[int]`, defaults to 0):
            How many of the tokens that have left the window each key-value head still attends to by softmax, those
            with the highest scores: one number, or one per HLA layer.
        hla_slot_score (`str`, defaults to `"attention"`):
            `attention`, what a token received from the queries that had it in their window; `recall`, how badly a
            first-order state of all tokens so far gives its value back; or `learned`, a small network per key-value
            head of k before its rotation and v, into which the loss of a language model sends no gradient.
        hla_code_version (`int`):
            What the other fields mean; code refuses a newer one than its own.
    """

    hla_operator: str = "linear"
    hla_feature_map: str = "hedgehog"
    hla_normalizer: str = "mass"
    hla_decay: int | float | str | None = None
    hla_accumulator: str = "query"
    hla_ridge: int | float = 0.0
    hla_chunk_size: int = 64
    hla_layers: list[int] | None = None
    hla_window: int = 64
    hla_num_sinks: int = 4
    hla_slots: int | list[int] = 0
    hla_slot_score: str = "attention"
    hla_code_version: int = CODE_VERSION

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.validate_hla()  # before `strict` calls it: that would wrap the ValueError in an error of its own
        for function in WHEN_MADE:
            function(type(self))
        if not hasattr(self, "auto_map"):
            self.auto_map = self._own_auto_map()

    def _own_auto_map(self) -> dict[str, str]:
        names = base_class_names(self.model_type.removeprefix("hla_"))
        modules = {"AutoConfig": "configuration_hla"}
        return {auto: f"{modules.get(auto, 'modeling_hla')}.HLA{name}" for auto, name in names.items()}

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> Self:
        own = {"model_type": cls.model_type}  # of a base model's config too: weights are converted by it
        return super().from_dict({"hla_code_version": 1} | config_dict | own, **kwargs)

    def validate_hla(self) -> None:
        """Raises ValueError naming the field, its value and what is allowed."""
        if not 1 <= self.hla_code_version <= CODE_VERSION:
            raise ValueError(
                f"hla_code_version must be 1 to {CODE_VERSION} for this code, got {self.hla_code_version}: for a newer "
                "model upgrade hla_hf, or load it with its own code (trust_remote_code=True in a process that has not "
                "imported hla_hf)"
            )
        for name, allowed in (
            ("hla_operator", OPERATORS),
            ("hla_feature_map", FEATURE_MAPS),
            ("hla_normalizer", NORMALIZERS),
            ("hla_accumulator", ACCUMULATORS),
            ("hla_slot_score", (*SLOT_SCORES, "learned")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; it must be one of {allowed}")
        for name, least in (("hla_ridge", 0), ("hla_chunk_size", 1), ("hla_window", 0), ("hla_num_sinks", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.hla_window > 0 and self.hla_normalizer != "mass":
            raise ValueError(
                f"hla_window={self.hla_window} shares its normaliser with HLA, so hla_normalizer must be 'mass', "
                f"got {self.hla_normalizer!r}; set hla_window=0 for another one"
            )
        if self.hla_accumulator == "softmax_query" and self.hla_feature_map == "hedgehog":
            raise ValueError(
                "hla_accumulator='softmax_query' has head_dim features, so hla_feature_map must be 'identity', "
                "'softmax', 'elu' or 'relu', got 'hedgehog', which has twice as many"
            )
        decay = self.hla_decay
        if not (decay is None or decay == "learned" or (not isinstance(decay, str) and 0 < decay <= 1)):
            raise ValueError(f"hla_decay must be None, a number in (0, 1] or 'learned', got {decay!r}")
        layers, count = self.hla_layer_ids, self.num_hidden_layers
        if len(set(layers)) < len(layers) or any(not 0 <= i < count for i in layers):
            raise ValueError(f"hla_layers must be distinct and in 0..{count - 1}, got {layers}")
        slots = self.hla_slots
        if (isinstance(slots, list) and len(slots) != len(layers)) or any(x < 0 for x in self.hla_slots_of_layers):
            raise ValueError(
                f"hla_slots must be a number of at least 0, or one for each of the {len(layers)} HLA layers, "
                f"got {slots}"
            )
        if self.hla_window == 0 and any(self.hla_slots_of_layers):
            raise ValueError(f"hla_slots={slots} needs a window that tokens leave, got hla_window=0")

    @property
    def hla_layer_ids(self) -> list[int]:
        """`hla_layers` with its default filled in: all layers of full attention."""
        if self.hla_layers is not None:
            return self.hla_layers
        types = getattr(self, "layer_types", None) or ["full_attention"] * self.num_hidden_layers
        return [i for i, kind in enumerate(types) if kind == "full_attention"]

    @property
    def hla_slots_of_layers(self) -> list[int]:
        """One for each of `hla_layer_ids`."""
        return self.hla_slots if isinstance(self.hla_slots, list) else [self.hla_slots] * len(self.hla_layer_ids)

    def to_diff_dict(self) -> dict:
        # A later version's defaults must not change what a saved model computes, so every field is written.
        return super().to_diff_dict() | {f.name: getattr(self, f.name) for f in dataclasses.fields(HLAConfigMixin)}

    def save_pretrained(self, *args, **kwargs) -> None:
        self.auto_map = self._own_auto_map()  # one that names the repository it came from would not hold in a new one
        super().save_pretrained(*args, **kwargs)


def base_class_names(model_type: str) -> dict[str, str]:
    """The names in Transformers of an architecture's config, decoder, causal language model and those of the sequence,
    token and question-answering heads that it has, by their Auto class, in this order.

    Raises: ValueError if it is not supported, here or by this Transformers.
    """
    available = available_architectures()
    if model_type not in available:
        where = f"Transformers {transformers.__version__}" if model_type in ARCHITECTURES else "hla_hf"
        raise ValueError(f"model_type {model_type!r} is not supported by {where}; supported are {', '.join(available)}")
    return {auto_class: names[model_type] for auto_class, names in _CLASS_NAMES.items() if model_type in names}


@cache
def available_architectures() -> tuple[str, ...]:
    """Those of `ARCHITECTURES` that this Transformers has."""
    return tuple(x for x in ARCHITECTURES if x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and x in CONFIG_MAPPING_NAMES)


WHEN_MADE: list[Callable[[type], None]] = []  # called with the class of each config that is made


@cache
def config_class(model_type: str, /) -> type:
    """`HLALlamaConfig` and so on, made when it is first asked for."""
    base = getattr(transformers, base_class_names(model_type)["AutoConfig"])
    attributes = {
        "model_type": f"hla_{model_type}",
        "_auto_class": "AutoConfig",  # saving copies this file, so that the directory loads without the package
        "base_class": base,
        "__module__": __name__,
        "__doc__": f"[`{base.__name__}`] with HLA layers.\n{HLAConfigMixin.__doc__}",
    }
    return strict(type(f"HLA{base.__name__}", (HLAConfigMixin, base), attributes))


def no_such_name(module: str, name: str) -> Exception:
    """What to raise for a name that a module lacks. `from ... import` replaces the words of an AttributeError."""
    lacking = [x for x in ARCHITECTURES if x not in available_architectures()]
    if lacking and name.startswith("HLA"):
        return ImportError(
            f"cannot import name {name!r} from {module!r}: Transformers {transformers.__version__} has no "
            f"{', '.join(lacking)}"
        )
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> type:
    for model_type in available_architectures():
        if name == f"HLA{CONFIG_MAPPING_NAMES[model_type]}":
            return config_class(model_type)
    raise no_such_name(__name__, name)
