"""The recurrent cache of one HLA layer, and how it gets into any Transformers cache and onto disk.

A `Cache` of Transformers is a list of layers, and each HLA layer of the model needs an `HLACacheLayer` at its index.
`use_hla_layers` puts them there in a cache that has not been used yet, whether `generate()` made it or the user did;
the layers that keep softmax attention keep their ordinary ones.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .window_hla import LayerState


FILE_VERSION = 3
MAX_RECORDED = 256  # tokens of one call that `crop` can take back


class LayerTokens(NamedTuple):
    """The projected tokens of one call of a layer, `[B, H or Hkv, T, d]`: q, k, v as softmax attention takes them,
    far_q and far_k before their rotation (None without a window); their padding mask and documents, `[B, T]` or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    mask: Tensor | None = None
    segment_ids: Tensor | None = None

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def part(self, start: int, end: int) -> "LayerTokens":
        heads, rows = self[:5], self[5:]
        heads = (x if x is None else x[:, :, start:end] for x in heads)
        return LayerTokens(*heads, *(x if x is None else x[:, start:end] for x in rows))

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerTokens":
        return LayerTokens(*(x if x is None else function(x) for x in self))


def _join(a: LayerTokens, b: LayerTokens) -> LayerTokens:
    masks = None
    if a.mask is not None or b.mask is not None:
        ones = (x.q.new_ones(x.q.shape[0], x.length) if x.mask is None else x.mask for x in (a, b))
        masks = torch.cat(list(ones), 1)
    return LayerTokens(*(x if x is None else torch.cat([x, y], 2) for x, y in zip(a[:5], b[:5], strict=True)), masks)


