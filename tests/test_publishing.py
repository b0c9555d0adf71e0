"""Uploads from both commands to a Hub on the loopback, and the cards that go with them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub import running_hub
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_conversion import FAST, TEXT, make_base, tokenizer, write_gguf  # noqa: F401
from tiny import tiny_base
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from conversion.convert import Conversion
from conversion.convert import main as convert_main
from hla_hf import to_hla
from training.recipe import Recipe


ROOT = Path(__file__).parents[1]
RUN = ["--seq_len", "32", "--steps", "1", "--eval_rows", "2", "--trackers", "none"]
CARD = """---
license: apache-2.0
language:
- en
- fr
---
# Base
"""


@pytest.fixture
def hub(tmp_path, tokenizer):  # noqa: F811
    """A Hub, and a function that runs a module of this project on a base and text beside it."""
    make_base(tokenizer, tmp_path / "base", tie_word_embeddings=True)
    (tmp_path / "base" / "README.md").write_text(CARD)
    (tmp_path / "text.txt").write_text(TEXT)
    with running_hub() as (state, address):

        def call(*words, token="writer", code=0, **environment):
            variables = os.environ | {
                "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": token, "PYTHONPATH": str(ROOT),
                "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
            } | environment  # fmt: skip
            variables.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in environment else None
            done = subprocess.run(
                [sys.executable, *map(str, words)], env=variables, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
            return done.stdout, done.stderr

        state.address, state.call = address, call
        yield state


def converting(*words):
    return ["-m", "conversion.convert", "base", "--data", "text.txt", *FAST, *words]


# Loads a model by its name where the package cannot be imported, saves it again, and prints its greedy answer.
LOAD = """
import json, sys
sys.modules["hla_hf"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name, options = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **options).eval()
AutoTokenizer.from_pretrained(name, trust_remote_code=True, **options)
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
logits = model(torch.arange(3, 40)[None]).logits
assert torch.equal(logits, again(torch.arange(3, 40)[None]).logits)
print(logits.double().sum().item())
"""


def test_both_commands_upload_what_loads_by_name(hub, tmp_path):
    hub.call(*converting("--output", "hla", "--push-to-hub", "user/tiny-hla", "--private"))
    assert hub.private == {"user/tiny-hla"}
    files = hub.repositories["user/tiny-hla"]["main"]
    assert files.keys() == {path.name for path in (tmp_path / "hla").iterdir()}
    assert 'from_pretrained("user/tiny-hla", trust_remote_code=True)' in files["README.md"].decode()

    training = ["-m", "training.finetune", "--data", "text.txt", *RUN]
    upload = ["--push-to-hub", "user/tuned", "--revision", "v1"]
    hub.call(*training, "--model", "user/tiny-hla", "--output", "tuned", "--learning_rate", "0.1", *upload)
    tuned = hub.repositories["user/tuned"]
    assert tuned["main"] == {} and tuned["v1"].keys() == {x.name for x in (tmp_path / "tuned" / "model").iterdir()}
    front = ModelCard(tuned["v1"]["README.md"].decode()).data
    assert front.base_model == "user/tiny-hla" and front.license == "apache-2.0"
    assert json.loads(tuned["v1"]["conversion.json"])["source"] == "base"

    # A model from the Hub whose weights moved is not its own teacher, as it is not on disk.
    model = ["--model", "user/tiny-hla", "--output", "kl", "--kl_weight", "1"]
    hub.repositories["user/tiny-hla"]["main"]["training.json"] = json.dumps({"recipe": {"train": "lora"}}).encode()
    _, error = hub.call(*training, *model, code=2, HF_HOME=str(tmp_path / "home2"))
    assert "name that one as teacher" in error

    for name, directory, options in (("user/tiny-hla", "hla", {}), ("user/tuned", "tuned/model", {"revision": "v1"})):
        online, _ = hub.call("-c", LOAD, name, json.dumps(options | {"code_revision": options.get("revision", "main")}))
        offline, _ = hub.call("-c", LOAD, name, json.dumps(options), HF_HUB_OFFLINE="1")
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / directory).eval()(torch.arange(3, 40)[None]).logits
        assert float(online) == float(offline) == pytest.approx(logits.double().sum().item(), rel=1e-6)


PUSH = """
import sys
import transformers
if sys.argv[1] == "base":
    from hla_hf import to_hla
    model = to_hla(transformers.LlamaForCausalLM.from_pretrained("base"), hla_window=8)
