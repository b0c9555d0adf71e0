"""How close a converted model is to its base: KL, top-1 agreement, perplexity; and what both remember."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from hla_hf import softmax_attention
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import HLALayer, hla_attentions

from .serving import layer_bytes


def log_probs(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Log-probabilities `[T - 1, V]` of the tokens after the first of `row [T]`."""
    return model(row[None].to(model.device), use_cache=False).logits[0, :-1].float().log_softmax(-1)


def kl_divergence(base: Tensor, other: Tensor) -> float:
    """From base to other, log-probabilities `[T, V]`: nats per token."""
    return F.kl_div(other, base, reduction="batchmean", log_target=True).item()


def divergence(base: Tensor, other: Tensor) -> dict[str, float]:
    """Of log-probabilities `[T, V]`: `kl` from base to other, nats per token; `top1`, share of equal top-1 tokens."""
    return {
        "kl": kl_divergence(base, other),
        "top1": (base.argmax(-1) == other.argmax(-1)).float().mean().item(),
    }


def mean_over_rows(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure over rows of equal length."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


@torch.no_grad()
def agreement_with_base(model: PreTrainedModel, tokens: Tensor) -> dict[str, float]:
    """On rows `tokens [N, T]`: `kl` (base to HLA, nats per token) and `top1` (share of positions where both have the
    same most likely next token). The base is the same weights with softmax attention."""
    rows = []
    for row in tokens:
        with softmax_attention(model):
            base = log_probs(model, row)
        rows.append(divergence(base, log_probs(model, row)))
    return mean_over_rows(rows)


@torch.no_grad()
def token_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The next-token losses of rows `tokens [N, T]`, each row a context of its own: `[N, T - 1]`."""
    rows = [F.nll_loss(log_probs(model, row), row[1:].to(model.device), reduction="none") for row in tokens]
    return torch.stack(rows).cpu()


def perplexity(model: PreTrainedModel, tokens: Tensor) -> float:
    """exp of the mean next-token loss over rows `tokens [N, T]`."""
    return token_losses(model, tokens).mean().exp().item()


@torch.no_grad()
def remembered_bytes(model: PreTrainedModel, context: int = 4096) -> dict[str, int]:
    """Bytes of the cache of one row of `context` tokens: of the `base` and of the `model`; and that context."""
    config, sizes, memory = model.config, [], {"device": "meta", "dtype": model.dtype}  # nothing is computed
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in DynamicCache(config=config).layers:
        layer.update(*[torch.empty(1, config.num_key_value_heads, context, head_dim, **memory)] * 2)
        sizes.append(layer_bytes(layer))
    base = sum(sizes)
    for attention in hla_attentions(model):
        settings = attention.hla.settings
        q, k = (torch.empty(1, n, 1, settings.head_dim, **memory) for n in (settings.heads, settings.key_value_heads))
        _, state = HLALayer(settings, **memory)(LayerTokens(q, k, k, q, k))  # its size from the first token on
        sizes[attention.layer_idx] = sum(x.numel() * x.element_size() for x in state if x is not None)
    return {"context": context, "base": base, "model": sum(sizes)}
