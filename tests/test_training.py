"""The training recipe on tiny random models: data, objectives, what is trained and saved, faults, several processes."""

import dataclasses
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from test_conversion import make_base, tokenizer  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from conversion.transfer import hla_parameters
from hla_hf import softmax_attention, to_hla
from training import checkpoint, export, finetune, loop
from training import model as student
from training.data import ShuffledRows, StreamedRows, as_batch, packed_rows
from training.objective import Objective, Place
from training.recipe import Recipe, parse_recipe


ROOT = Path(__file__).parents[1]
LINES = [f"Document {i}. " + "state of fixed size, keys and values; " * (i % 7) for i in range(120)]
ASSISTANT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def files(tokenizer, tmp_path_factory):  # noqa: F811
    """A base checkpoint, its conversion with HLA parameters away from their start, and text."""
    root = tmp_path_factory.mktemp("training")
    torch.set_num_threads(1)
    base = make_base(tokenizer, root / "base", tie_word_embeddings=True)
    model = to_hla(base, hla_window=4, hla_num_sinks=1, hla_chunk_size=16)
    for parameter in hla_parameters(model).values():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(root / "hla")
    tokenizer.save_pretrained(root / "hla")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in LINES))
    return root


def arguments(files, output, **fields):
    fields = {
        "model": files / "hla", "output": output, "data": files / "text.jsonl", "seq_len": 32, "steps": 4,
        "batch_size": 2, "eval_rows": 2, "checkpoint_steps": 2, "trackers": "none", "warmup": 0.25,
    } | fields  # fmt: skip
    words = []
    for name, value in fields.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def train(files, output, *flags, **fields):
    finetune.run(parse_recipe([*arguments(files, output, **fields), *flags]))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return history(output)


def history(output):
    path = output / "model" / "training.json"
    return json.loads(path.read_text()) if path.exists() else None


def losses(state):
    return [x["loss"] for x in state["train"]]


def weights(output):
    return load_file(output / "model" / "model.safetensors")


def error_of(capsys, words, code=2):
    with pytest.raises(SystemExit) as info:
        finetune.main([str(x) for x in words])
    assert info.value.code == code
    return capsys.readouterr().err


# ---- the recipe ----------------------------------------


