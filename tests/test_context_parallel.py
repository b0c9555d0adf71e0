"""A sequence sliced over processes: outputs and gradients are those of one process."""

import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing import assert_close

from hla_hf import ahla, causal_linear_attention, hla2, hla3
from training.context_parallel import carry_state, context_parallel


LENGTH = 48
CLOSE = {"atol": 2e-4, "rtol": 1e-3}
MODELS = [
    {"hla_window": 0, "hla_operator": operator, "hla_decay": decay}
    for operator, decay in (("linear", "learned"), ("ahla", None), ("hla2", 0.9), ("hla3", None))
] + [
    {"hla_window": 5, "hla_num_sinks": 2, "hla_operator": "linear"},
    {"hla_window": 17, "hla_num_sinks": 3, "hla_operator": "ahla"},  # longer than a slice of 4
    {"hla_window": 5, "hla_num_sinks": 0, "hla_operator": "hla2", "hla_accumulator": "key", "hla_decay": "learned"},
    {"hla_window": 14, "hla_num_sinks": 2, "hla_operator": "hla3"},
    {"hla_window": 0, "hla_operator": "linear", "hla_normalizer": "count"},
    {"hla_window": 5, "hla_num_sinks": 2, "hla_operator": "ahla", "hla_slots": 6},
    {"hla_window": 4, "hla_num_sinks": 1, "hla_operator": "hla3", "hla_slots": 3, "hla_slot_score": "recall"},
]


def check_operators(rank, world, group):
    torch.manual_seed(0)
    part = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    for operator in (causal_linear_attention, ahla, hla2, hla3):
        for settings in ({}, {"log_decay": -0.1, "normalize": True}):
            q, k, v = (torch.rand(2, h, LENGTH, 8, dtype=torch.float64) for h in (4, 2, 2))
            target = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
            whole = [x.clone().requires_grad_() for x in (q, k, v)]
            expected = operator(*whole, chunk_size=5, **settings)
            (expected * target).sum().backward()
            mine = [x[:, :, part].clone().requires_grad_() for x in (q, k, v)]
            out = carry_state(
                lambda state, mine=mine, operator=operator, settings=settings: operator(
                    *mine, initial_state=state, return_state=True, chunk_size=5, **settings
                ),
                group, device=q.device,
            )  # fmt: skip
            (out * target[:, :, part]).sum().backward()
            assert_close(out, expected[:, :, part])
            for x, y in zip(mine, whole, strict=True):
                assert_close(x.grad, y.grad[:, :, part])


def check_models(rank, world, group):
    from tiny import tiny_model, tokens

    part = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    ids = tokens(2, LENGTH)
    one = torch.arange(LENGTH).expand(2, -1)
    packed = torch.stack(
        [torch.arange(LENGTH), torch.arange(LENGTH) % (LENGTH // world)]
    )  # documents start with slices
    packed[0, 30:] -= 30
    for settings in MODELS:
        for positions in (one, packed):
            model = tiny_model(**settings).train()
            logits = model(ids, position_ids=positions, use_cache=False).logits
            target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
            (logits * target).sum().backward()
            expected = {name: p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
            with context_parallel(model, group):
                mine = model(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
                (mine * target[:, part]).sum().backward()
                with torch.no_grad():
                    again = model(ids[:, part], position_ids=positions[:, part], use_cache=False).logits
            message = f"{settings} on rank {rank} of {world}, {'packed' if positions is packed else 'one document'}: "
            assert_close(mine, logits[:, part], msg=lambda m, message=message: message + m, **CLOSE)
            assert_close(again, mine)
            for name, p in model.named_parameters():
                dist.all_reduce(p.grad, group=group)
                scale = expected[name].abs().max()
                assert_close(
                    p.grad / scale,
                    expected[name] / scale,
                    msg=lambda m, n=name, message=message: message + n + m,
                    **CLOSE,
                )
            assert "forward" not in vars(model.model.layers[0].self_attn.hla)


def worker(rank, world, folder):
    sys.path.insert(0, os.path.dirname(__file__))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        check_operators(rank, world, dist.group.WORLD)
        check_models(rank, world, dist.group.WORLD)
    except BaseException:
        with open(f"{folder}/error-{rank}.txt", "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)  # the others may be waiting for this one
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_slices_are_the_whole(world, tmp_path):
    context = mp.spawn(worker, (world, str(tmp_path)), nprocs=world, join=False)
    try:
        while not context.join(timeout=5, grace_period=1):
            pass
    except Exception as error:
        errors = "\n".join(x.read_text() for x in sorted(tmp_path.glob("error-*.txt")))
        pytest.fail(errors or str(error))


def test_what_cannot_be_sliced_is_refused():
    from tiny import tiny_model

    with pytest.raises(ValueError, match=r"hla_layers=\[1\] of 2"), context_parallel(tiny_model(hla_layers=[1]), None):
        pass
    model = tiny_model()
    with context_parallel(model, None), pytest.raises(ValueError, match="position_ids"):
        model(torch.arange(3, 9)[None])
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing"), context_parallel(model, None):
        pass
