# Written by `HLA_WRITE_STUB=1 python -m pytest tests/test_loading.py -k stub`.
from transformers.models.arcee.configuration_arcee import ArceeConfig
from transformers.models.arcee.modeling_arcee import (
    ArceeForCausalLM,
    ArceeForQuestionAnswering,
    ArceeForSequenceClassification,
    ArceeForTokenClassification,
    ArceeModel,
)
from transformers.models.cohere.configuration_cohere import CohereConfig
from transformers.models.cohere.modeling_cohere import CohereForCausalLM, CohereModel
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2ForTokenClassification,
    Gemma2Model,
)
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3ForCausalLM,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
)
from transformers.models.glm4.configuration_glm4 import Glm4Config
from transformers.models.glm4.modeling_glm4 import (
    Glm4ForCausalLM,
    Glm4ForSequenceClassification,
    Glm4ForTokenClassification,
    Glm4Model,
)
from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM, GraniteModel
from transformers.models.helium.configuration_helium import HeliumConfig
from transformers.models.helium.modeling_helium import (
    HeliumForCausalLM,
    HeliumForSequenceClassification,
    HeliumForTokenClassification,
    HeliumModel,
)
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from transformers.models.ministral.configuration_ministral import MinistralConfig
from transformers.models.ministral.modeling_ministral import (
    MinistralForCausalLM,
    MinistralForQuestionAnswering,
    MinistralForSequenceClassification,
    MinistralForTokenClassification,
    MinistralModel,
)
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralForCausalLM,
    MistralForQuestionAnswering,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralModel,
)
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import (
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    MixtralModel,
)
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM, Olmo2ForSequenceClassification, Olmo2Model
from transformers.models.olmo3.configuration_olmo3 import Olmo3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3ForCausalLM, Olmo3ForSequenceClassification, Olmo3Model
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import (
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3ForTokenClassification,
    Phi3Model,
)
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2ForCausalLM,
    Qwen2ForQuestionAnswering,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
)
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeForQuestionAnswering,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeForTokenClassification,
    Qwen3MoeModel,
)
from transformers.models.seed_oss.configuration_seed_oss import SeedOssConfig
from transformers.models.seed_oss.modeling_seed_oss import (
    SeedOssForCausalLM,
    SeedOssForQuestionAnswering,
    SeedOssForSequenceClassification,
    SeedOssForTokenClassification,
    SeedOssModel,
)
from transformers.models.smollm3.configuration_smollm3 import SmolLM3Config
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3ForCausalLM,
    SmolLM3ForQuestionAnswering,
    SmolLM3ForSequenceClassification,
    SmolLM3ForTokenClassification,
    SmolLM3Model,
)
from transformers.models.starcoder2.configuration_starcoder2 import Starcoder2Config
from transformers.models.starcoder2.modeling_starcoder2 import (
    Starcoder2ForCausalLM,
    Starcoder2ForSequenceClassification,
    Starcoder2ForTokenClassification,
    Starcoder2Model,
)

from .cache_hla import HLACacheLayer as HLACacheLayer
from .cache_hla import cache_nbytes as cache_nbytes
from .cache_hla import new_cache as new_cache
from .cache_hla import use_hla_layers as use_hla_layers
from .configuration_hla import ARCHITECTURES as ARCHITECTURES
from .configuration_hla import HLAConfigMixin
from .definitions import hla3_published as hla3_published
from .modeling_hla import HLADecoderMixin, HLAHeadMixin, HLAModelMixin
from .modeling_hla import softmax_attention as softmax_attention
from .modeling_hla import to_hla as to_hla
from .modeling_hla import to_softmax as to_softmax
from .ops_hla import ahla as ahla
from .ops_hla import causal_linear_attention as causal_linear_attention
from .ops_hla import feature_map as feature_map
from .ops_hla import hla2 as hla2
from .ops_hla import hla3 as hla3
from .window_hla import FarParameters as FarParameters
from .window_hla import LayerState as LayerState
from .window_hla import WindowSettings as WindowSettings
from .window_hla import windowed_attention as windowed_attention

__version__: str

class HLALlamaConfig(HLAConfigMixin, LlamaConfig): ...

