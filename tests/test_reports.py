"""Kinds of trouble that users of converted, linear-attention or remote-code models report: one test per kind."""

import copy
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import (
    ARCHITECTURE_SETTINGS,
    CACHE,
    MODES,
    OPERATORS,
    cache_of,
    tiny_base,
    tiny_model,
    tokens,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, Trainer, TrainingArguments
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import hla_hf
from hla_hf import modeling_hla
from hla_hf.modeling_hla import model_class
from hla_hf.ops_hla import FEATURE_MAPS


# ---- positions follow from the mask ----------------------------------------


PADS, PIECES = 13, (20, 1, 9, 1, 6)  # the first piece holds all of the padding


@torch.no_grad()
def logits_without_positions(model, ids, mask, pieces):
    """Logits of `ids` fed in pieces through one cache (one piece: no cache), with a mask and no position_ids."""
    outputs, cache, start = [], None, 0
    for length in pieces:
        end = start + length
        output = model(
            ids[:, start:end], attention_mask=mask[:, :end], use_cache=len(pieces) > 1,
            **({} if cache is None else {CACHE: cache}),
        )  # fmt: skip
        cache, start = cache_of(output), end
        outputs.append(output.logits)
    return torch.cat(outputs, 1)


def assert_padding_moves_nothing(model, atol):
    real = tokens(1, sum(PIECES) - PADS)
    ids = torch.cat([torch.zeros(1, PADS, dtype=torch.long), real], 1)
    batch = torch.cat([ids, tokens(1, sum(PIECES), seed=1)])
    mask = torch.ones_like(batch)
    mask[0, :PADS] = 0
    with torch.no_grad():
        expected = model(real, use_cache=False).logits.log_softmax(-1)
    for pieces in ((sum(PIECES),), PIECES):
        got = logits_without_positions(model, batch, mask, pieces).log_softmax(-1)[:1, PADS:]
        assert_close(got, expected, atol=atol, rtol=0, msg=lambda m, p=pieces: f"pieces {p}: {m}")


@pytest.mark.parametrize("window", (0, 8))
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_left_padding_without_positions(operator, feature_map, window):
    # double: the row mass of signed features can be near 0
    settings = {"hla_operator": operator, "hla_feature_map": feature_map, "hla_window": window}
    assert_padding_moves_nothing(tiny_model(dtype=torch.double, **settings), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ("llama", *ARCHITECTURE_SETTINGS))
def test_left_padding_without_positions_in_other_architectures(architecture, mode):
    settings = {"num_hidden_layers": 3} | ARCHITECTURE_SETTINGS.get(architecture, {}) | MODES[mode]
    # not in double: there the eager attention of the base itself is NaN at rows of padding
    assert_padding_moves_nothing(tiny_model(architecture, dtype=torch.float32, **settings), atol=1e-3)


# ---- engines that bring their own attention ----------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_sees_that_it_cannot_swap_the_attention(mode):
    assert tiny_base().is_backend_compatible()
    for model in (tiny_model(**MODES[mode]), hla_hf.to_hla(tiny_base(), **MODES[mode])):
        assert not model.is_backend_compatible() and not model.model.is_backend_compatible()
        prompt = tokens(1, 12)
        expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    assert hla_hf.to_softmax(model).is_backend_compatible()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "call",
    (
        lambda model, ids: model.generate_batch(ids.tolist(), max_new_tokens=4),
        lambda model, ids: model.generate(ids, max_new_tokens=4, cache_implementation="paged"),
        lambda model, ids: model.init_continuous_batching(),
        lambda model, ids: model.continuous_batching_context_manager().__enter__(),
    ),
)
def test_paged_generation_is_refused_before_it_begins(mode, call):
    model, prompt = tiny_model(**MODES[mode]), tokens(2, 9)
    implementation, expected = model.config._attn_implementation, model.generate(prompt, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"cannot be generated from by continuous batching .*use generate\(\)"):
        call(model, prompt)
    assert model.config._attn_implementation == implementation
    # in a generation config Transformers takes the word for its ordinary cache
    paged = GenerationConfig(max_new_tokens=4, cache_implementation="paged", pad_token_id=0)
    assert torch.equal(model.generate(prompt, generation_config=paged), expected)


# ---- packed weights, and a conversion that fails ----------------------------------------


