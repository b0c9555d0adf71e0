"""Facts that rows of text ask for, recall of facts in running text, and the speed of whole models side by side."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_base, tiny_config, tiny_model, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedTokenizerFast

from conversion import facts, recall, serving


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte."""
    vocabulary = {x: i for i, x in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def text_tokens(tokenizer, length):
    words = " ".join(f"word{i}" for i in range(length))
    return torch.tensor(tokenizer(words).input_ids[:length])


def four_words(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 4]) for i in range(len(words) - 3)}


# ---- rows of facts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", (300, 2048))
def test_every_fact_is_stated_before_it_is_asked_for(tokenizer, monkeypatch, length):
    drawn, draw_fact = [], facts.draw_fact
    monkeypatch.setattr(facts, "draw_fact", lambda *args: drawn.append(draw_fact(*args)) or drawn[-1])
    filler = text_tokens(tokenizer, 5000).view(10, 500)
    distances, wordings = [], set()
    for seed in range(8):
        drawn.clear()
        (row,) = facts.fact_rows(filler, tokenizer, 1, length, seed)
        assert row.shape == (length,)
        text, inserted = tokenizer.decode(row), 0
        for fact in drawn:
            assert fact.answers and all(answer.strip(" .") in fact.statement for answer in fact.answers.values())
            places = [text.rfind(question + answer) for question, answer in fact.answers.items()]
            if min(places) < 0:  # did not fit
                continue
            stated = text.find(fact.statement)
            distances += [place - stated - len(fact.statement) for place in places]
            assert stated >= 0 and min(distances) >= 0, fact
            wordings |= {" ".join(re.findall(r"\b[a-z]+\b", question)) for question in fact.answers}
            inserted += len(fact.statement) + sum(map(len, (*fact.answers, *fact.answers.values())))
        assert 0.2 * length < inserted < 0.6 * length
    assert len(wordings) > 10 and min(distances) < length / 10 and max(distances) > length / 3


def test_rows_of_facts_are_seeded_and_read_their_filler_again(tokenizer):
    filler = text_tokens(tokenizer, 90).view(3, 30)
    rows = facts.fact_rows(filler, tokenizer, 4, 1000, seed=1)
    assert torch.equal(rows, facts.fact_rows(iter(filler), tokenizer, 4, 1000, seed=1))
    assert not torch.equal(rows, facts.fact_rows(filler, tokenizer, 4, 1000, seed=2))
    assert len({tuple(row) for row in rows.tolist()}) == 4


@pytest.mark.parametrize("filler, length, word", ([[], 500, "filler"], [[torch.arange(9)], 20, "length=20"]))
def test_rows_of_facts_refuse_what_they_cannot_fill(tokenizer, filler, length, word):
    with pytest.raises(ValueError, match=word):
        facts.fact_rows(filler, tokenizer, 1, length)


def test_rows_of_facts_share_no_four_words_with_what_the_benchmarks_ask():
    asking = ("conversion/recall.py", "benchmarks/quality.py", "benchmarks/demo.py")
    judged = set().union(*(four_words(Path(name).read_text()) for name in asking))
    assert ("the", "pass", "key", "is") in judged
    random, trained = Random(0), set()
    for _ in range(5000):
        fact = facts.draw_fact(random, lambda: "")
        for part in (fact.statement, *(question + answer for question, answer in fact.answers.items())):
            trained |= four_words(part)
    assert len(trained) > 5000 and not trained & judged


# ---- recall ----------------------------------------------------------------------------------------------------------


