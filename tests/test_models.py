"""The models: every architecture and setting, padding, the seed setting by definition, bad input, saving, loading."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import (
    ARCHITECTURE_SETTINGS,
    ARCHITECTURES,
    CACHE,
    MODES,
    OPERATORS,
    SIZES,
    cache_of,
    positions,
    randomize,
    stepwise_logits,
    tiny_base,
    tiny_config,
    tiny_model,
    tokens,
)
from torch.testing import assert_close
from transformers import AttentionInterface

import hla_hf
from hla_hf.layer_hla import base_functions, hla_attention, unrotated
from hla_hf.modeling_hla import model_class
from hla_hf.ops_hla import FEATURE_MAPS


STEPS = (1, 7, 1, 1, 17, 9, 1)  # 37 tokens, over several chunks of 16 and past the window of 8
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


# ---- cached, cache-free and padded forms agree ----------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cached_equals_cache_free_at_every_step(architecture, mode):
    model, ids = tiny_model(architecture, **MODES[mode]), tokens(2, sum(STEPS))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    logits, cache = stepwise_logits(model, ids, STEPS)
    assert_close(logits, expected, **CLOSE)
    assert [layer.get_seq_length() for layer in cache.layers] == [37, 37]
    assert_close(stepwise_logits(model, ids, [1] * 37)[0], expected, **CLOSE)


def test_mistral_mixes_sliding_softmax_layers():
    model = tiny_model("mistral", sliding_window=5, hla_window=8, hla_layers=[0])
    ids = tokens(2, sum(STEPS))
    with torch.no_grad():
        assert_close(stepwise_logits(model, ids, STEPS)[0], model(ids).logits, **CLOSE)


SETTINGS = [
    *({"hla_feature_map": m, "hla_window": w} for m in FEATURE_MAPS for w in (0, 8)),
    *({"hla_normalizer": n, "hla_window": 0} for n in ("none", "count", "rms")),
    *({"hla_decay": d, "hla_window": w} for d in (0.9, 1.0, 1, "learned") for w in (0, 8)),
    *({"hla_accumulator": "key", "hla_window": w} for w in (0, 8)),
    *({"hla_accumulator": "softmax_query", "hla_feature_map": "elu", "hla_window": w} for w in (0, 8)),
    {"hla_ridge": 0.3, "hla_window": 8},
    {"hla_window": 1, "hla_num_sinks": 0},
    {"hla_window": 64, "hla_num_sinks": 3},
]  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_every_setting_cached_and_left_padded(settings, operator):
    # signed features can have a row mass near 0, so this is compared in double; the norms of Llama stay fp32
    model = tiny_model(hla_operator=operator, dtype=torch.double, **settings)
    ids = tokens(2, sum(STEPS))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        alone = model(ids[:1, 5:]).logits[0]
    assert expected.isfinite().all()
    close = {"atol": 1e-3, "rtol": 1e-3} if settings.get("hla_feature_map") == "identity" else CLOSE
    assert_close(stepwise_logits(model, ids, STEPS)[0], expected, **close)
    assert_close(stepwise_logits(model, ids, STEPS, mask)[0][0, 5:], alone, **close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing_at_real_tokens(architecture, mode):
    model, real = tiny_model(architecture, **MODES[mode]), tokens(1, 20)
    with torch.no_grad():
        expected = model(real).logits[0]
        places = {
            "left": [*range(7, 27)],
            "right": [*range(20)],
            "interior": [*range(3), *range(6, 14), *range(18, 27)],
        }
        for where, place in places.items():
            ids, mask = tokens(1, 27, seed=1), torch.zeros(1, 27, dtype=torch.long)
            ids[0, place], mask[0, place] = real[0], 1
            position_ids = positions(mask)
            for batch in (1, 2):  # a batch of one is masked too
                out = model(
                    ids.repeat(batch, 1),
                    attention_mask=mask.repeat(batch, 1),
                    position_ids=position_ids.repeat(batch, 1),
                ).logits[0]
                assert_close(out[place], expected, msg=lambda m, w=where: f"{w}: {m}", **CLOSE)
            out = stepwise_logits(model, ids, (5, 1, 14, 7), mask)[0][0]  # the mask of a cached step covers the past
            assert_close(out[place], expected, msg=lambda m, w=where: f"{w}, cached: {m}", **CLOSE)


@pytest.mark.parametrize("mode", ("pure", "windowed"))
def test_a_row_of_padding_only_gives_no_nan_and_no_gradient(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[1] = 0
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, attention_mask=mask).logits[0].sum().backward()
    assert embeds.grad[0].abs().sum() > 0 and (embeds.grad[1] == 0).all()
    logits, cache = stepwise_logits(model, ids, (4, 1, 6), mask)
    assert logits.isfinite().all()
    assert all(x.isfinite().all() for layer in cache.layers for x in layer.state if x is not None)
    with torch.no_grad():  # the state of that row is as good as new
        new = model(ids[1:]).logits[0]
        mask = torch.cat([mask, torch.ones_like(mask)], 1)
        kept = model(ids, attention_mask=mask, position_ids=positions(mask)[:, 11:], **{CACHE: cache}).logits[1]
    assert_close(kept, new, **CLOSE)


def test_masked_tokens_get_no_gradient_from_real_ones():
    model, ids = tiny_model(hla_feature_map="elu", hla_window=0, hla_decay=0.9), tokens(1, 12)
    mask = torch.ones_like(ids)
    mask[0, [0, 1, 6]] = 0
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    (model(inputs_embeds=embeds, attention_mask=mask).logits * mask[..., None]).sum().backward()
    assert (embeds.grad[0, mask[0] == 0] == 0).all() and (embeds.grad[0, mask[0] == 1] != 0).any()


# ---- the cache ----------------------------------------


@pytest.mark.parametrize("mode", ("pure", "windowed"))
@pytest.mark.parametrize("operator", OPERATORS)
def test_cache_bytes_do_not_depend_on_the_context(operator, mode):
    model = tiny_model(hla_operator=operator, **MODES[mode])
    sizes = {hla_hf.cache_nbytes(stepwise_logits(model, tokens(1, n), (n,))[1]) for n in (10, 100, 250)}
    assert len(sizes) == 1 and sizes.pop() > 0


def test_an_empty_cache_is_no_past():
    model, ids = tiny_model(**MODES["mixed"]), tokens(1, 9)
    with torch.no_grad():
        expected = model(ids).logits
        assert_close(model(ids, **{CACHE: hla_hf.new_cache(model.config)}).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_fp32_in_a_bf16_model(mode):
    model = tiny_model(dtype=torch.bfloat16, **MODES[mode])
    layer = stepwise_logits(model, tokens(1, 20), (20,))[1].layers[model.config.hla_layer_ids[0]]
    buffers = 3 if model.config.hla_window else 0  # k, v as softmax layers keep them, and k before its rotation
    assert sum(x.dtype == torch.bfloat16 for x in layer.state if x is not None) == buffers
    assert sum(x.dtype == torch.float32 for x in layer.state if x is not None) >= 2


# ---- numbers ----------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_seed_setting_equals_its_dense_definition(architecture):
    """out_t = sum_{j<=t} (q_t . u_j) v_j / t, u_j = sum_{i<=j} (e_j . k_i) k_i, e = softmax(q / sqrt(d))."""
    model = tiny_model(
        architecture, hla_operator="hla2", hla_feature_map="identity", hla_accumulator="softmax_query",
        hla_normalizer="count", hla_window=0,
    )  # fmt: skip
    attention, seen = model.model.layers[0].self_attn, {}
    forward = attention.hla.forward

    def spy(tokens, *rest, **options):
        out, state = forward(tokens, *rest, **options)
        seen.update(q=tokens.q, k=tokens.k, v=tokens.v, out=out)
        return out, state

    attention.hla.forward = spy
    with torch.no_grad():
        model(tokens(2, 37))
    q, k, v = (seen[name].double() for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    e = (q / q.shape[-1] ** 0.5).softmax(-1)
    lower = torch.ones(37, 37).double().tril()
    u = ((e @ k.mT) * lower) @ k
    out = ((q / q.shape[-1] ** 0.5 @ u.mT) * lower) @ v / torch.arange(1, 38)[:, None]
    assert_close(seen["out"].double(), out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", (64, 0))
def test_defaults_are_finite_in_bf16_at_32k_tokens(window):
    config = tiny_config(num_hidden_layers=1, hla_chunk_size=64, hla_window=window, max_position_embeddings=32768)
    model = hla_hf.HLALlamaForCausalLM(config).bfloat16()
    ids = tokens(1, 32768)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_softmax_attention_is_the_base_model(architecture):
    torch.manual_seed(0)
    base, ids = tiny_base(architecture), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for settings in MODES.values():
        model = model_class(architecture)(tiny_config(architecture, **settings)).eval()
        model.load_state_dict(base.state_dict(), strict=False)
        randomize(model)
        with torch.no_grad():
            before = model(ids, attention_mask=mask).logits
            with hla_hf.softmax_attention(model):
                assert torch.equal(model(ids, attention_mask=mask).logits, base(ids, attention_mask=mask).logits)
            assert torch.equal(model(ids, attention_mask=mask).logits, before)
            assert not torch.equal(before[:, 10:], base(ids, attention_mask=mask).logits[:, 10:])


def test_to_hla_is_the_hla_class_with_the_base_weights():
    base, ids = tiny_base("qwen2"), tokens(1, 23)
    weights = {name: p.data_ptr() for name, p in base.named_parameters()}
    torch.manual_seed(0)
    model = hla_hf.to_hla(base, hla_window=4)
    assert type(model) is hla_hf.HLAQwen2ForCausalLM and model.config.hla_window == 4
    assert all(weights.get(name, p.data_ptr()) == p.data_ptr() for name, p in model.named_parameters())
    again = hla_hf.HLAQwen2ForCausalLM(model.config).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    with pytest.raises(ValueError, match=r"HLAQwen2ForCausalLM.*supported"):
        hla_hf.to_hla(model)


# ---- bad input ----------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"hla_operator": "hla4"}, r"hla_operator='hla4'.*linear.*hla3"),
        ({"hla_feature_map": "cosine"}, r"hla_feature_map='cosine'.*identity.*hedgehog"),
        ({"hla_normalizer": "l2"}, r"hla_normalizer='l2'.*mass"),
        ({"hla_accumulator": "value"}, r"hla_accumulator='value'.*query.*key"),
        ({"hla_window": -1}, r"hla_window must be at least 0, got -1"),
        ({"hla_num_sinks": -2}, r"hla_num_sinks must be at least 0, got -2"),
        ({"hla_chunk_size": 0}, r"hla_chunk_size must be at least 1, got 0"),
        ({"hla_ridge": -0.5}, r"hla_ridge must be at least 0, got -0.5"),
        ({"hla_decay": 1.5}, r"hla_decay must be None, a number in \(0, 1\] or 'learned', got 1.5"),
        ({"hla_decay": 0.0}, r"hla_decay must be .* got 0.0"),
        ({"hla_decay": "fast"}, r"hla_decay must be .* got 'fast'"),
        ({"hla_layers": [0, 2]}, r"hla_layers must be distinct and in 0\.\.1, got \[0, 2\]"),
        ({"hla_layers": [1, 1]}, r"hla_layers must be distinct and in 0\.\.1, got \[1, 1\]"),
        ({"hla_accumulator": "softmax_query"}, r"hla_accumulator='softmax_query'.*'elu'.*got 'hedgehog'"),
        ({"hla_window": 8, "hla_normalizer": "count"}, r"hla_window=8.*'mass', got 'count'"),
    ],
)
def test_bad_settings_name_the_field_its_value_and_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_the_wrong_length_is_one_clear_error(mode):
    model, ids = tiny_model(**MODES[mode]), tokens(2, 9)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, T\] with B=2 and T=9 .*got \(2, 8\)"):
        model(ids, attention_mask=torch.ones(2, 8))
    cache = stepwise_logits(model, ids, (9,))[1]
    with pytest.raises(ValueError, match=r"T=10 .*got \(2, 12\)"):
        model(ids[:, :1], attention_mask=torch.ones(2, 12), **{CACHE: cache})


def test_a_cache_of_softmax_tokens_is_refused():
    base, model, ids = tiny_base(), tiny_model(), tokens(1, 9)
    cache = cache_of(base(ids))
    with pytest.raises(ValueError, match=r"layer 0 of the cache holds 9 tokens of softmax attention"):
        model(ids, **{CACHE: cache})


# ---- saving and loading ----------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_base_checkpoint_loads_into_the_hla_class(architecture, tmp_path):
    base = tiny_base(architecture)
    base.save_pretrained(tmp_path)
    model, info = model_class(architecture).from_pretrained(tmp_path, hla_operator="ahla", output_loading_info=True)
    assert info["missing_keys"] and all(".hla." in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    maps = model.model.layers[0].self_attn.hla.q_map
    assert_close(maps.data, torch.eye(8).expand_as(maps))
    assert all((layer.self_attn.hla.gate == -1).all() for layer in model.model.layers)
    assert all((layer.self_attn.hla.value_mix == 0).all() for layer in model.model.layers)
    with torch.no_grad(), hla_hf.softmax_attention(model):
        assert torch.equal(model(tokens(1, 9)).logits, base(tokens(1, 9)).logits)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("architecture", hla_hf.ARCHITECTURES)
def test_the_features_see_q_and_k_before_their_rotation(architecture, monkeypatch):
    settings = {"num_hidden_layers": 3} | ARCHITECTURE_SETTINGS.get(architecture, {})
    if architecture == "llama":
        settings["rope_parameters"] = YARN  # a rotation that also scales
    model = tiny_model(architecture, hla_window=8, **settings)
    functions = base_functions(model.model.layers[0].self_attn)
    original, before, seen = functions["apply_rotary_pos_emb"], {}, []

    def rotate(q, k, cos, sin, **kwargs):
        before["q, k"] = q, k
        return original(q, k, cos, sin, **kwargs)

    def attention(module, query, key, value, attention_mask, hla_rotation=None, **kwargs):
        rotated = torch.equal(query, before["q, k"][0])
        unrotated_ones = before["q, k"] if getattr(module, "use_rope", True) else (query, key)
        monkeypatch.setitem(functions, "apply_rotary_pos_emb", original)
        q, k = unrotated(module, query, key, hla_rotation)
        last = unrotated(module, query[:, :, -1:], key[:, :, -1:], [x[:, -1:] for x in hla_rotation], {})  # one token
        monkeypatch.setitem(functions, "apply_rotary_pos_emb", rotate)
        for x, y, expected in zip((q, k), last, unrotated_ones, strict=True):
            assert_close(x, expected)
            assert_close(y, expected[:, :, -1:])
        seen.append(rotated)
        return hla_attention(module, query, key, value, attention_mask, hla_rotation=hla_rotation, **kwargs)

    monkeypatch.setitem(functions, "apply_rotary_pos_emb", rotate)
    AttentionInterface.register("hla_test", attention)
    model.model.hla_config._attn_implementation = "hla_test"
    model.model(tokens(1, 9), use_cache=False)
    assert len(seen) == len(model.config.hla_layer_ids) and not any(seen)


@pytest.mark.parametrize("load", ({"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"dtype": "auto"}))
def test_loading_options_leave_nothing_uninitialised(load, tmp_path):
    model = tiny_model(hla_decay="learned", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = hla_hf.HLALlamaForCausalLM.from_pretrained(tmp_path, **load)
    for (name, p), (_, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert q.device.type == "cpu" and torch.equal(p.float(), q.float()), name


def test_tied_embeddings_stay_tied(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    for loaded in (
        hla_hf.HLALlamaForCausalLM.from_pretrained(tmp_path),
        hla_hf.to_hla(tiny_base(tie_word_embeddings=True)),
    ):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_saved_config_writes_every_field_and_an_auto_map(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "hla_llama" and config["hla_operator"] == "ahla" and config["hla_window"] == 64
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_hla.HLALlamaForCausalLM"


LOAD_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["hla_hf"] = None
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
from pathlib import Path
root = Path(sys.argv[1])
vocabulary = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(96)}, unk_token="w02"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w00", eos_token="w01")
for saved in sorted(root.iterdir()):
    expected, load = torch.load(saved / "expected.pt"), {"trust_remote_code": True}
    folder = saved
    for again in range(3):  # a reloaded model's own save loads again
        assert AutoConfig.from_pretrained(folder, **load).hla_window == 8
        model = AutoModelForCausalLM.from_pretrained(folder, **load)
        assert "hla_hf" not in type(model).__module__
        assert torch.equal(model(expected["ids"]).logits, expected["logits"]), folder
        decoder = AutoModel.from_pretrained(folder, **load)
        assert torch.equal(decoder(expected["ids"]).last_hidden_state, expected["hidden"]), folder
        folder = saved / f"again{again}"
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = pipeline("text-generation", str(folder), trust_remote_code=True)
    prompt = tokenizer.decode(expected["ids"][0])
    out = text(prompt, max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert out == tokenizer.decode(expected["generated"], skip_special_tokens=True), out
print("loaded", len(list(root.iterdir())))
"""


