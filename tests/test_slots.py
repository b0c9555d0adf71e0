"""Exact slots against a token loop in float64, forward and backward."""

import pytest
import reference
import torch
from test_ops import (
    HEADS,
    OPERATORS,
    PASSES,
    assert_close,
    assert_same_function,
    documents_of,
    gradients,
    make_inputs,
    make_mask,
    make_segments,
    of_head,
    tensors_of,
    windowed_attention,
    windowed_settings,
)
from tiny import CACHE, cache_of, positions, stepwise_logits, tiny_model, tokens
from transformers import StaticCache

import hla_hf
from hla_hf.window_hla import FarParameters, Tokens, WindowSettings, decode_step, step_places, step_tokens


SLOTS = {"window": 7, "num_sinks": 3, "slots": 5, "query_map": torch.exp, "key_map": torch.exp}
SCORES = ["given", "attention", "recall"]
CASES = [*((name, "given") for name in OPERATORS), ("hla3", "attention"), ("hla3", "recall")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def settings_of(name, accumulator="query", decay=None, heads=(6, 2)):
    return SLOTS | windowed_settings(name, accumulator, decay, heads) | {"operator": name}


def make_scores(k):
    """Ties among them too."""
    return torch.randint(0, 12, k.shape[:3]).double()


def scores_of(kind, q, k, v, window=7, num_sinks=3):
    """By their definitions, `[B, Hkv, T]`."""
    group, rows = q.shape[1] // k.shape[1], []
    for b, j in ((b, j) for b in range(k.shape[0]) for j in range(k.shape[1])):
        if kind == "recall":
            rows.append(reference.recall_error(k[b, j].exp(), v[b, j], sinks=num_sinks))
        else:
            queries = q[b, j * group : (j + 1) * group]
            rows.append(
                reference.received_attention(
                    queries, k[b, j], window=window, sinks=num_sinks, scale=q.shape[-1] ** -0.5
                )
            )
    return torch.stack(rows).view(k.shape[:3]).detach()


def definition(
    q, k, v, scores, *, operator, window, num_sinks, slots, query_map, key_map, accumulator_map, log_decay, **settings
):
    heads = q.shape[1], k.shape[1]
    decays = log_decay if isinstance(log_decay, tuple) else (log_decay,) * PASSES[operator]
    rows = []
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(heads[0])):
        j = h // (heads[0] // heads[1])
        rows.append(
            reference.with_slots(
                operator, q[b, h], k[b, j], v[b, j], query_map(q[b, h]), key_map(k[b, j]), scores[b, j],
                window=window, sinks=num_sinks, slots=slots, scale=q.shape[-1] ** -0.5,
                e=None if accumulator_map is None else accumulator_map(q[b, h]),
                decays=[of_head(x, b, h, heads) for x in decays],
                **{n: of_head(x, b, h, heads) for n, x in settings.items()},
            )
        )  # fmt: skip
    return torch.stack(rows).view(*q.shape[:3], -1)


def of_kind(kind, settings, scores):
    return settings | ({"slot_scores": scores} if kind == "given" else {"slot_score": kind})


@pytest.mark.parametrize("name", OPERATORS)
def test_token_loop_without_slots_is_the_windowed_definition(name):
    q, k, v = make_inputs((3, 1))
    settings = settings_of(name, "query", "token", (3, 1)) | {"slots": 0}
    expected = windowed_attention(q, k, v, **settings)
    assert_close(definition(q, k, v, make_scores(k), **settings), expected)


@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("accumulator", ["query", "key"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name, accumulator, decay):
    q, k, v = make_inputs()
    settings, scores = settings_of(name, accumulator, decay), make_scores(k)
    inputs = tensors_of(q, k, v, settings["gate"])
    expected = definition(q, k, v, scores, **settings)
    for chunk_size in (4, 8, 64):
        out = windowed_attention(q, k, v, slot_scores=scores, chunk_size=chunk_size, **settings)
        assert_same_function(out, expected, inputs)


@pytest.mark.parametrize("length", [1, 2, 7, 10, 11, 14, 15, 16, 63, 64, 65, 131])
@pytest.mark.parametrize("heads", HEADS)
def test_lengths_and_heads(heads, length):
    """Among them those at which the window and the slots are just full."""
    q, k, v = make_inputs(heads, length, batch=1)
    settings, scores = settings_of("hla3", "query", None, heads), make_scores(k)
    inputs = tensors_of(q, k, v)
    expected = definition(q, k, v, scores, **settings)
    for chunk_size in (5, 64):
        out = windowed_attention(q, k, v, slot_scores=scores, chunk_size=chunk_size, **settings)
        assert_same_function(out, expected, inputs)


@pytest.mark.parametrize(
    ("window", "sinks", "slots"), [(1, 0, 1), (1, 0, 40), (4, 0, 3), (7, 2, 1), (16, 3, 8), (5, 0, 64), (40, 2, 4)]
)
def test_sizes(window, sinks, slots):
    q, k, v = make_inputs()
    settings = settings_of("ahla") | {"window": window, "num_sinks": sinks, "slots": slots}
    scores = make_scores(k)
    inputs = tensors_of(q, k, v)
    expected = definition(q, k, v, scores, **settings)
    for chunk_size in (4, 64):
        out = windowed_attention(q, k, v, slot_scores=scores, chunk_size=chunk_size, **settings)
        assert_same_function(out, expected, inputs)
    if window + slots > 40 and not sinks:  # everything is near
        softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert_close(out, softmax)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["attention", "recall"])
