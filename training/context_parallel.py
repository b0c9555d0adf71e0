"""Context parallel: one sequence sliced over the processes of a group, which exchange only states.

An HLA layer's state after a slice is all that later tokens need of it, so a process takes the state of the process
before it as its `initial_state` and hands its own on: an exclusive scan along the group, one message per layer and
direction. Layers overlap: while a process computes layer l of its slice, the one before it is at layer l + 1, so of
L layers on R processes (R - 1) / (L + R - 1) of the time is spent waiting, forward and backward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hla_hf import LayerState
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import hla_attentions


State = tuple[Tensor | None, ...]
Layout = list[tuple[torch.Size, torch.dtype] | None]


def _send(tensors: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> None:
    buffer = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
    dist.send(buffer, group=group, group_dst=rank)


def _receive(layout: Sequence, rank: int, group: dist.ProcessGroup, device: torch.device) -> State:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.recv(buffer, group=group, group_src=rank)
    parts = zip(buffer.split(sizes), layout, strict=True)
    return tuple(part.clone().view(dtype).view(shape) for part, (shape, dtype) in parts)


class _ReceiveState(torch.autograd.Function):
    """The state of the process before; its gradient goes back there."""

    @staticmethod
    def forward(ctx, anchor, layout, rank, group):
        ctx.rank, ctx.group = rank, group
        state = _receive(layout, rank, group, anchor.device)
        ctx.differentiable = [x.is_floating_point() for x in state]
        ctx.mark_non_differentiable(*(x for x in state if not x.is_floating_point()))
        return state

    @staticmethod
    def backward(ctx, *gradients):
        _send([x for x, keep in zip(gradients, ctx.differentiable, strict=True) if keep], ctx.rank, ctx.group)
        return None, None, None, None


class _SendState(torch.autograd.Function):
    """Hands the state to the process after, which sends its gradient when this one's backward pass gets here."""

    @staticmethod
    def forward(ctx, rank, group, out, anchor, *state):
        ctx.rank, ctx.group = rank, group
        ctx.layout = [(x.shape, x.dtype) if x.is_floating_point() else None for x in state]
        ctx.device = out.device
        _send(state, rank, group)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, gradient):
        received = iter(_receive([x for x in ctx.layout if x is not None], ctx.rank, ctx.group, ctx.device))
        return None, None, gradient, None, *(None if x is None else next(received) for x in ctx.layout)


def carry_state(
    step: Callable[[State | None], tuple[Tensor, State]],
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    keep: Tensor | None = None,
    layouts: dict[str, Layout] | None = None,
) -> Tensor:
    """The output of this process's slice of a sequence, given those of the processes before it in `group`.

    Args:
        step: from an initial state (None: there is nothing before) to the slice's output and the state after it, as
            the operators do with `initial_state` and `return_state`.
        group: the processes, in the order of their slices, which must all have the same length.
        device: where states are.
        keep: `[B]`, False where a new document begins with this slice, so that nothing before it counts.
        layouts: kept from an earlier call on slices of the same shape, it saves telling the next process what comes.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
    layouts, state = {} if layouts is None else layouts, None
    if rank > 0:
        if "received" not in layouts:
            message = [None]
            dist.recv_object_list(message, group=group, group_src=rank - 1, device=device)
            layouts["received"] = message[0]
        present = [x for x in layouts["received"] if x is not None]
        tensors = _ReceiveState.apply(anchor, present, rank - 1, group)
        if keep is not None:
            tensors = tuple(torch.where(keep.view(-1, *[1] * (x.ndim - 1)), x, x.new_zeros(())) for x in tensors)
        left = iter(tensors)
        state = tuple(None if x is None else next(left) for x in layouts["received"])
    out, state = step(state)
    if rank < last:
        if "sent" not in layouts:
            layouts["sent"] = [None if x is None else (x.shape, x.dtype) for x in state]
            dist.send_object_list([layouts["sent"]], group=group, group_dst=rank + 1, device=device)
        out = _SendState.apply(rank + 1, group, out, anchor, *(x for x in state if x is not None))
    return out


@contextmanager
def context_parallel(model: PreTrainedModel, group: dist.ProcessGroup) -> Iterator[None]:
    """Within this context `model` takes this process's slice of each sequence: `input_ids` and the `position_ids` that
    it has in the whole sequence, no mask and no cache. Its logits are those that one process would compute.

    Raises: ValueError if the model keeps softmax layers, whose keys and values are not exchanged, or recomputes its
    activations, which would ask for states that have gone by.
    """
    decoder = model.base_model
    if len(decoder.config.hla_layer_ids) < decoder.config.num_hidden_layers:
        raise ValueError(
            "context parallel needs a model whose layers are all HLA, got hla_layers="
            f"{decoder.config.hla_layer_ids} of {decoder.config.num_hidden_layers} layers"
        )
    if model.is_gradient_checkpointing:
        raise ValueError("context parallel does not go with gradient_checkpointing: slice over more processes instead")
    keep, layouts = {}, {}

    def note_documents(module, args, kwargs) -> None:
        if kwargs.get("position_ids") is None:
            raise ValueError("context parallel needs position_ids, those of this slice in the whole sequence")
        keep["rows"] = kwargs["position_ids"][:, 0] != 0

    def sliced(attention: nn.Module, forward: Callable) -> Callable:
        def forward_slice(tokens: LayerTokens, state=None, **options) -> tuple[Tensor, None]:
            q = tokens.q
            known = layouts.setdefault((attention.layer_idx, q.shape, q.dtype), {})

            rows = keep["rows"].expand(q.shape[0])

            def step(state: State | None) -> tuple[Tensor, State]:
                return forward(tokens, None if state is None else LayerState(*state))

            return carry_state(step, group, device=q.device, keep=rows, layouts=known), None

        return forward_slice

    layers = hla_attentions(decoder)
    hook = decoder.register_forward_pre_hook(note_documents, with_kwargs=True)
    for attention in layers:
        attention.hla.forward = sliced(attention, attention.hla.forward)
    try:
        yield
    finally:
        hook.remove()
        for attention in layers:
            del attention.hla.forward
