"""Where models and classes come from: pickles, a directory's own code, another Transformers, weights that hooks own."""

import ast
import copy
import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from tiny import cache_of, stepwise_logits, tiny_base, tiny_model, tokens
from transformers import AutoModelForCausalLM

import hla_hf
from hla_hf.configuration_hla import ARCHITECTURES, CODE_VERSION, available_architectures, base_class_names


ROOT = Path(hla_hf.__file__).parent.parent
STUB = ROOT / "hla_hf" / "__init__.pyi"
FILES = (
    "cache_hla", "configuration_hla", "layer_hla", "modeling_hla", "near_hla", "ops_hla", "slots_hla", "step_hla",
    "window_hla",
)  # fmt: skip
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def run(script, *arguments, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(folder / "modules")}
    words = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- pickles ----------------------------------------


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch.save": through_torch_save, "copy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_model_that_has_decoded_is_whole_and_apart(how):
    model, ids = tiny_model(hla_operator="hla3", hla_window=8), tokens(1, 30)
    expected = model.generate(ids, **GREEDY)
    assert any(layer.hla._of_steps is not None for layer in hla_hf_attentions(model))
    again = COPIES[how](model)
    assert type(again) is hla_hf.HLALlamaForCausalLM and type(again.config) is hla_hf.HLALlamaConfig
    assert all(layer.hla._of_steps is None for layer in hla_hf_attentions(again))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(again.generate(ids, **GREEDY), expected)
    hla_hf.to_softmax(again)
    assert type(again) is transformers.LlamaForCausalLM and not hla_hf_attentions(again)
    assert len(hla_hf_attentions(model)) == 2


def hla_hf_attentions(model):
    return hla_hf.layer_hla.hla_attentions(model)


def test_models_and_configs_go_to_a_spawned_process():
    model = tiny_model(hla_operator="ahla", hla_window=8)
    decoder, ids = tiny_model("qwen3", hla_operator="hla2", hla_window=0).model.requires_grad_(False), tokens(1, 30)
    expected = model.generate(ids, **GREEDY)
    assert type(decoder) is hla_hf.HLAQwen3Model
    with multiprocessing.get_context("spawn").Pool(1) as pool, torch.no_grad():
        assert torch.equal(pool.apply(model.generate, (ids,), GREEDY), expected)
        assert torch.equal(pool.apply(decoder, (ids,))[0], decoder(ids)[0])
        assert pool.apply(decoder.config.to_diff_dict) == decoder.config.to_diff_dict()


# ---- types ----------------------------------------


