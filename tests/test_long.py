"""A long text through one cache: memory flat, no drift from the one-call form, positions past those trained."""

import copy

import pytest
import torch
from tiny import CACHE, MODES, cache_of, tiny_model

import hla_hf


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("mode", ("pure", "windowed"))
@torch.no_grad()
def test_a_hundred_thousand_tokens_through_one_cache(mode, dtype):
    """In pieces of 1,000 and, after each checkpoint, token by token, against all tokens so far in one call."""
    length, checkpoints = 100_000, (10_000, 50_000, 100_000)
    model = tiny_model(dtype=dtype, max_position_embeddings=length, hla_decay=0.999, **MODES[mode])
    ids = torch.randint(3, 96, (1, length + 20), generator=torch.Generator().manual_seed(0))
    cache, sizes, errors = None, set(), []
    for start in range(0, length, 1000):
        cache = cache_of(model(ids[:, start : start + 1000], logits_to_keep=1, use_cache=True, **{CACHE: cache}))
        sizes.add(hla_hf.cache_nbytes(cache))
        if start + 1000 in checkpoints:
            end = start + 1000
            ahead = copy.deepcopy(cache)
            steps = [model(ids[:, i : i + 1], **{CACHE: ahead}).logits for i in range(end, end + 20)]
            once = model(ids[:, : end + 20], use_cache=False, logits_to_keep=20).logits.float()
            errors.append(((torch.cat(steps, 1).float() - once).norm() / once.norm()).item())
    print(f"{mode}, {dtype}: {sizes} bytes; relative error at {checkpoints}: " + ", ".join(f"{e:.1e}" for e in errors))
    assert len(sizes) == 1
    if dtype == torch.float32:
        assert max(errors) < 1e-4
    else:  # two bf16 forms of one model differ by their rounding; it must not grow with the text
        assert max(errors) < 2 * errors[0] + 0.01


@torch.no_grad()
def test_positions_run_past_those_trained():
    model = tiny_model(max_position_embeddings=64)
    ids = torch.randint(3, 96, (1, 300), generator=torch.Generator().manual_seed(0))
    logits = torch.cat([model(ids[:, :200]).logits, model(ids).logits[:, 200:]], 1)
    assert logits.isfinite().all()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 305)