class HLACacheLayer(CacheLayerMixin):
    """What one HLA layer remembers: a `LayerState`, whose size does not depend on the context.

    A layer reads the state, computes, and writes the new one: `read`, `write`. A state has no way back. So that
    `crop` can take tokens back, after `activate_past_recording` the last tokens are kept too, each run of them with the
    state before it. `crop` goes back to such a state; the accepted tokens of the run are fed again by the next `read`.

    In a `StaticCache` (`max_cache_len` given) the tensors are updated in place, as compiled decoding needs them.
    """

    is_croppable = True

    def __init__(self, max_cache_len: int | None = None):
        super().__init__()
        self.state: LayerState | None = None
        # tokens fed, padding included: what positions and masks are counted in
        self.seq_length: int | Tensor = 0 if max_cache_len is None else torch.tensor(0)
        self.max_cache_len = max_cache_len
        self.record_past = False
        self.recorded: list[tuple[LayerState | None, LayerTokens]] = []  # the state before a run of tokens, and these
        self.stale: LayerTokens | None = None  # accepted tokens that `state` has not seen yet

    @property
    def is_compileable(self) -> bool:
        return self.max_cache_len is not None and not self.record_past

    @property
    def in_place(self) -> bool:
        """Whether the state may be written over: nobody else holds it."""
        if self.record_past or self.state is None or self.max_cache_len is not None:
            return not self.record_past
        if torch.compiler.is_dynamo_compiling():  # which does not know of inference mode
            return False
        return torch.is_inference_mode_enabled() or not self.state.seen.is_inference()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.max_cache_len is not None:
            self.seq_length = self.seq_length.to(key_states.device)
            _mark_static((self.seq_length,))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Counts the new tokens; the state is read and written by the attention function.

        Raises: ValueError if they are of another number of rows than the tokens before.
        """
        rows = None if self.state is None else self.state.seen.shape[0]
        if rows not in (None, key_states.shape[0]):
            raise ValueError(
                f"the cache holds {rows} rows and the new tokens are {key_states.shape[0]}: call the cache's "
                "batch_repeat_interleave(n) or batch_select_indices(rows) first"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seq_length += key_states.shape[-2]
        return key_states, value_states

    def parts(self, tokens: LayerTokens) -> list[LayerTokens]:
        """The tokens of one call, a long prompt cut in two if it is recorded: only its last tokens can be cropped."""
        cut = tokens.length - MAX_RECORDED
        if not self.record_past or cut <= 0:
            return [tokens]
        return [tokens.part(0, cut), tokens.part(cut, tokens.length)]

    def read(self, layer: Callable[[LayerTokens, LayerState | None], tuple[Tensor, LayerState]]) -> LayerState | None:
        """The state to go on from; after a crop `layer` is fed the accepted tokens of the run first."""
        if self.stale is not None:
            _, self.state = layer(self.stale, self.state)
            self.stale = None
        return self.state

    def write(self, tokens: LayerTokens, state: LayerState) -> None:
        """Stores the state after `tokens`."""
        if self.record_past:
            self._record(tokens)
        if self.is_compileable and self.state is not None:
            for old, new in zip(self.state, state, strict=True):
                if old is not new:
                    old.copy_(new)
            return
        self.state = state
        if self.is_compileable:
            _mark_static(state)

    def _record(self, tokens: LayerTokens) -> None:
        """Two runs hold MAX_RECORDED tokens or all there were."""
        if tokens.length > MAX_RECORDED:
            self.recorded = []
        elif self.recorded and self.recorded[-1][1].length + tokens.length <= MAX_RECORDED:
            before, run = self.recorded.pop()
            self.recorded.append((before, _join(run, tokens)))
        else:
            self.recorded = [*self.recorded[-1:], (self.state, tokens)]

    @property
    def _recorded_length(self) -> int:
        recorded = sum(run.length for _, run in self.recorded) + (0 if self.stale is None else self.stale.length)
        return min(recorded, MAX_RECORDED)

    def activate_past_recording(self, **_) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """
        Takes the last `-tokens_to_remove` tokens back. What remains cannot be cropped later: `crop(0)` commits all.

        Raises: ValueError if it is positive, or if more tokens are to go than were recorded since the last crop.
        """
        removed = -tokens_to_remove
        if removed < 0 or (removed > 0 and removed > self._recorded_length):
            raise ValueError(
                f"crop({tokens_to_remove}): an HLA layer can take back 0 to {self._recorded_length} tokens, given as "
                "a negative number: those fed since the last crop while past recording was on "
                f"(cache.activate_past_recording()), and at most the last {MAX_RECORDED} of a prompt"
            )
        if self.stale is not None:
            self.recorded.append((self.state, self.stale))
        self.seq_length -= removed
        while self.recorded and (removed > 0 or self.stale is not None):
            self.state, run = self.recorded.pop()
            kept = run.length - removed
            self.stale = run.part(0, kept) if kept > 0 else None
            if kept >= 0:
                break
            removed = -kept
        self.recorded = []

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        def of(x: LayerState | LayerTokens | None) -> LayerState | LayerTokens | None:
            return None if x is None else x.map(function)

        self.state, self.stale = of(self.state), of(self.stale)
        self.recorded = [(of(state), tokens.map(function)) for state, tokens in self.recorded]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        groups = [self.state, self.stale, *(x for pair in self.recorded for x in pair)]
        held = {id(x): x for group in groups for x in group or () if x is not None}
        return sum(x.numel() * x.element_size() for x in held.values())

    def get_seq_length(self) -> int | Tensor:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Softmax layers of the same model take their mask's size from the first layer, whichever kind it is.
        return self.max_cache_len or self.seq_length + query_length, 0

    def reset(self) -> None:
        self.recorded, self.stale = [], None
        if self.max_cache_len is None:
            self.state, self.seq_length, self.is_initialized = None, 0, False
        else:  # a state of zeros is that of no tokens
            self.seq_length.zero_()
            for x in self.state or ():
                if x is not None:
                    x.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        pass  # too small to be worth moving

    def prefetch(self) -> None:
        pass


def _mark_static(tensors: Sequence[Tensor | None]) -> None:
    if not torch.compiler.is_compiling():
        for x in (x for x in tensors if x is not None):
            torch._dynamo.mark_static_address(x)


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
        if hasattr(layer, "nbytes"):  # also one of a model that came with its own copy of this code
            total += layer.nbytes
        else:
            total += sum(
                x.numel() * x.element_size() for x in (layer.keys, layer.values) if isinstance(x, torch.Tensor)
            )
    return total


def new_cache(config) -> DynamicCache:
    """The cache that a model of this config makes for itself."""
    return use_hla_layers(DynamicCache(config=config), config.hla_layer_ids)


# ---- on disk ----------------------------------------


def save_cache(cache: Cache, path: str | os.PathLike, fingerprint: str) -> None:
    """Writes a cache as one safetensors file, under a temporary name first, so that `path` is whole or not there.

    `fingerprint` identifies the model. Raises: ValueError if a softmax layer is not one of a `DynamicCache`.
    """
    tensors = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, HLACacheLayer):
            for name, group in (("state", layer.state), ("stale", layer.stale)):
                fields = {} if group is None else group._asdict()
                tensors |= {f"{i}.{name}.{field}": x for field, x in fields.items() if x is not None}
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            tensors |= {f"{i}.keys": layer.keys, f"{i}.values": layer.values} if layer.is_initialized else {}
        else:
            raise ValueError(f"layer {i} of the cache is a {type(layer).__name__}; only a DynamicCache can be saved")
    header = {"version": FILE_VERSION, "model": fingerprint, "tokens": int(cache.get_seq_length())}
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        tensors = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        save_file(tensors, temporary, metadata={"hla_cache": json.dumps(header)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_cache(path: str | os.PathLike, config, fingerprint: str, device: torch.device | str = "cpu") -> DynamicCache:
    """Reads a cache that `save_cache` wrote for the same model.

    Raises: FileNotFoundError; ValueError if the file is not a saved cache, or of another version or model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no saved cache at {path}")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {})["hla_cache"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a saved cache, or is damaged: {error}") from error
    if header["version"] != FILE_VERSION:
        raise ValueError(f"{path} is of cache format {header['version']}, this code reads format {FILE_VERSION}")
    if header["model"] != fingerprint:
        raise ValueError(
            f"{path} was saved by another model (fingerprint {header['model']}, this one is {fingerprint}): "
            "weights, settings and dtype must be the same"
        )
    cache = new_cache(config)
    for i, layer in enumerate(cache.layers):
        parts = {n.removeprefix(f"{i}."): x for n, x in tensors.items() if n.startswith(f"{i}.")}
        if not parts:
            continue
        if isinstance(layer, HLACacheLayer):
            for name, kind in (("state", LayerState), ("stale", LayerTokens)):
                if any(n.startswith(f"{name}.") for n in parts):
                    setattr(layer, name, kind(*(parts.get(f"{name}.{field}") for field in kind._fields)))
            layer.seq_length, layer.is_initialized = header["tokens"], True
        else:
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = header["tokens"]
    return cache
