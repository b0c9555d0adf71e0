"""The operators against their literal definitions (reference.py), forward and backward."""

import math
import os
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MODES, stepwise_logits, tiny_model, tokens

import hla_hf
from hla_hf import ahla, causal_linear_attention, feature_map, hla2, hla3, hla3_published, near_hla, ops_hla, scan
from hla_hf.window_hla import FarParameters, LayerState, Tokens, WindowSettings, decode_step, step_places, step_tokens


OPERATORS = {"linear": causal_linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}
PASSES = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}
FORMS = tuple(ops_hla.FORMS)
STATEFUL_FORMS = [form for form in FORMS if form != "dense"]
HEADS = [(3, 3), (6, 2), (4, 1)]
LENGTHS = [1, 2, 63, 64, 65, 127, 131]


def windowed_attention(q, k, v, *, near_dim=None, **options):
    """The public function with all its arguments by name; softmax takes the first `near_dim` entries of q and k."""
    parameters, settings = (
        kind(**{name: options.pop(name) for name in names if name in options})
        for kind, names in ((FarParameters, FarParameters._fields), (WindowSettings, WindowSettings.__match_args__))
    )
    near_q, near_k = (x[..., :near_dim] for x in (q, k))
    return hla_hf.windowed_attention(near_q, near_k, v, parameters, settings, far_q=q, far_k=k, **options)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_inputs(heads=(6, 2), length=37, dim=5, value_dim=4, batch=2, dtype=torch.float64):
    """q, k positive, so that the row mass is not near zero; v of both signs."""
    q = torch.rand(batch, heads[0], length, dim, dtype=torch.float64).to(dtype)
    k = torch.rand(batch, heads[1], length, dim, dtype=torch.float64).to(dtype)
    return q, k, torch.randn(batch, heads[1], length, value_dim, dtype=torch.float64).to(dtype)


def make_decay(kind, name, heads=(6, 2), length=37, batch=2):
    if kind == "tuple":  # a different decay, of a different kind, for each pass
        return tuple(make_decay(("head", "token", None)[i], name, heads, length, batch) for i in range(PASSES[name]))
    if kind in (None, "number"):
        return None if kind is None else -0.1
    shape = {
        "head": heads[:1],
        "kv": heads[1:],
        "token": (batch, heads[0], length),
        "kv_token": (batch, heads[1], length),
    }
    return -torch.rand(shape[kind], dtype=torch.float64)


def of_head(x, b, h, heads):
    """The part of a decay or coefficient that belongs to batch row b, query head h."""
    if not isinstance(x, torch.Tensor):
        return x
    h = h if x.shape[-2 if x.ndim == 3 else 0] == heads[0] else h // (heads[0] // heads[1])
    return x[b, h] if x.ndim == 3 else x[h]


def definition(name, q, k, v, *, scale=None, log_decay=None, e=None, coefficient=1.0, **settings):
    """The literal definition, one head at a time, in float64."""
    heads = q.shape[1], k.shape[1]
    group = heads[0] // heads[1]
    q = q.double() * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, v = k.double(), v.double()
    decays = log_decay if isinstance(log_decay, tuple) else (log_decay,) * PASSES.get(name, 2)
    rows = []
    for b in range(q.shape[0]):
        outputs = []
        for h in range(heads[0]):
            e_head = None if e is None else e[b, h * e.shape[1] // heads[0]].double()
            outputs.append(
                reference.operator(
                    name, q[b, h], k[b, h // group], v[b, h // group], e=e_head,
                    decays=[of_head(x, b, h, heads) for x in decays],
                    coefficient=of_head(coefficient, b, h, heads), **settings,
                )
            )  # fmt: skip
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def gradients(out, inputs, weight=None):
    torch.manual_seed(1)
    weight = torch.randn(out.shape, dtype=torch.float64) if weight is None else weight
    return torch.autograd.grad((out.double() * weight).sum(), inputs, retain_graph=True, materialize_grads=True)


def tensors_of(*arguments):
    """Every float tensor among the arguments, made a leaf that takes gradients."""
    found = []
    for x in arguments:
        found += tensors_of(*x) if isinstance(x, tuple) else [x] if isinstance(x, torch.Tensor) else []
    return [x.requires_grad_() for x in found]


def assert_close(actual, expected, tolerance=1e-12):
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


def assert_same_function(actual, expected, inputs, tolerance=1e-11):
    """Forward and backward."""
    assert_close(actual, expected, tolerance)
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, b, tolerance)


# ---- the definitions ----------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", OPERATORS)
def test_lengths_and_heads(name, heads, length):
    q, k, v = make_inputs(heads, length, batch=1)
    inputs = tensors_of(q, k, v)
    expected = definition(name, q, k, v)
    for form in FORMS:
        assert_same_function(OPERATORS[name](q, k, v, form=form), expected, inputs)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [None, "number", "head", "kv", "token", "kv_token", "tuple"])
@pytest.mark.parametrize("name", OPERATORS)
def test_decays_and_normalizer(name, decay, normalize):
    q, k, v = make_inputs()
    log_decay = make_decay(decay, name)
    inputs = tensors_of(q, k, v, log_decay)
    expected = definition(name, q, k, v, log_decay=log_decay, normalize=normalize)
    for form in FORMS:
        out = OPERATORS[name](q, k, v, log_decay=log_decay, normalize=normalize, form=form, chunk_size=8)
        assert_same_function(out, expected, inputs)


@pytest.mark.parametrize("decay", [None, "tuple"])
@pytest.mark.parametrize("e_heads", [6, 2])
@pytest.mark.parametrize("name", ["hla2", "hla3"])
def test_accumulator_coefficient_ridge_scale(name, e_heads, decay):
    q, k, v = make_inputs()
    e = torch.rand(2, e_heads, 37, 5, dtype=torch.float64)
    coefficient, log_decay = torch.randn(e_heads, dtype=torch.float64), make_decay(decay, name)
    inputs = tensors_of(q, k, v, e, coefficient, log_decay)
    settings = {"e": e, "coefficient": coefficient, "ridge": 0.3, "scale": 0.7, "log_decay": log_decay}
    expected = definition(name, q, k, v, **settings)
    for form in FORMS:
        assert_same_function(OPERATORS[name](q, k, v, form=form, chunk_size=16, **settings), expected, inputs)


def test_softmax_accumulator_divided_by_the_token_count():
    q, k, v = make_inputs()
    e = (q / q.shape[-1] ** 0.5).softmax(-1)
    lower = torch.ones(37, 37, dtype=torch.float64).tril()
    kk, vv = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    expected = ((q @ kk.mT) @ ((e @ kk.mT) * lower).mT * lower) @ vv / torch.arange(1, 38)[:, None]
    out = hla2(q, k, v, e=e, scale=1.0) / torch.arange(1, 38)[:, None]
    assert_close(out, expected)