class PackedLinear(torch.nn.Linear):
    """A Linear of 8 bits with one scale per row, as quantising libraries replace it: its weight is no float."""

    def __init__(self, linear, dtype=torch.uint8):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 100
        packed = linear.weight.detach() / self.scale
        packed = (packed + 128).round() if dtype == torch.uint8 else packed
        self.zero = 128 if dtype == torch.uint8 else 0
        self.weight = torch.nn.Parameter(packed.to(dtype), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, ((self.weight.to(x.dtype) - self.zero) * self.scale).to(x.dtype))


class BufferLinear(PackedLinear):
    """One that keeps no parameter at all."""

    def __init__(self, linear):
        super().__init__(linear)
        packed = self.weight.data
        del self.weight
        self.register_buffer("weight", packed)


PACKINGS = {
    "uint8": PackedLinear,
    "float8": lambda linear: PackedLinear(linear, torch.float8_e4m3fn),
    "buffers": BufferLinear,
}


def packed_base(packing, dtype):
    torch.manual_seed(0)
    base = tiny_base().to(dtype)
    base.requires_grad_(False)
    for layer in base.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, PACKINGS[packing](getattr(layer.self_attn, name)))
    return base


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_base_of_packed_weights_is_converted_trained_and_generates(packing, dtype, operator):
    base, ids = packed_base(packing, dtype), tokens(2, 40)
    expected = base.generate(ids, max_new_tokens=6, do_sample=False)
    model = hla_hf.to_hla(base, hla_operator=operator, hla_window=8, hla_decay="learned")
    assert {p.dtype for n, p in model.named_parameters() if ".hla." in n} == {dtype}
    with hla_hf.softmax_attention(model):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert model.generate(ids, max_new_tokens=6, do_sample=False).shape == (2, 46)
    targets = ["o_proj"] if packing == "buffers" else ["q_proj", "v_proj"]
    if packing == "buffers":  # an adapter has to know its kind; one beside it does not
        for layer in model.model.layers:
            layer.self_attn.o_proj = torch.nn.Linear(32, 32, bias=False, dtype=dtype)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, modules_to_save=["hla"]))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    before, optimizer, losses = [p.detach().clone() for p in trained], torch.optim.Adam(trained, lr=1e-2), []
    moved = [False] * len(trained)  # at any time: a step of bfloat16 may be taken back
    for _ in range(8):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        moved = [was or not torch.equal(p, q) for was, p, q in zip(moved, trained, before, strict=True)]
    assert losses[-1] < losses[0] - 0.05, losses
    assert all(moved)
    assert adapted.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False).shape == (2, 46)


def test_what_names_the_quantisation_stays_in_the_config(tmp_path):
    base = tiny_base("mixtral")
    base.config.quantization_config = quantization = BitsAndBytesConfig(load_in_8bit=True)
    base.set_experts_implementation("eager")
    model = hla_hf.to_hla(base)
    assert model.config.quantization_config is quantization and model.config._experts_implementation == "eager"
    assert model.config.to_dict()["quantization_config"]["load_in_8bit"] is True
    assert hla_hf.to_softmax(model).config.quantization_config is quantization


