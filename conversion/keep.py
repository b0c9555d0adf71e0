"""Which layers lose most by becoming HLA, and giving those more: slots, or their softmax attention."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hla_hf import softmax_attention, to_hla, to_softmax
from hla_hf.configuration_hla import HLAConfigMixin
from hla_hf.layer_hla import ATTENTION, hla_attentions

from .evaluate import divergence, log_probs
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


@torch.no_grad()
def layer_costs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What the model loses when one layer alone is HLA, for each HLA layer: `[L, 2]`, KL in nats per token.

    Every row of `tokens [N, T]` is read twice over: the first column is the KL over its first reading, what is lost on
    language, the second that over its second, what is lost on recall.
    """
    rows = torch.cat([tokens, tokens], 1)
    layers, costs = hla_attentions(model), []
    for row in tqdm(rows, desc="ranking layers"):
        with softmax_attention(model):
            base = log_probs(model, row).chunk(2)
        for attention in layers:
            with only_hla_layer(model, attention):
                other = log_probs(model, row).chunk(2)
            costs.append([divergence(*halves)["kl"] for halves in zip(base, other, strict=True)])
    return torch.tensor(costs).unflatten(0, (len(rows), -1)).mean(0)


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
