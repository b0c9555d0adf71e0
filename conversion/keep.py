"""Which layers lose most by becoming HLA, and giving those more: slots, or their softmax attention."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hla_hf import softmax_attention, to_hla, to_softmax
from hla_hf.configuration_hla import HLAConfigMixin
from hla_hf.layer_hla import ATTENTION, hla_attentions

from .evaluate import kl_divergence, log_probs
from .progress import ProgressBar
from .transfer import hla_parameters


@contextmanager
def only_hla_layer(model: PreTrainedModel, attention: nn.Module) -> Iterator[None]:
    """Within this context `attention` is HLA and every other layer of `model` has softmax attention."""
    with softmax_attention(model):
        before, attention.config = attention.config, copy.copy(attention.config)
        attention.config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            attention.config = before


class ReplayedLayer:
    """The forward pass of a decoder layer, or, once it is set to `replay`, what that returned last."""

    def __init__(self, layer: nn.Module):
        self.layer, self.replaced = layer, vars(layer).get("forward")
        self.forward, self.replay, self.out = layer.forward, False, None
        layer.forward = self

    def __call__(self, *args, **kwargs) -> Any:
        if not self.replay:
            self.out = self.forward(*args, **kwargs)
        return self.out

    def restore(self) -> None:
        del self.layer.forward
        if self.replaced is not None:
            self.layer.forward = self.replaced


@contextmanager
def replayed_layers(model: PreTrainedModel) -> Iterator[list[ReplayedLayer]]:
    """Within this context the decoder layers of `model` can be told to return again what they returned."""
    layers = [ReplayedLayer(layer) for layer in model.base_model.layers]
    try:
        yield layers
    finally:
        for layer in layers:
            layer.restore()


@torch.no_grad()
def layer_costs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What the model loses when one layer alone is HLA, for each HLA layer: `[L, 2]`, KL in nats per token.

    Every row of `tokens [N, T]` is read twice over: the first column is the KL over its first reading, what is lost on
    language, the second that over its second, what is lost on recall.
    """
    rows, attentions = torch.cat([tokens, tokens], 1), hla_attentions(model)
    costs = torch.zeros(len(attentions), 2)
    with ProgressBar(total=len(rows) * len(attentions), desc="ranking layers", unit="layers") as progress:
        for row in rows:
            with replayed_layers(model) as layers:
                with softmax_attention(model):
                    base = log_probs(model, row).chunk(2)
                for i in reversed(range(len(attentions))):  # so that the layers before it are still those of the base
                    for layer in layers[: attentions[i].layer_idx]:
                        layer.replay = True
                    for layer in layers[attentions[i].layer_idx :]:
                        layer.replay = False
                    with only_hla_layer(model, attentions[i]):
                        other = log_probs(model, row).chunk(2)
                    costs[i] += torch.tensor([kl_divergence(*x) for x in zip(base, other, strict=True)])
                    progress.update()
    return costs / len(rows)


def spread_slots(costs: Tensor, mean: int) -> list[int]:
    """Slots for each layer, `mean` on average, in proportion to the root of its cost, `costs [L, 2]` of `layer_costs`.

    Measured on SmolLM2-135M: a share of the cost itself, which spans three decades, beside an even one is worse.
    """
    share = costs.sum(1).clamp(min=0).sqrt() + 1e-6
    ends = (mean * len(share) * share.cumsum(0) / share.sum()).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def change_settings(model: PreTrainedModel, **changes) -> None:
    """Makes the HLA layers of `model` anew with some `hla_*` fields changed, in place; what both have, keeps its
    parameters."""
    settings = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(HLAConfigMixin)}
    parameters = hla_parameters(model)
    to_hla(to_softmax(model), **settings | changes)
    for name, parameter in hla_parameters(model).items():
        if name in parameters:
            parameter.data = parameters[name].data


def keep_softmax(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Gives some HLA layers of `model` their softmax attention back, in place; the others keep what they learned."""
    before, slots = model.config.hla_layer_ids, model.config.hla_slots
    rest = [i for i in before if i not in layers]
    if isinstance(slots, list):
        slots = [slots[before.index(i)] for i in rest]
    change_settings(model, hla_layers=rest, hla_slots=slots)