def test_scores(kind, heads):
    q, k, v = make_inputs(heads, 61)
    q = 3 * q
    settings = settings_of("ahla", heads=heads)
    inputs = tensors_of(q, k, v)
    expected = definition(q, k, v, scores_of(kind, q, k, v), **settings)
    for chunk_size in (4, 64):
        out = windowed_attention(q, k, v, slot_score=kind, chunk_size=chunk_size, **settings)
        assert_same_function(out, expected, inputs)
    other = windowed_attention(q, k, v, slot_scores=make_scores(k), **settings)
    assert (other - out).abs().max() > 1e-3


def step(tokens, state, scores, settings):
    """`decode_step` of one token, by the arguments of `windowed_attention`."""
    parameters, window = (
        kind(**{name: settings[name] for name in names if name in settings})
        for kind, names in ((FarParameters, FarParameters._fields), (WindowSettings, WindowSettings.__match_args__))
    )
    q, k, v, mask = tokens
    state = state.map(torch.clone)
    with torch.no_grad():
        places = step_places(step_tokens(state, mask, window, state.k.shape[2]), window)
        return decode_step(Tokens(q, k, v, q, k), state, parameters, window, places, scores), state


@pytest.mark.parametrize("padding", [None, "left", "right", "interior"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_padding_and_carried_state(name, kind, padding):
    q, k, v = make_inputs(length=43)
    scores, mask = make_scores(k), make_mask(padding, 43)
    settings = settings_of(name, decay="head") | {"chunk_size": 8}
    options = of_kind(kind, settings, None)
    options.pop("slot_scores", None)
    inputs = tensors_of(q, k, v)

    def run(part, state=None):
        given = {"slot_scores": scores[:, :, part]} if kind == "given" else {}
        return windowed_attention(
            *(x[:, :, part] for x in (q, k, v)), attention_mask=mask[:, part], initial_state=state, return_state=True,
            **options, **given,
        )  # fmt: skip

    out = run(slice(None))[0]
    expected = torch.zeros_like(out)
    for b in range(2):
        real = mask[b].bool()
        row = [x[b : b + 1, :, real] for x in (q, k, v)]
        row_scores = scores[b : b + 1, :, real] if kind == "given" else scores_of(kind, *row)
        expected[b, :, real] = definition(*row, row_scores, **{n: x for n, x in settings.items() if n != "chunk_size"})[
            0
        ]
    assert_same_function(out, expected, inputs)
    for grad in gradients(out, inputs):
        assert (grad.transpose(1, 2)[mask == 0] == 0).all()
    for split in range(1, 43) if padding is None and name == "hla3" else (5, 13, 30):
        first, state = run(slice(0, split))
        second, _ = run(slice(split, None), state)
        assert_same_function(torch.cat([first, second], 2), expected, inputs)
    for start in (1, 9, 16, 30):  # prefill, single tokens, and again several
        outs, state = [], None
        first, state = run(slice(0, start))
        outs.append(first)
        for i in range(start, 38):
            part = slice(i, i + 1)
            one = [*(x[:, :, part].detach() for x in (q, k, v)), None if padding is None else mask[:, part]]
            out, state = step(one, state, scores[:, :, part] if kind == "given" else None, options)
            outs.append(out)
        outs.append(run(slice(38, None), state)[0])
        assert_close(torch.cat(outs, 2), expected, 1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 4, 7])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_packed_documents(name, window, kind, masked):
    q, k, v = make_inputs()
    segments, mask = make_segments(), make_mask("interior" if masked else None)
    settings = settings_of(name, decay="token") | {"window": window, "slots": 3, "num_sinks": 1}
    scores = make_scores(k)
    inputs = tensors_of(q, k, v, settings["gate"], settings["log_decay"])
    options = of_kind(kind, settings, scores)
    out, state = windowed_attention(
        q, k, v, segment_ids=segments, attention_mask=mask, chunk_size=8, return_state=True, **options
    )
    expected, final = torch.zeros_like(out), {}
    for b, part in documents_of(segments, mask):
        document = [x[b : b + 1, :, part] for x in (q, k, v)]
        alone = options | {"log_decay": options["log_decay"][b : b + 1, :, part]}
        if kind == "given":
            alone["slot_scores"] = scores[b : b + 1, :, part]
        alone_out, final[b] = windowed_attention(*document, return_state=True, **alone)
        expected[b, :, part] = alone_out[0]
    assert_same_function(out, expected, inputs)
    more = [torch.rand_like(x[:, :, :9]) for x in (q, k, v)]
    options["log_decay"] = options["log_decay"][..., :9]
    if kind == "given":
        options["slot_scores"] = scores[:, :, :9]
    after = windowed_attention(*more, initial_state=state, **options)
    for b, state in final.items():
        row = options | {"log_decay": options["log_decay"][b : b + 1]}
        row |= {"slot_scores": scores[b : b + 1, :, :9]} if kind == "given" else {}
        assert_close(after[b], windowed_attention(*(x[b : b + 1] for x in more), initial_state=state, **row)[0], 1e-11)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck(name):
    q, k, v = make_inputs((2, 1), 9, dim=2, value_dim=2, batch=1)
    options = settings_of(name, heads=(2, 1)) | {"window": 2, "num_sinks": 1, "slots": 2}
    mix, coefficient, gate = (options.pop(n) for n in ("value_mix", "coefficient", "gate"))
    options["slot_scores"] = torch.rand(1, 1, 9)

    def call(q, k, v, mix, coefficient, gate):
        return windowed_attention(
            q, k, v, value_mix=mix, coefficient=coefficient, gate=gate, chunk_size=3,
            attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 1]]), **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, tensors_of(q, k, v, mix, coefficient, gate), fast_mode=True)