# ---- masks, states, dtypes ----------------------------------------


def make_mask(kind, length=37):
    mask = torch.ones(2, length, dtype=torch.long)
    if kind == "left":
        mask[0, :9] = mask[1, :1] = 0
    elif kind == "right":
        mask[0, -9:] = mask[1, -20:] = 0
    elif kind == "interior":
        mask[0, 5:19] = mask[1, ::3] = 0
    elif kind == "whole row":
        mask[0] = 0
    return mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["left", "right", "interior", "whole row"])
@pytest.mark.parametrize("name", OPERATORS)
def test_padding_changes_nothing(name, kind, form):
    """Each row equals the same row without its padded tokens, which give 0 and receive gradients of exactly 0."""
    q, k, v = make_inputs()
    log_decay, mask = make_decay("token", name), make_mask(kind)
    inputs = tensors_of(q, k, v, log_decay)
    settings = {"normalize": True, "form": form, "chunk_size": 8}
    out = OPERATORS[name](q, k, v, log_decay=log_decay, attention_mask=mask, **settings)
    grads = gradients(out, inputs)
    expected = torch.zeros_like(out)
    for b in range(2):
        real = mask[b].bool()
        if real.any():
            row = [x[b : b + 1, :, real] for x in (q, k, v)]
            expected[b, :, real] = definition(name, *row, log_decay=log_decay[b : b + 1, :, real], normalize=True)[0]
    assert_same_function(out, expected, inputs)
    padded = mask == 0
    assert (out.transpose(1, 2)[padded] == 0).all()
    for grad in grads:
        assert (grad.transpose(1, 2)[padded] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", STATEFUL_FORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_carried_state_at_every_split(name, form, masked):
    q, k, v = make_inputs(length=11)
    log_decay, mask = make_decay("tuple", name, length=11), make_mask("interior" if masked else None, 11)
    inputs = tensors_of(q, k, v, log_decay)

    def run(part, state=None):
        decay = tuple(x[..., part] if x is not None and x.ndim == 3 else x for x in log_decay)
        return OPERATORS[name](
            *(x[:, :, part] for x in (q, k, v)), log_decay=decay, attention_mask=mask[:, part], normalize=True,
            initial_state=state, return_state=True, form=form, chunk_size=4,
        )  # fmt: skip

    whole, final = run(slice(None))
    for split in range(1, 11):
        first, state = run(slice(0, split))
        second, state = run(slice(split, None), state)
        assert_same_function(torch.cat([first, second], 2), whole, inputs)
        for a, b in zip(state, final, strict=True):
            assert_same_function(a, b, tensors_of(k))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_low_precision_inputs_are_computed_in_fp32(name, dtype, form):
    q, k, v = make_inputs(length=65, dim=32, dtype=dtype)
    v = v.float()  # the output has its dtype: what is lost is lost inside
    inputs = tensors_of(q, k, v)
    out = OPERATORS[name](q, k, v, form=form)
    expected = definition(name, q, k, v)
    assert_close(out, expected, 1e-6)
    precision = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for a, b in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, b, precision)
    assert OPERATORS[name](q, k, v.to(dtype), form=form).dtype == dtype
    if form != "dense":
        state = OPERATORS[name](q, k, v.to(dtype), form=form, return_state=True)[1]
        assert all(x.dtype == torch.float32 and x.shape[0] == 2 for x in state)


@pytest.mark.parametrize("name", OPERATORS)
def test_key_only_states_are_kept_per_key_value_head(name):
    q, k, v = make_inputs()
    heads = [x.shape[1] for x in OPERATORS[name](q, k, v, return_state=True)[1]]
    assert heads == {"linear": [2], "hla2": [2, 6], "ahla": [2, 6], "hla3": [2, 2, 6]}[name]


def test_mass_keeps_its_sign():
    q, k, v = make_inputs(length=65)
    q, k = q - 0.5, k - 0.5
    for name, function in OPERATORS.items():
        out, mass = function(q, k, v), function(q, k, torch.ones_like(v[..., :1]))
        assert (mass < 0).any() and (mass > 0).any()
        sign = torch.where(mass < 0, -1.0, 1.0)
        assert_close(function(q, k, v, normalize=True), out / (sign * mass.abs().clamp(min=1e-6)), 1e-9), name


# ---- window + sinks ----------------------------------------

WINDOWED = {"window": 7, "num_sinks": 3, "query_map": torch.exp, "key_map": torch.exp}


def windowed_settings(name, accumulator, decay, heads=(6, 2)):
    gate, value_mix = torch.rand(heads[0]).double(), torch.rand(heads[0]).double()
    coefficient = torch.rand(heads[accumulator == "key"]).double()
    return {
        "gate": gate, "value_mix": value_mix, "coefficient": coefficient, "ridge": 0.5,
        "accumulator_map": torch.exp if accumulator == "query" else None, "log_decay": make_decay(decay, name, heads),
    }  # fmt: skip


def cast(settings, dtype):
    return {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}


def windowed_definition(
    name, q, k, v, *, window=7, sinks=3, near_dim=None, log_decay=None, accumulator_map=None, **settings
):  # fmt: skip
    near_dim = near_dim or q.shape[-1]
    heads = q.shape[1], k.shape[1]
    decays = log_decay if isinstance(log_decay, tuple) else (log_decay,) * PASSES[name]
    rows = []
    for b in range(q.shape[0]):
        outputs = []
        for h in range(heads[0]):
            j = h // (heads[0] // heads[1])
            outputs.append(
                reference.windowed(
                    name, q[b, h, :, :near_dim], k[b, j, :, :near_dim], v[b, j], q[b, h].exp(), k[b, j].exp(),
                    window=window, sinks=sinks, scale=near_dim**-0.5,
                    e=None if accumulator_map is None else q[b, h].exp(),
                    decays=[of_head(x, b, h, heads) for x in decays],
                    **{n: of_head(x, b, h, heads) for n, x in settings.items()},
                )
            )  # fmt: skip
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("accumulator", ["query", "key"])
@pytest.mark.parametrize("name", OPERATORS)
def test_windowed_attention(name, accumulator, decay):
    q, k, v = make_inputs()
    settings = windowed_settings(name, accumulator, decay)
    inputs = tensors_of(q, k, v, settings["gate"])
    expected = windowed_definition(name, q, k, v, **settings)
    for chunk_size in (4, 8, 64):
        out = windowed_attention(q, k, v, operator=name, chunk_size=chunk_size, **WINDOWED, **settings)
        assert_same_function(out, expected, inputs)


