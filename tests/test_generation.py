"""generate() in every mode equals the cache-free result; rollback; caches on disk and handed around."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, CACHE, MODES, positions, stepwise_logits, tiny_base, tiny_model, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer, pipeline

import hla_hf
from hla_hf.cache_hla import MAX_RECORDED


CLOSE = {"atol": 1e-4, "rtol": 1e-4}
NEW = 12


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def model(mode):
    return tiny_model(**MODES[mode])


@pytest.fixture
def prompt():
    """A batch of two, the first left-padded by 6, long enough to be past the window of 8."""
    ids = tokens(2, 25)
    mask = torch.ones_like(ids)
    ids[0, :6], mask[0, :6] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, prompt, **settings):
    if "attention_mask" not in prompt:  # else `generate` takes token 0 for padding
        prompt = prompt | {"attention_mask": torch.ones_like(prompt["input_ids"])}
    return model.generate(**prompt, **{"max_new_tokens": NEW, "do_sample": False} | settings)


@torch.no_grad()
def forced_logits(model, sequences, mask):
    """Cache-free logits of whole sequences, whose prompts have this mask."""
    mask = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], 1)
    return model(sequences, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits


# ---- every mode ----------------------------------------


DECODING = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "top-k, several": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "end of sequence": {"eos_token_id": list(range(30, 50)), "num_beams": 2},
    "prefill in chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("decoding", DECODING)
def test_decoding_with_and_without_cache(model, prompt, decoding):
    settings, outputs = DECODING[decoding], []
    for use_cache in (True, False):
        if not use_cache:
            settings = {k: v for k, v in settings.items() if k != "prefill_chunk_size"}
        torch.manual_seed(0)
        outputs.append(generate(model, prompt, use_cache=use_cache, **settings))
    assert torch.equal(*outputs) and outputs[0].shape[1] > 26


@pytest.mark.parametrize(
    "architecture, dtype",
    [*((a, torch.float32) for a in hla_hf.ARCHITECTURES), *((a, torch.bfloat16) for a in ARCHITECTURES)],
)
def test_scores_of_every_step_are_the_cache_free_logits(architecture, dtype, mode, prompt):
    model = tiny_model(architecture, dtype=dtype, **MODES[mode])
    out = generate(model, prompt, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    expected = forced_logits(model, out.sequences, prompt["attention_mask"])[:, 24:-1].float()
    scores = torch.stack(out.scores, 1)
    if dtype == torch.float32:
        assert_close(scores, expected, **CLOSE)
    else:  # the two forms round differently; both stand as far from fp32
        reference = tiny_model(architecture, **MODES[mode])
        reference.load_state_dict(model.state_dict())
        exact = forced_logits(reference, out.sequences, prompt["attention_mask"])[:, 24:-1]
        error, error_free = ((x - exact).norm() / exact.norm() for x in (scores, expected))
        assert error < 1.5 * error_free + 0.01, (error, error_free)
    assert len(out.hidden_states) == NEW and out.hidden_states[0][0].shape == (2, 25, 32)


def test_left_padding_gives_what_the_row_alone_gives(model, prompt):
    alone = generate(model, {"input_ids": prompt["input_ids"][:1, 6:]})
    assert torch.equal(generate(model, prompt)[0, 6:], alone[0])


def test_finished_rows_of_a_batch_wait(model, prompt):
    free = generate(model, prompt)
    eos = free[0, 27].item()  # ends row 0 within three tokens
    out = generate(model, prompt, eos_token_id=eos, pad_token_id=0)
    for row in range(2):
        new = free[row, 25:].tolist()
        end = new.index(eos) + 1 if eos in new else NEW
        assert out[row, 25 : 25 + end].tolist() == new[:end] and (out[row, 25 + end :] == 0).all()


def test_inputs_embeds_and_logits_to_keep(model, prompt):
    embeds = model.get_input_embeddings()(prompt["input_ids"])
    new = generate(model, {"inputs_embeds": embeds, "attention_mask": prompt["attention_mask"]})
    assert torch.equal(new, generate(model, prompt)[:, 25:])
    with torch.no_grad():
        assert_close(model(**prompt, logits_to_keep=3).logits, model(**prompt).logits[:, -3:])


def test_attention_weights_are_those_of_softmax_layers_only(model, prompt):
    if len(model.config.hla_layer_ids) == 2:
        with pytest.raises(ValueError, match=r"output_attentions.*HLA"):
            model(**prompt, output_attentions=True)
        with pytest.raises(ValueError, match=r"output_attentions.*HLA"):
            generate(model, prompt, output_attentions=True, return_dict_in_generate=True)
    else:
        model.set_attn_implementation("eager")
        weights = model(**prompt, output_attentions=True).attentions
        assert [x.shape for x in weights] == [(2, 4, 25, 25)]


def resets_softmax_layers():
    """Whether this version of Transformers empties the dynamic layers of softmax attention on `reset()`."""
    layer = transformers.DynamicCache(config=tiny_base().config).layers[0]
    layer.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    layer.reset()
    return layer.get_seq_length() == 0


@pytest.mark.parametrize("made_by", ("DynamicCache()", "DynamicCache(config)", "StaticCache", "static", "dynamic"))
def test_any_cache(model, prompt, made_by):
    expected = generate(model, prompt)
    given = {
        "DynamicCache()": lambda: {CACHE: transformers.DynamicCache()},
        "DynamicCache(config)": lambda: {CACHE: transformers.DynamicCache(config=model.config)},
        "StaticCache": lambda: {CACHE: transformers.StaticCache(config=model.config, max_cache_len=40)},
        "static": lambda: {"cache_implementation": "static"},
        "dynamic": lambda: {"cache_implementation": "dynamic"},
    }[made_by]()
    assert torch.equal(generate(model, prompt, **given), expected)
    if CACHE in given and (resets_softmax_layers() or not made_by.startswith("Dynamic")):  # again, with another prompt
        other = {"input_ids": tokens(2, 17, seed=5), "attention_mask": torch.ones(2, 17, dtype=torch.long)}
        given[CACHE].reset()
        assert torch.equal(generate(model, other, **given), generate(model, other))


def test_a_chat_goes_on_with_the_kept_cache(model):
    ids, cache, fed = tokens(1, 9), hla_hf.new_cache(model.config), []
    forward = model.model.forward
    model.model.forward = lambda *args, **kw: fed.append(kw["input_ids"].shape[1]) or forward(*args, **kw)
    for turn in range(4):
        ids = torch.cat([ids, tokens(1, 5, seed=turn)], 1)
        out = generate(model, {"input_ids": ids}, **{CACHE: cache})
        assert fed[0] == (14 if turn == 0 else 6)  # this turn's tokens and the last one generated, no more
        assert torch.equal(out, generate(model, {"input_ids": ids}, use_cache=False))
        ids = out
        fed.clear()


def test_copies_of_a_cache_fan_out_from_a_shared_prefix(model):
    prefix = tokens(1, 20)
    _, cache = stepwise_logits(model, prefix, (20,))
    for seed in range(3):
        ids = torch.cat([prefix, tokens(1, 4, seed=seed)], 1)
        out = generate(model, {"input_ids": ids}, **{CACHE: copy.deepcopy(cache)})
        assert torch.equal(out, generate(model, {"input_ids": ids}))
    assert cache.get_seq_length() == 20


@torch.no_grad()
def test_batch_repeat_interleave_and_select_indices(model, prompt):
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    _, cache = stepwise_logits(model, ids, (25,), mask)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([5, 0, 1]))
    rows, new = torch.tensor([1, 0, 0]), tokens(3, 6, seed=3)
    ids, mask = torch.cat([ids[rows], new], 1), torch.cat([mask[rows], torch.ones_like(new)], 1)
    out = model(new, attention_mask=mask, position_ids=positions(mask)[:, 25:], **{CACHE: cache}).logits
    assert_close(out, model(ids, attention_mask=mask, position_ids=positions(mask)).logits[:, 25:], **CLOSE)


# ---- text ----------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """One token per character: 94 visible ones and the space."""
    characters = ["[PAD]", "Ġ", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", padding_side="left",
        chat_template="{% for m in messages %}<{{ m['content'] }}>{% endfor %}",
    )  # fmt: skip


def test_streamers(model, tokenizer, capsys):
    prompt = {"input_ids": tokens(1, 20)}
    expected = tokenizer.decode(generate(model, prompt)[0, 20:]).strip()
    generate(model, prompt, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generate, args=(model, prompt), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer).strip() == expected
    thread.join()


def test_stop_strings(model, tokenizer):
    prompt = {"input_ids": tokens(1, 20)}
    free = generate(model, prompt)[0, 20:]
    out = generate(model, prompt, stop_strings=tokenizer.decode(free[4:5]), tokenizer=tokenizer)[0, 20:]
    assert torch.equal(out, free[: free.tolist().index(free[4].item()) + 1])


def test_pipeline_with_chats_and_batches(model, tokenizer):
    text = pipeline("text-generation", model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    prompts = ["What is HLA?", "Attention of a higher order, in linear time"]
    single = [text(p, **settings)[0]["generated_text"] for p in prompts]
    batched = [out[0]["generated_text"] for out in text(prompts, batch_size=2, **settings)]
    cache_free = [text(p, use_cache=False, **settings)[0]["generated_text"] for p in prompts]
    assert single == batched == cache_free
    chat = [{"role": "user", "content": "What is HLA?"}]
    assert text(chat, **settings)[0]["generated_text"] == text("<What is HLA?>", **settings)[0]["generated_text"]


# ---- rollback ----------------------------------------


def recording_cache(model):
    cache = hla_hf.new_cache(model.config)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("prefix", (3, 8, 30))
@torch.no_grad()
def test_crop_takes_tokens_back(model, prefix):
    """Drafts of random lengths, of which random parts are rejected, across the window boundary."""
    ids, generator = tokens(2, prefix + 40), torch.Generator().manual_seed(prefix)
    expected = model(ids).logits
    _, cache = stepwise_logits(model, ids, (prefix,), cache=recording_cache(model))
    place = prefix
    while place < prefix + 30:
        draft, accepted = torch.randint(0, 6, (2,), generator=generator).sort(descending=True)[0].tolist()
        wrong = tokens(2, draft - accepted, seed=place)
        step = torch.cat([ids[:, place : place + accepted + 1], wrong], 1)
        parts = step.split(2, 1) if place % 2 else (step,)  # a draft in several calls, or one verification
        logits = torch.cat([model(part, **{CACHE: cache}).logits for part in parts], 1)
        assert_close(logits[:, : accepted + 1], expected[:, place : place + accepted + 1], **CLOSE)
        cache.crop(-(draft - accepted))
        place += accepted + 1
        assert cache.get_seq_length() == place
    assert_close(model(ids[:, place:], **{CACHE: cache}).logits, expected[:, place:], **CLOSE)


@torch.no_grad()
def test_crop_with_padding_beams_and_copies(model, prompt):
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    cache = recording_cache(model)
    stepwise_logits(model, ids, (3, 15), mask[:, :18], cache=cache)
    cache.crop(-4)
    rows = torch.tensor([1, 0, 1])
    cache.reorder_cache(rows)  # what is to be replayed is reordered too
    cache = copy.deepcopy(cache)
    ids, mask = ids[rows], mask[rows]
    expected = model(ids, attention_mask=mask, position_ids=positions(mask)).logits[:, 14:]
    out = model(ids[:, 14:], attention_mask=mask, position_ids=positions(mask)[:, 14:], **{CACHE: cache}).logits
    assert_close(out, expected, **CLOSE)


@torch.no_grad()
def test_what_was_not_recorded_cannot_be_cropped():
    model, ids = tiny_model(hla_window=8, max_position_embeddings=512), tokens(1, MAX_RECORDED + 20)
    _, cache = stepwise_logits(model, ids, (10,))
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-1\): .* 0 to 0 tokens.*activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"crop\(3\)"):
        cache.crop(3)
    cache = recording_cache(model)
    stepwise_logits(model, ids, (MAX_RECORDED + 20,), cache=cache)
    with pytest.raises(ValueError, match=rf"0 to {MAX_RECORDED} tokens"):
        cache.crop(-MAX_RECORDED - 1)
    cache.crop(-MAX_RECORDED)
    assert_close(model(ids[:, 20:], **{CACHE: cache}).logits, model(ids).logits[:, 20:], **CLOSE)


@pytest.mark.parametrize("mode", ("pure", "windowed"))
@torch.no_grad()
def test_recording_is_bounded_when_nobody_crops(mode):
    model, ids = tiny_model(max_position_embeddings=2048, **MODES[mode]), tokens(1, 5 * MAX_RECORDED)
    cache, sizes = recording_cache(model), []
    for start in range(0, 5 * MAX_RECORDED, 16):
        model(ids[:, start : start + 16], **{CACHE: cache})
        sizes.append(hla_hf.cache_nbytes(cache))
    assert max(sizes[32:49]) == max(sizes[49:])  # the first 33 calls fill 2 * MAX_RECORDED
    cache.crop(-100)
    assert_close(model(ids[:, -100:], **{CACHE: cache}).logits, model(ids).logits[:, -100:], **CLOSE)
    cache.crop(0)  # all is committed: nothing but the state is left
    assert hla_hf.cache_nbytes(cache) == hla_hf.cache_nbytes(stepwise_logits(model, ids, (20,))[1])


def nearly(model):
    """A model that agrees with the given one at most places, so that some of its drafts are rejected."""
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.add_(0.05 * torch.randn_like(model.lm_head.weight))
    return model


@pytest.mark.parametrize("assistant", ("itself", "nearly itself", "softmax"))
def test_assisted_decoding_is_greedy(model, mode, assistant):
    prompt, calls = {"input_ids": tokens(1, 20)}, []
    expected = generate(model, prompt, max_new_tokens=40)
    other = {
        "itself": lambda: tiny_model(**MODES[mode]),
        "nearly itself": lambda: nearly(tiny_model(**MODES[mode])),
        "softmax": lambda: tiny_base(),
    }[assistant]()
    model.register_forward_hook(lambda *_: calls.append(1))
    cache = hla_hf.new_cache(model.config)
    out = generate(model, prompt, max_new_tokens=40, assistant_model=other, **{CACHE: cache})
    assert torch.equal(out, expected)
    if assistant != "softmax":  # drafts were accepted; those that were not have left no trace in the cache
        assert len(calls) < 38
    more = generate(model, {"input_ids": out}, **{CACHE: cache})
    assert torch.equal(more, generate(model, {"input_ids": out}))


def test_prompt_lookup_is_greedy(model):
    prompt = {"input_ids": tokens(1, 6).repeat(1, 5)}
    expected = generate(model, prompt, max_new_tokens=40)
    assert torch.equal(generate(model, prompt, max_new_tokens=40, prompt_lookup_num_tokens=4), expected)


def test_hla_assists_a_softmax_model(model):
    base, prompt = tiny_base(), {"input_ids": tokens(1, 20)}
    assert torch.equal(generate(base, prompt, assistant_model=model), generate(base, prompt))


# ---- caches on disk ----------------------------------------


@torch.no_grad()
def test_a_saved_cache_goes_on(model, tmp_path):
    ids, path = tokens(1, 40), tmp_path / "read.safetensors"
    _, cache = stepwise_logits(model, ids, (30,))
    model.save_cache(cache, path)
    again = model.load_cache(path)
    assert again.get_seq_length() == 30 and list(tmp_path.iterdir()) == [path]
    expected = model(ids[:, 30:], **{CACHE: cache}).logits
    assert torch.equal(model(ids[:, 30:], **{CACHE: again}).logits, expected)


def test_one_document_many_questions(model, tmp_path):
    """One saved state, a batch of left-padded questions: each as if read and asked alone."""
    document, path = tokens(1, 30), tmp_path / "read.safetensors"
    model.save_cache(stepwise_logits(model, document, (30,))[1], path)
    cache = model.load_cache(path)
    cache.batch_repeat_interleave(3)
    questions, mask = torch.zeros(3, 7, dtype=torch.long), torch.ones(3, 37, dtype=torch.long)
    for row, n in enumerate((7, 4, 5)):
        questions[row, 7 - n :] = tokens(n, seed=row)
        mask[row, 30 : 37 - n] = 0
    out = generate(model, {"input_ids": questions, "attention_mask": mask}, **{CACHE: cache})
    for row, n in enumerate((7, 4, 5)):
        whole = torch.cat([document, questions[row : row + 1, 7 - n :]], 1)
        assert torch.equal(out[row, 7:], generate(model, {"input_ids": whole})[0, 30 + n :])


@torch.no_grad()
def test_a_cropped_cache_is_saved_with_its_replay(model, tmp_path):
    ids = tokens(1, 40)
    cache = recording_cache(model)
    stepwise_logits(model, ids, (20, 10), cache=cache)
    cache.crop(-5)
    model.save_cache(cache, tmp_path / "read.safetensors")
    again = model.load_cache(tmp_path / "read.safetensors")
    assert_close(model(ids[:, 25:], **{CACHE: again}).logits, model(ids).logits[:, 25:], **CLOSE)


@pytest.mark.parametrize("mode", ("pure", "windowed"))
def test_the_size_of_the_file_does_not_depend_on_the_text(mode, tmp_path):
    model, path, sizes = tiny_model(**MODES[mode]), tmp_path / "read.safetensors", set()
    for length in (100, 250):
        model.save_cache(stepwise_logits(model, tokens(1, length), (length,))[1], path)
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1


def test_a_saved_cache_of_another_model_or_version_is_refused(tmp_path, monkeypatch):
    model, path = tiny_model(), tmp_path / "read.safetensors"
    model.save_cache(stepwise_logits(model, tokens(1, 20), (20,))[1], path)
    for other in (tiny_model(seed=1), tiny_model(dtype=torch.bfloat16), tiny_model(hla_num_sinks=2)):
        with pytest.raises(ValueError, match=rf"another model \(fingerprint {model.fingerprint()}"):
            other.load_cache(path)
    assert model.model.load_cache(path).get_seq_length() == 20  # the decoder of the same model
    monkeypatch.setattr("hla_hf.cache_hla.FILE_VERSION", 4)
    with pytest.raises(ValueError, match="format 3, this code reads format 4"):
        model.load_cache(path)
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a saved cache, or is damaged"):
        model.load_cache(path)
    with pytest.raises(FileNotFoundError, match="no saved cache"):
        model.load_cache(tmp_path / "none")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model, path = tiny_model(), tmp_path / "read.safetensors"
    _, cache = stepwise_logits(model, tokens(1, 20), (20,))
    model.save_cache(cache, path)
    before = path.read_bytes()

    def fail(tensors, file, **_):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("hla_hf.cache_hla.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_cache(cache, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


CONTINUE_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["hla_hf"] = None
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder, name = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
cache = model.load_cache(folder + "/read.safetensors")
expected = torch.load(folder + "/expected.pt")
mask = torch.ones(1, cache.get_seq_length() + expected["ids"].shape[1], dtype=torch.long)
assert torch.equal(model(expected["ids"], attention_mask=mask, **{name: cache}).logits, expected["logits"])
model.save_cache(cache, folder + "/read2.safetensors")
assert model.load_cache(folder + "/read2.safetensors").get_seq_length() == mask.shape[1]
print("went on")
"""


def test_another_process_without_the_package_goes_on(tmp_path):
    model, ids = tiny_model(hla_window=8, hla_layers=[1]), tokens(1, 35)
    model.save_pretrained(tmp_path)
    _, cache = stepwise_logits(model, ids, (30,))
    model.save_cache(cache, tmp_path / "read.safetensors")
    logits, _ = stepwise_logits(model, ids[:, 30:], (5,), cache=cache)
    torch.save({"ids": ids[:, 30:], "logits": logits}, tmp_path / "expected.pt")
    script = [sys.executable, "-c", CONTINUE_WITHOUT_THE_PACKAGE, str(tmp_path), CACHE]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr[-3000:]
