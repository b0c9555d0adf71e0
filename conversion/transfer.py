"""Attention transfer: train the new parameters of every HLA layer to give that layer's softmax attention output, as it
arrives in the residual stream: after the output projection.

The model runs once per batch as its base model (softmax attention, teacher-forced, no gradient). Inside each layer's
attention function the HLA output is computed from the same q, k and v, and its error is differentiated there and then,
so all layers train from one pass and only one layer's activations are ever held.
"""

import signal
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hla_hf import softmax_attention
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import base_functions, hla_attentions, unrotated
from hla_hf.ops_hla import repeat_heads

from .progress import ProgressBar


def hla_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the base model does not have, by name."""
    return {name: p for name, p in module.named_parameters() if "hla" in name.split(".")}


def normalized_error(out: Tensor, target: Tensor) -> Tensor:
    """Squared error over the target's own energy, in fp32: 1 for an output of 0, so that no layer dominates."""
    out, target = out.float(), target.float()
    return (out - target).square().mean() / target.square().mean().clamp(min=1e-12)


def softmax_function(attention: nn.Module, implementation: str) -> Callable:
    """The attention function of an attention module: a registered one, or `eager`, which is in the model's own file."""
    return AttentionInterface().get_interface(implementation, base_functions(attention)["eager_attention_forward"])


def visit_attention(
    model: PreTrainedModel, input_ids: Tensor, visit: Callable[[nn.Module, LayerTokens, Tensor], None]
) -> None:
    """Runs `model` as its base model on `input_ids [B, T]` without padding and calls `visit(attention, tokens, out)`
    in every HLA layer: the tokens as `attention.hla` takes them, out `[B, H, T, d]` of softmax attention."""

    def attention(module, query, key, value, attention_mask, hla_rotation=None, **kwargs):
        softmax = softmax_function(module, model.base_model.softmax_implementation)
        out, weights = softmax(module, query, key, value, attention_mask, **kwargs)
        far = unrotated(module, query, key, hla_rotation) if module.hla.settings.window else (None, None)
        visit(module, LayerTokens(query, key, value, *far), out.transpose(1, 2))
        return out, weights

    AttentionInterface.register("hla_transfer", attention)
    with torch.no_grad(), softmax_attention(model):
        model.base_model.hla_config._attn_implementation = "hla_transfer"
        model.base_model(input_ids, use_cache=False)


def score_error(attention: nn.Module, tokens: LayerTokens) -> Tensor:
    """How far the learned scores of slots are from the log of the largest weight that softmax attention gives a token
    from beyond the window, within its group of heads: squared, weighted by that weight, as few tokens matter.

    0 if none of the tokens leaves the window.
    """
    window = attention.hla.settings.window
    index = torch.arange(tokens.length, device=tokens.q.device)
    with torch.no_grad():
        scores = window.scale * tokens.q.float() @ repeat_heads(tokens.k, tokens.q.shape[1]).float().mT
        if window.softcap is not None:
            scores = window.softcap * (scores / window.softcap).tanh()
        weights = scores.masked_fill(index > index[:, None], -torch.inf).softmax(-1)
        beyond = (index[:, None] - index >= window.window) & (index >= window.num_sinks)
        largest = weights.masked_fill(~beyond, 0).amax(2).unflatten(1, (tokens.k.shape[1], -1)).amax(2) + 1e-4
        weight = largest * beyond.any(0)
    error = attention.hla.slot_scores(tokens.far_k, tokens.v).float() - largest.log()
    return (weight * error.square()).sum() / weight.sum().clamp(min=1e-4)


def layer_losses(model: PreTrainedModel, input_ids: Tensor, backward: bool = False) -> Tensor:
    """The normalised error of every HLA layer on one batch `[B, T]` without padding, from one pass of the base model.

    With `backward`, its gradient is added to the HLA parameters that require one, and that of `score_error` to those of
    learned scores.
    """
    losses = {}

    def visit(module, tokens, target):
        with torch.set_grad_enabled(backward):
            out, _ = module.hla(tokens)
            loss = normalized_error(*(module.o_proj(x.transpose(1, 2).flatten(2)) for x in (out, target)))
            total = loss + score_error(module, tokens) if module.hla.settings.learns_scores else loss
        if backward:
            total.backward(inputs=[p for p in module.hla.parameters() if p.requires_grad])
        losses[module.layer_idx] = loss.detach()

    visit_attention(model, input_ids, visit)
    return torch.stack([losses[module.layer_idx] for module in hla_attentions(model)])


class Interrupted(Exception):
    """Training was stopped by Ctrl-C; `state` is what `transfer_attention(interrupted=state)` goes on from."""

    def __init__(self, state: dict):
        super().__init__(f"stopped after {len(state['history'])} steps")
        self.state = state


class InterruptFlag:
    """Within this context the first Ctrl-C only sets `requested`, so that a step is never left half done."""

    def __enter__(self) -> "InterruptFlag":
        self.requested = False
        self.previous = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, *_) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self.previous)

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self.previous)


def transfer_attention(
    model: PreTrainedModel, tokens: Tensor, *, steps: int, batch_size: int, learning_rate: float, seed: int = 0,
    interrupted: dict | None = None,
) -> list[float]:  # fmt: skip
    """Trains the HLA parameters of `model` on `tokens [N, T]`, whatever else it has frozen; the rest is left unchanged.

    One cycle of AdamW over `steps` batches. Returns the mean loss of each HLA layer over the last tenth of the steps.
    Raises: Interrupted on Ctrl-C, with a `state` from which a later call goes on as if nothing had happened when it is
    given as `interrupted`.
    """
    parameters = hla_parameters(model)
    trainable = {p: p.requires_grad for p in model.parameters()}
    for p in trainable:
        p.requires_grad_(False)
    for p in parameters.values():
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    order = torch.Generator().manual_seed(seed)
    history: list[Tensor] = []
    if interrupted is not None:
        for name, p in parameters.items():
            p.data.copy_(interrupted["parameters"][name])
        optimizer.load_state_dict(interrupted["optimizer"])
        schedule.load_state_dict(interrupted["schedule"])
        order.set_state(interrupted["order"])
        history = list(interrupted["history"])
    bar = ProgressBar(total=steps, initial=len(history), desc="attention transfer", unit="steps")
    with InterruptFlag() as interrupt, bar as progress:
        while len(history) < steps and not interrupt.requested:
            batch = tokens[torch.randperm(len(tokens), generator=order)[:batch_size]]
            losses = layer_losses(model, batch.to(model.device), backward=True)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(losses)
            progress.set_postfix(loss=f"{losses.mean().item():.4f}", refresh=False)
            progress.update()
    for p, requires_grad in trainable.items():
        p.requires_grad_(requires_grad)
    if interrupt.requested:
        raise Interrupted(
            {
                "parameters": {name: p.detach() for name, p in parameters.items()},
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "order": order.get_state(),
                "history": history,
            }
        )
    return torch.stack(history[-max(1, steps // 10) :]).mean(0).tolist()
