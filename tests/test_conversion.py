"""Conversion end to end on tiny checkpoints that the tests make: every source, what is trained, what is refused."""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from reference import received_attention
from safetensors.torch import load_file
from tiny import ARCHITECTURE_SETTINGS, CACHE, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from conversion import convert as command
from conversion import transfer
from conversion.evaluate import agreement_with_base, divergence, log_probs, perplexity, remembered_bytes
from conversion.keep import layer_costs, only_hla_layer, spread_slots
from conversion.load import working_copy
from conversion.progress import shown
from conversion.serving import cache_bytes, read
from conversion.settings import SLOTS
from conversion.text import read_tokens, sample_tokens
from conversion.transfer import hla_parameters, layer_losses, score_error, transfer_attention, visit_attention
from hla_hf import ARCHITECTURES, softmax_attention, to_hla
from hla_hf.cache_hla import LayerTokens
from hla_hf.configuration_hla import HLAConfigMixin, base_class_names, config_class
from hla_hf.layer_hla import hla_attentions
from training import recipe


TEXT = "Linear attention keeps a state of fixed size. Softmax attention keeps every key and value. " * 40
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
FAST = ["--steps", "3", "--tokens", "256", "--seq-len", "32", "--facts", "0", "--hla-slots", "0", "--hla-window", "8",
        "--hla-chunk-size", "16"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHAT,
    )  # fmt: skip


def make_base(tokenizer, path, model_type="llama", **settings):
    torch.manual_seed(0)
    names = base_class_names(model_type)
    config_class, model_class = (getattr(transformers, names[x]) for x in ("AutoConfig", "AutoModelForCausalLM"))
    model = model_class(
        config_class(
            vocab_size=len(tokenizer),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **(TINY | ARCHITECTURE_SETTINGS.get(model_type, {}) | settings),
        )
    )
    model.eval()
    model.generation_config.repetition_penalty = 1.05
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    make_base(tokenizer, path, tie_word_embeddings=True)
    return path


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def error_of(capsys, arguments, code=2):
    with pytest.raises(SystemExit) as info:
        command.main([str(x) for x in arguments])
    assert info.value.code == code
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def converted(tokenizer, tmp_path_factory):
    """Base and converted directory of every architecture, made when first asked for."""
    root = tmp_path_factory.mktemp("architectures")
    (root / "text.txt").write_text(TEXT)

    @functools.cache
    def make(model_type):
        base, hla = root / model_type, root / f"hla_{model_type}"
        make_base(tokenizer, base, model_type)
        command.main([str(base), "--output", str(hla), "--data", str(root / "text.txt"), *FAST])
        return base, hla

    return make


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_converts_and_keeps_its_weights(model_type, converted):
    original, model = (AutoModelForCausalLM.from_pretrained(path).eval() for path in converted(model_type))
    assert model.config.model_type == f"hla_{model_type}" and type(model.config) is config_class(model_type)
    weights = model.state_dict()
    for name, weight in original.state_dict().items():
        assert torch.equal(weights[name], weight), name
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected = original(ids).logits
        with softmax_attention(model):
            assert torch.equal(model(ids).logits, expected)
        assert not torch.allclose(model(ids).logits, expected, atol=1e-4)
        assert torch.equal(to_hla(original, hla_layers=[])(ids).logits, expected)
    report = json.loads((converted(model_type)[1] / "conversion.json").read_text())
    assert report["layers"] == model.config.hla_layer_ids and len(report["layer_losses"]) == len(report["layers"]) > 0
    assert {"kl", "top1"} <= report["before"].keys() and {"kl", "top1"} <= report["after"].keys()
    assert report["bytes"] == remembered_bytes(model)
    sizes = {"context": ids.shape[1], "model": cache_bytes(read(model, ids)[1])}
    with softmax_attention(model):
        assert remembered_bytes(model, ids.shape[1]) == sizes | {"base": cache_bytes(read(model, ids)[1])}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_generates_as_without_a_cache(model_type, converted):
    model = AutoModelForCausalLM.from_pretrained(converted(model_type)[1]).eval()
    with torch.no_grad():
        for p in hla_parameters(model).values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    ids = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :6], mask[0, :6] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
    for beams in (1, 3):
        cached = model.generate(ids, num_beams=beams, **options)
        assert torch.equal(cached, model.generate(ids, num_beams=beams, use_cache=False, **options))
        alone = model.generate(ids[:1, 6:], num_beams=beams, **options | {"attention_mask": mask[:1, 6:]})
        assert torch.equal(cached[:1, 6:], alone)


def test_every_architecture_loads_without_the_package(converted, tmp_path):
    directories = [str(converted(model_type)[1]) for model_type in ARCHITECTURES]
    ids = torch.arange(3, 60)[None]
    logits = [AutoModelForCausalLM.from_pretrained(d).eval()(ids).logits.detach() for d in directories]
    torch.save(logits, tmp_path / "logits.pt")
    script = f"""
import sys; sys.modules["hla_hf"] = None
import torch
torch.set_num_threads({torch.get_num_threads()})  # the experts' sums depend on it
from transformers import AutoModelForCausalLM
for path, logits in zip({directories!r}, torch.load({str(tmp_path / "logits.pt")!r})):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    assert torch.equal(model(torch.arange(3, 60)[None]).logits, logits), path
    model.save_pretrained(path + "-again")
    again = AutoModelForCausalLM.from_pretrained(path + "-again", trust_remote_code=True).eval()
    assert torch.equal(again(torch.arange(3, 60)[None]).logits, logits), path
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_converted_directory_is_complete_and_loads_without_the_package(base, tmp_path, text_file):
    out = tmp_path / "hla"
    command.main(
        [
            str(base),
            "--output",
            str(out),
            *FAST,
            "--eval-file",
            str(text_file),
            "--eval-len",
            "64",
            "--data",
            str(text_file),
        ]
    )
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "README.md", "conversion.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "ops_hla.py", "cache_hla.py", "configuration_hla.py",
        "modeling_hla.py",
    }  # fmt: skip
    card = (out / "README.md").read_text()
    report = json.loads((out / "conversion.json").read_text())
    for key in ("kl", "top1", "perplexity"):
        assert f"{report['after'][key]:.4g}" in card
    assert report["base"]["perplexity"] > 1
    assert str(tmp_path) not in card + json.dumps(report) and str(base.parent) not in card + json.dumps(report)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.generation_config.repetition_penalty == 1.05
    ids = torch.arange(3, 90)[None]
    torch.save(model(ids).logits.detach(), tmp_path / "logits.pt")
    script = f"""
