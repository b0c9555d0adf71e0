"""The examples on tiny models, each as its reader runs it; the package without what only the commands need."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_base, tiny_model
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline


ROOT = Path(__file__).parents[1]
# Says something of its own where a chat has no system message, as many templates do.
CHAT = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """One token per ASCII character, and `<s>` before every text that is not a continuation."""
    special = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>"]
    tokens = [*special, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model_path(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "model"
    tiny_model(vocab_size=len(tokenizer), hla_window=8, hla_num_sinks=2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def run(tmp_path):
    """Runs Python with the given arguments, in a home of its own, and returns what it printed."""

    def run(*arguments):
        environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *map(str, arguments)]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def example(name):
    return ROOT / "examples" / f"{name}.py"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed_weights(before, after):
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (before, after))
    return {name for name, weight in before.items() if not torch.equal(weight, after[name])}


def test_package_imports_loads_and_generates_without_what_only_the_commands_need(model_path, run):
    code = """
import sys
for name in ("accelerate", "datasets", "peft"):
    sys.modules[name] = None
import hla_hf, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__module__, model.generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=3).shape[1])
"""
    assert run("-c", code, model_path).split() == ["hla_hf.modeling_hla", "12"]


def test_convert_and_chat(tokenizer, tmp_path, run):
    tiny_base(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("Linear attention keeps a state of fixed size.\n" * 40)
    options = ["--prompt", "Who?", "--data", "text.txt", "--steps", 2, "--tokens", 256, "--seq-len", 32, "--facts", 0]
    printed = run(example("convert_and_chat"), "base", "--output", "hla", *options, "--hla-window", 8)
    assert len(printed.split("> Who?\n")[1].strip()) > 50
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hla").config.hla_window == 8


def test_distil(model_path, tmp_path, run):
    (tmp_path / "text.txt").write_text("Linear attention keeps a state.\nSoftmax attention keeps every key.\n\n" * 20)
    printed = run(
        example("distil"), model_path, "--data", "text.txt", "--output", "out", "--steps", 40, "--max-length", 32
    )
    losses = [float(x) for x in re.findall(r"'loss': '?([0-9.e+-]+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0], printed
    changed = changed_weights(model_path, tmp_path / "out")
    assert changed and all(".hla." in name for name in changed)


def test_sft_trl(model_path, tmp_path, run):
    pytest.importorskip("trl")
    turns = [{"role": "user", "content": "Which city?"}, {"role": "assistant", "content": "Paris, of course."}]
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": turns}] * 40)
    options = ["--steps", 20, "--max-length", 128]
    printed = run(example("sft_trl"), model_path, "--data", data, "--output", "out", *options)
    losses = [float(x) for x in re.findall(r"'loss': '?([0-9.e+-]+)", printed)]
    assert len(losses) == 2 and losses[-1] < losses[0], printed
    assert any("q_proj" in name for name in changed_weights(model_path, tmp_path / "out"))
    assert (tmp_path / "out" / "modeling_hla.py").is_file()


def test_classify(model_path, tmp_path, run):
    rows = [
        {"text": f"{i} it was {'good' if i % 3 else 'bad'}", "label": "good" if i % 3 else "bad"} for i in range(80)
    ]
    options = ["--data", write_lines(tmp_path / "texts.jsonl", rows), "--output", "out", "--learning-rate", 1e-2]
    printed = run(example("classify"), model_path, *options)
    assert float(re.search(r"20 held-out texts: ([0-9.]+)", printed)[1]) > 0.9
    classify = pipeline("text-classification", str(tmp_path / "out"))
    assert type(classify.model).__name__ == "HLALlamaForSequenceClassification"
    assert [x["label"] for x in classify(["7 it was good", "6 it was bad"], batch_size=2)] == ["good", "bad"]


def test_evaluate_lm_eval(model_path, tokenizer, tmp_path, run):
    pytest.importorskip("lm_eval")
    choices = ["Paris", "Lyon", "Rome"]
    rows = [{"question": f"City {i}:", "choices": choices, "answer": i % 3} for i in range(24)]
    printed = run(example("evaluate_lm_eval"), model_path, "--data", write_lines(tmp_path / "questions.jsonl", rows))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    right = 0
    for row in rows:
        scores = []
        for choice in choices:
            start = len(tokenizer(row["question"]).input_ids)
            ids = tokenizer(f"{row['question']} {choice}", return_tensors="pt").input_ids
            with torch.no_grad():
                log_probs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
            scores.append(log_probs[start - 1 :].sum())
        right += int(torch.stack(scores).argmax()) == row["answer"]
    assert f"accuracy on 24 questions: {right / 24:.3f}" in printed
    assert 0 < right < 24
