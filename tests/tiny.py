"""Tiny random models whose HLA parameters are away from their neutral start, so that a test of them can fail."""

import torch
import transformers

import hla_hf
from hla_hf.configuration_hla import CONFIG_CLASSES
from hla_hf.modeling_hla import _CACHE_ARGUMENT as CACHE
from hla_hf.modeling_hla import CAUSAL_LM_CLASSES


torch.set_num_threads(1)  # a tiny model has nothing to share out, and busy cores make sharing very slow
ARCHITECTURES = list(hla_hf.ARCHITECTURES)
OPERATORS = ("linear", "ahla", "hla2", "hla3")
MODES = {
    "pure": {"hla_window": 0},
    "windowed": {"hla_window": 8, "hla_num_sinks": 2},
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


def tiny_config(architecture="llama", **settings):
    return CONFIG_CLASSES[architecture](**SIZES | {"hla_chunk_size": 16} | settings)


def tiny_base(architecture="llama", **settings):
    prefix = hla_hf.ARCHITECTURES[architecture]
    config = getattr(transformers, f"{prefix}Config")(**SIZES | settings)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def randomize(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("hla_gate"):
                parameter.normal_()
            elif ".hla_" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def tiny_model(architecture="llama", seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    return randomize(CAUSAL_LM_CLASSES[architecture](tiny_config(architecture, **settings))).eval().to(dtype)


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