class Wrapped(torch.Tensor):
    """A weight as torchao keeps one: a tensor of tensors, with hardly an operation of its own."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["data_"], inner["scale_"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale_)
        raise NotImplementedError(function)


def test_a_cache_of_wrapped_weights_is_saved(tmp_path):
    model = tiny_model(hla_window=8)
    cache = cache_of(model(tokens(1, 12), use_cache=True))
    prints = []
    for scale in (1.0, 1.0, 2.0):
        weight = Wrapped(torch.arange(1024).reshape(32, 32), torch.full((32, 1), scale))
        model.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        prints.append(model.fingerprint())
        model.save_cache(cache, tmp_path / "cache")
        assert model.load_cache(tmp_path / "cache").get_seq_length() == 12
    assert prints[0] == prints[1] != prints[2]


def everything_of(model):
    contents = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            contents[name, key] = id(value), list(value.items()) if isinstance(value, dict) else None
        contents[name, "class"] = type(module)
    return contents


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
@pytest.mark.parametrize(
    "fails",
    (
        (modeling_hla, "_become"),
        (modeling_hla, "_place_for_parameters"),
        (modeling_hla.HLALayer, "reset"),
        (torch.nn.Module, "register_forward_pre_hook"),
    ),
    ids=lambda x: x[1],
)
def test_a_conversion_that_fails_leaves_the_model_as_it_was(fails, error, monkeypatch):
    model, calls = tiny_base(num_hidden_layers=3), []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    before, config, ids = everything_of(model), model.config.to_dict(), tokens(1, 9)
    logits = model(ids).logits
    owner, name = fails
    original, made = getattr(owner, name), []

    def fail_the_second_time(*args, **kwargs):
        made.append(1)
        if len(made) == 2:
            raise error("out of memory")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(error, match="out of memory"):
        patch.setattr(owner, name, fail_the_second_time)
        hla_hf.to_hla(model)
    assert everything_of(model) == before and model.config.to_dict() == config
    assert type(model) is transformers.LlamaForCausalLM and torch.equal(model(ids).logits, logits)
    handle.remove()
    assert len(calls) == 2 and torch.equal(model(ids).logits, logits) and len(calls) == 2
    assert hla_hf.to_hla(model).generate(ids, max_new_tokens=3).shape == (1, 12)


# ---- no T x T mask ----------------------------------------


class NothingSquare(TorchDispatchMode):
    """Raises where a tensor of T * T elements or more is made."""

    def __init__(self, length):
        super().__init__()
        self.limit = length * length

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            assert not isinstance(x, torch.Tensor) or x.numel() < self.limit, f"{function}: {tuple(x.shape)}"
        return out


def set_on_the_model(model, implementation, folder):
    model.set_attn_implementation(implementation)
    return model


def set_on_the_config(model, implementation, folder):
    model.config._attn_implementation = implementation
    return model


def loaded_with(model, implementation, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)


def made_with(model, implementation, folder):
    made = AutoModelForCausalLM.from_config(model.config, attn_implementation=implementation)
    made.load_state_dict(model.state_dict())
    return made.eval()


def converted_from(model, implementation, folder):
    base = tiny_base()
    base.set_attn_implementation(implementation)
    converted = hla_hf.to_hla(base, hla_operator="ahla", hla_window=model.config.hla_window)
    converted.load_state_dict(model.state_dict())
    return converted


@pytest.mark.parametrize("window", (0, 8))
@pytest.mark.parametrize("implementation", ("sdpa", "eager", "flex_attention"))
@pytest.mark.parametrize("how", (set_on_the_model, set_on_the_config, loaded_with, made_with, converted_from))
def test_a_mask_that_no_layer_reads_is_never_made(how, implementation, window, tmp_path, monkeypatch):
    model = how(tiny_model(hla_window=window), implementation, tmp_path)
    for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():  # what makes the mask of each implementation
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse_a_mask)
    length = 1400
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, :5] = 0
    with NothingSquare(length):
        model.train()(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            cache = cache_of(model.eval()(ids, attention_mask=mask, use_cache=True, logits_to_keep=1))
            longer = torch.cat([mask, mask[:, -2:]], 1)
            model(ids[:, :1], attention_mask=longer[:, :-1], **{CACHE: cache})
            model(ids[:, :1], attention_mask=longer, **{CACHE: cache})
        for cache_implementation in ("dynamic", "static"):
            settings = {"max_new_tokens": 3, "cache_implementation": cache_implementation, "disable_compile": True}
            assert model.generate(ids, attention_mask=mask, **settings).shape == (2, length + 3)
        model.generate(ids, attention_mask=mask, max_new_tokens=2, use_cache=False)


def test_a_mask_that_no_layer_reads_is_never_compiled(monkeypatch):
    model, ids, mask = tiny_model(hla_window=8), tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse_a_mask)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert_close(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)


def refuse_a_mask(*args, **kwargs):
    raise AssertionError("a mask was made")


def test_softmax_layers_have_their_mask():
    model, ids, mask = tiny_model(hla_layers=[1]), tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(AssertionError, match="a mask was made"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse_a_mask)
        model(ids, attention_mask=mask)


# ---- a model in a subfolder ----------------------------------------


LOAD_FROM_A_SUBFOLDER = """
import sys
if sys.argv[2] == "without the package":
    sys.modules["hla_hf"] = None