import sys; sys.modules["hla_hf"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
out = {str(out)!r}
AutoConfig.from_pretrained(out, trust_remote_code=True)
AutoModel.from_pretrained(out, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
assert torch.equal(model(torch.arange(3, 90)[None]).logits, torch.load({str(tmp_path / "logits.pt")!r}))
chat = pipeline("text-generation", model=out, trust_remote_code=True)
answer = chat([{{"role": "user", "content": "Linear attention"}}], max_new_tokens=5, do_sample=False)
assert answer[0]["generated_text"][-1]["role"] == "assistant"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_transfer_trains_the_new_parameters_only_and_lowers_every_layers_error(base):
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval(), hla_window=4, hla_num_sinks=1)
    for name, p in model.named_parameters():  # a random model attends to all tokens alike: give it something to learn
        if "q_proj" in name or "k_proj" in name:
            p.data *= 12
    with torch.no_grad():
        for name, p in hla_parameters(model).items():
            if name.endswith("gate"):
                p.fill_(3.0)
    frozen = {name: p.clone() for name, p in model.named_parameters() if name not in hla_parameters(model)}
    tokens = torch.randint(0, 300, (8, 48), generator=torch.Generator().manual_seed(0))
    before = layer_losses(model, tokens)
    transfer_attention(model, tokens, steps=30, batch_size=4, learning_rate=3e-2)
    after = layer_losses(model, tokens)
    assert (after < 0.9 * before).all(), (before, after)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], p) for name, p in frozen.items())
    assert all(p.requires_grad for p in model.parameters())


def test_transfer_trains_the_scores_of_slots(base):
    """Towards the log of the largest attention from beyond the window, found here by loops."""
    settings = {"hla_window": 4, "hla_num_sinks": 1, "hla_slots": 3, "hla_slot_score": "learned"}
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval(), **settings)
    for name, p in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            p.data *= 12
    seen, errors = {}, {}

    def visit(attention, tokens, out):
        seen[attention.layer_idx], errors[attention.layer_idx] = tokens, score_error(attention, tokens)

    rows = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    visit_attention(model, rows, visit)
    attention, tokens = hla_attentions(model)[0], seen[0]
    group = tokens.q.shape[1] // tokens.k.shape[1]
    scores, total, weight = attention.hla.slot_scores(tokens.far_k, tokens.v), 0, 0
    for b, h, j in itertools.product(range(4), range(tokens.k.shape[1]), range(1, 20)):
        largest = 0
        for t, i in itertools.product(range(j + 4, 24), range(h * group, (h + 1) * group)):
            near = (tokens.k[b, h, : t + 1] @ tokens.q[b, i, t] * attention.scaling).softmax(0)
            largest = max(largest, near[j].item())
        total += (largest + 1e-4) * (scores[b, h, j].item() - math.log(largest + 1e-4)) ** 2
        weight += largest + 1e-4
    assert errors[0].item() == pytest.approx(total / weight, rel=1e-4)
    before = dict(errors)
    transfer_attention(model, rows, steps=40, batch_size=4, learning_rate=1e-2)
    visit_attention(model, rows, visit)
    assert all(errors[i] < 0.5 * before[i] for i in before), (before, errors)


def test_layer_losses_are_differentiated_to_every_new_parameter_and_no_other(base):
    model = to_hla(
        AutoModelForCausalLM.from_pretrained(base).eval(), hla_window=4, hla_num_sinks=1, hla_decay="learned"
    )
    layer_losses(model, torch.arange(3, 60)[None], backward=True)
    for name, p in model.named_parameters():
        if name in hla_parameters(model):
            assert p.grad is not None and p.grad.abs().sum() > 0, name
        else:
            assert p.grad is None, name


@pytest.mark.parametrize(
    ("parse", "script", "module"),
    [(command.parse_arguments, "hla-convert", "conversion.convert"),
     (recipe.parse_recipe, "hla-finetune", "training.finetune")],
)  # fmt: skip
def test_usage_names_the_command_as_it_was_started(parse, script, module, monkeypatch, capsys):
    for started, name in ((f"/bin/{script}", script), ("/somewhere/convert.py", f"python -m {module}")):
        monkeypatch.setattr(sys, "argv", [started, "--unknown"])
        with pytest.raises(SystemExit):
            parse(["--unknown"])
        assert f"usage: {name} " in capsys.readouterr().err


def test_a_working_copy_rounds_the_weights_alone(base, monkeypatch):
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval())
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    copied, frequencies = working_copy(model), model.base_model.rotary_emb.inv_freq
    assert copied.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert torch.equal(copied.base_model.rotary_emb.inv_freq, frequencies)
    assert working_copy(copied) is copied  # already in bfloat16
    row = torch.arange(3, 35)
    with torch.no_grad(), softmax_attention(model), softmax_attention(copied):
        assert divergence(log_probs(model, row), log_probs(copied, row))["kl"] < 1e-2
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert working_copy(model) is model


