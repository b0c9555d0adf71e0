"""How close a converted model is to its base: KL, top-1 agreement, perplexity."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hla_hf import softmax_attention


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
