"""Speed and cache of a model at a context, for `demo.py` and `quality.py`, base and converted models alike."""

import time

import torch
from transformers import Cache, PreTrainedModel


def cache_bytes(cache: Cache) -> int:
    """Bytes of every tensor that a cache's layers hold."""
    tensors = [x for layer in cache.layers for x in (getattr(layer, "state", None) or (layer.keys, layer.values))]
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


@torch.no_grad()
def measure(model: PreTrainedModel, context: int, steps: int = 16) -> tuple[float, float, int]:
    """Tokens per second of prefill and of decoding (median step) at a context, and the cache's bytes there."""
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    output = model(ids.to(model.device), logits_to_keep=1, use_cache=True)
    prefill = context / (time.perf_counter() - start)
    name = "cache" if "cache" in output else "past_key_values"
    size = cache_bytes(output[name])
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        output = model(output.logits[:, -1:].argmax(-1), use_cache=True, **{name: output[name]})
        times.append(time.perf_counter() - start)
    return prefill, 1 / sorted(times)[steps // 2], size