def stub():
    """What an editor and a type checker read: names as `__init__.py` imports them, and the classes that it makes."""
    imports, modules, classes = [], {}, []
    for node in ast.parse((ROOT / "hla_hf" / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            names = sorted(x.name for x in node.names if x.name in hla_hf.__all__)
            imports += [f"from .{node.module} import {x} as {x}" for x in names]
    imports += [
        "from .configuration_hla import HLAConfigMixin",
        "from .modeling_hla import HLADecoderMixin, HLAHeadMixin, HLAModelMixin",
    ]
    mixins = {"AutoConfig": "Config", "AutoModel": "Decoder", "AutoModelForCausalLM": "Model"}
    for names in map(base_class_names, available_architectures()):
        for auto_class, name in names.items():
            mixin = mixins.get(auto_class, "Head")
            modules.setdefault(getattr(transformers, name).__module__, []).append(name)
            body = " ..." if mixin == "Config" else f"\n    config: HLA{names['AutoConfig']}"
            classes.append(f"class HLA{name}(HLA{mixin}Mixin, {name}):{body}\n")
    outside = []
    for module, names in sorted(modules.items()):
        line = f"from {module} import {', '.join(sorted(names))}"
        lines = [f"from {module} import (", *(f"    {name}," for name in sorted(names)), ")"]
        outside += [line] if len(line) <= 120 else lines
    inside = sorted(imports, key=lambda x: x.split()[1:4])
    head = "# Written by `HLA_WRITE_STUB=1 python -m pytest tests/test_loading.py -k stub`."
    return "\n".join([head, *outside, "", *inside, "", "__version__: str", "", *classes])


@pytest.mark.skipif(available_architectures() != ARCHITECTURES, reason="a Transformers without some of them")
def test_the_stub_is_that_of_the_package():
    if os.environ.get("HLA_WRITE_STUB"):
        STUB.write_text(stub())
    assert STUB.read_text() == stub()
    tree = ast.parse(STUB.read_text())
    names = [x.name for x in tree.body if isinstance(x, ast.ClassDef)]
    names += [y.name for x in tree.body if isinstance(x, ast.ImportFrom) for y in x.names if y.asname]
    assert sorted(names) == sorted(hla_hf.__all__)
    assert "hla_hf" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / "hla_hf" / "py.typed").is_file()


# ---- another Transformers ----------------------------------------

WITHOUT_ARCEE = """
import sys
from transformers.models.auto import configuration_auto, modeling_auto
for table in (configuration_auto.CONFIG_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES,
              modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    del table["arcee"]
sys.modules["transformers.models.arcee"] = None
import hla_hf
made = [x for x in sys.modules if x.startswith("transformers.models.") and ".modeling_" in x]
assert set(made) <= {"transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"}, made
from hla_hf import *
for name in ("CohereModel", "LlamaForCausalLM", "MixtralForCausalLM", "Gemma3TextConfig"):
    assert getattr(hla_hf, "HLA" + name).__name__ == "HLA" + name == globals()["HLA" + name].__name__
assert len([x for x in hla_hf.__all__ if x.startswith("HLA") and x != "HLACacheLayer"]) == 97


def error(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def from_import():
    from hla_hf import HLAArceeForCausalLM


print(error(from_import))
print(error(getattr, hla_hf, "HLAArceeConfig"))
print(error(getattr, hla_hf.modeling_hla, "HLAArceeForCausalLM"))
print(error(getattr, hla_hf.configuration_hla, "HLAArceeConfig"))
print(error(hla_hf.config_class, "arcee"))
assert not hasattr(hla_hf, "LlamaForCausalLM") and not hasattr(hla_hf.modeling_hla, "nothing")
"""


def test_a_transformers_without_one_architecture_loads_the_others(tmp_path):
    errors = run(WITHOUT_ARCEE, folder=tmp_path).splitlines()
    assert len(errors) == 5
    for error in errors[:4]:
        assert error.startswith("ImportError: ") and "HLAArcee" in error
        assert f"Transformers {transformers.__version__} has no arcee" in error
    assert errors[4].startswith("ValueError: model_type 'arcee' is not supported by Transformers")
    assert not hasattr(hla_hf, "HLANothingModel")


# ---- a directory's own code ----------------------------------------


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, path
    path.write_text(text.replace(old, new))


def saved_copy(source, folder, code_version=CODE_VERSION, version_known=CODE_VERSION, negated=False):
    """A saved directory whose config and code are of other versions; `negated` code computes -out in each layer."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"hla_code_version": code_version}
    if code_version is None:
        del config["hla_code_version"]
    (folder / "config.json").write_text(json.dumps(config))
    if version_known != CODE_VERSION:
        edit(folder / "configuration_hla.py", f"CODE_VERSION = {CODE_VERSION}", f"CODE_VERSION = {version_known}")
    if negated:
        edit(folder / "layer_hla.py", "return module.hla(tokens)[0].", "return -module.hla(tokens)[0].")
    return folder


DIRECTORIES = """
import copy, io, multiprocessing, pickle, sys
from pathlib import Path
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
root = Path(sys.argv[1])
expected = torch.load(root / "expected.pt")
ids, known = expected["ids"], expected["version"]
greedy = {"max_new_tokens": 6, "do_sample": False}


def load(name):
    return AutoModelForCausalLM.from_pretrained(root / name / "model", trust_remote_code=True).eval()


@torch.no_grad()
def logits(model):
    return model(ids, use_cache=False).logits


def refused(name):
    try:
        load(name)
    except ValueError as error:
        text = f"hla_code_version must be 1 to {known} for this code, got {known + 1}: for a newer model upgrade"
        assert text in str(error), error
        return True


model = load("first")
module = sys.modules[type(model).__module__]
assert torch.equal(model.generate(ids, **greedy), expected["generated"])
assert torch.equal(logits(model), expected["logits"])

# Each runs its own code, also where only one file differs and the folders have one name.
assert torch.equal(logits(load("negated")), expected["negated"])
assert torch.equal(logits(load("newer")), expected["negated"])
assert torch.equal(logits(load("versionless")), expected["logits"]) and refused("from the future")
config = AutoConfig.from_pretrained(root / "versionless, newer code" / "model", trust_remote_code=True)
assert config.hla_code_version == config.to_dict()["hla_code_version"] == 1
assert type(config)().hla_code_version == known + 1
assert torch.equal(logits(load("first")), expected["logits"]) and torch.equal(logits(model), expected["logits"])

# What has decoded is still copied, saved and sent.
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
again = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(file, weights_only=False)]
assert all(type(x) is type(model) for x in again)
assert all(torch.equal(x.generate(ids, **greedy), expected["generated"]) for x in again)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert torch.equal(pool.apply(model.generate, (ids,), greedy), expected["generated"])

# A form that only the package has.
q = torch.zeros(1, 1, 4, 8)
ops = sys.modules[type(model).__module__.replace("modeling_hla", "ops_hla")]
try:
    ops.ahla(q, q, q, form="scan")
    raise SystemExit("no error")
except ValueError as error:
    assert "form 'scan'" in str(error) and "hla_hf installed" in str(error), error

# The package comes later.
assert "hla_hf" not in sys.modules
name = model.model.hla_config._attn_implementation
function = AttentionInterface()[name]
import hla_hf
attentions = AttentionInterface()
assert name != "hla" and attentions[name] is function and attentions["hla"] is hla_hf.layer_hla.hla_attention
assert torch.equal(model.generate(ids, **greedy), expected["generated"]) and model.config.hla_layers == [0, 1]
with hla_hf.softmax_attention(model):
    assert torch.allclose(logits(model), expected["softmax"], atol=1e-5)
