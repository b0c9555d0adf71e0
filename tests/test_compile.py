"""torch.compile of the whole model and of the decoding step, without a graph break or a recompilation; torch.export."""

import pytest
import torch
from tiny import CACHE, MODES, cache_of, positions, tiny_model, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import CompileConfig, StaticCache, Trainer, TrainingArguments

import hla_hf


CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SLOW = pytest.mark.slow
LENGTHS = (20, 64, 65, 200)
TIGHT = {"atol": 2e-5, "rtol": 2e-5}  # in float64: rotations and some parameters stay fp32 there too
DYNAMIC = MODES | {
    "learned": MODES["slots"] | {"hla_slot_score": "learned"},
    "recall": MODES["slots"] | {"hla_slot_score": "recall", "hla_decay": "learned"},
    "third order": MODES["windowed"] | {"hla_operator": "hla3", "hla_decay": 0.97},
    "pure, decay": MODES["pure"] | {"hla_decay": "learned"},
}
SOME = ["windowed", *(pytest.param(mode, marks=SLOW) for mode in MODES if mode != "windowed")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", SOME)
@pytest.mark.parametrize("use_cache", (False, pytest.param(True, marks=SLOW)))
def test_forward_compiles_as_one_graph(mode, use_cache):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 40)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for seed in range(3):
            ids = tokens(2, 40, seed=seed)
            assert_close(compiled(ids, use_cache=use_cache).logits, model(ids).logits, **CLOSE)
    assert counter.frame_count == 1


@SLOW
@pytest.mark.parametrize("mode", MODES)
def test_training_step_compiles(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected.get(name), msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


@pytest.mark.parametrize("mode", ["windowed", "slots", "mixed", pytest.param("pure", marks=SLOW)])
@torch.no_grad()
def test_decoding_step_compiles_once(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 40)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    cache = StaticCache(config=model.config, max_cache_len=40)
    for start in (0, 1):  # the second text after a reset, with the same compiled step
        logits = [model(ids[:, :20], **{CACHE: cache}).logits]
        addresses = [x.data_ptr() for i in model.config.hla_layer_ids for x in cache.layers[i].state if x is not None]
        for i in range(20, 40):
            logits.append(step(ids[:, i : i + 1], **{CACHE: cache}).logits)
        assert addresses == [
            x.data_ptr() for i in model.config.hla_layer_ids for x in cache.layers[i].state if x is not None
        ]
        assert_close(torch.cat(logits, 1), model(ids).logits, **CLOSE)
        assert counter.frame_count == 1, start
        cache.reset()
        ids = ids.flip(1)


@pytest.mark.parametrize("mode", SOME)
def test_generate_with_the_static_cache_compiled(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 25)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **settings)
    counters.clear()
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True  # else Transformers compiles on accelerators only
    out = model.generate(ids, cache_implementation="static", compile_config=compile_config, **settings)
    assert torch.equal(out, expected) and counters["stats"]["unique_graphs"] == 1


class Step(torch.nn.Module):
    """One token of decoding as a function of tensors: ids `[B, 1]`, position `[]`, states to logits and states."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, ids, position, state):
        layers = self.cache.layers
        for layer, tensors in zip(layers, state, strict=True):
            layer.state, layer.seq_length = hla_hf.LayerState(*tensors), position
        logits = self.model(ids, position_ids=position.expand(ids.shape), **{CACHE: self.cache}).logits
        return logits, [tuple(layer.state) for layer in layers]


@pytest.mark.parametrize("mode", ["windowed", "slots", pytest.param("pure", marks=SLOW)])
@torch.no_grad()
def test_decoding_step_exports(mode, tmp_path):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 40)
    cache = hla_hf.new_cache(model.config)
    model(ids[:, :20], **{CACHE: cache})
    state = [tuple(layer.state) for layer in cache.layers]
    step = Step(model, hla_hf.new_cache(model.config))
    program = torch.export.export(step, (ids[:, 20:21], torch.tensor(20), state), strict=False)
    torch.export.save(program, tmp_path / "step.pt2")
    step = torch.export.load(tmp_path / "step.pt2").module()
    expected = model(ids).logits
    for i in range(20, 40):
        logits, state = step(ids[:, i : i + 1], torch.tensor(i), state)
        assert_close(logits[:, 0], expected[:, i], **CLOSE)


# ---- one graph for every length ----------------------------------------


def only_length_changes(length, what, seed=0):
    """Two rows of a text whose length a compiler is told to expect to change: ids and what else the model is given."""
    ids = tokens(2, length, seed=seed)
    options = {}
    if what == "padding":
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        mask[1, length // 2 : length // 2 + 3] = 0
        options = {"attention_mask": mask}
    elif what == "documents":
        options = {"position_ids": torch.arange(length).expand(2, -1) % (length // 2 + 3)}
    for x in (ids, *options.values()):
        torch._dynamo.mark_dynamic(x, 1)
    return ids, options


def assert_same_states(cache, expected):
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if not isinstance(other, hla_hf.HLACacheLayer):
            continue
        assert layer.seq_length == other.seq_length
        for name, x, y in zip(other.state._fields, layer.state, other.state, strict=True):
            assert_close(x, y, msg=lambda m, n=name: f"{n}: {m}", **TIGHT)


def cases(fast, backend_of_fast="aot_eager"):
    """Mode, what is given, backend: the slow ones with the real Inductor."""
    everything = [(mode, what) for mode in DYNAMIC for what in ("", "padding", "documents")]
    slow = [(mode, what, "inductor") for mode, what in everything if (mode, what) in fast or mode in DYNAMIC.keys() - MODES]
    return [*((*case, backend_of_fast) for case in fast), *(pytest.param(*case, marks=SLOW) for case in slow)]


@pytest.mark.parametrize(
    ("mode", "what", "backend"), cases([("windowed", "padding"), ("slots", "documents"), ("pure", "")])
)
def test_training_is_one_graph_for_every_length(mode, what, backend):
    model = tiny_model(**DYNAMIC[mode])
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in LENGTHS:
        ids, options = only_length_changes(length, what)
        results = []
        for function in (model, compiled):
            loss = function(ids, labels=ids, use_cache=False, **options).loss
            loss.backward()
            results.append((loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
            model.zero_grad()
        (expected, expected_grads), (loss, grads) = results
        assert_close(loss, expected, **TIGHT)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            assert_close(grad, expected_grads[name], msg=lambda m, n=name: f"{length}, {n}: {m}", **TIGHT)
    assert counter.frame_count == 1