@torch.no_grad()
def test_slots_go_where_a_layer_costs_most(base, text_file, tokenizer, tmp_path):
    assert spread_slots(torch.tensor([[3.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.5, 0.5]]), 10) == [20, 10, 0, 10]
    arguments = [str(base), "--output", str(tmp_path / "hla"), *FAST, "--data", str(text_file), "--hla-slots"]
    report = command.convert(command.parse_arguments([*arguments, "auto:6", "--hla-slot-score", "learned"]))
    slots = report["hla"]["hla_slots"]
    assert sum(slots) == 3 * 6 and len(set(slots)) > 1
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval(), hla_window=8, hla_chunk_size=16)
    assert slots == spread_slots(layer_costs(model, read_tokens([text_file], tokenizer, 10, 32)[8:9]), 6)
    row = read_tokens([text_file], tokenizer, 1, 32)
    for attention, (language, recall) in zip(hla_attentions(model), layer_costs(model, row).tolist(), strict=True):
        with softmax_attention(model):
            base_probs = log_probs(model, row.repeat(1, 2)[0])
        with only_hla_layer(model, attention):
            halves = divergence(base_probs, log_probs(model, row.repeat(1, 2)[0]))["kl"]
        assert (32 * language + 31 * recall) / 63 == pytest.approx(halves, rel=1e-4)
    assert not any("forward" in vars(layer) for layer in model.base_model.layers)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    assert model.config.hla_slots == slots and "--hla-slots auto:6" in report["command"]

    arguments[2] = str(tmp_path / "hybrid")
    report = command.convert(command.parse_arguments([*arguments, "auto:6", "--keep-softmax", "auto:1"]))
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").config
    assert hybrid.hla_slots == [slots[i] for i in hybrid.hla_layers] and len(report["layers"]) == 3
    for bad in ("auto:0", "auto:", "many"):
        with pytest.raises(ValueError, match=f"--hla-slots must be numbers or auto:N, N at least 1, got '{bad}'"):
            command.parse_arguments([*arguments, bad])
    with pytest.raises(ValueError, match="--hla-slots auto:6 needs a window that tokens leave, got --hla-window 0"):
        command.parse_arguments([*arguments, "auto:6", "--hla-window", "0"])


def test_a_share_of_the_rows_asks_for_facts(base, text_file, tokenizer):
    text_file.write_text(TEXT * 8)
    arguments = [str(base), "--output", "hla", "--data", str(text_file), "--tokens", "2560", "--seq-len", "256"]
    plain, mixed = (
        command.prepare_texts(command.parse_arguments([*arguments, "--facts", share]), None, tokenizer, None)
        for share in ("0", "0.4")
    )
    assert plain.training.shape == mixed.training.shape == (10, 256)
    assert torch.equal(mixed.training[:6], plain.training[:6])
    assert not any(set(tokenizer.decode(row).split()) <= set(TEXT.split()) for row in mixed.training[6:])
    assert torch.equal(mixed.held_out, read_tokens([text_file], tokenizer, 8, 256)[6:])  # text alone
    text_file.write_text(TEXT * 80)
    many = command.parse_arguments([*arguments, "--tokens", "10240", "--facts", "0.5"])
    assert len(command.prepare_texts(many, None, tokenizer, None).held_out) == 4  # a tenth of all rows
    assert "in 40% of its rows facts" in mixed.description and "facts" not in plain.description
    with pytest.raises(ValueError, match=r"--facts must be at least 0 and below 1, got 1\.0"):
        command.parse_arguments([*arguments, "--facts", "1"])
    short = command.parse_arguments([*arguments, "--seq-len", "16", "--facts", "0.5"])
    with pytest.raises(ValueError, match=r"--seq-len 16: length=16 is too short for a fact.*--facts 0"):
        command.prepare_texts(short, None, tokenizer, None)


def test_the_layers_that_cost_most_keep_softmax_attention(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()  # this layer's attention does nothing
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "base")
    arguments = [str(tmp_path / "base"), "--output", str(tmp_path / "hla"), *FAST]
    report = command.convert(command.parse_arguments([*arguments, "--keep-softmax", "auto:2"]))
    language, recall = torch.tensor(report["layer_costs"]).T
    assert report["layers"] == [0, 1, 2] and len(report["layer_losses"]) == 3
    assert language[1] < 1e-6 and recall[1] < 1e-6 and (language[[0, 2]] > 1e-6).all() and (recall[[0, 2]] > 1e-6).all()
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    assert kept.config.hla_layers == [1] and report["after"]["kl"] < 1e-6 < report["before"]["kl"]

    every_layer = command.convert(command.parse_arguments([*arguments[:2], str(tmp_path / "all"), *FAST]))
    assert every_layer["layer_costs"] == [] and every_layer["layer_losses"] == report["layer_losses"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "all").model.layers[1].self_attn.hla.state_dict()
    for name, p in kept.model.layers[1].self_attn.hla.state_dict().items():
        assert torch.equal(p, trained[name]), name

    with pytest.raises(ValueError, match="auto:3 leaves none of 3"):
        command.convert(command.parse_arguments([*arguments[:2], str(tmp_path / "none"), "--keep-softmax", "auto:3"]))
    with pytest.raises(SystemExit):
        command.parse_arguments([*arguments, "--keep-softmax", "3"])


def test_agreement_is_perfect_for_a_model_that_is_its_base(base):
    # A window longer than the text is softmax attention.
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval(), hla_window=64)
    tokens = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(0))
    assert agreement_with_base(model, tokens)["kl"] < 1e-6
    assert agreement_with_base(model, tokens)["top1"] == 1
    model = to_hla(AutoModelForCausalLM.from_pretrained(base).eval(), hla_window=2, hla_num_sinks=0)
    assert agreement_with_base(model, tokens)["kl"] > 1e-6