else:
    sys.modules["hla_hf"] = None
    model = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
getattr(model, "save_pretrained" if sys.argv[3:] else "push_to_hub")(sys.argv[2], **dict.fromkeys(sys.argv[3:], True))
"""


def test_a_push_from_python_has_a_card_of_its_own(hub, tmp_path, monkeypatch):
    hub.call("-c", PUSH, "base", "user/first")
    hub.call("-c", PUSH, "user/first", "second", "push_to_hub")  # where the package cannot be imported
    cards = {x: ModelCard(hub.repositories[f"user/{x}"]["main"]["README.md"].decode()) for x in ("first", "second")}
    first, second = cards["first"].data, cards["second"].data
    assert (first.license, first.language, first.pipeline_tag) == ("apache-2.0", ["en", "fr"], "text-generation")
    assert (second.license, second.base_model, second.pipeline_tag) == ("unknown", "user/first", "text-classification")
    assert "| `hla_window` | `8` |" in cards["first"].text and "automatically generated" not in cards["first"].text
    assert "AutoModelForSequenceClassification.from_pretrained" in cards["second"].text
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    for card in cards.values():
        assert {"hla", "linear-attention"} <= set(card.data.tags)
        card.validate()
    files = hub.repositories["user/first"]["main"]
    hub.commit("user/first", "main", files | {"README.md": CARD.encode()})
    hub.call("-c", PUSH, "base", "user/first")
    assert "# Base" in hub.repositories["user/first"]["main"]["README.md"].decode()  # someone's own stays


def test_a_pushed_card_names_its_repository_and_has_the_tags_that_were_asked_for(hub):
    push = PUSH.replace("**dict", "tags=['mine'], **dict")
    hub.call("-c", push, "base", "user/first")
    hub.call("-c", push, "user/first", "user/second")  # where the package cannot be imported
    for name in ("first", "second"):
        card = ModelCard(hub.repositories[f"user/{name}"]["main"]["README.md"].decode())
        assert card.text.startswith(f"# {name}\n") and f'Tokenizer.from_pretrained("user/{name}", trust' in card.text
        assert {"hla", "mine"} <= set(card.data.tags)


def test_a_push_of_a_directory_leaves_the_readme_that_is_there(hub, tmp_path):
    readme = tmp_path / "mine" / "README.md"
    readme.parent.mkdir()
    written = CARD.replace("# Base", "# By hand")
    readme.write_text(written)
    hub.call("-c", PUSH, "base", "mine", "push_to_hub")
    files = hub.repositories["user/mine"]["main"]
    assert readme.read_text() == written == files["README.md"].decode()
    hub.commit("user/mine", "main", files | {"README.md": CARD.encode()})
    hub.call("-c", PUSH, "base", "mine", "push_to_hub")
    assert readme.read_text() == written
    assert "# Base" in hub.repositories["user/mine"]["main"]["README.md"].decode()


def test_a_model_without_a_name_inherits_nothing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("---\nlicense: mit\nbase_model: someone/unrelated\n---\n")
    model = to_hla(tiny_base())
    model.save_pretrained("saved")
    data = ModelCard.load("saved/README.md").data
    assert (model.config.name_or_path, data.license, data.base_model) == ("", "unknown", None)


@pytest.mark.parametrize("readme", [b"---\nlicense: [mit\n---\n", b"---\n- mit\n---\n", b"caf\xe9"])
def test_a_readme_that_is_no_card_stops_no_saving(readme, tmp_path):
    base, own = tmp_path / "base", tmp_path / "own"
    tiny_base().save_pretrained(base)
    own.mkdir()
    for directory in (base, own):
        (directory / "README.md").write_bytes(readme)
    model = to_hla(LlamaForCausalLM.from_pretrained(base))
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(own)
    assert ModelCard.load(tmp_path / "new" / "README.md").data.license == "unknown"
    assert (own / "README.md").read_bytes() == readme


def test_a_second_upload_replaces_the_first(hub, tmp_path):
    upload = ["--push-to-hub", "user/tiny-hla"]
    hub.call(*converting("--output", "one", *upload))
    files = hub.repositories["user/tiny-hla"]["main"]
    old = {"model-00001-of-00002.safetensors": b"old", "old_hla.py": b"old", "photo.png": b"mine"}
    hub.commit("user/tiny-hla", "main", files | old)
    hub.call(*converting("--output", "two", "--seed", "1", *upload))
    after = hub.repositories["user/tiny-hla"]["main"]
    assert after.keys() == files.keys() | {"photo.png"}
    assert after["model.safetensors"] == (tmp_path / "two" / "model.safetensors").read_bytes()


def test_a_failed_upload_leaves_the_directory_and_says_how_to_go_on(hub, tmp_path):
    hub.breaks = True
    _, error = hub.call(*converting("--output", "hla", "--push-to-hub", "user/tiny-hla", "--revision", "v1"), code=1)
    assert (tmp_path / "hla" / "model.safetensors").is_file() and not (tmp_path / "hla.interrupted").exists()
    (line,) = [line for line in error.splitlines() if "stopped: " in line]  # bars of the upload may still follow
    assert "could not be uploaded" in line
    words = shlex.split(line.partition("upload it with: ")[2])
    assert words == ["hf", "upload", "user/tiny-hla", "hla", "--revision", "v1"]
    hub.breaks = False
    hub.call("-m", "huggingface_hub.cli.hf", *words[1:])
    assert hub.repositories["user/tiny-hla"]["v1"].keys() == {path.name for path in (tmp_path / "hla").iterdir()}


def test_what_would_refuse_an_upload_is_found_before_the_work(hub, tmp_path):
    hub.repositories["other/theirs"] = {}
    hub.commit("other/theirs", "main", {})
    for repository, token, words in (
        ("user/x", "nobody", "log in first"), ("user/x", "reader", "may only read"), ("x", "writer", "USER/NAME"),
        ("other/x", "writer", "of user only"), ("other/theirs", "writer", "may not write there"),
    ):  # fmt: skip
        _, error = hub.call(*converting("--output", "hla", "--push-to-hub", repository), token=token, code=2)
        assert words in error.strip().splitlines()[-1], error
    assert not (tmp_path / "hla").exists() and "user/x" not in hub.repositories
    upload = ["--model", "base", "--output", "run", "--push-to-hub", "user/x"]
    _, error = hub.call("-m", "training.finetune", "--data", "text.txt", *upload, token="reader", code=2)
    assert "may only read" in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"private": True}, {"revision": "v1"}])
def test_options_of_an_upload_need_one(settings):
    with pytest.raises(ValueError, match="needs --push-to-hub"):
        Conversion(source="x", output="y", **settings)
    with pytest.raises(ValueError, match="needs --push-to-hub"):
        Recipe(model="x", output="y", data=["z"], **settings)


def card_of(directory, hub, monkeypatch):
    card = ModelCard.load(directory / "README.md")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    card.validate()
    return card


def test_the_front_matter_says_where_a_model_comes_from(hub, tmp_path, monkeypatch, tokenizer):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    evaluation = ["--eval-file", "text.txt", "--eval-len", "256", "--eval-tokens", "512"]
    convert_main([*converting("--output", "hla", *evaluation)[2:]])
    card, report = card_of(tmp_path / "hla", hub, monkeypatch), json.loads(Path("hla/conversion.json").read_text())
    data = card.data
    assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en", "fr"], None)
    assert (data.library_name, data.pipeline_tag, data.datasets) == ("transformers", "text-generation", None)
    assert {"hla", "linear-attention"} <= set(data.tags)
    values = {x.metric_type: (x.dataset_name, x.metric_value) for x in data.eval_results}
    assert values["perplexity"] == ("text.txt", round(report["after"]["perplexity"], 4))
    assert (
        values["kl"] == ("held-out text", round(report["after"]["kl"], 4)) and values.keys() == report["after"].keys()
    )
    assert values["recall"] == ("text.txt", report["after"]["recall"]) and 0 <= report["base"]["recall"] <= 1
    assert "that of the base model, apache-2.0" in card.text and "| facts found in running text (share) |" in card.text
    size = report["bytes"]
    assert (
        f"Of 4,096 tokens it remembers {size['model'] / 1e6:.3g} MB, the base model {size['base'] / 1e6:.3g}"
        in card.text
    )

    (tmp_path / "base" / "README.md").unlink()
    convert_main([*converting("--output", "unknown")[2:]])
    card = card_of(tmp_path / "unknown", hub, monkeypatch)
    assert card.data.license == "unknown" and "license is unknown" in card.text


@pytest.mark.parametrize(
    "license, expected", [("apache-2.0", ("apache-2.0", None)), ("My License", ("other", "my-license"))]
)
def test_the_license_of_a_gguf_file(hub, tmp_path, monkeypatch, tokenizer, license, expected):  # noqa: F811
    gguf = pytest.importorskip("gguf")
    original = make_base(tokenizer, tmp_path / "f32", head_dim=8, intermediate_size=64)
    start = gguf.GGUFWriter.add_context_length
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_context_length", lambda self, n: (start(self, n), self.add_license(license))
    )
    write_gguf(gguf, tmp_path / "tiny.gguf", original, tokenizer, gguf.GGMLQuantizationType.F32)
    shutil.rmtree(tmp_path / "f32")
    monkeypatch.chdir(tmp_path)
    convert_main(["tiny.gguf", "--output", "hla", "--data", "text.txt", *FAST])
    data = card_of(tmp_path / "hla", hub, monkeypatch).data
    assert (data.license, data.get("license_name")) == expected


def test_a_base_and_an_adapter_on_the_hub(hub, tmp_path):
    hub.call("-m", "huggingface_hub.cli.hf", "upload", "user/base", "base")
    words = ["user/base", "--output", "hla", "--data", "text.txt", *FAST]
    hub.call("-m", "conversion.convert", *words)
    data = ModelCard.load(tmp_path / "hla" / "README.md").data
    assert (data.base_model, data.base_model_relation, data.license) == ("user/base", "finetune", "apache-2.0")

    model = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = "user/base"
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text(CARD)
    hub.call("-m", "huggingface_hub.cli.hf", "upload", "user/adapter", "adapter")
    hub.call("-m", "conversion.convert", "user/adapter", "--output", "adapted", *words[3:])
    merged, weights = model.merge_and_unload().state_dict(), load_file(tmp_path / "adapted" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(weights[name], merged[name])


def test_the_workflow_calls_what_exists_on_the_oldest_transformers_declared():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert set(job["strategy"]["matrix"]["transformers"]) == {"oldest", "newest"}
    pin, run = (step["run"] for step in job["steps"] if "run" in step)
    assert os.access(ROOT / run, os.X_OK)
    command = pin.split("$(")[1].split(')"')[0]
    oldest = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    assert f'"transformers>={oldest.strip()},<' in (ROOT / "pyproject.toml").read_text() and oldest.count("\n") == 1
    assert f"OLDEST ?= $(shell {command})" in makefile and "$(PIN)" in makefile and "PIN=transformers==" in pin
    for target in re.findall(r"make (\S+)", (ROOT / run).read_text()):
        assert f"\n{target}: " in makefile
