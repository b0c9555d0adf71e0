"""This package's own kernels, on a GPU or in Triton's interpreter (`make test-kernels`), beside plain PyTorch."""

import os
from types import SimpleNamespace

import pytest
import torch
from tiny import stepwise_logits, tiny_config, tiny_model, tokens

from hla_hf import layer_hla, near_hla, ops_hla, window_hla
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import HLALayer, LayerSettings
from hla_hf.window_hla import Tokens, local_softmax


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    near_hla.triton is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs a GPU, or Triton's interpreter",
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of the norm
DEFAULT = {"hla_operator": "linear", "hla_feature_map": "hedgehog", "hla_window": 8, "hla_num_sinks": 2}
STEPS = {
    "window": {},
    "no sinks": {"hla_num_sinks": 0},
    "slots": {"hla_slots": 5, "hla_slot_score": "learned"},
    "more slots than window": {"hla_window": 3, "hla_num_sinks": 0, "hla_slots": 12, "hla_slot_score": "learned"},
}


def assert_near(out, expected, dtype):
    error = (out.double().cpu() - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"


def plain_softmax(q, k, v, visible, softcap):
    group = q.shape[1] // k.shape[1], q.shape[2]
    scores = (q.unflatten(1, (-1, group[0])).flatten(2, 3) @ k.mT).unflatten(2, group)
    return local_softmax(scores if softcap is None else softcap * (scores / softcap).tanh(), visible, v)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "chunks, heads, length, columns, dims, per_head",
    [
        (2, (2, 2), 1, 5, (16, 16), False),
        (2, (4, 2), 17, 50, (24, 20), True),
        (1, (2, 1), 64, 132, (64, 64), False),
        (2, (3, 1), 65, 100, (40, 80), True),
        (1, (2, 2), 130, 300, (128, 128), True),
    ],
)
def test_near_softmax(chunks, heads, length, columns, dims, per_head, softcap, dtype):
    """Forward and backward, the gradient of the largest score's weight included."""
    generator = torch.Generator().manual_seed(length)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = random(chunks, heads[0], length, dims[0]), *(random(chunks, heads[1], columns, dim) for dim in dims)
    inputs = [x.to(dtype) for x in (q, k, v)]
    visible = torch.rand(chunks, heads[1] if per_head else 1, length, columns, generator=generator) < 0.6
    visible[..., 3] = True
    grads = random(chunks, heads[0], length, dims[1]), random(chunks, heads[0], length, 1)
    results = []
    for function, kind, device in ((plain_softmax, torch.float64, "cpu"), (near_hla.near_softmax, dtype, DEVICE)):
        leaves = [x.to(device, kind).requires_grad_() for x in inputs]
        out = function(*leaves, visible.to(device), softcap)
        given = [g.to(x) for g, x in zip(grads, out, strict=True)]
        results.append([*out, *torch.autograd.grad(out, leaves, given)])
    for expected, actual in zip(*results, strict=True):
        assert_near(actual, expected, dtype)


def random_layer(softcap, **settings):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 36, "head_dim": 24}
    config = tiny_config(**DEFAULT | settings | heads)
    attention = SimpleNamespace(layer_idx=0, head_dim=24, scaling=24**-0.5, attn_logit_softcapping=softcap)
    layer = HLALayer(LayerSettings.of(config, attention))
    layer.reset()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("padding, softcap", [(False, None), (True, 2.0)])
@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_step(name, padding, softcap, dtype, monkeypatch):
    """Token by token from none on, until all places have been taken and given up again: output and state."""
    torch.manual_seed(0)
    layer, length = random_layer(softcap, **STEPS[name]), 30
    inputs = [torch.randn(2, heads, length, 24, dtype=torch.bfloat16) for heads in (6, 2, 2, 6, 2)]
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :4] = mask[1, 10:14] = 0
    calls, results = [], []
    step = layer_hla.fused_step
    monkeypatch.setattr(layer_hla, "fused_step", lambda *given: calls.append(1) or step(*given))
    for backend, kind, device in (("torch", torch.float64, "cpu"), ("kernels", dtype, DEVICE)):
        monkeypatch.setattr(ops_hla, "BACKEND", backend)
        layer, outs = layer.to(device, kind), []
        own = layer._own()
        some = [x[:, :, :1].to(device, kind) for x in inputs]
        state = window_hla._no_tokens(Tokens(*some), layer._far_parameters(own), layer.settings.window)
        state = state._replace(out=torch.zeros(2, 2, 48, 25, dtype=ops_hla.compute_dtype(some[0]), device=device))
        for i in range(length):
            token = LayerTokens(*(x[:, :, i : i + 1].to(device, kind) for x in inputs))
            token = token._replace(mask=mask[:, i : i + 1].to(device)) if padding else token
            out, state = layer(token, state, in_place=True, memo={})
            outs.append(out)
        results.append([torch.cat(outs, 2), *(x for x in state if x is not None)])
    assert len(calls) == length
    for expected, actual in zip(*results, strict=True):
        if expected.is_floating_point():
            assert_near(actual, expected, dtype)
        else:
            assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_a_model_of_kernels(name, monkeypatch):
    """Prefill, tokens of decoding from its states, more tokens at once, tokens again, with padding."""
    model = tiny_model(dtype=torch.float32, **DEFAULT | STEPS[name])
    ids, mask, steps = tokens(2, 38), torch.ones(2, 38, dtype=torch.long), [24, 1, 1, 10, 1, 1]
    mask[0, :5] = 0
    calls = []
    for module, function in ((layer_hla, "fused_step"), (window_hla, "near_softmax")):
        original = getattr(module, function)
        counted = lambda *given, f=original, n=function: calls.append(n) or f(*given)  # noqa: E731
        monkeypatch.setattr(module, function, counted)
    monkeypatch.setattr(ops_hla, "BACKEND", "kernels")
    logits, _ = stepwise_logits(model.to(DEVICE), ids.to(DEVICE), steps, mask.to(DEVICE))
    assert calls.count("fused_step") == 8 and calls.count("near_softmax") >= 4
    monkeypatch.setattr(ops_hla, "BACKEND", "torch")
    expected, _ = stepwise_logits(model.to("cpu", torch.float64), ids, steps, mask)
    torch.testing.assert_close(logits.cpu()[mask == 1].double(), expected[mask == 1], atol=1e-3, rtol=1e-3)