class HLALlamaModel(HLADecoderMixin, LlamaModel):
    config: HLALlamaConfig

class HLALlamaForCausalLM(HLAModelMixin, LlamaForCausalLM):
    config: HLALlamaConfig

class HLALlamaForSequenceClassification(HLAHeadMixin, LlamaForSequenceClassification):
    config: HLALlamaConfig

class HLALlamaForTokenClassification(HLAHeadMixin, LlamaForTokenClassification):
    config: HLALlamaConfig

class HLALlamaForQuestionAnswering(HLAHeadMixin, LlamaForQuestionAnswering):
    config: HLALlamaConfig

class HLAMistralConfig(HLAConfigMixin, MistralConfig): ...

class HLAMistralModel(HLADecoderMixin, MistralModel):
    config: HLAMistralConfig

class HLAMistralForCausalLM(HLAModelMixin, MistralForCausalLM):
    config: HLAMistralConfig

class HLAMistralForSequenceClassification(HLAHeadMixin, MistralForSequenceClassification):
    config: HLAMistralConfig

class HLAMistralForTokenClassification(HLAHeadMixin, MistralForTokenClassification):
    config: HLAMistralConfig

class HLAMistralForQuestionAnswering(HLAHeadMixin, MistralForQuestionAnswering):
    config: HLAMistralConfig

class HLAMinistralConfig(HLAConfigMixin, MinistralConfig): ...

class HLAMinistralModel(HLADecoderMixin, MinistralModel):
    config: HLAMinistralConfig

class HLAMinistralForCausalLM(HLAModelMixin, MinistralForCausalLM):
    config: HLAMinistralConfig

class HLAMinistralForSequenceClassification(HLAHeadMixin, MinistralForSequenceClassification):
    config: HLAMinistralConfig

class HLAMinistralForTokenClassification(HLAHeadMixin, MinistralForTokenClassification):
    config: HLAMinistralConfig

class HLAMinistralForQuestionAnswering(HLAHeadMixin, MinistralForQuestionAnswering):
    config: HLAMinistralConfig

class HLAQwen2Config(HLAConfigMixin, Qwen2Config): ...

class HLAQwen2Model(HLADecoderMixin, Qwen2Model):
    config: HLAQwen2Config

class HLAQwen2ForCausalLM(HLAModelMixin, Qwen2ForCausalLM):
    config: HLAQwen2Config

class HLAQwen2ForSequenceClassification(HLAHeadMixin, Qwen2ForSequenceClassification):
    config: HLAQwen2Config

class HLAQwen2ForTokenClassification(HLAHeadMixin, Qwen2ForTokenClassification):
    config: HLAQwen2Config

class HLAQwen2ForQuestionAnswering(HLAHeadMixin, Qwen2ForQuestionAnswering):
    config: HLAQwen2Config

class HLAQwen3Config(HLAConfigMixin, Qwen3Config): ...

class HLAQwen3Model(HLADecoderMixin, Qwen3Model):
    config: HLAQwen3Config

class HLAQwen3ForCausalLM(HLAModelMixin, Qwen3ForCausalLM):
    config: HLAQwen3Config

class HLAQwen3ForSequenceClassification(HLAHeadMixin, Qwen3ForSequenceClassification):
    config: HLAQwen3Config

class HLAQwen3ForTokenClassification(HLAHeadMixin, Qwen3ForTokenClassification):
    config: HLAQwen3Config

class HLAQwen3ForQuestionAnswering(HLAHeadMixin, Qwen3ForQuestionAnswering):
    config: HLAQwen3Config

class HLASmolLM3Config(HLAConfigMixin, SmolLM3Config): ...

class HLASmolLM3Model(HLADecoderMixin, SmolLM3Model):
    config: HLASmolLM3Config

class HLASmolLM3ForCausalLM(HLAModelMixin, SmolLM3ForCausalLM):
    config: HLASmolLM3Config

class HLASmolLM3ForSequenceClassification(HLAHeadMixin, SmolLM3ForSequenceClassification):
    config: HLASmolLM3Config

class HLASmolLM3ForTokenClassification(HLAHeadMixin, SmolLM3ForTokenClassification):
    config: HLASmolLM3Config