def test_windowed_near_dim():
    q, k, v = make_inputs()
    settings = windowed_settings("hla3", "query", None) | {"operator": "hla3"}
    expected = windowed_attention(q, k, v, **WINDOWED, **settings)
    more = [torch.cat([torch.randn_like(x), x], -1) for x in (q, k)]
    dim = q.shape[-1]
    maps = {name: lambda x: x[..., dim:].exp() for name in ("query_map", "key_map", "accumulator_map")}
    swapped = [torch.cat([x[..., dim:], x[..., dim:]], -1) for x in more]
    options = WINDOWED | settings | maps
    assert_close(windowed_attention(*swapped, v, near_dim=dim, **options), expected)
    out = windowed_attention(*more, v, near_dim=dim, **options)  # other scores, the same features
    near_only = windowed_attention(*(x[..., :dim] for x in more), v, **(WINDOWED | settings | {"gate": torch.zeros(6)}))
    far_off = windowed_attention(*more, v, near_dim=dim, **(options | {"gate": torch.zeros(6)}))
    assert_close(far_off, near_only)
    assert not torch.allclose(out, expected)


@pytest.mark.parametrize("kind", [None, "left", "right", "interior"])
@pytest.mark.parametrize("name", OPERATORS)
def test_windowed_near_dim_by_definition(name, kind):
    q, k, v = make_inputs()
    settings = windowed_settings(name, "query", None) | {"near_dim": 3}
    options, mask = settings | WINDOWED | {"operator": name, "chunk_size": 8}, make_mask(kind)
    inputs = tensors_of(q, k, v, settings["gate"])
    expected = torch.zeros_like(v).repeat_interleave(3, 1)
    for b in range(2):
        real = mask[b].bool()
        expected[b, :, real] = windowed_definition(name, *(x[b : b + 1, :, real] for x in (q, k, v)), **settings)[0]
    assert_same_function(windowed_attention(q, k, v, attention_mask=mask, **options), expected, inputs)
    state, outputs = None, []
    for part in (slice(0, 5), slice(5, 6), slice(6, 20), slice(20, 37)):
        tokens = (x[:, :, part] for x in (q, k, v))
        out, state = windowed_attention(
            *tokens, attention_mask=mask[:, part], initial_state=state, return_state=True, **options
        )
        outputs.append(out)
    assert_same_function(torch.cat(outputs, 2), expected, inputs)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_windowed_lengths_and_heads(heads, length):
    q, k, v = make_inputs(heads, length, batch=1)
    settings = windowed_settings("ahla", "query", None, heads)
    inputs = tensors_of(q, k, v)
    out = windowed_attention(q, k, v, operator="ahla", **WINDOWED, **settings)
    assert_same_function(out, windowed_definition("ahla", q, k, v, **settings), inputs)


def test_windowed_without_sinks_and_with_a_window_over_everything():
    q, k, v = make_inputs()
    settings = windowed_settings("linear", "key", None)
    for window, sinks in ((7, 0), (1, 0), (37, 2), (64, 0)):
        out = windowed_attention(q, k, v, **(WINDOWED | settings | {"window": window, "num_sinks": sinks}))
        assert_close(out, windowed_definition("linear", q, k, v, window=window, sinks=sinks, **settings))
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(out, softmax)


@pytest.mark.parametrize("kind", [None, "left", "right", "interior"])
@pytest.mark.parametrize("name", OPERATORS)
def test_windowed_padding_and_carried_state(name, kind):
    q, k, v = make_inputs()
    settings = windowed_settings(name, "query", "head") | WINDOWED | {"operator": name, "chunk_size": 8}
    mask = make_mask(kind)
    inputs = tensors_of(q, k, v)
    out = windowed_attention(q, k, v, attention_mask=mask, **settings)
    expected = torch.zeros_like(out)
    for b in range(2):
        real = mask[b].bool()
        expected[b, :, real] = windowed_attention(*(x[b : b + 1, :, real] for x in (q, k, v)), **settings)[0]
    assert_same_function(out, expected, inputs)
    for grad in gradients(out, inputs):
        assert (grad.transpose(1, 2)[mask == 0] == 0).all()
    for splits in ([1, 2, 5, 6, 20], [12], [30, 31]):
        state, outputs = None, []
        for start, end in zip([0, *splits], [*splits, 37], strict=True):
            part = [x[:, :, start:end] for x in (q, k, v)]
            step, state = windowed_attention(
                *part, attention_mask=mask[:, start:end], initial_state=state, return_state=True, **settings
            )
            outputs.append(step)
        assert_same_function(torch.cat(outputs, 2), expected, inputs)


@pytest.mark.parametrize("heads, decay, softcap", [((6, 2), None, None), ((4, 1), "head", None), ((3, 3), None, 0.5)])
@pytest.mark.parametrize("accumulator", ["query", "key"])
@pytest.mark.parametrize("name", OPERATORS)
@torch.no_grad()
def test_decoding_step(name, accumulator, heads, decay, softcap):
    """Token by token from any start, padding between real tokens, against the definition of each row's real tokens."""
    q, k, v = make_inputs(heads)
    settings = windowed_settings(name, accumulator, decay, heads)
    parameters = FarParameters(torch.exp, torch.exp, **{n: x for n, x in settings.items() if n != "ridge"})
    options = WindowSettings(7, 3, name, softcap=softcap, ridge=0.5)
    mask = make_mask("interior")
    expected = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(2):
        real = mask[b].bool()
        row = (x[b : b + 1, :, real] for x in (q, k, v))
        if softcap is None:
            expected[b, :, real] = windowed_definition(name, *row, **settings)[0]
        else:  # whose definition is that of the test above but for the scores
            expected[b, :, real] = hla_hf.windowed_attention(*row, parameters, options)[0]
    for start in (1, 10, 11, 30):
        first = (x[:, :, :start] for x in (q, k, v))
        kept = mask[:, :start]
        _, state = hla_hf.windowed_attention(*first, parameters, options, attention_mask=kept, return_state=True)
        for t in range(start, 37):
            token = Tokens(*(x[:, :, t : t + 1] for x in (q, k, v, q, k)))
            places = step_places(step_tokens(state, mask[:, t : t + 1], options, state.k.shape[2]), options)
            assert_close(decode_step(token, state, parameters, options, places), expected[:, :, t : t + 1])


def test_windowed_low_precision():
    q, k, v = make_inputs(length=65, dim=32, value_dim=32, dtype=torch.bfloat16)
    settings = cast(windowed_settings("ahla", "key", None), torch.float32)
    exact = cast(settings, torch.float64)
    out, state = windowed_attention(q, k, v, operator="ahla", return_state=True, **WINDOWED, **settings)
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in (state.past_r, state.r, state.out))
    expected = windowed_definition("ahla", q.double(), k.double(), v.double(), **exact)
    assert_close(out, expected, 2**-6)  # the maps run in the dtype of q and k


