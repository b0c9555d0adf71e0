"""Higher-order Linear Attention (arXiv 2510.27258) for Hugging Face Transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache_hla import HLACacheLayer, cache_nbytes, new_cache, use_hla_layers
from .configuration_hla import ARCHITECTURES, CONFIG_CLASSES
from .modeling_hla import CAUSAL_LM_CLASSES, MODEL_CLASSES, softmax_attention, to_hla, to_softmax
from .ops_hla import ahla, causal_linear_attention, feature_map, hla2, hla3, hla3_published, windowed_attention


__version__ = "0.1.0"
__all__ = [
    "ARCHITECTURES",
    "HLACacheLayer",
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
]

for _model_type, _config_class in CONFIG_CLASSES.items():
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, MODEL_CLASSES[_model_type], exist_ok=True)
    AutoModelForCausalLM.register(_config_class, CAUSAL_LM_CLASSES[_model_type], exist_ok=True)
    for _class in (_config_class, MODEL_CLASSES[_model_type], CAUSAL_LM_CLASSES[_model_type]):
        globals()[_class.__name__] = _class
        __all__.append(_class.__name__)
