"""Kinds of trouble that users of converted, linear-attention or remote-code models report: one test per kind."""

import pytest
import torch
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
from transformers import GenerationConfig

import hla_hf
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
    assert_padding_moves_nothing(tiny_model(architecture, **settings), atol=1e-3)


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