class Reader:
    """Says what followed the last line when it stood in the text before, in so far as it remembers the text."""

    device = "cpu"

    def __init__(self, tokenizer, memory):
        self.tokenizer, self.memory = tokenizer, memory

    def __call__(self, ids, logits_to_keep, use_cache, **cache):
        (name, cache), following = *cache.items(), []
        read = torch.cat([cache.read, ids], 1) if cache else ids
        for row in read:
            text = self.tokenizer.decode(row)
            line = text.rpartition("\n")[2]
            at = text.find(line, max(0, len(text) - self.memory)) + len(line)
            following.append(self.tokenizer((text + "?")[at]).input_ids[0])
        logits = F.one_hot(torch.tensor(following), len(self.tokenizer))[:, None].float()
        return SimpleOutput(logits=logits, **{name: SimpleNamespace(read=read, layers=[])})


class SimpleOutput(dict):
    __getattr__ = dict.__getitem__


def test_recall_is_solved_by_who_remembers_that_far(tokenizer, benchmark):
    text = recall.evenly_spaced_rows(text_tokens(tokenizer, 3000), 3, 1000)
    for memory, solved in ((1000, (1, 1, 1)), (600, (0, 1, 1)), (300, (0, 0, 1)), (30, (0, 0, 0))):
        found, _ = recall.recall(Reader(tokenizer, memory), tokenizer, text)
        assert found == {name: dict(zip((0.1, 0.5, 0.9), solved, strict=True)) for name in recall.WORDINGS}


def test_a_context_states_each_fact_at_its_depth_and_leaves_room_for_the_question(tokenizer, benchmark):
    row, keys = recall.with_facts(text_tokens(tokenizer, 1000), tokenizer, (0.9, 0.1, 0.5), recall.WORDINGS, "0")
    text = tokenizer.decode(row)
    longest = max(len(wording.question) for wording in recall.WORDINGS.values())
    assert len(row) + 1 + longest == 1000 and len(set(keys.values())) == 3
    order = [text.index(recall.WORDINGS[name].sentences[0].format(key=keys[name])) for name in keys]
    assert order[1] < 200 < order[2] < 700 < order[0]
    assert all(text.count(key) == (2 if name == "passkey" else 1) for name, key in keys.items())
    other, others = recall.with_facts(text_tokens(tokenizer, 1000), tokenizer, (0.9, 0.1, 0.5), recall.WORDINGS, "1")
    assert len(other) == len(row) and others != keys


def test_recall_refuses_text_and_contexts_that_are_too_short(tokenizer, benchmark):
    with pytest.raises(ValueError, match="500 tokens, fewer"):
        recall.evenly_spaced_rows(text_tokens(tokenizer, 500), 3, 501)
    with pytest.raises(ValueError, match="context of 100"):
        recall.with_facts(text_tokens(tokenizer, 100), tokenizer, (0.5,), recall.WORDINGS, "0")


# ---- whole models ----------------------------------------------------------------------------------------------------


def test_models_are_measured_side_by_side(tokenizer, benchmark, tmp_path, capsys):
    _, run = benchmark("models")
    settings = {"vocab_size": 300, "hla_window": 8, "dtype": torch.float32}
    base, hla = tiny_base(vocab_size=300), tiny_model(**settings)
    for name, model in (("base", base), ("hla", hla)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    run(
        tmp_path / "base", tmp_path / "hla", "--contexts", 16, 64, "--rounds", 2, "--steps", 2,
        "--max-training-context", 16, "--json", tmp_path / "models.json", "--batch", 3,
        "--plot", tmp_path / "models.png",
    )  # fmt: skip
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "models.json").read_text())["results"]
    assert all(row["base"] > 0 and row["ratio"] == row["HLA"] / row["base"] for row in rows)
    found = {(row["context"], row["what"]): row for row in rows}
    assert ((16, "training tokens/s") in found) and ((64, "training tokens/s") not in found)
    for model, name in ((base, "base"), (hla, "HLA")):
        for context in (16, 64):
            size = serving.cache_bytes(serving.read(model, tokens(1, context))[1])
            assert found[context, "cache bytes"][name] == pytest.approx(size, abs=512)
            assert found[context, "prefill peak bytes"][name] > size
    assert "threads" in capsys.readouterr().out