else:
    import hla_hf
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
root, load = sys.argv[1], {"subfolder": "runs/last", "trust_remote_code": sys.argv[2] == "without the package"}
expected = torch.load(f"{root}/expected.pt")
assert AutoConfig.from_pretrained(root, **load).hla_window == 8
model, decoder = (auto.from_pretrained(root, **load) for auto in (AutoModelForCausalLM, AutoModel))
assert torch.equal(model(expected["ids"]).logits, expected["logits"])
assert torch.equal(decoder(expected["ids"]).last_hidden_state, expected["hidden"])
assert model.generation_config.pad_token_id == 0
model.save_pretrained(f"{root}/again")
again = AutoModelForCausalLM.from_pretrained(f"{root}/again", trust_remote_code=load["trust_remote_code"])
assert torch.equal(again(expected["ids"]).logits, expected["logits"])
print("hla_hf" in type(model).__module__)
"""


@pytest.mark.parametrize("package", ("with the package", "without the package"))
def test_a_subfolder_loads(package, tmp_path):
    model, ids = tiny_model("qwen3", hla_window=8, tie_word_embeddings=True), tokens(1, 20)
    model.save_pretrained(tmp_path / "runs" / "last")
    expected = {"ids": ids, "logits": model(ids).logits, "hidden": model.model(ids)[0]}
    torch.save({name: x.detach() for name, x in expected.items()}, tmp_path / "expected.pt")
    script = [sys.executable, "-c", LOAD_FROM_A_SUBFOLDER, str(tmp_path), package]
    if package == "without the package":
        done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert "does not appear to have a file named configuration_hla.py" in done.stderr, done.stderr[-3000:]
        for file in (tmp_path / "runs" / "last").glob("*.py"):  # Transformers looks for code in the root only
            shutil.copy(file, tmp_path)
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == str(package == "with the package")


# ---- training and generating by turns ----------------------------------------


def padded(length=25, pads=6):
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_reentrant", (True, False))
def test_a_model_generates_the_same_in_the_middle_of_its_training(mode, use_reentrant):
    model, prompt = tiny_model(**MODES[mode]), padded()
    expected = model.generate(**prompt, **GREEDY)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.train()
    model(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)
    model.config.use_cache = False  # as trainers leave it
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_inference_mode_goes_on_outside(mode):
    model, prompt, new = tiny_model(**MODES[mode]), padded(), tokens(2, 1, seed=5)
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.inference_mode():
        cache = cache_of(model(**prompt, use_cache=True))
        expected = model(new, attention_mask=mask, **{CACHE: copy.deepcopy(cache)}).logits.clone()
    with torch.no_grad():
        assert_close(model(new, attention_mask=mask, **{CACHE: copy.deepcopy(cache)}).logits, expected)
    logits = model(new, attention_mask=mask, **{CACHE: copy.deepcopy(cache)}).logits
    assert_close(logits, expected)
    logits.sum().backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces", ((12, 12), (12, 1, 1, 10), (4, 8, 12)))
def test_gradients_flow_through_a_cache(mode, pieces):
    model, ids = tiny_model(dtype=torch.double, **MODES[mode]), tokens(2, 24)

    def gradients(logits):
        model.zero_grad()
        logits[:, 12:].log_softmax(-1)[..., 5].sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(model(ids, use_cache=False).logits)
    logits, cache, start = [], None, 0
    for length in pieces:
        output = model(ids[:, start : start + length], use_cache=True, **({} if cache is None else {CACHE: cache}))
        logits.append(output.logits)
        cache, start = cache_of(output), start + length
    for name, gradient in gradients(torch.cat(logits, 1)).items():
        assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("mode", MODES)
def test_autocast_begins_and_ends_between_the_tokens_of_a_cache(mode, operator):
    model, ids = tiny_model(hla_operator=operator, **MODES[mode]), tokens(2, 24)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(ids, use_cache=False).logits
            first = model(ids[:, :12], use_cache=True)
            second = model(ids[:, 12:13], **{CACHE: cache_of(first)})
        third = model(ids[:, 13:14], **{CACHE: cache_of(second)})
        with torch.autocast("cpu", torch.bfloat16):
            last = model(ids[:, 14:], **{CACHE: cache_of(third)})
    logits = torch.cat([x.logits.float() for x in (first, second, third, last)], 1)
    error, error_free = ((x - expected).norm() / expected.norm() for x in (logits, rounded.float()))
    assert error < 1.5 * error_free + 0.01, (error, error_free)


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_of_transformers_predicts_saves_and_resumes(mode, tmp_path):
    model = tiny_model(**MODES[mode])
    rows = [{"input_ids": tokens(12, seed=i), "labels": tokens(12, seed=i)} for i in range(6)]
    settings = TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, save_steps=2, eval_steps=2, eval_strategy="steps",
        load_best_model_at_end=True, gradient_checkpointing=True, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert trainer.predict(rows).predictions.shape == (6, 12, 96)  # no cache among what is gathered
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    for name, p in model.named_parameters():
        assert_close(p, after[name], msg=lambda m, n=name: f"{n}: {m}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(loaded(rows[0]["input_ids"][None]).logits, model.eval()(rows[0]["input_ids"][None]).logits)


# ---- what is put on top of a model, and taken from it ----------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_lora_on_the_parameters_of_hla(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(1, 20)
    before = model(ids).logits
    config = LoraConfig(target_modules=[], target_parameters=["hla.q_map", "hla.k_map"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in adapted.parameters() if p.requires_grad)
    adapted.eval()
    expected, generated = adapted(ids).logits, adapted.generate(input_ids=ids, **GREEDY)
    assert (expected - before).abs().max() > 0.01
    merged = adapted.merge_and_unload()
    assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(merged.generate(ids, **GREEDY), generated)


@pytest.mark.parametrize("tied", (True, False))
def test_resized_embeddings(tied, tmp_path):
    model, ids = tiny_model(hla_window=8, tie_word_embeddings=tied), tokens(1, 9)
    model.resize_token_embeddings(101)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(ids).logits.shape == (1, 9, 101)
    assert_close(loaded(ids).logits, model(ids).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    base = tiny_base(tie_word_embeddings=tied)
    base.resize_token_embeddings(101)
    assert hla_hf.to_softmax(hla_hf.to_hla(base)).config.vocab_size == 101


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_any_dtype_is_the_same_mask(mode):
    model, prompt = tiny_model(**MODES[mode]), padded(300)  # more tokens than int8 or bfloat16 can count
    expected = model(**prompt).logits
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float16):
        mask = prompt["attention_mask"].to(dtype)
        assert_close(
            model(prompt["input_ids"], attention_mask=mask).logits, expected, msg=lambda m, d=dtype: f"{d} {m}"
        )


@pytest.mark.parametrize("architecture", ("llama", "mixtral"))
def test_there_is_one_class_of_each_name(architecture):
    model = hla_hf.to_hla(tiny_base(architecture))
    name = type(model).__name__
    assert getattr(hla_hf, name) is model_class(architecture) is type(model)
    assert AutoModelForCausalLM.from_config(model.config).__class__ is type(model)
    ids, again = tokens(1, 9), pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) and torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(again.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("mode", MODES)
def test_the_default_dtype_changes_nothing(mode):
    model, prompt = tiny_model(**MODES[mode]), padded()
    expected, generated = model(**prompt).logits, model.generate(**prompt, **GREEDY)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert_close(model(**prompt).logits, expected)
            assert torch.equal(model.generate(**prompt, **GREEDY), generated)
        finally:
            torch.set_default_dtype(torch.float32)


# ---- settings and caches that do not fit ----------------------------------------


def test_a_misspelt_setting_is_named():
    base = tiny_base()
    before = everything_of(base)
    for settings, message in (
        ({"hla_windw": 8}, r"no setting 'hla_windw' \(given 8\); it has .*'hla_window'"),
        ({"window": 8}, "no setting 'window'"),
        ({"hla_window": -1}, "hla_window must be at least 0, got -1"),
        ({"hla_ridge": float("nan")}, "hla_ridge must be at least 0, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            hla_hf.to_hla(base, **settings)
        assert everything_of(base) == before


def test_a_field_that_is_set_after_the_config_was_made_is_checked(tmp_path):
    tiny_model(num_hidden_layers=2, hla_layers=[1]).save_pretrained(tmp_path)
    for settings, message in (
        ({"hla_window": -3}, "hla_window must be at least 0, got -3"),
        ({"hla_operator": "hla4"}, "hla_operator='hla4' is unknown"),
        ({"num_hidden_layers": 1}, r"hla_layers must be distinct and in 0..0, got \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path, **settings)


@pytest.mark.parametrize("mode", ("pure", "windowed"))
@pytest.mark.parametrize("rows", ((1, 3), (3, 1)))
def test_a_cache_of_another_number_of_rows_is_refused(mode, rows):
    model = tiny_model(**MODES[mode])
    cache = cache_of(model(tokens(rows[0], 20), use_cache=True))
    for length in (4, 1):
        with pytest.raises(ValueError, match=f"cache holds {rows[0]} rows and the new tokens are {rows[1]}: .*repeat"):
            model(tokens(rows[1], length), **{CACHE: cache})
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("mode", MODES)
def test_softmax_attention_does_not_go_on_from_the_cache_of_hla(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(1, 20)
    cache = cache_of(model(ids, use_cache=True))
    with hla_hf.softmax_attention(model), pytest.raises(ValueError, match="softmax attention cannot continue from"):
        model(ids[:, :1], **{CACHE: cache})