assert torch.equal(logits(model), expected["logits"])
out = model(ids, use_cache=True)
assert hla_hf.cache_nbytes(getattr(out, hla_hf.modeling_hla._CACHE_ARGUMENT)) == expected["nbytes"]
second = load("negated")  # of the package's version, so the package's code is meant
assert type(second) is hla_hf.HLALlamaForCausalLM and torch.equal(logits(second), expected["logits"])
assert refused("newer") and refused("from the future")
for x in (model, *again, second):
    assert torch.equal(logits(x), expected["logits"])
    assert torch.allclose(logits(hla_hf.to_softmax(x)), expected["softmax"], atol=1e-5)
    assert type(x).__module__.startswith("transformers.models.")
model.save_pretrained(root / "softmax")
assert type(AutoModelForCausalLM.from_pretrained(root / "softmax")) is type(model)
print("done")
"""


def test_directories_with_code_of_their_own_and_the_package_in_one_process(tmp_path):
    model, ids = tiny_model(hla_window=8, hla_layers=[0, 1]), tokens(1, 30)
    source = tmp_path / "first" / "model"
    model.save_pretrained(source)
    assert sorted(x.stem for x in source.glob("*.py")) == sorted(FILES)
    assert json.loads((source / "config.json").read_text())["hla_code_version"] == CODE_VERSION
    saved_copy(source, tmp_path / "negated" / "model", negated=True)
    newer = CODE_VERSION + 1
    saved_copy(source, tmp_path / "newer" / "model", newer, newer, negated=True)
    saved_copy(source, tmp_path / "from the future" / "model", newer)
    saved_copy(source, tmp_path / "versionless" / "model", None)
    saved_copy(source, tmp_path / "versionless, newer code" / "model", None, newer)
    with torch.no_grad():
        out = model(ids, use_cache=True)
        expected = {
            "ids": ids,
            "version": CODE_VERSION,
            "generated": model.generate(ids, **GREEDY),
            "logits": model(ids).logits,
        }
        expected["nbytes"] = hla_hf.cache_nbytes(cache_of(out))
        with hla_hf.softmax_attention(model):
            expected["softmax"] = model(ids).logits
        handles = [x.hla.register_forward_hook(lambda *x: (-x[-1][0], x[-1][1])) for x in hla_hf_attentions(model)]
        expected["negated"] = model(ids).logits
    assert len(handles) == 2 and not torch.allclose(expected["negated"], expected["logits"], atol=0.1)
    torch.save(expected, tmp_path / "expected.pt")
    assert run(DIRECTORIES, tmp_path, folder=tmp_path).endswith("done\n")


def test_a_saved_config_brings_the_code_that_it_names(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    assert sorted(x.stem for x in tmp_path.glob("*.py")) == sorted(FILES)


# ---- hooks that own parameters ----------------------------------------

PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
          "model.norm": "cpu", "lm_head": "cpu"}  # fmt: skip


def from_directory(model, folder):
    model.save_pretrained(folder / "saved")
    return AutoModelForCausalLM.from_pretrained(
        folder / "saved", device_map=PLACES, offload_folder=folder / "offloaded"
    ).eval()


def offloaded(model, folder):
    model = accelerate.cpu_offload(copy.deepcopy(model))
    accelerate.hooks.add_hook_to_module(model.model, accelerate.hooks.ModelHook())  # of a forward that HLA replaces
    return model


def dispatched(model, folder):
    return accelerate.dispatch_model(copy.deepcopy(model), PLACES, "cpu", offload_dir=folder)


def same_decoding(model, expected):
    ids = tokens(1, 24)
    steps = [stepwise_logits(x, ids, [16] + [1] * 8)[0] for x in (model, expected)]
    torch.testing.assert_close(*steps, rtol=0, atol=1e-5)
    with torch.no_grad():
        logits = [x(ids, use_cache=False).logits for x in (model, expected)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("operator, window", [("hla3", 8), ("hla2", 0)])
@pytest.mark.parametrize("place", [from_directory, offloaded, dispatched])
def test_parameters_that_hooks_own(place, operator, window, tmp_path):
    expected = tiny_model(hla_operator=operator, hla_window=window, hla_accumulator="key", hla_decay="learned")
    model = place(expected, tmp_path)
    assert next(model.model.layers[1].self_attn.hla.parameters()).device.type == "meta"
    same_decoding(model, expected)


@pytest.mark.parametrize("place", [offloaded, dispatched])
def test_a_dispatched_model_becomes_hla_and_softmax_again(place, tmp_path):
    base = tiny_base()
    settings = {"hla_operator": "hla3", "hla_accumulator": "key", "hla_decay": "learned", "hla_window": 8}
    expected = hla_hf.to_hla(copy.deepcopy(base), **settings)
    model = hla_hf.to_hla(place(base, tmp_path), **settings)
    assert next(model.model.layers[1].self_attn.q_proj.parameters()).device.type == "meta"
    same_decoding(model, expected)
    same_decoding(hla_hf.to_softmax(model), base)
    assert not torch.allclose(model(tokens(1, 24)).logits, expected(tokens(1, 24)).logits, atol=0.1)