@pytest.mark.parametrize("kind", SCORES)
def test_compiles_as_one_graph(kind):
    torch._dynamo.reset()  # a second length would be compiled otherwise
    q, k, v = make_inputs(length=29)
    options = of_kind(kind, settings_of("hla3", decay="head"), make_scores(k)) | {"chunk_size": 8}
    options["segment_ids"] = (torch.arange(29) > 5).long().expand(2, -1)
    inputs = tensors_of(q, k, v)
    compiled = torch.compile(windowed_attention, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled(q, k, v, **options), windowed_attention(q, k, v, **options), inputs)


@pytest.mark.parametrize("kind", SCORES)
def test_low_precision(kind):
    q, k, v = make_inputs(length=65, dim=32, value_dim=32, dtype=torch.bfloat16)
    settings = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in settings_of("ahla").items()}
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
    scores = (
        make_scores(k) + torch.rand(k.shape[:3])
        if kind == "given"
        else scores_of(kind, *(x.double() for x in (q, k, v)))
    )
    options = of_kind(kind, settings, scores)
    out, state = windowed_attention(q, k, v, return_state=True, **options)
    assert_close(out, definition(*(x.double() for x in (q, k, v)), scores, **exact), 1e-2)
    assert state.k.dtype == torch.bfloat16 and state.score.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": -1}, "slots must be at least 0, got -1"),
        ({"slot_score": "best"}, "slot_score 'best' is unknown; it must be one of"),
        ({"slot_scores": torch.zeros(2, 2, 5)}, r"slot_scores must be \[B, Hkv, T\] = \(2, 2, 37\), got .*\[2, 2, 5\]"),
    ],
)
def test_bad_input(settings, message):
    with pytest.raises(ValueError, match=message):
        windowed_attention(*make_inputs(), gate=torch.ones(6), **SLOTS | settings)


# ---- models ----------------------------------------


def slots_model(**settings):
    return tiny_model(**{"hla_window": 8, "hla_num_sinks": 2, "hla_slots": [6, 3], "hla_operator": "hla3"} | settings)


@torch.no_grad()
def test_no_slots_is_the_model_without_the_field():
    ids = tokens(2, 40)
    plain = slots_model(hla_slots=0)
    without, with_slots = plain(ids), slots_model()(ids)
    assert torch.equal(slots_model(hla_slots=[0, 0])(ids).logits, without.logits)
    assert not torch.allclose(with_slots.logits, without.logits)
    states = [layer.state for layer in cache_of(without).layers]
    assert all(state.score is None and state.number is None and state.recall is None for state in states)
    places = [layer.state.number.shape[2] for layer in cache_of(with_slots).layers]
    assert places == [states[0].k.shape[2] + count for count in (6, 3)]


