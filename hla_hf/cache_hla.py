"""The recurrent cache of one HLA layer, and how it gets into any Transformers cache.

A `Cache` of Transformers is a list of layers, and each HLA layer of the model needs an `HLACacheLayer` at its index.
`use_hla_layers` puts them there in a cache that has not been used yet, whether `generate()` made it or the user did;
the layers that keep softmax attention keep their ordinary ones.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class HLACacheLayer(CacheLayerMixin):
    """What one HLA layer remembers: a tuple of tensors, batch first, whose size does not depend on the context."""

    def __init__(self, max_cache_len: int | None = None):
        super().__init__()
        self.state: tuple[Tensor, ...] | None = None
        self.seq_length = 0  # tokens fed, padding included: what positions and masks are counted in
        self.max_cache_len = max_cache_len

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Counts the new tokens; the attention itself reads and writes `state`."""
        self.seq_length += key_states.shape[-2]
        self.is_initialized = True
        return key_states, value_states

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = tuple(function(x) for x in self.state)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.numel() * x.element_size() for x in self.state or ())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Softmax layers of the same model take their mask's size from the first layer, whichever kind it is.
        return self.max_cache_len or self.seq_length + query_length, 0

    def reset(self) -> None:
        self.state, self.seq_length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        pass  # the attention moves the state to where its inputs are


def use_hla_layers(cache: Cache, hla_layers: Sequence[int]) -> Cache:
    """Puts an `HLACacheLayer` at each of `hla_layers` of an unused cache; does nothing to a cache that has them.

    Raises: ValueError if one of those layers already holds keys and values of softmax attention.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= max(hla_layers, default=-1):
            cache.layers.append(cache.layer_class_to_replicate())
    for i in hla_layers:
        layer = cache.layers[i]
        if isinstance(layer, HLACacheLayer):
            continue
        if layer.is_initialized and layer.get_seq_length() > 0:
            raise ValueError(
                f"layer {i} of the cache holds {layer.get_seq_length()} tokens of softmax attention "
                f"({type(layer).__name__}), which an HLA layer cannot continue from; pass a new cache, "
                "or none to let the model make its own"
            )
        cache.layers[i] = HLACacheLayer(getattr(layer, "max_cache_len", None))
    return cache


def cache_nbytes(cache: Cache) -> int:
    """Bytes that a cache holds, softmax layers included."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, HLACacheLayer):
            total += layer.nbytes
        else:
            total += sum(
                x.numel() * x.element_size() for x in (layer.keys, layer.values) if isinstance(x, torch.Tensor)
            )
    return total


def new_cache(config) -> DynamicCache:
    """The cache that a model of this config makes for itself."""
    return use_hla_layers(DynamicCache(config=config), config.hla_layer_ids)
