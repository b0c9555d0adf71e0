"""Models read a packed batch, as Transformers' padding-free collator makes it, like its documents one by one."""

import pytest
import torch
from tiny import CACHE, tiny_model, tokens
from transformers import DataCollatorWithFlattening

from hla_hf import new_cache


MODES = {
    "pure": {"hla_window": 0, "hla_operator": "hla3", "hla_decay": "learned"},
    "count": {"hla_window": 0, "hla_normalizer": "count", "hla_feature_map": "elu"},
    "windowed": {"hla_window": 5, "hla_num_sinks": 2},
    "mixed": {"hla_window": 5, "hla_num_sinks": 2, "hla_layers": [1]},
    "mixed eager": {"hla_window": 0, "hla_layers": [0], "attn_implementation": "eager"},
}
LENGTHS = [1, 17, 1, 1, 30, 2]
DOCUMENTS = [tokens(n, seed=n + i).tolist() for i, n in enumerate(LENGTHS)]


def model_of(mode, **settings):
    return tiny_model(**MODES[mode], **settings)


def collate(**options):
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": x} for x in DOCUMENTS])
    batch.pop("labels")
    return batch


def separately(model):
    return torch.cat([model(torch.tensor([x])).logits for x in DOCUMENTS], 1)


PACKINGS = {
    "position_ids": collate(),
    "cu_seq_lens": collate(return_flash_attn_kwargs=True),
    "seq_idx": collate(return_seq_idx=True),
    "cu_seq_lens alone": collate(return_flash_attn_kwargs=True, return_position_ids=False),
    "seq_idx alone": collate(return_seq_idx=True, return_position_ids=False),
}
# Explicit lengths win over positions that do not restart.
PACKINGS["cu_seq_lens over positions"] = PACKINGS["cu_seq_lens"] | {"position_ids": torch.arange(sum(LENGTHS))[None]}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mode", MODES)
def test_packed_documents(mode, packing):
    model = model_of(mode)
    expected = separately(model)
    output = model(**PACKINGS[packing])
    assert output[CACHE] is None if CACHE in output else True
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
    whole = model(input_ids=PACKINGS[packing]["input_ids"]).logits
    assert (whole - expected).abs().max() > 1e-2  # documents matter


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_packed_batch(mode, checkpointing):
    model = model_of(mode).double()
    weight = torch.randn(1, sum(LENGTHS), model.config.vocab_size, dtype=torch.float64)
    (separately(model) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    (model(**PACKINGS["position_ids"]).logits * weight).sum().backward()
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()  # rotation, and the eager softmax, in fp32
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6 * scale, rtol=0)


@pytest.mark.parametrize("mode", ["windowed", "mixed"])
def test_explicit_lengths_that_join_what_positions_part(mode):
    model, ids = model_of(mode), PACKINGS["position_ids"]
    one = {"seq_idx": torch.zeros(1, sum(LENGTHS), dtype=torch.long)}
    expected = model(input_ids=ids["input_ids"]).logits
    torch.testing.assert_close(model(**ids, **one).logits, expected, atol=1e-4, rtol=1e-4)


def test_padding_in_a_packed_batch():
    model, batch = model_of("windowed"), PACKINGS["seq_idx alone"]
    ids = torch.cat([torch.zeros(1, 3).long(), batch["input_ids"], torch.zeros(1, 2).long()], 1)
    mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (3, 2))
    seq_idx = torch.nn.functional.pad(batch["seq_idx"], (3, 2), value=-1)
    logits = model(ids, attention_mask=mask, seq_idx=seq_idx).logits[:, 3:-2]
    torch.testing.assert_close(logits, separately(model), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="attention_mask must be None or all ones in a packed batch"):
        model_of("mixed")(ids, attention_mask=mask, seq_idx=seq_idx)
    ones = torch.ones_like(batch["input_ids"])
    mixed = model_of("mixed")
    torch.testing.assert_close(mixed(**batch, attention_mask=ones).logits, separately(mixed), atol=1e-4, rtol=1e-4)


def test_packing_and_a_cache_is_an_error():
    model, batch = model_of("windowed"), PACKINGS["cu_seq_lens"]
    for extra in ({"use_cache": True}, {CACHE: new_cache(model.config)}):
        with pytest.raises(ValueError, match=r"packed batch .* pass use_cache=False and no cache"):
            model(**batch, **extra)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 10])}, r"cu_seq_lens_q must rise from 0 to T=52.*got \[0, 10\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 30, 20, 52])}, "cu_seq_lens_q must rise"),
        ({"seq_idx": torch.zeros(1, 3)}, r"seq_idx must be \[B, T\] = \(1, 52\), got \(1, 3\)"),
    ],
)
def test_bad_lengths(wrong, message):
    with pytest.raises(ValueError, match=message):
        model_of("windowed")(PACKINGS["position_ids"]["input_ids"], **wrong)
