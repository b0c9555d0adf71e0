"""Higher-order Linear Attention (arXiv 2510.27258) for Hugging Face Transformers."""

from functools import cache

import transformers
from transformers import AutoConfig

from . import configuration_hla, definitions, modeling_hla, scan  # noqa: F401  two of them register their forms
from .cache_hla import HLACacheLayer, cache_nbytes, new_cache, use_hla_layers
from .configuration_hla import ARCHITECTURES, available_architectures, base_class_names, config_class
from .definitions import hla3_published
from .modeling_hla import model_class, softmax_attention, to_hla, to_softmax
from .ops_hla import ahla, causal_linear_attention, feature_map, hla2, hla3
from .window_hla import FarParameters, LayerState, WindowSettings, windowed_attention


__version__ = "0.1.0"
__all__ = [
    "ARCHITECTURES",
    "FarParameters",
    "HLACacheLayer",
    "LayerState",
    "WindowSettings",
    "ahla",
    "cache_nbytes",
    "causal_linear_attention",
    "feature_map",
    "hla2",
    "hla3",
    "hla3_published",
    "new_cache",
    "softmax_attention",
    "to_hla",
    "to_softmax",
    "use_hla_layers",
    "windowed_attention",
    *(f"HLA{name}" for x in available_architectures() for name in base_class_names(x).values()),
]


def __getattr__(name: str) -> type:
    """`HLALlamaConfig`, `HLALlamaModel`, `HLALlamaForCausalLM` and so on: classes are made when asked for."""
    if name.startswith("HLA") and name in __all__:
        return getattr(configuration_hla if name.endswith("Config") else modeling_hla, name)
    raise configuration_hla.no_such_name(__name__, name)


def _register_models(config: type) -> None:
    model_type = config.model_type.removeprefix("hla_")
    if model_type in available_architectures() and config is config_class(model_type):
        for auto_class in base_class_names(model_type):
            if auto_class != "AutoConfig":
                getattr(transformers, auto_class).register(config, model_class(model_type, auto_class), exist_ok=True)
        _name_targets_for_peft()


@cache
def _name_targets_for_peft() -> None:
    """Where PEFT has default target modules for `llama`, they are those of `hla_llama`."""
    try:
        from peft.utils import constants  # takes 0.2 s, so not before there is a model
    except ImportError:
        return
    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING"):
            targets |= {f"hla_{x}": targets[x] for x in available_architectures() if x in targets}


for _model_type in available_architectures():
    AutoConfig.register(f"hla_{_model_type}", config_class(_model_type), exist_ok=True)
configuration_hla.WHEN_MADE.append(_register_models)