def eager_softmax(q, k, v):
    """What Transformers computes in low precision, with scores and weights in the dtype of q."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    above = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(above, -torch.inf)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def total_error(actual, expected):
    return (actual.double() - expected.double()).norm() / expected.double().norm()


@pytest.mark.parametrize("given", ["nothing", "slots", "attention_mask", "segment_ids", "initial_state"])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 130])
def test_products_in_low_precision_are_as_good_as_those_of_softmax(length, given, monkeypatch):
    """Forward and backward, beside float64, for the default operator; also on a CPU that would not do so."""
    monkeypatch.setattr("hla_hf.window_hla.product_dtype", lambda x: x.dtype)
    inputs = [x.bfloat16() for x in make_inputs((4, 2), length, dim=32, value_dim=32, batch=2, dtype=torch.float32)]
    inputs = tensors_of(4 * inputs[0], *inputs[1:])

    def run(q, k, v):
        """By features that weigh like those of a layer; the state that it goes on from is that of the same tokens."""
        settings = {"operator": "linear", "window": 16, "num_sinks": 4, "signed": False, "chunk_size": 64}
        settings |= {name: lambda x: feature_map("softmax", x) for name in ("query_map", "key_map")}
        settings["gate"] = torch.full((4,), 0.5, dtype=v.dtype)
        if given == "slots":
            settings |= {"slots": 8, "slot_scores": make_scores(k)}
        elif given == "attention_mask":
            settings["attention_mask"] = (torch.arange(length) >= torch.tensor([[0], [length // 3]])).long()
        elif given == "segment_ids":
            settings["segment_ids"] = (torch.arange(length) // 50).expand(2, -1)
        elif given == "initial_state":
            settings["initial_state"] = windowed_attention(q, k, v, return_state=True, **settings)[1]
        return windowed_attention(q, k, v, **settings)

    def make_scores(k):
        return torch.randint(0, 12, k.shape[:3], generator=torch.Generator().manual_seed(0)).to(k.dtype)

    exact, which = tensors_of(*(x.double() for x in inputs)), slice(2 if length == 1 else 0, None)
    outs = run(*inputs), run(*exact), eager_softmax(*inputs), eager_softmax(*exact)
    assert length == 1 or total_error(*outs[:2]) <= total_error(*outs[2:])
    all_gradients = [gradients(out, of[which]) for out, of in zip(outs, (inputs, exact) * 2, strict=True)]
    for ours, expected, softmax, expected_softmax in zip(*all_gradients, strict=True):
        assert total_error(ours, expected) <= 1.1 * total_error(softmax, expected_softmax)


# ---- packed documents ----------------------------------------


def make_segments(length=37):
    """Documents of one token, at the start, at the end and side by side, among longer ones."""
    lengths = ([1, 1, 9, 1, 20, 4, 1], [30, 7])
    return torch.stack([torch.repeat_interleave(torch.arange(len(x)) % 3, torch.tensor(x)) for x in lengths])


def documents_of(segments, mask):
    """Row and token indices of each document's real tokens."""
    for b in range(len(segments)):
        real = mask[b].nonzero()[:, 0]
        if len(real):
            cuts = (segments[b, real].diff() != 0).nonzero()[:, 0] + 1
            yield from ((b, part) for part in real.tensor_split(cuts))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_packed_documents(name, form, decay, masked):
    q, k, v = make_inputs()
    log_decay, segments = make_decay(decay, name), make_segments()
    mask = make_mask("interior" if masked else None)
    inputs = tensors_of(q, k, v, log_decay)
    out = OPERATORS[name](
        q, k, v, log_decay=log_decay, segment_ids=segments, attention_mask=mask if masked else None, normalize=True,
        form=form, chunk_size=8,
    )  # fmt: skip
    expected = torch.zeros_like(out)
    for b, part in documents_of(segments, mask):
        decays = log_decay[b : b + 1, :, part] if decay == "token" else log_decay
        document = [x[b : b + 1, :, part] for x in (q, k, v)]
        expected[b, :, part] = definition(name, *document, log_decay=decays, normalize=True)[0]
    assert_same_function(out, expected, inputs)


@pytest.mark.parametrize("form", STATEFUL_FORMS)
@pytest.mark.parametrize("name", [*OPERATORS, "windowed"])
def test_packed_documents_and_carried_state(name, form):
    """The carried state belongs to the first document, the returned one to the last."""
    q, k, v = make_inputs(length=57)
    segments = torch.cat([torch.full((2, 20), 5), make_segments() + 5], 1)
    if name == "windowed":
        options = windowed_settings("hla3", "query", "head") | WINDOWED | {"operator": "hla3", "chunk_size": 16}
    else:
        options = {"form": form, "chunk_size": 8, "log_decay": make_decay("head", name)}
    function = OPERATORS.get(name, windowed_attention)
    inputs = tensors_of(q, k, v)
    out, final = function(q, k, v, segment_ids=segments, return_state=True, **options)
    expected = torch.zeros_like(out)
    for b, part in documents_of(segments, torch.ones_like(segments)):
        document, state = function(*(x[b : b + 1, :, part] for x in (q, k, v)), return_state=True, **options)
        expected[b, :, part] = document[0]
    assert_same_function(out, expected, inputs)
    for split in (1, 12, 20, 21, 29, 56):
        first, state = function(
            *(x[:, :, :split] for x in (q, k, v)), segment_ids=segments[:, :split], return_state=True, **options
        )
        same = segments[:, split] == segments[:, split - 1]
        if same.any() != same.all():
            continue  # a document that ends in one row and goes on in the other: reset that row's state by hand
        state = state if same.all() else None
        second = function(
            *(x[:, :, split:] for x in (q, k, v)), segment_ids=segments[:, split:], initial_state=state, **options
        )
        assert_same_function(torch.cat([first, second], 2), expected, inputs)
    last = function(*(x[:, :, -4:] for x in (q, k, v)), initial_state=final, **options)
    for b, start in ((0, 56), (1, 50)):
        whole = [torch.cat([x[b : b + 1, :, start:], x[b : b + 1, :, -4:]], 2) for x in (q, k, v)]
        assert_close(last[b], function(*whole, **options)[0, :, -4:], 1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 4, 7, 40])
@pytest.mark.parametrize("name", OPERATORS)
def test_windowed_packed_documents(name, window, masked):
    q, k, v = make_inputs()
    options = windowed_settings(name, "query", "token") | WINDOWED | {"operator": name, "window": window}
    segments, mask = make_segments(), make_mask("interior" if masked else None)
    inputs = tensors_of(q, k, v, options["gate"], options["log_decay"])
    out = windowed_attention(q, k, v, segment_ids=segments, attention_mask=mask, chunk_size=8, **options)
    expected = torch.zeros_like(out)
    for b, part in documents_of(segments, mask):
        document = [x[b : b + 1, :, part] for x in (q, k, v)]
        alone = options | {"log_decay": options["log_decay"][b : b + 1, :, part]}
        expected[b, :, part] = windowed_attention(*document, **alone)[0]
    assert_same_function(out, expected, inputs)


