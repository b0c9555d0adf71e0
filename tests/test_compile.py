"""torch.compile of the whole model and of the decoding step, without a graph break or a recompilation; torch.export."""

import pytest
import torch
from tiny import CACHE, MODES, cache_of, tiny_model, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import CompileConfig, StaticCache, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

import hla_hf


CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SLOW = pytest.mark.slow
LENGTHS = (20, 64, 65, 200)
TIGHT = {"atol": 1e-10, "rtol": 1e-10}
WITH_DECAY = {"hla_decay": "learned"}
# Of which kind each mode is tested with, as they differ in little else; with the real Inductor by `make test-slow`.
DYNAMIC = {
    "windowed": MODES["windowed"],
    "windowed, padding": MODES["windowed"] | WITH_DECAY,
    "windowed, documents": MODES["windowed"] | {"hla_operator": "hla3"},
    "slots": MODES["slots"] | {"hla_slot_score": "learned"},
    "slots, padding": MODES["slots"] | {"hla_slot_score": "recall"},
    "slots, documents": MODES["slots"],
    "pure": MODES["pure"],
    "pure, padding": MODES["pure"] | WITH_DECAY,
    "pure, documents": MODES["pure"] | WITH_DECAY,
}


def every_length(*fast):
    """Each mode with Inductor, some also without its kernels, which takes seconds."""
    slow = [pytest.param(mode, "inductor", marks=SLOW) for mode in DYNAMIC]
    return pytest.mark.parametrize(("mode", "backend"), [*((mode, "aot_eager") for mode in fast), *slow])


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


@pytest.fixture
def float64_throughout(monkeypatch):
    """Transformers' norms and rotations are float32 whatever the model's dtype, and Inductor rounds them otherwise."""

    def rotation(self, x, position_ids):
        angles = (position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def norm(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotation)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)


def text(mode, length, seed=0):
    """Two rows of a length that a compiler is told to expect to change: ids, and the padding or documents of a mode."""
    ids, options = tokens(2, length, seed=seed), {}
    if "padding" in mode:
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        mask[1, length // 2 : length // 2 + 3] = 0
        options = {"attention_mask": mask}
    elif "documents" in mode:
        options = {"position_ids": torch.arange(length).expand(2, -1) % (length // 2 + 3)}
    for x in (ids, *options.values()):
        torch._dynamo.mark_dynamic(x, 1)
    return ids, options


@every_length("windowed, padding")
def test_training_is_one_graph_for_every_length(mode, backend, float64_throughout):
    model = tiny_model(**DYNAMIC[mode])
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in LENGTHS:
        ids, options = text(mode, length)
        results = []
        for function in (model, compiled):
            logits = function(ids, use_cache=False, **options).logits  # Transformers' own loss is float32
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            results.append((loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
            model.zero_grad()
        (expected, expected_grads), (loss, grads) = results
        assert_close(loss, expected, **TIGHT)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            assert_close(grad, expected_grads[name], msg=lambda m, n=f"{length}, {name}": f"{n}: {m}", **TIGHT)
    assert counter.frame_count == 1


@every_length("slots")
@torch.no_grad()
def test_prefill_is_one_graph_for_every_length(mode, backend, float64_throughout):
    if "documents" in mode:
        pytest.skip("a packed batch has no cache")
    model = tiny_model(**DYNAMIC[mode])
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in LENGTHS:
        ids, options = text(mode, length)
        out, expected = (function(ids, use_cache=True, **options) for function in (compiled, model))
        real = options.get("attention_mask", torch.ones_like(ids)) != 0
        assert_close(out.logits[real], expected.logits[real], **TIGHT)
        assert_same_states(cache_of(out), cache_of(expected))
    assert counter.frame_count == 1


@SLOW
def test_trainer_compiles_twice(tmp_path):
    """With rows of changing length: for the first, then for all others."""
    rows = [{"input_ids": tokens(1, length, seed=length)[0]} for length in (20, 64, 65, 200, 33, 130, 7, 90)]
    arguments = TrainingArguments(
        tmp_path, max_steps=len(rows), per_device_train_batch_size=1, torch_compile=True, report_to=[],
        torch_compile_backend="aot_eager", save_strategy="no", use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    counters.clear()
    Trainer(
        tiny_model(**MODES["windowed"], dtype=torch.float32),
        arguments,
        train_dataset=rows,
        data_collator=lambda batch: dict.fromkeys(("input_ids", "labels"), batch[0]["input_ids"][None]),
    ).train()
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def assert_same_states(cache, expected):
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.seq_length == other.seq_length
        for name, x, y in zip(other.state._fields, layer.state, other.state, strict=True):
            if y is not None:
                assert_close(x, y, msg=lambda m, n=name: f"{n}: {m}", **TIGHT)


@torch.no_grad()
def test_a_compiled_prefill_goes_on_from_a_cache(float64_throughout):
    model = tiny_model(**MODES["windowed"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    caches = [hla_hf.new_cache(model.config) for _ in range(2)]
    for length in (20, 33):
        ids, _ = text("windowed", length, seed=length)
        out, expected = (
            function(ids, **{CACHE: cache}).logits for function, cache in zip((compiled, model), caches, strict=True)
        )
        assert_close(out, expected, **TIGHT)
        assert_same_states(*caches)


@pytest.mark.parametrize(
    "mode",
    [
        "windowed",
        *(pytest.param(x, marks=SLOW) for x in DYNAMIC if x != "windowed"),
    ],
)
@torch.no_grad()
def test_export_is_of_every_length(mode, float64_throughout):
    model = tiny_model(**DYNAMIC[mode])
    ids, options = text(mode, LENGTHS[0])
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"input_ids": {1: length}, "use_cache": None} | {name: {1: length} for name in options}
    inputs = {"input_ids": ids, "use_cache": False} | options
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    for length in LENGTHS:
        ids, options = text(mode, length)
        out, expected = (f(input_ids=ids, use_cache=False, **options).logits for f in (program, model))
        assert_close(out, expected, atol=1e-9, rtol=1e-9)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@SLOW
@pytest.mark.parametrize("mode", [mode for mode in DYNAMIC if "documents" not in mode])
@torch.no_grad()
def test_onnx_is_of_every_length(mode, tmp_path, float64_throughout):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = Logits(tiny_model(**DYNAMIC[mode], dtype=torch.float32))
    ids, options = text(mode, LENGTHS[0])
    inputs = {"input_ids": ids} | options
    shapes = {name: {1: "length"} for name in inputs}
    torch.onnx.export(model, kwargs=inputs, dynamo=True, dynamic_shapes=shapes).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for length in LENGTHS:
        ids, options = text(mode, length)
        inputs = {"input_ids": ids} | options
        (out,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        assert_close(torch.from_numpy(out), model(**inputs), **CLOSE)