def test_the_command_line_wins_over_the_file(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: m\noutput: o\ndata: [a.txt, b.txt]\nkl_weight: 1\nload_best: false\nsteps: null\n"
    )
    recipe = parse_recipe(["--config", str(tmp_path / "r.yaml"), "--output", "p", "--learning_rate", "3e-4"])
    assert (recipe.model, recipe.output, recipe.data) == ("m", "p", ["a.txt", "b.txt"])
    assert (recipe.kl_weight, recipe.load_best, recipe.learning_rate, recipe.steps) == (1.0, False, 3e-4, None)
    assert recipe.trackers == ["tensorboard"]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"train": "most"}, ("train", "'most'", "lora, hla or full")),
        ({"schedule": "bumpy"}, ("schedule", "'bumpy'", "cosine")),
        ({"ce_weight": 0}, ("kl_weight and ce_weight",)),
        ({"steps": 0}, ("steps", "at least 1", "got 0")),
        ({"temperature": 0}, ("temperature", "greater than 0")),
        ({"context_parallel": 2}, ("context_parallel=2", "number of processes, 1")),
        ({"context_parallel": 2, "kl_weight": 1}, ("context_parallel", "kl_weight")),
        ({"context_parallel": 3}, ("seq_len=32", "context_parallel=3")),
        ({"teacher": "x"}, ("teacher", "'x'", "kl_weight is 0")),
        ({"model": "nowhere/at-all/x"}, ("model", "'nowhere/at-all/x'", "cannot be read")),
        ({"data": "none.jsonl"}, ("'none.jsonl'", "does not exist")),
        ({"seq_len": 513}, ("seq_len=513", "512 positions")),
        ({"eval_seq_len": 600}, ("eval_seq_len=600", "512 positions")),
        ({"trackers": "carrier_pigeon"}, ("trackers", "'carrier_pigeon'")),
        ({"kl_weight": 1, "teacher": "nowhere/y/z"}, ("teacher", "'nowhere/y/z'", "cannot be read")),
        ({"resume": True}, ("--resume", "no checkpoint")),
        ({"eval_rows": 1000}, ("eval_rows=1000", "none is left")),
    ],
)
def test_bad_recipes(files, tmp_path, capsys, fields, words):
    message = error_of(capsys, arguments(files, tmp_path / "out", **fields))
    assert all(word in message for word in words) and len(message.strip().splitlines()[-1]) > 20, message
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_unknown_field(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("learning_rat: 1\n")
    message = error_of(capsys, ["--config", tmp_path / "r.yaml"])
    assert "'learning_rat'" in message and "learning_rate" in message


def test_models_that_cannot_be_trained(files, tokenizer, tmp_path, capsys):  # noqa: F811
    message = error_of(capsys, arguments(files, tmp_path / "out", model=files / "base"))
    assert "without HLA layers" in message and "'llama'" in message
    model = AutoModelForCausalLM.from_pretrained(files / "hla")
    model.resize_token_embeddings(len(tokenizer) - 10)
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    message = error_of(capsys, arguments(files, tmp_path / "out", model=tmp_path / "small"))
    assert "tokenizer" in message and str(len(tokenizer)) in message and str(len(tokenizer) - 10) in message


@pytest.mark.parametrize("path", sorted((ROOT / "training" / "configs").glob("*.yaml")), ids=lambda x: x.stem)
def test_accelerate_parses_the_config(path):
    words = ["--config_file", str(path), "-m", "training.finetune", "--config", "x.yaml"]
    parsed, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    settings = yaml.safe_load(path.read_text())
    assert parsed.num_processes == settings["num_processes"] and parsed.num_machines == settings["num_machines"]
    assert parsed.mixed_precision == settings["mixed_precision"] and parsed.use_cpu == settings["use_cpu"]
    kind = settings["distributed_type"]
    assert (parsed.use_fsdp, parsed.use_deepspeed, parsed.multi_gpu) == tuple(
        kind == x for x in ("FSDP", "DEEPSPEED", "MULTI_GPU")
    )
    if parsed.use_fsdp:
        assert int(parsed.fsdp_version) == 2
    if parsed.use_deepspeed:
        assert parsed.zero_stage == int(path.stem[-1])


@pytest.mark.parametrize("path", sorted((ROOT / "training" / "recipes").glob("*.yaml")), ids=lambda x: x.stem)
def test_recipes_parse(path):
    assert isinstance(parse_recipe(["--config", str(path), "--model", "m", "--output", "o", "--data", "d"]), Recipe)


# ---- data ----------------------------------------


def test_rows_hold_the_documents_end_to_end(files, tokenizer):  # noqa: F811
    rows = packed_rows([str(files / "text.jsonl")], tokenizer, 32)
    ids, positions, labels = [], [], []
    for line in LINES:
        document = [*tokenizer(line).input_ids, tokenizer.eos_token_id]
        ids += document
        positions += range(len(document))
        labels += [-100, *document[1:]]
    batch = as_batch(list(rows))
    assert len(rows) == len(ids) // 32
    assert batch["input_ids"].flatten().tolist() == ids[: len(rows) * 32]
    for row, start in enumerate(range(0, len(rows) * 32, 32)):
        restart = positions[start]  # what a row cuts off starts anew in the next one
        boundary = next((i for i in range(1, 32) if positions[start + i] == 0), 32)
        expected = [p - restart if i < boundary else p for i, p in enumerate(positions[start : start + 32])]
        assert batch["position_ids"][row].tolist() == expected
        assert batch["labels"][row].tolist() == [-100, *labels[start + 1 : start + 32]]


def test_sources_agree_and_tokenising_is_cached(files, tokenizer, tmp_path):  # noqa: F811
    rows = packed_rows([str(files / "text.jsonl")], tokenizer, 32)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text((files / "text.jsonl").read_text())
    for other in (
        packed_rows([str(files / "text.jsonl")], tokenizer, 32, streaming=True),
        packed_rows([str(files / "text.jsonl")], tokenizer, 32, num_proc=2),
        packed_rows([str(tmp_path / "folder")], tokenizer, 32),
    ):
        assert [list(x["input_ids"]) for x in other] == list(rows["input_ids"])
    same, again = (
        packed_rows([str(files / "text.jsonl")], AutoTokenizer.from_pretrained(files / "hla"), 32) for _ in range(2)
    )
    assert again.cache_files == same.cache_files
    assert len(packed_rows([str(files / "text.jsonl")] * 2, tokenizer, 32)) >= 2 * len(rows)


CHATS = [
    [
        {"role": "user", "content": f"question {i}"},
        {"role": "assistant", "content": f"answer {i}"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "that is all"},
    ]
    for i in range(8)
]
MARKED = ASSISTANT.replace(
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}",
)


@pytest.mark.parametrize("template", [ASSISTANT, MARKED], ids=["plain", "marked"])
def test_a_chat_has_loss_on_the_assistants_turns(files, tmp_path, template):
    tokenizer = AutoTokenizer.from_pretrained(files / "hla")  # noqa: F811
    tokenizer.chat_template = template
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": x}) + "\n" for x in CHATS))
    batch = as_batch(list(packed_rows([str(tmp_path / "chat.jsonl")], tokenizer, 160)))
    ids, labels, positions = (batch[x].flatten() for x in ("input_ids", "labels", "position_ids"))
    first = slice(0, int((positions[1:] == 0).nonzero()[0]) + 1)
    assert tokenizer.decode(ids[first]) == tokenizer.apply_chat_template(CHATS[0], tokenize=False)
    assert tokenizer.decode(labels[first][labels[first] != -100]) == "answer 0<|im_end|>\nthat is all<|im_end|>\n"