@pytest.mark.parametrize("kind", ["attention", "recall", "learned"])
@torch.no_grad()
def test_model_decodes_as_it_reads(kind, tmp_path):
    """Padded rows; in pieces and token by token; reordered rows; a saved cache; a static one."""
    model, ids = slots_model(hla_slot_score=kind), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    logits, cache = stepwise_logits(model, ids, (13, 4, *[1] * 23, 12, *[1] * 8), mask)
    assert (logits - expected)[mask.bool()].abs().max() < 1e-9
    _, cache = stepwise_logits(model, ids, (20, *[1] * 10), mask)
    size = hla_hf.cache_nbytes(cache)
    model.save_cache(cache, tmp_path / "read.safetensors")
    for again in (model.load_cache(tmp_path / "read.safetensors"), cache):
        again.reorder_cache(torch.tensor([1, 0]))
        swapped, swapped_mask = ids.flip(0), mask.flip(0)
        for i in range(30, 60):
            place = positions(swapped_mask)[:, i : i + 1]
            step = {"attention_mask": swapped_mask[:, : i + 1], "position_ids": place, CACHE: again}
            out = model(swapped[:, i : i + 1], **step).logits
            assert (out[:, 0] - expected.flip(0)[:, i]).abs().max() < 1e-9
        assert hla_hf.cache_nbytes(again) == size
    static = StaticCache(config=model.config, max_cache_len=60)
    for _ in range(2):
        logits = [
            model(ids[1:, start:end], **{CACHE: static}).logits
            for start, end in ((0, 30), *((i, i + 1) for i in range(30, 60)))
        ]
        assert (torch.cat(logits, 1) - expected[1:]).abs().max() < 1e-9
        static.reset()


@pytest.mark.parametrize("kind", ["attention", "recall", "learned"])
@torch.no_grad()
def test_crop_of_steps_in_which_tokens_entered_and_left_slots(kind):
    model, ids = slots_model(hla_slot_score=kind), tokens(1, 70)
    expected = model(ids).logits
    cache = hla_hf.new_cache(model.config)
    cache.activate_past_recording()
    stepwise_logits(model, ids, (9,), cache=cache)
    for place in range(9, 60, 3):
        draft = torch.cat([ids[:, place : place + 3], tokens(1, 4, seed=place)], 1)
        out = model(draft, **{CACHE: cache}).logits
        assert (out[:, :3] - expected[:, place : place + 3]).abs().max() < 1e-9
        cache.crop(-4)


@torch.no_grad()
def test_packed_rows_of_a_model():
    model, ids = slots_model(hla_slot_score="recall"), tokens(1, 60)
    places = torch.cat([torch.arange(25), torch.arange(35)])[None]
    out = model(ids, position_ids=places, use_cache=False).logits
    for part in (slice(0, 25), slice(25, 60)):
        assert (out[:, part] - model(ids[:, part]).logits).abs().max() < 1e-9


def test_training_step_reaches_every_parameter():
    model, ids = slots_model(), tokens(2, 60)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_learned_scores():
    """They decide what is kept, are trained by what is made of `slot_scores`, and exist where there are slots only."""
    model, ids = slots_model(hla_slots=[0, 3], hla_slot_score="learned"), tokens(2, 60)
    first, second = (layer.self_attn.hla for layer in model.model.layers)
    assert not any(name.startswith("score") for name, _ in first.named_parameters())
    before = model(ids).logits
    with torch.no_grad():
        second.score_out.neg_()
    assert (model(ids).logits - before).abs().max() > 1e-3
    k, v = torch.randn(2, 2, 2, 9, 8).double()
    expected = [
        torch.nn.functional.gelu(torch.cat([k, v], -1)[:, j] @ second.score_in[j] + second.score_bias[j])
        for j in (0, 1)
    ]
    expected = torch.stack([x @ second.score_out[j] for j, x in enumerate(expected)], 1)
    scores = second.slot_scores(k, v)
    assert_close(scores, expected)
    scores.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for n, p in second.named_parameters() if n.startswith("score"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hla_slots": -1}, "hla_slots must be a number of at least 0, or one for each of the 2 HLA layers, got -1"),
        ({"hla_slots": [1, 2, 3]}, r"one for each of the 2 HLA layers, got \[1, 2, 3\]"),
        ({"hla_slots": [1, -2]}, r"at least 0.*got \[1, -2\]"),
        ({"hla_window": 0}, r"hla_slots=\[6, 3\] needs a window that tokens leave, got hla_window=0"),
        ({"hla_slot_score": "best"}, "hla_slot_score='best' is unknown; it must be one of"),
    ],
)
def test_bad_config(settings, message):
    with pytest.raises(ValueError, match=message):
        slots_model(**settings)