# ---- operators and a default layer -----------------------------------------------------------------------------------


def test_a_default_layer_is_timed(benchmark):
    """Softmax attention within its window, not beyond it, and decoding goes on from its state."""
    ops, _ = benchmark("ops")
    q, k, v = (torch.randn(1, heads, 90, 8) for heads in (4, 2, 2))
    with torch.no_grad():
        out, softmax = ops.default_attention(q, k, v), ops.softmax_attention(q, k, v)
        _, state = ops.default_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], return_state=True)
        last = ops.default_attention(*(x[:, :, -1:] for x in (q, k, v)), initial_state=state)
    assert torch.allclose(out[:, :, :64], softmax[:, :, :64], atol=1e-5)
    assert not torch.allclose(out[:, :, 70:], softmax[:, :, 70:], atol=1e-3)
    assert torch.allclose(last, out[:, :, -1:], atol=1e-5)


# ---- what a GPU is expected to take ----------------------------------------------------------------------------------


def test_expected_times(benchmark, capsys):
    """Of attention: in proportion to the context for flash attention, the same at any for HLA."""
    _, run = benchmark("expect")
    run("--contexts", 4096, 8192, "--slots", 0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "attention, forward" in line]
    (flash, hla), (longer, same) = ([float(x) for x in line[3:5]] for line in lines)
    assert longer == pytest.approx(2 * flash, rel=0.01) and same == hla > 0


def test_measured_times_beside_the_expected(benchmark, tmp_path, monkeypatch, capsys):
    script, run = benchmark("expect")
    monkeypatch.setattr(script, "TOKENS", 128)
    tiny_config(hla_window=8, hla_slots=4, head_dim=16).save_pretrained(tmp_path)
    model = script.Model(AutoConfig.from_pretrained(tmp_path))
    least = [model.decoding(32768, 16, hla) / 16 for hla in (False, True)]

    def check(base, hla):
        """With decoding that takes so many times the least."""
        rates = {"base": 1 / (base * least[0]), "HLA": 1 / (hla * least[1])}
        result = {"context": 32768, "what": "decode tokens/s", "ratio": rates["HLA"] / rates["base"]} | rates
        measured = {"hla": str(tmp_path), "batch": 16, "results": [result]}
        (tmp_path / "models.json").write_text(json.dumps(measured))
        run("--measured", tmp_path / "models.json")

    assert least[0] > 10 * least[1]
    check(2, 3)
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["2.00", "3.00"]
    with pytest.raises(SystemExit, match=r"0\.50 of the least time"):
        check(0.5, 3)
    with pytest.raises(SystemExit, match=r"target 2\.00"):
        check(2, 1e6)


def test_memory_of_a_layer(benchmark, monkeypatch, capsys):
    script, run = benchmark("memory")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    monkeypatch.setattr(script, "SHAPES", script.SHAPES | sizes)
    run("--tokens", 200, "--dtype", "float32")
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-3:]]
    kept, peak = zip(*([int(x.replace(",", "")) for x in row] for row in rows), strict=True)
    assert all(x > 4 * 10 * 32 for x in kept) and all(x > y for x, y in zip(peak, kept, strict=True))
    assert kept[0] < kept[1] < kept[2]  # HLA keeps the inputs of its blocks too, and slots more of them


@pytest.mark.slow
def test_what_kernels_need(tmp_path):
    pytest.importorskip("fla")
    command = [sys.executable, "benchmarks/resources.py", "--targets", "sm_90", "--head-dims", "64"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([*command, "--json", tmp_path / "needs.json"], check=True, env=environment)
    needs = json.loads((tmp_path / "needs.json").read_text())
    assert {x["kernel"] for x in needs} >= {"chunk_fwd_kernel_h", "chunk_fwd_kernel_o", "chunk_bwd_kernel_dh"}
    assert all(x["fit"] > 0 and x["spilled"] == 0 for x in needs)