class HLASmolLM3ForQuestionAnswering(HLAHeadMixin, SmolLM3ForQuestionAnswering):
    config: HLASmolLM3Config

class HLAOlmo2Config(HLAConfigMixin, Olmo2Config): ...

class HLAOlmo2Model(HLADecoderMixin, Olmo2Model):
    config: HLAOlmo2Config

class HLAOlmo2ForCausalLM(HLAModelMixin, Olmo2ForCausalLM):
    config: HLAOlmo2Config

class HLAOlmo2ForSequenceClassification(HLAHeadMixin, Olmo2ForSequenceClassification):
    config: HLAOlmo2Config

class HLAOlmo3Config(HLAConfigMixin, Olmo3Config): ...

class HLAOlmo3Model(HLADecoderMixin, Olmo3Model):
    config: HLAOlmo3Config

class HLAOlmo3ForCausalLM(HLAModelMixin, Olmo3ForCausalLM):
    config: HLAOlmo3Config

class HLAOlmo3ForSequenceClassification(HLAHeadMixin, Olmo3ForSequenceClassification):
    config: HLAOlmo3Config

class HLAGraniteConfig(HLAConfigMixin, GraniteConfig): ...

class HLAGraniteModel(HLADecoderMixin, GraniteModel):
    config: HLAGraniteConfig

class HLAGraniteForCausalLM(HLAModelMixin, GraniteForCausalLM):
    config: HLAGraniteConfig

class HLAPhi3Config(HLAConfigMixin, Phi3Config): ...

class HLAPhi3Model(HLADecoderMixin, Phi3Model):
    config: HLAPhi3Config

class HLAPhi3ForCausalLM(HLAModelMixin, Phi3ForCausalLM):
    config: HLAPhi3Config

class HLAPhi3ForSequenceClassification(HLAHeadMixin, Phi3ForSequenceClassification):
    config: HLAPhi3Config

class HLAPhi3ForTokenClassification(HLAHeadMixin, Phi3ForTokenClassification):
    config: HLAPhi3Config

class HLAHeliumConfig(HLAConfigMixin, HeliumConfig): ...

class HLAHeliumModel(HLADecoderMixin, HeliumModel):
    config: HLAHeliumConfig

class HLAHeliumForCausalLM(HLAModelMixin, HeliumForCausalLM):
    config: HLAHeliumConfig

class HLAHeliumForSequenceClassification(HLAHeadMixin, HeliumForSequenceClassification):
    config: HLAHeliumConfig

class HLAHeliumForTokenClassification(HLAHeadMixin, HeliumForTokenClassification):
    config: HLAHeliumConfig

class HLAStarcoder2Config(HLAConfigMixin, Starcoder2Config): ...

class HLAStarcoder2Model(HLADecoderMixin, Starcoder2Model):
    config: HLAStarcoder2Config

class HLAStarcoder2ForCausalLM(HLAModelMixin, Starcoder2ForCausalLM):
    config: HLAStarcoder2Config

class HLAStarcoder2ForSequenceClassification(HLAHeadMixin, Starcoder2ForSequenceClassification):
    config: HLAStarcoder2Config

class HLAStarcoder2ForTokenClassification(HLAHeadMixin, Starcoder2ForTokenClassification):
    config: HLAStarcoder2Config

class HLAArceeConfig(HLAConfigMixin, ArceeConfig): ...

class HLAArceeModel(HLADecoderMixin, ArceeModel):
    config: HLAArceeConfig

class HLAArceeForCausalLM(HLAModelMixin, ArceeForCausalLM):
    config: HLAArceeConfig

class HLAArceeForSequenceClassification(HLAHeadMixin, ArceeForSequenceClassification):
    config: HLAArceeConfig

class HLAArceeForTokenClassification(HLAHeadMixin, ArceeForTokenClassification):
    config: HLAArceeConfig

class HLAArceeForQuestionAnswering(HLAHeadMixin, ArceeForQuestionAnswering):
    config: HLAArceeConfig

class HLASeedOssConfig(HLAConfigMixin, SeedOssConfig): ...

class HLASeedOssModel(HLADecoderMixin, SeedOssModel):
    config: HLASeedOssConfig

