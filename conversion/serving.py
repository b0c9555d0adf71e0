"""Reading into a cache, its bytes and the speed at a context, of base and converted models alike."""

import inspect
import time

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, LlamaModel, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin


# the name of the argument and of the output in this release of Transformers
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def layer_bytes(layer: CacheLayerMixin) -> int:
    """Bytes of every tensor that a layer of a cache holds."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(vars(layer)) if isinstance(x, Tensor))


def cache_bytes(cache: Cache) -> int:
    """Those of all layers."""
    return sum(map(layer_bytes, cache.layers))


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
    """The most likely token `[B, 1]` after `ids [B, T]`, and the cache, which has read them."""
    output = model(ids.to(model.device), logits_to_keep=1, use_cache=True, **{CACHE: cache})
    return output.logits[:, -1:].argmax(-1), output[CACHE]


def measure(model: PreTrainedModel, context: int, steps: int = 16) -> tuple[float, float, int]:
    """Tokens per second of prefill and of decoding (median step) at a context, and the cache's bytes there."""
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    token, cache = read(model, ids)
    prefill = context / (time.perf_counter() - start)
    size = cache_bytes(cache)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        token, cache = read(model, token, cache)
        times.append(time.perf_counter() - start)
    return prefill, 1 / sorted(times)[steps // 2], size