# ---- scan, published forms ----------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(OPERATORS)),
    heads=st.sampled_from(HEADS),
    lengths=st.tuples(*[st.integers(1, 6)] * 3),
    decay=st.sampled_from([None, "number", "head", "kv", "token", "tuple"]),
    seed=st.integers(0, 2**16),
)
def test_concatenation_is_associative(name, heads, lengths, decay, seed):
    torch.manual_seed(seed)
    total, passes = sum(lengths), PASSES[name]
    q, k, v = make_inputs(heads, total, batch=1)
    features = [q, k, v] + ([torch.randn_like(q)] if name in ("hla2", "hla3") else [])
    options = {"coefficient": torch.randn(heads[0]).double(), "ridge": 0.5} if len(features) == 4 else {}
    decays = ops_hla.as_decays(make_decay(decay, name, heads, total, 1), passes, q, k)

    def segment(start, end):
        part = [x if x is None or x.shape[2] == 1 else x[:, :, start:end] for x in decays]
        weights = [ops_hla.chunk_weights(x, end - start, None, None) for x in part]
        return scan.segment_of(name, [x[:, :, start:end] for x in features], weights, options)

    cuts = [0, lengths[0], lengths[0] + lengths[1], total]
    a, b, c = (segment(*part) for part in pairwise(cuts))
    concatenate = scan.concatenate
    left, right = concatenate(name, concatenate(name, a, b), c), concatenate(name, a, concatenate(name, b, c))
    for parts in zip(left, right, segment(0, total), strict=True):
        for x, y, whole in zip(*parts, strict=True):
            assert_close(x, y)
            assert_close(x, whole)


def test_scan_takes_a_logarithmic_number_of_concatenations(monkeypatch):
    calls = []
    concatenate = scan.concatenate
    monkeypatch.setattr(scan, "concatenate", lambda *x: calls.append(1) or concatenate(*x))
    hla2(*make_inputs(length=128), form="scan", chunk_size=4)
    assert len(calls) == 6  # 33 elements: 32 chunks and what was before them


@pytest.mark.parametrize("heads", HEADS)
def test_published_third_order(heads):
    q, k, v = make_inputs(heads)
    inputs = tensors_of(q, k, v)
    group = heads[0] // heads[1]
    expected = torch.stack(
        [
            torch.stack(
                [
                    reference.published_hla3(q[b, h] * 5**-0.5, k[b, h // group], v[b, h // group])
                    for h in range(heads[0])
                ]
            )
            for b in range(2)
        ]
    )
    for form in ("dense", "recurrent", "chunk"):
        assert_same_function(hla3_published(q, k, v, form=form, chunk_size=8), expected, inputs)
    assert (hla3(q, k, v) - expected).abs().max() > 0.1 * expected.abs().max()  # another operator
    first, state = hla3_published(*(x[:, :, :20] for x in (q, k, v)), return_state=True)
    second = hla3_published(*(x[:, :, 20:] for x in (q, k, v)), initial_state=state)
    assert_same_function(torch.cat([first, second], 2), expected, inputs)
    with pytest.raises(ValueError, match=r"form='scan' is for .*not for 'hla3_published'"):
        hla3_published(q, k, v, form="scan")


def test_published_second_order_and_its_decay():
    """The paper's decay g is the stack with decays g and g^2; its printed update of G is not."""
    q, k, v = make_inputs((1, 1), batch=1)
    decay = 0.9
    log = math.log(decay)
    stack = hla2(q, k, v, scale=1.0, log_decay=(log, 2 * log))[0, 0]
    single = q[0, 0], k[0, 0], v[0, 0]
    assert_close(hla2(q, k, v, scale=1.0)[0, 0], reference.published_hla2(*single), 1e-10)
    assert_close(stack, reference.published_hla2(*single, decay=decay), 1e-10)
    printed = reference.published_hla2(*single, decay=decay, corrected=False)
    assert (printed - stack).abs().max() > 0.1 * stack.abs().max()


def test_printed_concatenation_is_not_associative():
    """G_AB = r_B G_A + G_B + S_B (r_B C_A) as printed, and with r_B^2 G_A, which is associative."""
    q, k, v = (x[0, 0] for x in make_inputs((1, 1), 3, batch=1))

    def join(a, b, power):
        (S_a, C_a, G_a, r_a), (S_b, C_b, G_b, r_b) = a, b
        return r_b * S_a + S_b, r_b * C_a + C_b, r_b**power * G_a + G_b + S_b @ (r_b * C_a), r_a * r_b

    segments = [(torch.outer(k[t], k[t]), torch.outer(q[t], v[t]), torch.zeros(5, 4).double(), 0.9) for t in range(3)]
    for power, holds in ((1, False), (2, True)):
        left = join(join(*segments[:2], power), segments[2], power)[2]
        right = join(segments[0], join(*segments[1:], power), power)[2]
        assert ((left - right).abs().max() < 1e-12) == holds


# ---- gradients, memory, extremes ----------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", [*OPERATORS, "hla3_published"])
def test_gradcheck(name, normalize, decay, form):
    """Also through a mask and packed documents."""
    if name == "hla3_published" and (decay or form == "scan"):
        pytest.skip("has no decay and no scan")
    function = OPERATORS.get(name, hla3_published)
    inputs = make_inputs((2, 1), 5, dim=2, value_dim=2, batch=1)
    log_decay = None if decay is None else make_decay(decay, "linear", (2, 1), 5, 1) - 0.1
    options = {"normalize": normalize, "form": form, "chunk_size": 2}
    leaves = tensors_of(*inputs, log_decay)
    packed = {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]]), "segment_ids": torch.tensor([[0, 0, 0, 1, 1]])}
    for extra in ({}, packed):

        def call(q, k, v, *decay, extra=extra):
            return function(q + 0.1, k + 0.1, v, **({"log_decay": decay[0]} if decay else {}), **options, **extra)

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_windowed_gradcheck(name):
    q, k, v = make_inputs((2, 1), 6, dim=2, value_dim=2, batch=1)
    options = (
        windowed_settings(name, "query", None, (2, 1)) | WINDOWED | {"window": 2, "num_sinks": 1, "operator": name}
    )
    mix, coefficient, gate = (options.pop(n) for n in ("value_mix", "coefficient", "gate"))
    decay = make_decay("head", "linear", (2, 1)) - 0.1
    options.pop("log_decay")

    def call(q, k, v, mix, coefficient, gate, decay):
        return windowed_attention(
            q, k, v, value_mix=mix, coefficient=coefficient, gate=gate, log_decay=decay, chunk_size=2,
            attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, tensors_of(q, k, v, mix, coefficient, gate, decay), fast_mode=True)