class HLASeedOssForCausalLM(HLAModelMixin, SeedOssForCausalLM):
    config: HLASeedOssConfig

class HLASeedOssForSequenceClassification(HLAHeadMixin, SeedOssForSequenceClassification):
    config: HLASeedOssConfig

class HLASeedOssForTokenClassification(HLAHeadMixin, SeedOssForTokenClassification):
    config: HLASeedOssConfig

class HLASeedOssForQuestionAnswering(HLAHeadMixin, SeedOssForQuestionAnswering):
    config: HLASeedOssConfig

class HLACohereConfig(HLAConfigMixin, CohereConfig): ...

class HLACohereModel(HLADecoderMixin, CohereModel):
    config: HLACohereConfig

class HLACohereForCausalLM(HLAModelMixin, CohereForCausalLM):
    config: HLACohereConfig

class HLAGlm4Config(HLAConfigMixin, Glm4Config): ...

class HLAGlm4Model(HLADecoderMixin, Glm4Model):
    config: HLAGlm4Config

class HLAGlm4ForCausalLM(HLAModelMixin, Glm4ForCausalLM):
    config: HLAGlm4Config

class HLAGlm4ForSequenceClassification(HLAHeadMixin, Glm4ForSequenceClassification):
    config: HLAGlm4Config

class HLAGlm4ForTokenClassification(HLAHeadMixin, Glm4ForTokenClassification):
    config: HLAGlm4Config

class HLAGemma2Config(HLAConfigMixin, Gemma2Config): ...

class HLAGemma2Model(HLADecoderMixin, Gemma2Model):
    config: HLAGemma2Config

class HLAGemma2ForCausalLM(HLAModelMixin, Gemma2ForCausalLM):
    config: HLAGemma2Config

class HLAGemma2ForSequenceClassification(HLAHeadMixin, Gemma2ForSequenceClassification):
    config: HLAGemma2Config

class HLAGemma2ForTokenClassification(HLAHeadMixin, Gemma2ForTokenClassification):
    config: HLAGemma2Config

class HLAGemma3TextConfig(HLAConfigMixin, Gemma3TextConfig): ...

class HLAGemma3TextModel(HLADecoderMixin, Gemma3TextModel):
    config: HLAGemma3TextConfig

class HLAGemma3ForCausalLM(HLAModelMixin, Gemma3ForCausalLM):
    config: HLAGemma3TextConfig

class HLAGemma3TextForSequenceClassification(HLAHeadMixin, Gemma3TextForSequenceClassification):
    config: HLAGemma3TextConfig

class HLAMixtralConfig(HLAConfigMixin, MixtralConfig): ...

class HLAMixtralModel(HLADecoderMixin, MixtralModel):
    config: HLAMixtralConfig

class HLAMixtralForCausalLM(HLAModelMixin, MixtralForCausalLM):
    config: HLAMixtralConfig

class HLAMixtralForSequenceClassification(HLAHeadMixin, MixtralForSequenceClassification):
    config: HLAMixtralConfig

class HLAMixtralForTokenClassification(HLAHeadMixin, MixtralForTokenClassification):
    config: HLAMixtralConfig

class HLAMixtralForQuestionAnswering(HLAHeadMixin, MixtralForQuestionAnswering):
    config: HLAMixtralConfig

class HLAQwen3MoeConfig(HLAConfigMixin, Qwen3MoeConfig): ...

class HLAQwen3MoeModel(HLADecoderMixin, Qwen3MoeModel):
    config: HLAQwen3MoeConfig

class HLAQwen3MoeForCausalLM(HLAModelMixin, Qwen3MoeForCausalLM):
    config: HLAQwen3MoeConfig

class HLAQwen3MoeForSequenceClassification(HLAHeadMixin, Qwen3MoeForSequenceClassification):
    config: HLAQwen3MoeConfig

class HLAQwen3MoeForTokenClassification(HLAHeadMixin, Qwen3MoeForTokenClassification):
    config: HLAQwen3MoeConfig

class HLAQwen3MoeForQuestionAnswering(HLAHeadMixin, Qwen3MoeForQuestionAnswering):
    config: HLAQwen3MoeConfig
