"""Sequence, token and question-answering heads: made, converted, saved, loaded, trained; adapters on any of them."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from peft import AutoPeftModel, IA3Config, LoraConfig, get_peft_model
from tiny import ARCHITECTURE_SETTINGS, MODES, SIZES, randomize, tiny_base, tiny_config, tiny_model, tokens
from transformers import Trainer, TrainingArguments

import hla_hf
from hla_hf.configuration_hla import ARCHITECTURES, available_architectures, base_class_names
from hla_hf.layer_hla import hla_attentions
from hla_hf.modeling_hla import model_class


ROOT = Path(hla_hf.__file__).parent.parent
SEQUENCE, TOKEN, QUESTION = HEADS = tuple(
    f"AutoModelFor{x}" for x in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
)
EVERY_HEAD = [(x, head) for x in available_architectures() for head in HEADS if head in base_class_names(x)]
SOME_HEADS = [("llama", SEQUENCE), ("llama", TOKEN), ("llama", QUESTION),
              ("mistral", QUESTION), ("mixtral", SEQUENCE),
              ("qwen3_moe", QUESTION)]  # fmt: skip
DEPTH = {"num_hidden_layers": 3, "num_labels": 3}
SETTINGS = {"hla_window": 8, "hla_num_sinks": 2} | DEPTH


def tiny_head(architecture="llama", head=SEQUENCE, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    config = tiny_config(architecture, **SETTINGS | ARCHITECTURE_SETTINGS.get(architecture, {}) | settings)
    return randomize(model_class(architecture, head)(config)).eval().to(dtype)


def base_head(architecture, head, dtype=torch.float64):
    names = base_class_names(architecture)
    config = getattr(transformers, names["AutoConfig"])(**SIZES | DEPTH | ARCHITECTURE_SETTINGS.get(architecture, {}))
    config._experts_implementation = "eager"  # which has float64
    torch.manual_seed(0)
    return getattr(transformers, names[head])(config).eval().to(dtype)


def answers(model, ids, **inputs):
    """What the head says of each row, or of each token."""
    with torch.no_grad():
        output = model(ids, use_cache=False, **inputs)
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)


def body(model):
    return model.base_model.state_dict()


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# ---- made ----------------------------------------


def test_heads_are_those_of_transformers():
    assert len(EVERY_HEAD) >= 43 or available_architectures() != ARCHITECTURES
    for architecture in available_architectures():
        auto_map, names = tiny_config(architecture).auto_map, base_class_names(architecture)
        assert list(auto_map) == list(names)
        for head in HEADS:
            table = getattr(transformers, head)._model_mapping._model_mapping
            if head in names:
                assert auto_map[head] == f"modeling_hla.HLA{table[architecture]}" and names[head] in dir(transformers)
                assert getattr(hla_hf, f"HLA{names[head]}") is model_class(architecture, head)
            else:
                assert architecture not in table
    with pytest.raises(ValueError, match="auto_class='AutoModelForTokenClassification': cohere has AutoModel, Auto"):
        model_class("cohere", TOKEN)


@pytest.mark.parametrize("architecture, head", EVERY_HEAD)
def test_every_head_computes_what_its_decoder_and_its_base_say(architecture, head):
    base = base_head(architecture, head)
    layers, ids = base.base_model.layers, tokens(2, 40)
    expected = answers(base, ids)
    model = hla_hf.to_hla(base, hla_window=8, hla_num_sinks=2)
    assert type(model) is model_class(architecture, head) is type(randomize(model))
    assert model.base_model.layers is layers and type(model.base_model) is model_class(architecture, "AutoModel")
    assert len(hla_attentions(model)) == len(model.config.hla_layer_ids) > 0
    with hla_hf.softmax_attention(model):
        torch.testing.assert_close(answers(model, ids), expected, rtol=0, atol=1e-10)
    changed = answers(model, ids)
    assert not torch.allclose(changed, expected, atol=1e-3)

    fresh = model_class(architecture, head)(copy.deepcopy(model.config)).eval().double()
    assert type(fresh.base_model) is model_class(architecture, "AutoModel")
    assert fresh.base_model.config is fresh.config
    assert all(len(x.self_attn._forward_pre_hooks) == 1 for i, x in enumerate(fresh.base_model.layers)
               if i in fresh.config.hla_layer_ids)  # fmt: skip
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(answers(fresh, ids), changed, rtol=0, atol=1e-10)

    hla_hf.to_softmax(model)
    assert type(model) is getattr(transformers, base_class_names(architecture)[head])
    torch.testing.assert_close(answers(model, ids), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_what_they_give_alone(head, mode, side):
    model, lengths = tiny_head(head=head, **MODES[mode]), (40, 23, 5)
    rows = [tokens(1, length, seed=length) for length in lengths]
    ids, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(40 - row.shape[1], 40) if side == "left" else slice(0, row.shape[1])
        ids[i, place], mask[i, place] = row[0], 1
    together = answers(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        got = together[i] if head == SEQUENCE else together[i, mask[i].bool()]
        torch.testing.assert_close(got, answers(model, row)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("head", HEADS)
def test_a_refused_conversion_leaves_the_head_as_it_was(head):
    base, ids = base_head("llama", head), tokens(1, 20)
    expected, before = answers(base, ids), type(base)
    with pytest.raises(ValueError, match="hla_window must be at least 0"):
        hla_hf.to_hla(base, hla_window=-1)
    assert type(base) is before and torch.equal(answers(base, ids), expected) and not hla_attentions(base)


# ---- saved and loaded ----------------------------------------


@pytest.mark.parametrize("architecture, head", SOME_HEADS)
def test_saving_loading_and_copying(architecture, head, tmp_path):
    model, ids = tiny_head(architecture, head, torch.float32), tokens(2, 30)
    model.save_pretrained(tmp_path / "head")
    again, info = getattr(transformers, head).from_pretrained(tmp_path / "head", output_loading_info=True)
    assert type(again) is type(model) and not info["missing_keys"] and not info["unexpected_keys"]
    assert again.config.num_labels == 3
    for copied in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert_same(copied.state_dict(), model.state_dict())
        assert torch.equal(answers(copied, ids), answers(model, ids))
    again.save_pretrained(tmp_path / "again")
    assert_same(getattr(transformers, head).from_pretrained(tmp_path / "again").state_dict(), model.state_dict())


@pytest.mark.parametrize("architecture, head", SOME_HEADS)
def test_a_head_starts_from_a_converted_language_model(architecture, head, tmp_path):
    model = tiny_model(architecture, dtype=torch.float32, **SETTINGS | ARCHITECTURE_SETTINGS.get(architecture, {}))
    model.save_pretrained(tmp_path / "lm")
    auto = getattr(transformers, head)
    classifier, info = auto.from_pretrained(tmp_path / "lm", num_labels=3, output_loading_info=True)
    new = {name.partition(".")[0] for name in info["missing_keys"]}
    assert new == {"qa_outputs" if head == QUESTION else "score"} and info["unexpected_keys"] == {"lm_head.weight"}
    assert_same(body(classifier), body(model))

    # And back into the base's own class, under the names that it has.
    hla_hf.to_softmax(classifier).save_pretrained(tmp_path / "softmax")
    assert type(classifier) is getattr(transformers, base_class_names(architecture)[head])
    base, info = auto.from_pretrained(tmp_path / "softmax", output_loading_info=True)
    assert type(base) is type(classifier) and not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(base.state_dict(), classifier.state_dict())

    # A head of the base loads into that of HLA.
    loaded, info = model_class(architecture, head).from_pretrained(tmp_path / "softmax", output_loading_info=True)
    assert info["missing_keys"] and all(".hla." in name for name in info["missing_keys"]), info["missing_keys"]
    assert_same({name: x for name, x in body(loaded).items() if ".hla." not in name}, body(base))


WITHOUT_THE_PACKAGE = """
import sys
from pathlib import Path
import torch, transformers
root = Path(sys.argv[1])
for name in ("one", "two"):  # the second with code of its own
    for head in sys.argv[2:]:
        saved = torch.load(root / f"{name}-{head}.pt")
        folder = root / f"{name}-{head}"
        model = getattr(transformers, head).from_pretrained(folder, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        assert type(model.base_model).__module__ == type(model).__module__
        out = model(saved["ids"])
        assert torch.equal(out[0], saved["out"]), (name, head)
        model.save_pretrained(root / "resaved")
        again = getattr(transformers, head).from_pretrained(root / "resaved", trust_remote_code=True).eval()
        assert torch.equal(again(saved["ids"])[0], saved["out"])
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        made = getattr(transformers, head).from_config(config, trust_remote_code=True)
        assert type(made).__name__ == type(model).__name__
assert "hla_hf" not in sys.modules
# A head as the first thing that is made of a language model's directory.
model = transformers.AutoModelForQuestionAnswering.from_pretrained(root / "lm", trust_remote_code=True)
expected = torch.load(root / "lm.pt")
assert all(torch.equal(x, expected[name]) for name, x in model.base_model.state_dict().items())
print("loaded")
"""


def test_heads_load_without_the_package(tmp_path):
    for name, operator in (("one", "linear"), ("two", "ahla")):
        for head in HEADS:
            model, ids = tiny_head(head=head, dtype=torch.float32, hla_operator=operator), tokens(2, 30)
            model.save_pretrained(tmp_path / f"{name}-{head}")
            assert head in json.loads((tmp_path / f"{name}-{head}" / "config.json").read_text())["auto_map"]
            if name == "two":
                path = tmp_path / f"{name}-{head}" / "layer_hla.py"
                path.write_text(path.read_text() + "\n# of another release\n")
            with torch.no_grad():
                torch.save({"ids": ids, "out": model(ids)[0]}, tmp_path / f"{name}-{head}.pt")
    model = tiny_model("qwen3", dtype=torch.float32)
    model.save_pretrained(tmp_path / "lm")
    torch.save(body(model), tmp_path / "lm.pt")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment.pop("PYTHONPATH", None)
    script = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path), *HEADS]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0 and done.stdout.endswith("loaded\n"), done.stderr[-3000:]


# ---- trained ----------------------------------------


def labelled(head, count=48):
    """Rows whose first token says what is right, in reach of the far part only: the window is shorter."""
    rows = []
    for i in range(count):
        label, length = i % 2, 14 + i % 5
        ids = tokens(length, seed=i)
        ids[ids < 10] += 20
        ids[0] = 5 + label
        labels = {"labels": label}
        if head == TOKEN:
            labels = {"labels": [label] * length}
        elif head == QUESTION:
            labels = {"start_positions": 2 + label, "end_positions": 6 + label}
        rows.append({"input_ids": ids.tolist(), **labels})
    return Dataset.from_list(rows)


def collate(rows):
    """Pads on the left, labels of tokens included."""
    length = max(len(row["input_ids"]) for row in rows)

    def pad(values, value):
        return [value] * (length - len(values)) + values

    batch = {"input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    for name in rows[0].keys() - {"input_ids"}:
        values = [pad(row[name], -100) if isinstance(row[name], list) else row[name] for row in rows]
        batch[name] = torch.tensor(values)
    return batch


@pytest.mark.parametrize("head", HEADS)
def test_trainer_trains_a_head(head, tmp_path):
    model = tiny_head(head=head, dtype=torch.float32, num_labels=2, hla_window=4, hla_num_sinks=0)
    before = copy.deepcopy(model.state_dict())
    options = TrainingArguments(
        tmp_path / "run", max_steps=60, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=10,
        report_to=[], use_cpu=True, save_strategy="no", seed=0,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=labelled(head), data_collator=collate)
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert losses[-1] < 0.5 * losses[0], losses
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert any(".hla." in name for name in changed) and any("q_proj" in name for name in changed)
    trainer.save_model(tmp_path / "saved")
    again = getattr(transformers, head).from_pretrained(tmp_path / "saved")
    assert type(again) is type(model)
    assert_same(again.state_dict(), model.state_dict())


def test_reward_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    from test_examples import make_tokenizer

    tokenizer = make_tokenizer()
    model = tiny_head(dtype=torch.float32, num_labels=1, vocab_size=len(tokenizer))
    rows = [{"prompt": f"{i}: ", "chosen": "it was good", "rejected": "it was bad"} for i in range(32)]
    options = trl.RewardConfig(
        str(tmp_path), max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=5,
        report_to=[], use_cpu=True, save_strategy="no", gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = trl.RewardTrainer(model, args=options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert losses[-1] < 0.5 * losses[0], losses


# ---- adapters ----------------------------------------


@pytest.mark.parametrize("adapter", [LoraConfig, IA3Config])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "mistral", "smollm3"])
def test_peft_has_the_default_targets_of_the_base(architecture, adapter):
    settings = DEPTH | ARCHITECTURE_SETTINGS.get(architecture, {})
    targets = []
    for model in (tiny_base(architecture, **settings), tiny_model(architecture, **settings)):
        try:
            adapted = get_peft_model(model, adapter())
        except ValueError as error:  # no defaults for the base
            targets.append(str(error))
        else:
            targets.append(adapted.targeted_module_names)
    assert targets[0] == targets[1] and targets[0]
    assert architecture not in ("llama", "qwen2") or any("v_proj" in name for name in targets[1])


def test_peft_before_the_package_or_after_a_model():
    code = """
import sys
{}
from peft import LoraConfig, get_peft_model
{}
model = hla_hf.HLALlamaForCausalLM(hla_hf.HLALlamaConfig(
    vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
print(len(get_peft_model(model, LoraConfig()).targeted_module_names))
"""
    for first, then in (("", "import hla_hf"), ("import hla_hf; assert 'peft' not in sys.modules", "")):
        script = [sys.executable, "-c", code.format(first, then)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
        assert done.stdout.split() == ["2"], done.stderr[-3000:]


@pytest.mark.parametrize("head, task", [(SEQUENCE, "SEQ_CLS"), (TOKEN, "TOKEN_CLS"), (QUESTION, "QUESTION_ANS")])
def test_an_adapter_on_a_head_is_saved_and_loaded(head, task, tmp_path):
    model, ids = tiny_head(head=head, dtype=torch.float32), tokens(2, 30)
    model.save_pretrained(tmp_path / "model")
    model = getattr(transformers, head).from_pretrained(tmp_path / "model").eval()
    plain = answers(model, ids)
    adapted = get_peft_model(model, LoraConfig(task_type=task, init_lora_weights=False)).eval()
    expected = answers(adapted, ids)
    assert not torch.allclose(expected, plain, atol=1e-3)
    adapted.save_pretrained(tmp_path / "adapter")
    auto = getattr(__import__("peft"), f"AutoPeftModelFor{head.removeprefix('AutoModelFor')}", AutoPeftModel)
    again = auto.from_pretrained(tmp_path / "adapter", **({} if head == TOKEN else {"num_labels": 3})).eval()
    torch.testing.assert_close(answers(again, ids), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(answers(again.merge_and_unload(), ids), expected, rtol=0, atol=1e-4)
