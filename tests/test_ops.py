"""The operators against their literal definitions (reference.py), forward and backward."""

import pytest
import reference
import torch

from hla_hf import ops_hla
from hla_hf.ops_hla import ahla, causal_linear_attention, feature_map, hla2, hla3, windowed_attention


OPERATORS = {"linear": causal_linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}
PASSES = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}
FORMS = ("dense", "recurrent", "chunk")
STATEFUL_FORMS = [form for form in FORMS if form != "dense"]
HEADS = [(3, 3), (6, 2), (4, 1)]
LENGTHS = [1, 2, 63, 64, 65, 127, 131]


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


def windowed_definition(name, q, k, v, *, window=7, sinks=3, log_decay=None, accumulator_map=None, **settings):
    heads = q.shape[1], k.shape[1]
    decays = log_decay if isinstance(log_decay, tuple) else (log_decay,) * PASSES[name]
    rows = []
    for b in range(q.shape[0]):
        outputs = []
        for h in range(heads[0]):
            j = h // (heads[0] // heads[1])
            outputs.append(
                reference.windowed(
                    name, q[b, h], k[b, j], v[b, j], q[b, h].exp(), k[b, j].exp(), window=window, sinks=sinks,
                    scale=q.shape[-1] ** -0.5, e=None if accumulator_map is None else q[b, h].exp(),
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


def test_windowed_low_precision():
    q, k, v = make_inputs(length=65, dim=32, value_dim=32, dtype=torch.bfloat16)
    settings = {
        n: x.float() if isinstance(x, torch.Tensor) else x for n, x in windowed_settings("ahla", "key", None).items()
    }
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
    out, state = windowed_attention(q, k, v, operator="ahla", return_state=True, **WINDOWED, **settings)
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in state[-3:])
    expected = windowed_definition("ahla", q.double(), k.double(), v.double(), **exact)
    assert_close(out, expected, 2**-6)  # the maps run in the dtype of q and k


# ---- feature maps and bad input ----------------------------------------


def test_feature_maps():
    x = torch.randn(2, 3, 4, 6)
    weight = torch.randn(3, 6, 6)
    y = torch.einsum("bhtd,hdf->bhtf", x, weight)
    assert_close(feature_map("hedgehog", x, weight), torch.cat([y.softmax(-1), (-y).softmax(-1)], -1), 1e-6)
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
