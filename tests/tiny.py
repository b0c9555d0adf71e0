"""Tiny random models whose HLA parameters are away from their neutral start, so that a test of them can fail."""

import torch
import transformers

from hla_hf.configuration_hla import base_class_names, config_class
from hla_hf.modeling_hla import _CACHE_ARGUMENT as CACHE
from hla_hf.modeling_hla import model_class


torch.set_num_threads(1)  # a tiny model has nothing to share out, and busy cores make sharing very slow
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
OPERATORS = ("linear", "ahla", "hla2", "hla3")
MODES = {
    "pure": {"hla_window": 0},
    "windowed": {"hla_window": 8, "hla_num_sinks": 2},
    "slots": {"hla_window": 8, "hla_num_sinks": 2, "hla_slots": 5},
    "mixed": {"hla_window": 8, "hla_num_sinks": 2, "hla_layers": [1]},
    "mixed, HLA first": {"hla_window": 0, "hla_layers": [0]},
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough for greedy decoding to depend on the context
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


LOCAL = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16}
# What makes each architecture differ from Llama, at a size where it shows.
ARCHITECTURE_SETTINGS = {
    "ministral": LOCAL,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo3": LOCAL,
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gemma2": LOCAL | {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 4},
    "gemma3_text": LOCAL | {"query_pre_attn_scalar": 4},
    "mixtral": MOE,
    "qwen3_moe": MOE,
}


def tiny_config(architecture="llama", **settings):
    return config_class(architecture)(**SIZES | {"hla_operator": "ahla", "hla_chunk_size": 16} | settings)


def tiny_base(architecture="llama", **settings):
    names = base_class_names(architecture)
    config_class, causal_lm_class = (getattr(transformers, names[x]) for x in ("AutoConfig", "AutoModelForCausalLM"))
    return causal_lm_class(config_class(**SIZES | settings)).eval()


def randomize(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("hla.gate"):
                parameter.normal_()
            elif ".hla." in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def tiny_model(architecture="llama", seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    model = model_class(architecture)(tiny_config(architecture, **settings))
    if architecture in ("mixtral", "qwen3_moe") and dtype == torch.float64:  # which their default kernels do not take
        model.set_experts_implementation("eager")
    return randomize(model).eval().to(dtype)


def tokens(*shape, seed=0):
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def cache_of(output):
    return getattr(output, CACHE)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def stepwise_logits(model, ids, steps, mask=None, cache=None):
    """Logits of `ids` fed through one cache in pieces of the given lengths, and that cache."""
    logits, start = [], 0
    for length in steps:
        end = start + length
        padding = (
            {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        )
        output = model(ids[:, start:end], use_cache=True, **padding, **{CACHE: cache})
        logits.append(output.logits)
        cache, start = cache_of(output), end
    return torch.cat(logits, 1), cache