def test_perplexity_is_that_of_the_models_own_loss(base):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    tokens = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(0))
    assert perplexity(model, tokens) == pytest.approx(model(tokens, labels=tokens).loss.exp().item(), rel=1e-5)


def test_text_sources_agree(tokenizer, tmp_path):
    lines = [f"document {i}. {TEXT[:100]}" for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    chats = [[{"role": "user", "content": x}] for x in lines]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": x}) + "\n" for x in chats))
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    rows = read_tokens([str(tmp_path / "a.jsonl")], tokenizer, 5, 32)
    expected = []
    for line in lines:
        expected += [*tokenizer(line).input_ids, tokenizer.eos_token_id]
    assert rows.shape == (5, 32) and rows.flatten().tolist() == expected[:160]
    chat = tokenizer.decode(read_tokens([str(tmp_path / "chat.jsonl")], tokenizer, 1, 32)[0])
    assert chat.startswith("<|im_start|>user\ndocument 0.")
    with pytest.raises(ValueError, match="'body'"):
        read_tokens([str(tmp_path / "other.jsonl")], tokenizer, 1, 32)


def test_sampled_text_starts_from_bos_and_from_a_user_turn(base, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    rows = sample_tokens(model, tokenizer, 5, 24, batch_size=2)
    assert rows.shape == (5, 24)
    turn = tokenizer("<|im_start|>user\n").input_ids
    assert sum(row[: len(turn)].tolist() == turn for row in rows) == 2
    assert all(row[0] == tokenizer.bos_token_id for row in rows)
    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_self_is_the_default_text_and_steps_0_skips_training(base, tmp_path):
    arguments = [str(base), "--output", str(tmp_path / "hla"), "--steps", "0", "--tokens", "64", "--seq-len", "32",
                 "--facts", "0"]  # fmt: skip
    report = command.convert(command.parse_arguments(arguments))
    assert (
        "the base model sampled" in report["text"]
        and report["layer_losses"] == []
        and report["before"] == report["after"]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    untrained = to_hla(AutoModelForCausalLM.from_pretrained(base))
    for (name, p), q in zip(model.named_parameters(), untrained.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_conversion_from_python_tells_nothing_of_its_host(base, tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/someone/server.py", "--token", "secret"])
    settings = {"steps": 3, "tokens": 256, "seq_len": 32, "hla_window": 8, "hla_layers": [0, 2], "learning_rate": 3e-3,
                "hla_slots": 0}  # fmt: skip
    files = {"data": [str(text_file)], "eval_file": str(text_file), "eval_len": 64, "eval_tokens": 128}
    conversion = command.Conversion(source=str(base), output=str(tmp_path / "hla"), **settings, **files)
    report = command.convert(conversion)
    assert report["hla"] == conversion.hla and report["hla"]["hla_window"] == 8
    card = (tmp_path / "hla" / "README.md").read_text()
    assert report["command"] in card and "secret" not in card and str(tmp_path) not in card + json.dumps(report)
    words = shlex.split(report["command"])
    assert words[:3] == ["python", "-m", "conversion.convert"]
    published = {"source": base.name, "output": "hla", "data": ["text.txt"], "eval_file": "text.txt"}
    assert command.parse_arguments(words[3:]) == dataclasses.replace(conversion, **published)
    assert len(words) == 3 + 1 + 2 * 13 + 1  # only what is not default: thirteen options, one of them with two values


def test_a_conversion_has_every_field_of_the_config_with_its_default():
    conversion = command.Conversion(source="x", output="y")
    fields = {f.name: f.default for f in dataclasses.fields(HLAConfigMixin) if f.name != "hla_code_version"}
    assert conversion.hla == fields | {"hla_slots": SLOTS, "hla_slot_score": "learned"} and conversion.fact_share == 0.5
    for untrained in ({"steps": 0}, {"hla_window": 0}):
        conversion_of_all = command.Conversion(source="x", output="y", data=["z.txt"], **untrained)
        assert conversion_of_all.hla == fields | {k: v for k, v in untrained.items() if k in fields}
        assert conversion_of_all.fact_share == 0
    assert command.Conversion(source="x", output="y", data=["z.txt"]).fact_share == 0.5
    assert command.parse_arguments(["x", "--output", "y"]) == conversion
    with pytest.raises(ValueError, match="--steps must be at least 0, got -1"):
        command.Conversion(source="x", output="y", steps=-1)
    words = ["x", "--output", "y", "--keep-softmax", "auto:2", "--hla-layers", "--resume", "--hla-decay", "0.9"]
    settings = {"keep_softmax": 2, "hla_layers": [], "resume": True, "hla_decay": 0.9}
    assert command.parse_arguments(words) == command.Conversion(source="x", output="y", **settings)
    assert "--keep-softmax auto:2" in command.parse_arguments(words).command


@pytest.mark.parametrize("program", ["conversion.convert", "training.finetune"])
@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_threads_wait_passively_unless_the_user_says_otherwise(program, policy):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "TRUE"}
    if policy:
        environment["OMP_WAIT_POLICY"] = policy
    done = subprocess.run([sys.executable, "-m", program, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"OMP_WAIT_POLICY = '{policy or 'PASSIVE'}'" in done.stderr, done.stderr


def test_a_base_without_a_tokenizer(base, tmp_path, text_file, capsys):
    shutil.copytree(base, tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "base" / name).unlink()
    arguments = [tmp_path / "base", "--output", tmp_path / "hla"]
    untrained = [*arguments, "--steps", "0"]
    for words in (arguments, [*arguments, "--data", text_file], [*untrained, "--eval-file", text_file],
                  [*untrained, "--data", text_file], [*untrained, "--keep-softmax", "auto:1"]):  # fmt: skip
        message = error_of(capsys, words).splitlines()[-1]
        assert message.startswith("error: SOURCE") and "has no tokenizer" in message and "tiktoken" not in message
    assert not (tmp_path / "hla").exists()
    command.main([*map(str, untrained), "--tokens", "64", "--seq-len", "32"])
    assert "random tokens, as the base model has no tokenizer" in (tmp_path / "hla" / "README.md").read_text()
    assert not (tmp_path / "hla" / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(base).lm_head.weight)
    command.main([str(tmp_path / "hla"), "--to-softmax", "--output", str(tmp_path / "back")])
    assert (tmp_path / "back" / "model.safetensors").is_file()


def test_a_generation_config_that_some_versions_refuse_to_save(base, tmp_path, text_file):
    shutil.copytree(base, tmp_path / "base")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    command.main([str(tmp_path / "base"), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST])
    command.main([str(tmp_path / "hla"), "--output", str(tmp_path / "back"), "--to-softmax"])
    for name in ("hla", "back"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert written.items() >= settings.items() and "do_sample" not in written


def test_what_would_stop_the_writing_is_found_before_training(base, tmp_path, text_file, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    monkeypatch.setattr(command, "transfer_attention", None)
    message = error_of(capsys, [base, "--output", tmp_path / "new" / "hla", "--data", text_file, *FAST])
    assert "cannot be written" in message and "no space left" in message
    assert [x.name for x in tmp_path.iterdir()] == ["text.txt"]


def test_settings_and_dtype_reach_the_saved_model(base, tmp_path, text_file):
    command.main(
        [str(base), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST, "--dtype", "bfloat16",
         "--hla-operator", "hla2", "--hla-accumulator", "key", "--hla-decay", "learned", "--hla-layers", "0", "2",
         "--hla-num-sinks", "2"]
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    config = model.config
    assert (config.hla_operator, config.hla_accumulator, config.hla_decay) == ("hla2", "key", "learned")
    assert config.hla_layers == [0, 2] and config.hla_num_sinks == 2 and config.hla_window == 8
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    layers = {name.split(".")[2] for name in hla_parameters(model)}
    assert layers == {"0", "2"}


@pytest.mark.parametrize("kind", ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"))
def test_gguf_file(tokenizer, tmp_path, text_file, kind):
    gguf = pytest.importorskip("gguf")
    original = make_base(tokenizer, tmp_path / "base", head_dim=8, intermediate_size=64)
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, path, original, tokenizer, gguf.GGMLQuantizationType[kind])
    command.main([str(path), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla").eval()
    ids = torch.arange(3, 60)[None]
    with softmax_attention(model), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-4)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "hla")("attention keeps").input_ids
        == tokenizer("attention keeps").input_ids
    )


def test_pytorch_bin_and_extended_vocabulary(base, tokenizer, tmp_path):
    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer) + 9)
    model.save_pretrained(tmp_path / "bin")
    tokenizer.save_pretrained(tmp_path / "bin")
    weights = load_file(tmp_path / "bin" / "model.safetensors")
    torch.save(weights, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    loaded, _ = command.load_base(str(tmp_path / "bin"))
    assert loaded.get_input_embeddings().weight.shape[0] == len(tokenizer) + 9
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in weights.items())


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_scaling_survives(rope, tokenizer, tmp_path):
    original = make_base(tokenizer, tmp_path / "base", rope_parameters={"rope_theta": 1e4} | rope)
    model, _ = command.load_base(str(tmp_path / "base"))
    to_hla(model, hla_window=8).save_pretrained(tmp_path / "hla")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla").eval()
    assert model.config.rope_parameters == original.config.rope_parameters
    ids = torch.randint(3, 300, (1, 600), generator=torch.Generator().manual_seed(0))  # beyond the trained positions
    with torch.no_grad():
        expected = original(ids).logits
        with softmax_attention(model):
            assert torch.equal(model(ids).logits, expected)
        assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("place", ["load_base", "prepare_texts", "layer_costs", "measure", "write_model", "upload"])
def test_ctrl_c_at_any_moment_leaves_nothing_half_written(base, tmp_path, text_file, monkeypatch, capsys, place):
    function = getattr(command, place)

    def interrupted(*args, **kwargs):
        if place in ("prepare_texts", "write_model", "upload"):  # while it is being done, or when it is
            function(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, place, interrupted)
    arguments = [base, "--output", tmp_path / "parts" / "hla", "--data", text_file, *FAST, "--hla-slots", "auto:4"]
    message = error_of(capsys, arguments, code=130)
    left = [path.name for path in (tmp_path / "parts").iterdir()] if (tmp_path / "parts").exists() else []
    if place == "upload":
        assert left == ["hla"] and "is complete" in message
        AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "hla")
    elif place == "write_model":
        assert left == ["hla.interrupted"] and "with --resume goes on" in message
        monkeypatch.undo()
        command.main([str(x) for x in arguments] + ["--resume"])
        assert [path.name for path in (tmp_path / "parts").iterdir()] == ["hla"]
    else:
        assert left == [] and "the same command begins again" in message


def test_sampled_text_outlives_ctrl_c(base, tmp_path, monkeypatch, capsys):
    arguments = [base, *FAST, "--hla-slots", "0", "--output"]

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(command, "measure", interrupted)
        assert "with --resume goes on" in error_of(capsys, [*arguments, tmp_path / "parts"], code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["parts.interrupted"]
    with monkeypatch.context() as patch:
        patch.setattr(command, "sample_tokens", None)  # nothing is sampled again
        command.main([*map(str, arguments), str(tmp_path / "parts"), "--resume"])
    command.main([*map(str, arguments), str(tmp_path / "whole")])
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "parts"}
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_ctrl_c_in_the_last_step_stops_too(base, tmp_path, text_file, monkeypatch, capsys):
    layer_losses, calls = transfer.layer_losses, []

    def interrupting(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return layer_losses(*args, **kwargs)

    monkeypatch.setattr(transfer, "layer_losses", interrupting)
    arguments = [base, "--data", text_file, *FAST, "--output", tmp_path / "hla"]
    assert "stopped after 3 steps of 3" in error_of(capsys, arguments, code=130)
    command.main([*map(str, arguments), "--resume"])
    assert len(calls) == 3 and {path.name for path in tmp_path.iterdir()} == {"text.txt", "hla"}


def test_without_a_terminal_there_is_a_line_per_ten_per_cent(base, tmp_path, text_file, capfd):
    arguments = [str(base), "--data", str(text_file), *FAST, "--steps", "40", "--output"]
    command.main([*arguments, str(tmp_path / "hla")])
    lines = capfd.readouterr().err.splitlines()
    steps = [line for line in lines if line.startswith("attention transfer")]
    assert [line.partition("%")[0].split()[-1] for line in steps] == [str(x) for x in range(0, 101, 10)]
    assert "(20 of 40 steps)" in steps[5] and "to go" in steps[5] and "loss=" in steps[5]
    assert not any("it/s" in line or "\r" in line for line in lines)
    command.main([*arguments, str(tmp_path / "silent"), "--quiet"])
    assert capfd.readouterr() == ("", "")
    assert "--quiet" not in (tmp_path / "silent" / "README.md").read_text()


def test_the_bar_of_gguf_files_is_hidden_without_a_terminal_and_comes_back():
    before = modeling_gguf_pytorch_utils.tqdm
    with shown(quiet=False):
        assert modeling_gguf_pytorch_utils.tqdm([]).disable
    assert modeling_gguf_pytorch_utils.tqdm is before


def test_peft_adapter_is_merged_first(base, tmp_path, text_file):
    model = LlamaForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    command.main([str(tmp_path / "adapter"), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST])
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "hla").state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight)
    original = LlamaForCausalLM.from_pretrained(base).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(weights[name], original[name])


def test_back_to_softmax(base, tmp_path, text_file):
    command.main([str(base), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hla")
    model.model.layers[1].self_attn.q_proj.weight.data += 0.1  # as fine-tuning would
    model.save_pretrained(tmp_path / "hla")
    command.main([str(tmp_path / "hla"), "--output", str(tmp_path / "back"), "--to-softmax"])
    back, report = LlamaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
    assert not list((tmp_path / "back").glob("*.py"))
    ids = torch.arange(3, 60)[None]
    with softmax_attention(model), torch.no_grad():
        assert torch.equal(back.eval()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(SystemExit):
        command.main([str(base), "--output", str(tmp_path / "again"), "--to-softmax"])
    assert not (tmp_path / "again").exists()


def test_interrupted_conversion_goes_on_as_if_nothing_had_happened(base, tmp_path, text_file, monkeypatch, capsys):
    arguments = [str(base), "--data", str(text_file), *FAST, "--steps", "6", "--output"]
    command.main([*arguments, str(tmp_path / "whole")])
    calls, layer_losses = [], transfer.layer_losses

    def interrupting(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return layer_losses(*args, **kwargs)

    monkeypatch.setattr(transfer, "layer_losses", interrupting)
    message = error_of(capsys, [*arguments, tmp_path / "parts"], code=130)
    assert "stopped after 3 steps of 6" in message and "--resume" in message
    assert not (tmp_path / "parts").exists()
    message = error_of(capsys, [*arguments, tmp_path / "parts", "--resume", "--batch-size", "3"])
    assert "batch_size" in message
    command.main([*arguments, str(tmp_path / "parts"), "--resume"])
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "whole", "parts"}
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert "no interrupted conversion" in error_of(capsys, [*arguments, tmp_path / "third", "--resume"])


def write_gguf(gguf, path, model, tokenizer, kind):
    """Writes the matrices of `model` in the quantisation `kind`, and leaves in it what they are then."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL if i < 3 else gguf.TokenType.NORMAL for _, i in vocabulary])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        data, dtype = weight.numpy().copy(), gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        for key, n in heads.items():
            if key in name:  # llama.cpp keeps the pairs that rotate beside each other
                data = data.reshape(n, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        data = gguf.quants.quantize(data, dtype)
        name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        name = name.replace("lm_head", "output").replace("model.layers", "blk")
        for key, short in names.items():
            name = name.replace(key, short)
        writer.add_tensor(name, data, raw_dtype=dtype)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), dtype), dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- bad input: one clear error, nothing written ---------------------------------------------------------------------


def test_output_that_is_not_empty_is_refused(base, tmp_path, capsys):
    (tmp_path / "hla").mkdir()
    (tmp_path / "hla" / "mine.txt").write_text("keep")
    assert "not an empty directory" in error_of(capsys, [base, "--output", tmp_path / "hla"])
    assert [x.name for x in (tmp_path / "hla").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--hla-operator", "hla4"], ("hla_operator", "hla4", "hla3")),
        (["--hla-feature-map", "exp"], ("hla_feature_map", "exp", "hedgehog")),
        (["--hla-window", "-1"], ("hla_window", "-1", "at least 0")),
        (["--hla-layers", "0", "7"], ("hla_layers", "7", "0..2")),
        (["--data", "no-such-file.txt"], ("--data", "no-such-file.txt", "does not exist")),
        (["--eval-file", "no-such-file.txt"], ("--eval-file", "no-such-file.txt", "does not exist")),
    ],
)
def test_bad_arguments(base, tmp_path, capsys, arguments, words):
    message = error_of(capsys, [base, "--output", tmp_path / "hla", *arguments])
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


def test_text_too_short(base, tmp_path, capsys, text_file):
    text_file.write_text("short")
    assert "fewer than one row" in error_of(capsys, [base, "--output", tmp_path / "hla", "--data", text_file])
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.parametrize("model_type", ["gpt2", "t5", "gemma3", "deepseek_v3", "mamba"])
def test_unsupported_architecture_is_named(model_type, tmp_path, capsys):
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path / model_type)
    message = error_of(capsys, [tmp_path / model_type, "--output", tmp_path / "hla"])
    assert f"'{model_type}'" in message and "llama" in message and "qwen3" in message
    assert not (tmp_path / "hla").exists()


def test_quantised_base_is_refused_with_the_reason(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    message = error_of(capsys, [tmp_path / "base", "--output", tmp_path / "hla"])
    assert "bitsandbytes" in message and "--dequantize" in message


def test_missing_and_corrupted_weights(base, tokenizer, tmp_path, capsys):
    def damaged(name):
        path = tmp_path / name
        make_base(tokenizer, path)
        return path, path / "model.safetensors"

    path, weights = damaged("missing")
    weights.unlink()
    assert "cannot be read" in error_of(capsys, [path, "--output", tmp_path / "hla"])
    path, weights = damaged("truncated")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "cannot be read" in error_of(capsys, [path, "--output", tmp_path / "hla"])
    path, weights = damaged("partial")
    tensors = LlamaForCausalLM.from_pretrained(path).state_dict()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    LlamaForCausalLM(LlamaConfig.from_pretrained(path)).save_pretrained(path, state_dict=tensors)
    assert "model.layers.1.mlp.up_proj.weight" in error_of(capsys, [path, "--output", tmp_path / "hla"])
    (tmp_path / "bad.gguf").write_bytes(b"GGUF not really")
    assert "bad.gguf" in error_of(capsys, [tmp_path / "bad.gguf", "--output", tmp_path / "hla"])
    assert "does not exist" in error_of(capsys, [tmp_path / "none.gguf", "--output", tmp_path / "hla"])
    assert not (tmp_path / "hla").exists()


def test_sharded_source_with_a_missing_shard(tokenizer, tmp_path, capsys, text_file):
    make_base(tokenizer, tmp_path / "base")
    LlamaForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 1
    command.main([str(tmp_path / "sharded"), "--output", str(tmp_path / "hla"), "--data", str(text_file), *FAST])
    shards[1].unlink()
    assert "cannot be read" in error_of(capsys, [tmp_path / "sharded", "--output", tmp_path / "again"])


def test_tokenizer_larger_than_the_embedding_is_refused(tokenizer, tmp_path, capsys):
    model = make_base(tokenizer, tmp_path / "base")
    model.resize_token_embeddings(len(tokenizer) - 10)
    model.save_pretrained(tmp_path / "base")
    assert "tokenizer" in error_of(capsys, [tmp_path / "base", "--output", tmp_path / "hla"])


def test_a_failure_while_saving_leaves_nothing_half_written_and_what_was_trained(
    base, tmp_path, text_file, monkeypatch, capsys
):
    def fail(*args):
        raise OSError("disk full")

    arguments = [base, "--data", text_file, *FAST, "--output"]
    with monkeypatch.context() as patch:
        patch.setattr(command, "model_card", fail)
        message = error_of(capsys, [*arguments, tmp_path / "hla"], code=1)
        assert "disk full" in message and "hla.interrupted" in message and "--resume" in message
        assert {x.name for x in tmp_path.iterdir()} == {"text.txt", "hla.interrupted"}
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "layer_losses", None)  # nothing is trained again
        report = command.convert(command.parse_arguments([*map(str, arguments), str(tmp_path / "hla"), "--resume"]))
    whole = command.convert(command.parse_arguments([*map(str, arguments), str(tmp_path / "whole")]))
    assert {x.name for x in tmp_path.iterdir()} == {"text.txt", "hla", "whole"}
    assert report["layer_losses"] == whole["layer_losses"]
    parts, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("hla", "whole"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_quality_measures_the_base_the_model_and_its_window(converted, text_file, tmp_path, benchmark):
    original, hla = converted("llama")
    _, run = benchmark("quality")
    common = (hla, "--base", original, "--eval-file", text_file, "--eval-tokens", 1200, "--contexts", 500, 600)
    run(*common, "--depths", 0.5, "--serving-context", 64, "--output", tmp_path / "all.json")
    results = json.loads((tmp_path / "all.json").read_text())["results"]
    tokenizer = AutoTokenizer.from_pretrained(hla)
    rows = read_tokens([text_file], tokenizer, 2, 600)
    model = AutoModelForCausalLM.from_pretrained(hla).eval()
    assert results["HLA"]["perplexity at 600"] == pytest.approx(perplexity(model, rows), rel=1e-6)
    with softmax_attention(model):
        assert results["base"]["perplexity at 600"] == pytest.approx(perplexity(model, rows), rel=1e-5)
    for p in (p for name, p in hla_parameters(model).items() if name.endswith("gate")):
        p.data.fill_(-100.0)
    assert results["window only"]["perplexity at 600"] == pytest.approx(perplexity(model, rows), rel=1e-5)
    assert len({result["perplexity at 600"] for result in results.values()}) == 3
    assert results["HLA"]["kl"] > 1e-6 and results["HLA"]["kl"] != results["window only"]["kl"]
    assert results["HLA"]["cache bytes"] < results["base"]["cache bytes"]
    assert {
        "perplexity at 600, tokens 128-256",
        "recall at 600",
        "recall at 500, vault, depth 0.5",
        "recall at 500, passkey in filler, depth 0.5",
    } <= set(results["base"])

    run(*common, "--recall-trials", 0, "--serving-context", 0, "--subjects", "HLA", "--output", tmp_path / "one.json")
    one = json.loads((tmp_path / "one.json").read_text())["results"]
    assert one == {"HLA": {key: value for key, value in results["HLA"].items() if key in one["HLA"]}}


def test_recall_asks_every_key_once_and_gives_every_operator_the_same_state(benchmark):
    recall, _ = benchmark("recall")
    tokens, answers = recall.sequences(3, 8, 16, torch.Generator().manual_seed(0))
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        pairs, questions = dict(row[:8]), row[8:]
        assert sorted(pairs) == sorted(key for key, _ in questions) and {mark for _, mark in questions} == {32}
        assert answer == [pairs[key] for key, _ in questions]

    sizes = {"vocabulary": 16, "width": 48, "heads": 12, "head_dim": 8}
    options = argparse.Namespace(**sizes, feature_map="identity", normalizer="rms")
    for settings in recall.VARIANTS.values():
        if settings:
            output = recall.build(settings, options)(tokens[..., 0], use_cache=True)
            state = output[CACHE].layers[0].state
            assert sum(x[0].numel() for x in state if x is not None and x.is_floating_point()) == 12 * 8 * 8, settings


def test_recall_is_learned(benchmark, tmp_path):
    _, run = benchmark("recall")
    arguments = ["--pairs", 4, "--vocabulary", 4, "--steps", 60, "--batch-size", 32, "--learning-rate", 1e-2]
    run(*arguments, "--variants", "softmax", "first order", "--seeds", 1, "--output", tmp_path / "recall.json")
    for (share,) in json.loads((tmp_path / "recall.json").read_text())["results"].values():
        assert share > 0.9


def test_every_variant_of_the_ablation_trains(base, text_file, tmp_path, benchmark):
    ablation, run = benchmark("ablation")
    output = tmp_path / "ablation.json"
    run(
        base, "--data", text_file, "--eval-file", text_file, "--layers", 0, "--tokens", 256, "--seq-len", 128,
        "--batch-size", 1, "--steps", 6, "--learning-rate", 0.02, "--eval-len", 512, "--output", output,
    )  # fmt: skip
    results = json.loads(output.read_text())["results"]
    assert list(results) == list(ablation.VARIANTS)
    errors = [tuple(result["errors"]) for result in results.values()]
    assert len(set(errors)) == len(errors) and all(0 < x < 10 for row in errors for x in row)


def test_every_second_order_beside_slots_trains_with_the_state_of_first_order(base, text_file, tmp_path, benchmark):
    order, run = benchmark("order")
    output = tmp_path / "order.json"
    run(
        base, "--data", text_file, "--eval-file", text_file, "--slots", 20, "--window", 8, "--steps", 4,
        "--seq-len", 64, "--learning-rate", 0.02, "--eval-tokens", 128, "--eval-lengths", 128, "--output", output,
    )  # fmt: skip
    results = json.loads(output.read_text())["results"]
    assert list(results) == list(order.VARIANTS)
    linear = results["linear"]
    for name, result in results.items():
        assert 0 < result["error"] < 1 and all(x > 1 for x in result["perplexity"]), name
        if name not in ("linear", "hla2, as many slots"):
            assert result["state"] <= linear["state"], name
        if result["c"]:
            assert torch.tensor(result["c"]).abs().min() > 0, name
    assert results["delta"]["state"] == linear["state"] and results["metric"]["slots"] < linear["slots"]
    assert len({result["error"] for result in results.values()}) == len(results)


@pytest.mark.parametrize("quantity", ["delta", "residual", "metric"])
@torch.no_grad()
def test_second_orders_beside_slots_follow_their_definition(quantity, benchmark):
    order, _ = benchmark("order")
    window, sinks, slots, length = 4, 2, 3, 24
    options = {"hla_window": window, "hla_num_sinks": sinks, "hla_slots": slots, "hla_operator": "linear"}
    original = hla_attentions(tiny_model(**options))[0].hla
    layer = order.DenseLayer(original.settings, quantity).double()
    layer.load_state_dict(original.state_dict(), strict=False)
    torch.nn.init.uniform_(layer.c, 0.2, 0.8)
    q, far_q, k, v, far_k = (torch.randn(1, heads, length, 8).double() for heads in (4, 4, 2, 2, 2))
    out, parameters = layer(LayerTokens(q, k, v, far_q, far_k))[0][0], layer._far_parameters()
    scale = original.settings.window.scale
    for head in range(4):
        group, c = head // 2, layer.c[head if quantity == "metric" else head // 2]
        keys, values, phi_k = far_k[0, group], v[0, group], parameters.key_map(far_k)[0, group]
        score = received_attention(
            q[0, 2 * group : 2 * group + 2], k[0, group], window=window, sinks=sinks, scale=scale
        )
        kept, absorbed, stored = [], [], []
        for t in range(length):
            if t - window >= sinks:
                kept.append(t - window)
            if len(kept) > slots:
                j = min(kept, key=lambda j: (score[j].item(), -j))
                weights, value = phi_k[absorbed] @ phi_k[j], values[j]
                if absorbed and quantity != "metric":
                    before = torch.stack(stored) if quantity == "delta" else values[absorbed]
                    value = value - c * weights @ before / weights.sum()
                kept.remove(j)
                absorbed.append(j)
                stored.append(value)
            near = [*range(min(sinks, t + 1)), *kept, *range(max(sinks, t - window + 1), t + 1)]
            exp = (scale * k[0, group, near] @ q[0, head, t]).exp()
            expected, mass = exp @ values[near], exp.sum()
            if absorbed:
                query = far_q[:, :, t : t + 1].clone()
                if quantity == "metric":
                    moment = keys[absorbed].T @ keys[absorbed]
                    query[0, head, 0] += c * moment @ query[0, head, 0] / (moment.trace() / 8)
                far = phi_k[absorbed] @ parameters.query_map(query)[0, head, 0]
                far = far * parameters.gate[head] * exp.max() / len(absorbed) ** 0.5
                expected, mass = expected + far @ torch.stack(stored), mass + far.sum()
            torch.testing.assert_close(out[head, t], expected / mass, atol=1e-5, rtol=1e-5)