def test_bad_data(files, tmp_path, capsys):
    def message(content, **fields):
        (tmp_path / "d.jsonl").write_text(content)
        return error_of(capsys, arguments(files, tmp_path / "out", data=tmp_path / "d.jsonl", **fields))

    assert "'body'" in message('{"body": "x"}\n')
    assert "does not fill one row" in message('{"text": "x"}\n')
    for streaming in (False, True):
        text = message("", streaming=streaming)
        assert "d.jsonl" in text and ("empty" in text or "cannot be read" in text)
    assert "does not fill one row" in message('{"text": "x"}\n', streaming=True)
    tokenizer = AutoTokenizer.from_pretrained(files / "hla")  # noqa: F811
    tokenizer.chat_template = "{% if messages|length > 2 %}rewritten {% endif %}" + ASSISTANT
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": x}) + "\n" for x in CHATS))
    with pytest.raises(ValueError, match="generation"):
        packed_rows([str(tmp_path / "chat.jsonl")], tokenizer, 32)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        packed_rows([str(tmp_path / "chat.jsonl")], tokenizer, 32)


def test_the_order_of_rows_does_not_depend_on_processes_and_resumes(files, tokenizer):  # noqa: F811
    rows = packed_rows([str(files / "text.jsonl")], tokenizer, 32)
    count = len(rows)

    def ids(batches):
        return [x for batch in batches for x in batch["input_ids"].tolist()]

    alone = ShuffledRows(rows, 4, seed=1)
    together = [ShuffledRows(rows, 2, seed=1, process=i, num_processes=2) for i in range(2)]
    steps = -(-2 * count // 4)
    expected = ids(next(alone) for _ in range(steps))
    assert expected == ids(next(x) for _ in range(steps) for x in together)
    assert sorted(expected[:count]) == sorted(rows["input_ids"]) == sorted(expected[count : 2 * count])
    assert expected[:count] != expected[count : 2 * count] and expected[:count] != rows["input_ids"]
    resumed = ShuffledRows(rows, 4, seed=1)
    middle = ShuffledRows(rows, 4, seed=1)
    for _ in range(3):
        next(middle)
    resumed.load_state_dict(json.loads(json.dumps(middle.state_dict())))
    assert ids(next(resumed) for _ in range(5)) == expected[12:32]


def test_streamed_rows_resume_where_they_stood(files, tokenizer):  # noqa: F811
    def stream(process=0, num_processes=1):
        rows = packed_rows([str(files / "text.jsonl")], tokenizer, 32, streaming=True).skip(2)
        return StreamedRows(rows, 2, process, num_processes)

    first = stream()
    for _ in range(3):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    expected = [next(first)["input_ids"] for _ in range(90)]  # into the second epoch
    assert first.epoch >= 1
    second = stream()
    second.load_state_dict(state)
    assert all(torch.equal(next(second)["input_ids"], x) for x in expected)
    alone, halves = stream(), [stream(i, 2) for i in range(2)]
    rows = torch.cat([next(alone)["input_ids"] for _ in range(4)])
    assert torch.equal(rows[::2], torch.cat([next(halves[0])["input_ids"] for _ in range(2)]))
    assert torch.equal(rows[1::2], torch.cat([next(halves[1])["input_ids"] for _ in range(2)]))


# ---- objective and teacher ----------------------------------------


def recipe_of(files, tmp_path, **fields):
    return parse_recipe(arguments(files, tmp_path / "out", **fields))


@pytest.mark.parametrize("kind", ["lora", "hla"])
def test_the_same_weights_are_the_exact_teacher(files, tmp_path, kind):
    base = AutoModelForCausalLM.from_pretrained(files / "base").eval()
    model = student.make_trainable(
        AutoModelForCausalLM.from_pretrained(files / "hla"), recipe_of(files, tmp_path, train=kind, lora_dropout=0.5)
    ).train()
    for parameter in model.parameters():
        if parameter.requires_grad:  # as after training
            parameter.data += 0.1 * torch.randn_like(parameter)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.arange(3, 63).view(2, 30)
    with torch.no_grad():
        with student.as_base_model(model):
            assert torch.equal(model(ids).logits, base(ids).logits)
        assert model.training and {name for name, p in model.named_parameters() if p.requires_grad} == trainable
        assert not torch.allclose(model.eval()(ids).logits, base(ids).logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_objective_is_kl_and_next_token_loss_over_the_targets(files, tmp_path, kind):
    recipe = recipe_of(files, tmp_path, train=kind, kl_weight=0.7, ce_weight=0.3, temperature=2.0)
    plain = AutoModelForCausalLM.from_pretrained(files / "hla").eval()
    teacher = student.load_teacher(recipe, plain)
    assert (teacher is None) == (kind == "lora")
    model = student.make_trainable(plain, recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    batch = {"input_ids": torch.arange(3, 63).view(2, 30), "position_ids": torch.arange(30).expand(2, 30)}
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :10] = -100
    share = Place(Accelerator(cpu=True), 1).share(batch)
    loss, sums = Objective(recipe, model, model, teacher)(share)
    base = AutoModelForCausalLM.from_pretrained(files / "base").eval()
    ours, theirs = model(batch["input_ids"]).logits[:, :-1], base(batch["input_ids"]).logits[:, :-1]
    kl = ce = count = top1 = 0
    for b in range(2):
        for t in range(29):
            if batch["labels"][b, t + 1] != -100:
                p, q = (theirs[b, t] / 2).softmax(-1), (ours[b, t] / 2).softmax(-1)
                kl, count = kl + (p * (p / q).log()).sum(), count + 1
                ce = ce - ours[b, t].log_softmax(-1)[batch["labels"][b, t + 1]]
                top1 += int(ours[b, t].argmax() == theirs[b, t].argmax())
    torch.testing.assert_close(
        sums,
        torch.stack([torch.tensor(float(count)), loss.detach(), kl.detach(), ce.detach(), torch.tensor(float(top1))]),
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(loss, 0.3 * ce + 0.7 * 4 * kl, rtol=1e-3, atol=1e-3)
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_model_whose_weights_moved_is_not_its_own_teacher(files, tmp_path, capsys):
    train(files, tmp_path / "first", steps=2)
    words = {"model": tmp_path / "first" / "model", "kl_weight": 1, "steps": 2}
    assert "name that one as teacher" in error_of(capsys, arguments(files, tmp_path / "second", **words))
    AcceleratorState._reset_state(True)
    state = train(files, tmp_path / "second", teacher=files / "base", **words)
    assert state["train"][0]["kl"] > 0


def test_packed_documents_do_not_see_each_other(files, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(files / "hla").eval()
    ids = torch.arange(3, 43)[None]
    positions = torch.cat([torch.arange(13), torch.arange(1), torch.arange(26)])[None]
    parts = [ids[:, :13], ids[:, 13:14], ids[:, 14:]]
    for context in (softmax_attention(model), torch.no_grad()):
        with context, torch.no_grad():
            packed = model(ids, position_ids=positions, use_cache=False).logits
            expected = torch.cat([model(x, use_cache=False).logits for x in parts], 1)
        torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-4)


# ---- runs: every objective and choice of parameters ----------------------------------------


OBJECTIVES = {
    "ce": {},
    "kl": {"kl_weight": 1, "ce_weight": 0, "temperature": 2},
    "both": {"kl_weight": 1, "ce_weight": 0.5},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["lora", "hla", "full"])
def test_a_run_trains_what_it_says_and_leaves_a_complete_model(files, tmp_path, kind, objective):
    state = train(files, tmp_path / "out", train=kind, accumulation=2, load_best=False, **OBJECTIVES[objective])
    out = tmp_path / "out"
    before, after = load_file(files / "hla" / "model.safetensors"), weights(out)
    assert before.keys() == after.keys() and not any("lora" in name for name in after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    hla = {name for name in before if ".hla." in name}
    projections = {name for name in before if "self_attn." in name and name.endswith("_proj.weight")}
    assert changed == {"lora": hla | projections, "hla": hla, "full": set(before)}[kind]
    assert {"kl", "top1"} <= state["eval"][-1].keys() or objective == "ce"
    assert len(state["train"]) == 4 and [x["step"] for x in state["eval"]] == [0, 2, 4]
    assert state["tokens"] == 4 * 2 * 2 * 32
    names = {path.name for path in (out / "model").iterdir()}
    assert names >= {
        "README.md", "config.json", "generation_config.json", "modeling_hla.py", "ops_hla.py", "tokenizer.json",
        "chat_template.jinja", "curves.png", "training.json",
    }  # fmt: skip
    card = (out / "model" / "README.md").read_text()
    assert f"{state['eval'][-1]['perplexity']:.4g}" in card and f'train: "{kind}"' in card
    assert str(files) not in card + (out / "model" / "training.json").read_text()  # it is going to be published
    assert (out / "adapter").exists() == (kind == "lora")
    if kind == "lora":
        ids = torch.arange(3, 43)[None]
        merged = AutoModelForCausalLM.from_pretrained(out / "model").eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(files / "hla")
        for model in (
            AutoPeftModelForCausalLM.from_pretrained(out / "adapter"),
            PeftModel.from_pretrained(base, out / "adapter"),
        ):
            torch.testing.assert_close(model.eval()(ids).logits, merged, atol=1e-5, rtol=1e-4)
            again = model.merge_and_unload()
            torch.testing.assert_close(again(ids).logits, merged, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(
            AutoModelForCausalLM.from_pretrained(files / "hla").eval()(ids).logits, merged, atol=1e-4
        )


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["q_proj", "embed_tokens"], ["lm_head", "embed_tokens"]])
def test_adapters_of_tied_weights_merge_to_what_was_trained(files, tmp_path, targets):
    fields = {"lora_targets": targets, "load_best": False, "learning_rate": 3e-2, "kl_weight": 1}
    state = train(files, tmp_path / "out", **fields)
    ids = torch.arange(3, 43)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
    assert not merged.config.tie_word_embeddings
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(files / "hla")
    for name, module in (("lm_head", "get_output_embeddings"), ("embed_tokens", "get_input_embeddings")):
        same = torch.equal(getattr(before, module)().weight, getattr(merged, module)().weight)
        assert same == (name not in targets), name
    text = packed_rows([str(files / "text.jsonl")], AutoTokenizer.from_pretrained(files / "hla"), 32)
    batch = as_batch(list(text)[:2])  # the rows held out
    loss = merged(**batch).loss
    assert state["eval"][-1]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-3)


@pytest.mark.parametrize("model_type", ["phi3", "gemma2", "qwen3_moe"])
def test_other_architectures(files, tokenizer, tmp_path, model_type):  # noqa: F811
    """A fused projection, local layers that keep their softmax, a mixture of experts."""
    base = make_base(tokenizer, tmp_path / "base", model_type)
    model = to_hla(base, hla_window=4, hla_num_sinks=1, hla_chunk_size=16)
    model.save_pretrained(tmp_path / "hla")
    tokenizer.save_pretrained(tmp_path / "hla")
    fields = {"model": tmp_path / "hla", "kl_weight": 1, "load_best": False, "learning_rate": 1e-2}
    train(files, tmp_path / "out", **fields)
    ids = torch.arange(3, 43)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()(ids).logits
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(adapted(ids).logits, merged, atol=1e-4, rtol=1e-3)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()(ids).logits
    with torch.no_grad(), student.as_base_model(adapted):
        assert torch.equal(adapted(ids).logits, original)


def test_distillation_lowers_the_held_out_kl_and_the_best_is_exported(files, tmp_path, capsys):
    fields = {
        "kl_weight": 1,
        "ce_weight": 0,
        "batch_size": 4,
        "checkpoint_steps": 10,
        "test_data": files / "text.jsonl",
    }
    state = train(files, tmp_path / "out", steps=40, learning_rate=1e-2, **fields)
    kls = [x["kl"] for x in state["eval"]]
    assert kls[-1] < 0.7 * kls[0], kls
    assert state["test_after"]["kl"] < 0.8 * state["test_before"]["kl"]
    assert state["exported_step"] == min(state["eval"], key=lambda x: x["loss"])["step"] == state["best"]["step"]
    # A learning rate that ruins the model: the checkpoint before it is what is exported.
    state = train(files, tmp_path / "bad", steps=4, learning_rate=5.0, **fields | {"checkpoint_steps": 2})
    assert state["exported_step"] == state["best"]["step"] == 0
    assert "the weights of step 0 of 4" in capsys.readouterr().out
    for name, weight in load_file(files / "hla" / "model.safetensors").items():
        torch.testing.assert_close(weights(tmp_path / "bad")[name], weight)
    assert len(list((tmp_path / "bad").glob("checkpoint-*"))) == 2  # the best and the last


def test_accumulation_checkpointing_and_streaming_change_nothing_they_should_not(files, tmp_path):
    whole = train(files, tmp_path / "whole", batch_size=4, kl_weight=1)
    parts = train(files, tmp_path / "parts", batch_size=1, accumulation=4, kl_weight=1)
    recomputed = train(files, tmp_path / "recomputed", batch_size=4, kl_weight=1, gradient_checkpointing=True)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(recomputed) == pytest.approx(losses(whole), rel=1e-5)
    for name, weight in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "parts")[name], weight, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(weights(tmp_path / "recomputed")[name], weight, atol=1e-4, rtol=1e-3)


def test_bf16_autocast_keeps_what_is_trained_in_float32(files, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = AutoModelForCausalLM.from_pretrained(files / "hla", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    AutoTokenizer.from_pretrained(files / "hla").save_pretrained(tmp_path / "bf16")
    state = train(files, tmp_path / "out", model=tmp_path / "bf16", kl_weight=1)
    assert all(torch.isfinite(torch.tensor(losses(state))))
    saved = load_file(next((tmp_path / "out").glob("checkpoint-*4")) / "model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float32}, {k: x.dtype for k, x in saved.items()}
    assert all("lora" in x or "hla" in x for x in saved)
    assert {x.dtype for x in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_trackers_write_where_they_should(files, tmp_path):
    pytest.importorskip("tensorboard")
    train(files, tmp_path / "out", trackers="tensorboard", steps=2)
    assert list((tmp_path / "out" / "logs").rglob("events.out.tfevents*"))


# ---- interruption and resumption ----------------------------------------


def stop_after(monkeypatch, calls, number=signal.SIGTERM):
    """Sends the process a signal within the forward pass of that many training batches."""
    original, count = Objective.__call__, [0]

    def call(self, batch):
        if torch.is_grad_enabled():
            count[0] += 1
            if count[0] == calls:
                os.kill(os.getpid(), number)
        return original(self, batch)

    monkeypatch.setattr(Objective, "__call__", call)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("streaming", [False, True], ids=["prepared", "streamed"])
def test_a_stopped_and_resumed_run_is_bit_equal(files, tmp_path, monkeypatch, capsys, number, streaming):
    fields = {
        "steps": 7,
        "accumulation": 2,
        "lora_dropout": 0.2,
        "kl_weight": 1,
        "checkpoint_steps": 5,
        "streaming": streaming,
    }
    whole = train(files, tmp_path / "whole", **fields)
    with monkeypatch.context() as patch:
        stop_after(patch, 6, number)  # the second half of step 3
        if number == signal.SIGTERM:
            assert train(files, tmp_path / "parts", **fields) is None
            message = capsys.readouterr().err
        else:
            with pytest.raises(KeyboardInterrupt) as info:
                train(files, tmp_path / "parts", **fields)
            message = str(info.value)
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
    assert "stopped at step 3 of 7" in message
    assert (tmp_path / "parts" / "checkpoint-00000003").is_dir()
    assert "give --resume" in error_of(capsys, arguments(files, tmp_path / "parts", **fields))
    message = error_of(capsys, [*arguments(files, tmp_path / "parts", **fields | {"seed": 3}), "--resume"])
    assert "seed=0" in message and "3" in message
    AcceleratorState._reset_state(True)
    parts = train(files, tmp_path / "parts", "--resume", **fields)
    assert losses(parts) == losses(whole)
    assert [x["loss"] for x in parts["eval"]] == [x["loss"] for x in whole["eval"]]
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[name], weight), name


@pytest.mark.parametrize("place", ["load_student", "make_rows", "load_teacher"])
def test_ctrl_c_before_the_first_step_leaves_nothing(files, tmp_path, monkeypatch, capsys, place):
    monkeypatch.setattr(finetune, place, lambda *args: signal.raise_signal(signal.SIGINT))
    message = error_of(capsys, arguments(files, tmp_path / "run", kl_weight=1), code=130)
    assert "the same command" in message and not (tmp_path / "run").exists()


def test_a_second_ctrl_c_leaves_the_last_checkpoint(files, tmp_path, monkeypatch, capsys):
    fields = {"steps": 3, "checkpoint_steps": 2}
    monkeypatch.setattr(finetune, "export", lambda *args: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    assert "with --resume" in error_of(capsys, arguments(files, tmp_path / "run", **fields), code=130)
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if "model" in p.name or "check" in p.name)[-1:] == [
        "checkpoint-00000003"
    ]
    monkeypatch.undo()
    AcceleratorState._reset_state(True)
    assert train(files, tmp_path / "run", "--resume", **fields)["step"] == 3


def test_a_quiet_run_prints_nothing(files, tmp_path, capfd):
    assert train(files, tmp_path / "run", "--quiet", steps=2) is not None
    assert capfd.readouterr() == ("", "")


def command(files, output, *flags, **fields):
    return [sys.executable, "-m", "training.finetune", *arguments(files, output, **fields), *flags]


ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def start(words):
    return subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(process, condition, seconds=120):
    for _ in range(seconds * 20):
        if condition() or process.poll() is not None:
            break
        time.sleep(0.05)
    assert condition(), process.communicate()[0]


def test_killed_at_random_moments_the_last_checkpoint_continues_to_the_same_end(files, tmp_path):
    fields = {"steps": 60, "checkpoint_steps": 1, "eval_rows": 1}
    whole = train(files, tmp_path / "whole", **fields)
    out, rng, kills = tmp_path / "parts", random.Random(0), 0
    for _ in range(3):
        last = checkpoint.latest_checkpoint(out) if out.is_dir() else None
        process = start(command(files, out, *(["--resume"] if last else []), **fields))
        wait_for(process, lambda last=last: history(out) or any(x != last for x in out.glob("checkpoint-*")))
        time.sleep(rng.random() / 2)
        kills += process.poll() is None
        process.kill()
        process.wait()
        assert checkpoint.latest_checkpoint(out) is not None
    assert kills
    parts = train(files, out, "--resume", **fields) if not history(out) else history(out)
    assert losses(parts) == losses(whole)
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weights(out)[name], weight), name
    assert not [x for x in out.iterdir() if x.name.startswith(".")]


def test_sigterm_from_outside_exits_0_with_the_command_to_continue(files, tmp_path):
    out = tmp_path / "out"
    process = start(command(files, out, steps=5000, checkpoint_steps=1000))
    wait_for(process, lambda: any(out.glob("checkpoint-*")))
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "--resume" in text and "checkpoint written" in text, text
    assert checkpoint.latest_checkpoint(out) is not None


# ---- faults ----------------------------------------


def nan_at(monkeypatch, steps):
    original, count = Objective.__call__, [0]

    def call(self, batch):
        loss, sums = original(self, batch)
        if torch.is_grad_enabled():
            count[0] += 1
            if count[0] in steps:
                return loss * float("nan"), sums * float("nan")
        return loss, sums

    monkeypatch.setattr(Objective, "__call__", call)


def test_a_step_without_a_finite_loss_is_skipped_and_counted(files, tmp_path, monkeypatch):
    nan_at(monkeypatch, {2, 3})
    state = train(files, tmp_path / "out", steps=5, kl_weight=1)
    assert state["skipped"] == 2 and state["skipped_in_a_row"] == 0
    assert [x["step"] for x in state["train"] if x["loss"] != x["loss"]] == [2, 3]
    assert all(torch.isfinite(x).all() for x in weights(tmp_path / "out").values())
    assert [x["step"] for x in state["eval"]] == [0, 4, 5]  # no checkpoint in the middle of trouble


def test_ten_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(files, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        nan_at(patch, set(range(4, 100)))
        message = error_of(capsys, arguments(files, tmp_path / "out", steps=30), code=1)
    assert "10 steps in a row" in message and "checkpoint-00000002" in message
    AcceleratorState._reset_state(True)
    assert len(train(files, tmp_path / "out", "--resume", steps=30)["train"]) == 30


def test_a_full_disk_loses_nothing(files, tmp_path, capsys):
    """A real limit on the size of files: writing past it fails as on a full disk."""
    out = tmp_path / "out"
    fields = {"steps": 6, "checkpoint_steps": 3}
    evaluations, original = [], loop.save_checkpoint

    def limited(accelerator, output, progress, rows):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if progress.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            original(accelerator, output, progress, rows)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        evaluations.append(progress.step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", limited)
        message = error_of(capsys, arguments(files, out, **fields), code=1)
    assert "cannot be written" in message and "checkpoint-00000003" in message and "--resume" in message
    assert evaluations == [0, 3] and not [x for x in out.iterdir() if x.name.startswith(".checkpoint")]
    AcceleratorState._reset_state(True)
    assert len(train(files, out, "--resume", **fields)["train"]) == 6


def test_what_would_stop_the_export_is_found_before_training(files, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", fail)
        message = error_of(capsys, arguments(files, tmp_path / "out"))
    assert "cannot be written" in message and "no space left" in message
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib" in error_of(capsys, arguments(files, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_is_made_up_for_by_resuming(files, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise ValueError("cannot be drawn")

    with monkeypatch.context() as patch:
        patch.setattr(export, "plot", fail)
        message = error_of(capsys, arguments(files, tmp_path / "out"), code=1)
    assert "cannot be drawn" in message and "checkpoint-00000004" in message and "--resume" in message
    assert not (tmp_path / "out" / "model").exists()
    AcceleratorState._reset_state(True)
    monkeypatch.setattr(loop.Run, "step", None)  # nothing is trained again
    assert len(train(files, tmp_path / "out", "--resume")["train"]) == 4


def test_a_generation_config_that_some_versions_refuse_to_save(files, tmp_path):
    shutil.copytree(files / "hla", tmp_path / "hla")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "hla" / "generation_config.json").write_text(json.dumps(settings))
    train(files, tmp_path / "out", model=tmp_path / "hla", steps=1)
    written = json.loads((tmp_path / "out" / "model" / "generation_config.json").read_text())
    assert written.items() >= settings.items() and "do_sample" not in written


def test_runs_from_python_follow_each_other_and_tell_nothing_of_their_host(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/home/someone/server.py", "--token", "secret"])
    settings = {"seq_len": 32, "steps": 2, "batch_size": 2, "eval_rows": 2, "trackers": ["none"], "accumulation": 1}
    recipe = Recipe(model=str(files / "hla"), data=[str(files / "text.jsonl")], output=str(tmp_path / "a"), **settings)
    first = finetune.run(recipe)
    second = finetune.run(dataclasses.replace(recipe, output=str(tmp_path / "b"), accumulation=2, resume=False))
    assert [len(x["train"]) for x in (first, second)] == [2, 2] and second["tokens"] == 2 * first["tokens"]
    written = history(tmp_path / "a")
    assert {k: v for k, v in first.items() if k != "recipe"} == {k: v for k, v in written.items() if k != "recipe"}
    assert "secret" not in (tmp_path / "a" / "model" / "README.md").read_text()
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        stopped = dataclasses.replace(recipe, output=str(tmp_path / "c"), steps=5, load_best=False)
        assert finetune.run(stopped) is None
    words = shlex.split(capsys.readouterr().err.rpartition("continue with: ")[2])
    assert parse_recipe(words[3:]) == dataclasses.replace(stopped, resume=True)


def test_a_truncated_checkpoint_is_named_with_the_one_to_continue_from(files, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        train(files, out)
    last, earlier = sorted(out.glob("checkpoint-*"), reverse=True)[:2]
    content = (last / "optimizer.bin").read_bytes()
    (last / "optimizer.bin").write_bytes(content[: len(content) // 2])
    message = error_of(capsys, [*arguments(files, out), "--resume"])
    assert str(last) in message and "optimizer.bin" in message and str(earlier) in message
    assert last.is_dir()
    (last / "optimizer.bin").unlink()
    assert "optimizer.bin is missing" in error_of(capsys, [*arguments(files, out), "--resume"])


# ---- several processes ----------------------------------------


def launch_words(config, files, output, *flags, **fields):
    words = [
        "accelerate.commands.launch",
        "--config_file",
        f"training/configs/{config}.yaml",
        "--main_process_port",
        "0",
    ]
    return [sys.executable, "-m", *words, "-m", "training.finetune", *arguments(files, output, **fields), *flags]


def launch(config, files, output, *flags, **fields):
    words = launch_words(config, files, output, *flags, **fields)
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return history(output)


def assert_same_run(files, tmp_path, config, **fields):
    fields = {"kl_weight": 1, "steps": 4, "load_best": False} | fields
    alone = train(files, tmp_path / "alone", batch_size=2, accumulation=2, **fields)
    together = launch(config, files, tmp_path / "together", batch_size=2, **fields)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    for key in ("loss", "kl"):
        assert [x[key] for x in together["eval"]] == pytest.approx([x[key] for x in alone["eval"]], rel=1e-3)
    for name, weight in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "together")[name], weight, atol=1e-3, rtol=1e-2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "together" / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(tmp_path / "together")


def test_two_data_parallel_processes_are_one_run(files, tmp_path):
    assert_same_run(files, tmp_path, "multi_cpu")


def test_two_fsdp2_processes_are_one_run(files, tmp_path):
    assert_same_run(files, tmp_path, "fsdp2_cpu")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2_cpu"])
def test_two_processes_that_share_each_row_are_one_run(files, tmp_path, config):
    alone = train(files, tmp_path / "alone", batch_size=2, load_best=False)
    together = launch(config, files, tmp_path / "together", batch_size=2, load_best=False, context_parallel=2)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    assert [x["loss"] for x in together["eval"]] == pytest.approx([x["loss"] for x in alone["eval"]], rel=1e-4)
    for name, weight in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "together")[name], weight, atol=1e-3, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2_cpu"])
@pytest.mark.parametrize("kind", ["hla", "full"])
def test_two_processes_with_other_parameters(files, tmp_path, config, kind):
    assert_same_run(files, tmp_path, config, train=kind)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2_cpu"])
def test_two_processes_resume_bit_equal(files, tmp_path, config):
    fields = {"kl_weight": 1, "steps": 6, "checkpoint_steps": 3}
    whole = launch(config, files, tmp_path / "whole", **fields)
    out = tmp_path / "parts"
    process = start(launch_words(config, files, out, **fields))
    wait_for(process, lambda: any(out.glob("checkpoint-*")))
    workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    for pid in [process.pid, *map(int, workers.split())]:  # the launcher would not take its workers with it
        os.kill(pid, signal.SIGKILL)
    process.wait()
    parts = launch(config, files, out, "--resume", **fields)
    assert losses(parts) == losses(whole)


def test_every_field_of_the_recipe_has_a_help_text():
    assert all(field.metadata.get("help") for field in dataclasses.fields(Recipe))