def test_loads_anywhere_without_the_package(tmp_path):
    for architecture in ARCHITECTURES:
        settings = {"hla_window": 8, "tie_word_embeddings": architecture == "qwen3"}
        model = tiny_model(architecture, dtype=torch.float32, **settings)
        ids = tokens(1, 30)
        model.save_pretrained(tmp_path / architecture)
        with torch.no_grad():
            generated = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 30:]
            saved = {"ids": ids, "logits": model(ids).logits, "hidden": model.model(ids)[0], "generated": generated}
        torch.save(saved, tmp_path / architecture / "expected.pt")
    script = [sys.executable, "-c", LOAD_WITHOUT_THE_PACKAGE, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded 4" in done.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_auto_classes_need_no_trust_with_the_package(architecture, tmp_path):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    tiny_model(architecture).save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is model_class(architecture)
    assert type(AutoModel.from_pretrained(tmp_path)) is model_class(architecture, "AutoModel")
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == SIZES["vocab_size"]


@pytest.mark.parametrize("mode", ["windowed", "mixed"])
def test_generating_as_the_base_model(mode):
    base = tiny_base()
    prompt, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    expected = base.generate(prompt, **options)
    model = hla_hf.to_hla(base, **MODES[mode])
    hla = model.generate(prompt, **options)
    with hla_hf.softmax_attention(model):
        assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, **options), hla)
