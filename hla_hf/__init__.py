"""Higher-order Linear Attention (arXiv 2510.27258) for Hugging Face Transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

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
    *(f"HLA{name}" for x in available_architectures() for name in base_class_names(x)),
]


def __getattr__(name: str) -> type:
    """`HLALlamaConfig`, `HLALlamaModel`, `HLALlamaForCausalLM` and so on: classes are made when asked for."""
    if name.startswith("HLA") and name in __all__:
        return getattr(configuration_hla if name.endswith("Config") else modeling_hla, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_models(config: type) -> None:
    model_type = config.model_type.removeprefix("hla_")
    if model_type in available_architectures() and config is config_class(model_type):
        AutoModel.register(config, model_class(model_type, "AutoModel"), exist_ok=True)
        AutoModelForCausalLM.register(config, model_class(model_type), exist_ok=True)


for _model_type in available_architectures():
    AutoConfig.register(f"hla_{_model_type}", config_class(_model_type), exist_ok=True)
configuration_hla.WHEN_MADE.append(_register_models)
