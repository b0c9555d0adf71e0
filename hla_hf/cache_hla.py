"""The recurrent cache of one HLA layer, and how it gets into any Transformers cache and onto disk.

A `Cache` of Transformers is a list of layers, and each HLA layer of the model needs an `HLACacheLayer` at its index.
`use_hla_layers` puts them there in a cache that has not been used yet, whether `generate()` made it or the user did;
the layers that keep softmax attention keep their ordinary ones.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


FILE_VERSION = 1
MAX_RECORDED = 256  # tokens of one call that `crop` can take back


class HLACacheLayer(CacheLayerMixin):
    """What one HLA layer remembers: a tuple of tensors, batch first, whose size does not depend on the context.

    A state cannot be read backwards. So that `crop` can take tokens back, after `activate_past_recording` the layer
    also keeps the state at a checkpoint and the projected tokens since. `crop` goes back to the checkpoint, and the
    next call of `attend` first reads the accepted ones of those tokens again.

    In a `StaticCache` (`max_cache_len` given) the tensors are updated in place, as compiled decoding needs them.
    """

    is_croppable = True

    def __init__(self, max_cache_len: int | None = None):
        super().__init__()
        self.state: tuple[Tensor, ...] | None = None
        # tokens fed, padding included: what positions and masks are counted in
        self.seq_length: int | Tensor = 0 if max_cache_len is None else torch.tensor(0)
        self.max_cache_len = max_cache_len
        self.record_past = False
        self.checkpoint: tuple[Tensor, ...] | None = None
        self.recorded: tuple[Tensor | None, ...] | None = None  # q, k, v `[B, H, T, d]`, mask `[B, T]` since then
        self.is_stale = False  # `recorded` is to be read again before anything else

    @property
    def is_compileable(self) -> bool:
        return self.max_cache_len is not None and not self.record_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.max_cache_len is not None:
            self.seq_length = self.seq_length.to(key_states.device)
            _mark_static((self.seq_length,))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Counts the new tokens; the attention itself reads and writes the state through `attend`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seq_length += key_states.shape[-2]
        return key_states, value_states

    def attend(self, mix: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Out `[B, H, T, d]` of `mix(q, k, v, mask, state) -> out, state`, whose state this layer carries."""
        tokens = (q, k, v, mask)
        if self.is_stale:
            _, self.state = mix(*self.recorded, self.state)
            self._forget()
        if not self.record_past:
            self._forget()
            return self._step(mix, tokens)
        out = []
        if q.shape[2] > MAX_RECORDED:  # a prompt: only its last tokens can be cropped
            out.append(self._step(mix, _slice(tokens, 0, q.shape[2] - MAX_RECORDED)))
            self._forget()
            tokens = _slice(tokens, q.shape[2] - MAX_RECORDED, q.shape[2])
        if self.recorded is None:
            self.checkpoint, self.recorded = self.state, tokens
        else:
            self.recorded = _join(self.recorded, tokens)
            surplus = self._recorded_length() - MAX_RECORDED
            if surplus > MAX_RECORDED:  # nobody crops: the checkpoint follows
                _, self.checkpoint = mix(*_slice(self.recorded, 0, surplus), self.checkpoint)
                self.recorded = _slice(self.recorded, surplus, surplus + MAX_RECORDED)
        out.append(self._step(mix, tokens))
        return torch.cat(out, 2)

    def _step(self, mix: Callable, tokens: tuple[Tensor | None, ...]) -> Tensor:
        out, state = mix(*tokens, self.state)
        if self.is_compileable and self.state is not None:
            for old, new in zip(self.state, state, strict=True):
                old.copy_(new)
        else:
            self.state = state
            if self.is_compileable:
                _mark_static(state)
        return out

    def _recorded_length(self) -> int:
        return 0 if self.recorded is None else self.recorded[0].shape[2]

    def _forget(self) -> None:
        self.checkpoint, self.recorded, self.is_stale = None, None, False

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """
        Takes the last `-tokens_to_remove` tokens back. What remains cannot be cropped later: `crop(0)` commits all.

        Raises: ValueError if it is positive, or if more tokens are to go than were recorded since the last crop.
        """
        kept = self._recorded_length() + tokens_to_remove
        if tokens_to_remove > 0 or (tokens_to_remove < 0 and kept < 0):
            raise ValueError(
                f"crop({tokens_to_remove}): an HLA layer can take back 0 to {self._recorded_length()} tokens, given as "
                "a negative number: those fed since the last crop while past recording was on "
                f"(cache.activate_past_recording()), and at most the last {MAX_RECORDED} of a prompt"
            )
        if tokens_to_remove < 0:
            if not self.is_stale:
                self.state = self.checkpoint
            recorded = _slice(self.recorded, 0, kept)
            self._forget()
            if kept > 0:
                self.recorded, self.is_stale = recorded, True
            self.seq_length += tokens_to_remove
        elif not self.is_stale:
            self._forget()

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for name in ("state", "checkpoint", "recorded"):
            tensors = getattr(self, name)
            if tensors is not None:
                setattr(self, name, tuple(x if x is None else function(x) for x in tensors))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [x for x in (*(self.state or ()), *(self.checkpoint or ()), *(self.recorded or ())) if x is not None]
        return sum(x.numel() * x.element_size() for x in {id(x): x for x in held}.values())

    def get_seq_length(self) -> int | Tensor:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Softmax layers of the same model take their mask's size from the first layer, whichever kind it is.
        return self.max_cache_len or self.seq_length + query_length, 0

    def reset(self) -> None:
        self._forget()
        if self.max_cache_len is None:
            self.state, self.seq_length, self.is_initialized = None, 0, False
        else:  # a state of zeros is that of no tokens
            self.seq_length.zero_()
            for x in self.state or ():
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


def _mark_static(tensors: Sequence[Tensor]) -> None:
    if not torch.compiler.is_compiling():
        for x in tensors:
            torch._dynamo.mark_static_address(x)


def _slice(tokens: Sequence[Tensor | None], start: int, end: int) -> tuple[Tensor | None, ...]:
    q, k, v, mask = tokens
    return *(x[:, :, start:end] for x in (q, k, v)), None if mask is None else mask[:, start:end]


def _join(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    masks = None
    if a[3] is not None or b[3] is not None:
        masks = torch.cat([x[0].new_ones(x[0].shape[0], x[0].shape[2]) if x[3] is None else x[3] for x in (a, b)], 1)
    return *(torch.cat([x, y], 2) for x, y in zip(a[:3], b[:3], strict=True)), masks


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


# ---- on disk ----------------------------------------


def save_cache(cache: Cache, path: str | os.PathLike, fingerprint: str) -> None:
    """Writes a cache as one safetensors file, under a temporary name first, so that `path` is whole or not there.

    `fingerprint` identifies the model. Raises: ValueError if a softmax layer is not one of a `DynamicCache`.
    """
    tensors = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, HLACacheLayer):
            parts = {"state": layer.state or (), "recorded": (layer.recorded or ()) if layer.is_stale else ()}
            tensors |= {f"{i}.{name}.{j}": x for name in parts for j, x in enumerate(parts[name]) if x is not None}
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
            layer.state = tuple(parts[f"state.{j}"] for j in range(len(parts)) if f"state.{j}" in parts) or None
            if "recorded.0" in parts:
                layer.recorded, layer.is_stale = tuple(parts.get(f"recorded.{j}") for j in range(4)), True
            layer.seq_length, layer.is_initialized = header["tokens"], True
        else:
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = header["tokens"]
    return cache