def test_second_derivatives_are_right():
    q, k, v = tensors_of(*make_inputs((2, 1), 5, dim=2, value_dim=2, batch=1))
    assert torch.autograd.gradgradcheck(lambda *x: hla2(*x, chunk_size=2), (q, k, v))


def bytes_held(function):
    """Bytes that `function()` allocates and that live as long as its result."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = function()
    del result
    return sum(x.nbytes() for x in profile.profiler.kineto_results.events() if x.name() == "[memory]")


@pytest.mark.parametrize("name", [*OPERATORS, "windowed"])
def test_what_is_kept_for_the_backward_pass(name):
    """Inputs, and states once per block: under 3 times q, whatever the length."""
    q, k, v = tensors_of(*make_inputs((9, 3), 2048, dim=64, value_dim=64, batch=1, dtype=torch.float32))
    if name == "windowed":
        gate = torch.ones(9)
        maps = {"query_map": lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)}
        maps["key_map"] = maps["query_map"]
        call = lambda: windowed_attention(q, k, v, window=64, num_sinks=4, operator="ahla", gate=gate, **maps)  # noqa: E731
    else:
        call = lambda: OPERATORS[name](q, k, v)  # noqa: E731
    call()
    kept = bytes_held(call) - q.nbytes + sum(x.nbytes for x in (q, k, v))  # less the output
    assert 1.5 * q.nbytes < kept < 3 * q.nbytes


@pytest.mark.parametrize("name", [*OPERATORS, "windowed"])
def test_autocast_keeps_fp32_inside(name):
    q, k, v = make_inputs(length=65, dim=16, dtype=torch.float32)
    if name == "windowed":
        options = windowed_settings("hla3", "query", None) | WINDOWED | {"operator": "hla3"}
        options = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    else:
        options = {}
    inputs = tensors_of(q, k, v)
    function = OPERATORS.get(name, windowed_attention)
    expected = function(q, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = function(q, k, v, return_state=True, **options)
    assert_same_function(out, expected, inputs, 1e-6)
    assert all(x is None or x.dtype in (torch.float32, torch.long) for x in state)


@pytest.mark.parametrize("name", ["hla3", "windowed"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()  # a second length would be compiled otherwise
    q, k, v = make_inputs(length=21)
    decay = make_decay("head", "linear")
    segments = (torch.arange(21) > 9).long().expand(2, -1)
    options = {"log_decay": decay, "segment_ids": segments, "chunk_size": 8}
    if name == "windowed":
        options |= windowed_settings("hla3", "query", "head") | WINDOWED | {"operator": "hla3"}
    function = OPERATORS.get(name, windowed_attention)
    inputs = tensors_of(q, k, v)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled(q, k, v, **options), function(q, k, v, **options), inputs)


@pytest.mark.parametrize("form", ["recurrent", "chunk", "scan"])
@pytest.mark.parametrize("name", OPERATORS)
def test_strong_decay(name, form):
    """Decays of exp(-50) per token: nothing overflows, forward or backward."""
    q, k, v = make_inputs(length=131)
    log_decay = -50 * torch.rand(2, 6, 131, dtype=torch.float64)
    inputs = tensors_of(q, k, v, log_decay)
    expected = definition(name, q, k, v, log_decay=log_decay)
    assert_same_function(OPERATORS[name](q, k, v, log_decay=log_decay, form=form), expected, inputs, 1e-10)
    assert_close(
        OPERATORS[name](q.float(), k.float(), v.float(), log_decay=log_decay.float(), form=form), expected, 1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e2])
@pytest.mark.parametrize("name", OPERATORS)
def test_extreme_norms_and_length(name, size, dtype):
    """T = 20,000, |q| = |k| = size: finite in fp32 and bf16, and in fp16 wherever fp16 can hold the exact result."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20_000, 16) for _ in range(3))
    q, k = (size * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k, v = tensors_of(*(x.to(dtype) for x in (q, k, v)))
    out = OPERATORS[name](q, k, v, normalize=False)
    grads = torch.autograd.grad(out.float().abs().clamp(max=1e30).mean(), (q, k, v))
    wide, *_ = (OPERATORS[name](q.double(), k.double(), v.double()),)
    fits = wide.abs().max() < torch.finfo(dtype).max
    assert bool(out.isfinite().all()) == bool(fits)
    assert fits or dtype == torch.float16
    if fits:
        assert all(x.isfinite().all() for x in grads)


# ---- backends ----------------------------------------

GPU = "cuda" if torch.cuda.is_available() else "cpu"


RUNS_KERNELS = GPU == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_KERNELS = pytest.mark.skipif(not RUNS_KERNELS, reason="needs a GPU, or Triton's interpreter")
WINDOWS = {"windowed": {}, "slots": {"slots": 5}}


@NEEDS_KERNELS
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize(
    "name, decay", [*product(OPERATORS, [None, "head", "kv_token"]), ("hla3_published", None)]
)  # the last has no decay
def test_backends(name, decay, form, backend, monkeypatch):
    if backend == "kernels":
        pytest.importorskip("fla.ops.simple_gla")
    function = OPERATORS.get(name, hla3_published)
    length, split = (70, 66) if form == "chunk" else (20, 16)  # token by token the interpreter is slow
    q, k, v = make_inputs(length=length, dim=16, value_dim=16, dtype=torch.float32)
    log_decay = make_decay(decay, "linear", length=length)
    decays = {} if log_decay is None else {"log_decay": log_decay}
    inputs = tensors_of(q, k, v)
    monkeypatch.setattr(ops_hla, "BACKEND", "torch")
    expected, end = function(*(x.double() for x in inputs), **decays, form=form, return_state=True, normalize=True)
    first = [x[:, :, :split].to(GPU) for x in (q, k, v)]
    last = [x[:, :, split:].to(GPU) for x in (q, k, v)]
    halves = [{}, {}] if not decays else [{"log_decay": log_decay}] * 2
    if decay == "kv_token":
        halves = [{"log_decay": x} for x in (log_decay[..., :split], log_decay[..., split:])]
    monkeypatch.setattr(ops_hla, "BACKEND", backend)
    out, state = function(*first, **halves[0], form=form, return_state=True, normalize=True)
    rest, state = function(*last, **halves[1], form=form, return_state=True, normalize=True, initial_state=state)
    precision = 1e-5 if GPU == "cpu" or backend == "torch" else 5e-3  # the kernels' products are TF32
    assert_same_function(torch.cat([out, rest], 2).cpu(), expected, inputs, precision)
    for a, b in zip(state, end, strict=True):
        assert_close(a.cpu(), b, precision)


def stand_in(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """The signature of the kernels, in plain torch: what they are handed is tested where they are not installed."""
    weights = ops_hla.chunk_weights(None if g is None else g.mT, q.shape[1], None, None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, state = ops_hla.attend_block(q * scale, k, v, weights, initial_state)
    return out.transpose(1, 2), state if output_final_state else None


@pytest.fixture(params=["stand-in", pytest.param("fla", marks=NEEDS_KERNELS)])
def kernels(request, monkeypatch):
    """`called` lists the kernels called since; on `device`, to `precision` in fp32."""
    if request.param == "fla":
        pytest.importorskip("fla.ops.simple_gla")
        pair = ops_hla._fla_kernels()
    else:
        pair = stand_in, stand_in
    called = []

    def counted(kernel):
        return lambda *tensors, **options: called.append(kernel) or kernel(*tensors, **options)

    monkeypatch.setattr(ops_hla, "_fla_kernels", lambda: [counted(kernel) for kernel in pair])
    monkeypatch.setattr(ops_hla, "BACKEND", "kernels")
    on_gpu = request.param == "fla" and GPU == "cuda"  # where the kernels' products are TF32
    return SimpleNamespace(called=called, device=GPU if on_gpu else "cpu", precision=5e-3 if on_gpu else 1e-5)


def states_of_passes(state):
    """Of an operator or of `windowed_attention`."""
    return [x for x in (state[1:4] if isinstance(state, LayerState) else state) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 130])
@pytest.mark.parametrize("window", [None, "windowed"])
@pytest.mark.parametrize("name", ["linear", "hla3"])
def test_kernels_at_any_length(name, window, length, dtype, kernels, monkeypatch):
    """Against the literal definition; the row mass makes the number of values odd. Beside a stand-in the window's
    softmax is exact: a gradient of its largest score differs where plain PyTorch rounds two of them to the same."""
    exact = kernels.device == "cpu" and not near_hla.use_triton(torch.empty(0))
    product_dtype = ops_hla.compute_dtype if exact else lambda x: x.dtype
    monkeypatch.setattr("hla_hf.window_hla.product_dtype", product_dtype)
    heads = 4, 2
    inputs = [x.to(dtype) for x in make_inputs(heads, length, dim=8, value_dim=6, batch=1, dtype=torch.float32)]
    q, k, v = inputs = tensors_of(*inputs)
    on_device = [x.to(kernels.device) for x in inputs]
    if window is None:
        expected = definition(name, q, k, v, normalize=True, log_decay=-0.1)
        out, state = OPERATORS[name](*on_device, normalize=True, log_decay=-0.1, return_state=True)
    else:
        settings = cast(windowed_settings(name, "query", "head", heads), torch.float32)
        expected = windowed_definition(name, *(x.double() for x in inputs), **cast(settings, torch.float64))
        settings = {n: x.to(kernels.device) if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
        settings |= WINDOWED | {"accumulator_map": lambda x: x.float().exp(), "operator": name}
        settings |= {"query_map": lambda x: x.float().exp(), "key_map": lambda x: x.float().exp()}
        out, state = windowed_attention(*on_device, return_state=True, **settings)
        state = states_of_passes(state)
    assert bool(kernels.called) == (length > 1)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    precision = kernels.precision if dtype == torch.float32 else 2**-6
    # one token answers with its value, whatever its query and key
    assert_same_function(out.cpu(), expected, inputs if length > 1 else [v], precision)


@pytest.mark.parametrize("decay", [None, "kv_token"])
@pytest.mark.parametrize("given", ["attention_mask", "segment_ids", "both"])
@pytest.mark.parametrize(
    "name, window", [*((x, None) for x in OPERATORS), *((x, "windowed") for x in OPERATORS), ("hla3", "slots")]
)
def test_kernels_with_padding_documents_and_carried_state(name, window, given, decay, kernels, monkeypatch):
    """Against plain torch in float64, in two calls."""
    length, split = 74, 67
    q, k, v = tensors_of(*make_inputs((4, 2), length, dim=8, value_dim=6, dtype=torch.float32))
    log_decay = make_decay(decay, name, (4, 2), length)
    segments = torch.cat([make_segments(), 5 + torch.arange(length - 37).expand(2, -1) // 20], 1)
    options = {"attention_mask": make_mask("interior", length), "segment_ids": segments}
    options = options if given == "both" else {given: options[given]}
    function, settings = OPERATORS[name], {"normalize": True}
    if window is not None:
        function, settings = windowed_attention, windowed_settings(name, "query", None, (4, 2))
        settings |= WINDOWED | WINDOWS[window] | {"operator": name, "chunk_size": 16}
    settings.pop("log_decay", None)

    def run(dtype, device, splits):
        state, outputs = None, []
        fixed = {n: x.to(device, dtype) if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
        for start, end in pairwise(splits):
            per_token = {n: x[:, start:end].to(device) for n, x in options.items()}
            decays = None if log_decay is None else log_decay[..., start:end].to(device)
            tokens = (x[:, :, start:end].to(device, dtype) for x in (q, k, v))
            out, state = function(
                *tokens, log_decay=decays, initial_state=state, return_state=True, **per_token, **fixed
            )
            outputs.append(out.cpu())
        return torch.cat(outputs, 2), states_of_passes(state)

    out, state = run(torch.float32, kernels.device, [0, split, length])
    assert kernels.called
    monkeypatch.setattr(ops_hla, "BACKEND", "torch")
    expected, end = run(torch.float64, "cpu", [0, split, length])
    assert_same_function(out, expected, [q, k, v], 10 * kernels.precision)
    for a, b in zip(state, end, strict=True):
        assert_close(a.cpu(), b, 10 * kernels.precision)


@pytest.mark.parametrize("mode", ["pure", "windowed", "slots"])
def test_kernels_in_a_model(mode, kernels, monkeypatch):
    """Prefill, tokens of decoding that go on from the kernels' states, and more tokens at once, with padding."""
    model = tiny_model(dtype=torch.float32, hla_operator="hla2", hla_feature_map="hedgehog", **MODES[mode])
    ids, mask, steps = tokens(2, 36), torch.ones(2, 36, dtype=torch.long), [24, 1, 1, 10]
    mask[0, :5] = 0
    logits, _ = stepwise_logits(model.to(kernels.device), ids.to(kernels.device), steps, mask.to(kernels.device))
    assert kernels.called
    monkeypatch.setattr(ops_hla, "BACKEND", "torch")
    expected, _ = stepwise_logits(model.to("cpu", torch.float64), ids, steps, mask)
    assert_close(logits.cpu()[mask == 1], expected[mask == 1], 100 * kernels.precision)


@pytest.mark.parametrize("window", [None, "windowed", "slots"])
def test_kernels_are_given_tensors_without_a_wait(window, monkeypatch):
    """On the meta device, where a look at a value raises; the kernels themselves are stood in for."""
    monkeypatch.setattr(ops_hla, "_fla_kernels", lambda: (stand_in, stand_in))
    monkeypatch.setattr(ops_hla, "BACKEND", "kernels")
    q, k, v = tensors_of(*(x.to("meta") for x in make_inputs(dtype=torch.bfloat16)))
    options = {"attention_mask": make_mask("left").to("meta"), "segment_ids": make_segments().to("meta")}
    function = hla3
    if window is not None:
        function, parameters = windowed_attention, windowed_settings("hla3", "query", None)
        moved = {n: x.to("meta", torch.float32) if isinstance(x, torch.Tensor) else x for n, x in parameters.items()}
        options |= moved | WINDOWED | WINDOWS[window] | {"operator": "hla3"}
    out, state = function(q, k, v, return_state=True, **options)
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in states_of_passes(state))
    assert all(x.is_meta for x in gradients(out, [q, k, v], torch.empty_like(out)))


def test_kernels_with_strong_decay(kernels):
    """Decays of exp(-50) per token: nothing overflows, forward or backward."""
    q, k, v = make_inputs((4, 2), 131, dtype=torch.float32)
    log_decay = -50 * torch.rand(2, 4, 131, dtype=torch.float64)
    inputs = tensors_of(q, k, v)
    expected = definition("hla2", q, k, v, log_decay=log_decay)
    on_device = [x.to(kernels.device) for x in (*inputs, log_decay)]
    out = hla2(*on_device[:3], log_decay=on_device[3])
    assert kernels.called
    assert_same_function(out.cpu(), expected, inputs, 100 * kernels.precision)


# ---- feature maps and bad input ----------------------------------------


def test_feature_maps():
    x = torch.randn(2, 3, 4, 6)
    weight = torch.randn(3, 6, 6)
    y = torch.einsum("bhtd,hdf->bhtf", x, weight)
    assert_close(feature_map("hedgehog", x, weight), torch.cat([y.softmax(-1), (-y).softmax(-1)], -1), 1e-6)
    size = torch.randn(x.shape[1], x.shape[3])
    expected = feature_map("hedgehog", x, weight) * (x * size[:, None]).sum(-1, keepdim=True).exp()
    assert_close(feature_map("hedgehog", x, weight, size), expected, 1e-5)
    assert feature_map("hedgehog", x, weight, size * 1e30).isfinite().all()
    assert torch.equal(feature_map("identity", x), x)
    assert torch.equal(feature_map("relu", x), x.clamp(min=0))
    assert_close(feature_map("elu", x), torch.where(x > 0, x + 1, x.exp()), 1e-6)
    assert_close(feature_map("softmax", x), x.exp() / x.exp().sum(-1, keepdim=True), 1e-6)
    with pytest.raises(ValueError, match=r"feature map .cosine. is unknown.*hedgehog"):
        feature_map("cosine", x)


Q, K, V = torch.zeros(2, 6, 5, 4), torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((Q[:, :5], K, V), {}, "q a multiple of it"),
        ((Q, K, V[:, :1]), {}, "same number of heads"),
        ((Q, K[:, :, :4], V), {}, "same length"),
        ((Q[:, :, :0], K[:, :, :0], V[:, :, :0]), {}, "at least 1"),
        ((Q, K[..., :3], V), {}, "head_dim"),
        ((Q[0], K, V), {}, r"must be \[B, heads, T, dim\]"),
        ((Q, K, V), {"log_decay": 0.1}, "log_decay must be at most 0, got a value of 0.1"),
        ((Q, K, V), {"log_decay": torch.zeros(5)}, r"log_decay must be a number.*got shape \(5,\)"),
        ((Q, K, V), {"log_decay": (None, None, None)}, "log_decay has 3 entries"),
        ((Q, K, V), {"attention_mask": torch.ones(2, 6)}, r"attention_mask must be \[B, T\] = \(2, 5\)"),
        ((Q, K, V), {"segment_ids": torch.ones(2, 6)}, r"segment_ids must be \[B, T\] = \(2, 5\), got \(2, 6\)"),
        ((Q, K, V), {"form": "fast"}, "form 'fast' is unknown"),
        ((Q, K, V), {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ((Q, K, V), {"initial_state": (V,)}, "initial_state must have 2 tensors, got 1"),
        ((Q, K, V), {"form": "dense", "return_state": True}, "form='dense' takes whole sequences"),
        ((Q, K, V), {"e": Q[..., :3]}, "e must be shaped as q"),
    ],
)
def test_bad_input(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        hla2(*arguments, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"num_sinks": -1}, "num_sinks must be at least 0, got -1"),
        ({"operator": "hla4"}, "operator 'hla4' is unknown"),
        ({"attention_mask": torch.ones(2, 6)}, "attention_mask"),
    ],
)
def test_bad_windowed_input(settings, message):
    with pytest.raises(ValueError, match=message):
        windowed_attention(Q, K, V, gate=torch.ones(6), **(WINDOWED | settings))


def test_operator_names_are_those_of_the_configuration():
    assert set(OPERATORS) == set(ops_hla.OPERATORS)


@pytest.mark.parametrize("with_state", (False, True))
@pytest.mark.parametrize("with_decay", (False, True))
def test_states_of_chunks_without_a_loop(with_decay, with_state):
    inputs = [torch.randn(2 * 7, 3, 4, 5, dtype=torch.float64)]
    across = torch.rand(2 * 7, 3, dtype=torch.float64)
    across[3], across[9, 1], across[10, 1] = 0, 0, 1e-320  # a document begins; what is no normal number counts as 0
    inputs += [across] if with_decay else []
    inputs += [torch.randn(2, 3, 4, 5, dtype=torch.float64)] if with_state else []

    def of_loop(update, across=None, state=None):
        weights = across if across is None else ops_hla.Weights(None, None, None, across)
        return ops_hla._chunk_states(update, weights, state, 7)

    def at_once(update, across=None, state=None):
        return ops_hla._all_chunk_states(update, across, state, 7)

    results = []
    for function in (of_loop, at_once):
        values = [x.clone().requires_grad_() for x in inputs]
        arguments = dict(zip(["update", *["across"] * with_decay, *["state"] * with_state], values, strict=True))
        states = function(**arguments)
        sum((x * x.detach().cos()).sum() for x in states).backward()
        results.append((*states, *(x.grad for x in values)))
    normal = across > 1e-300
    for expected, found in zip(*results, strict=True):
        if expected.shape == across.shape:  # no gradient through what is taken for 0, as through a document's start
            expected, found = expected * normal, found * normal
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
