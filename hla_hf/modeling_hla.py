"""HLA models: each architecture's own classes plus one mixin, no decoder code.

Every decoder's attention in Transformers 5 projects q, k, v, rotates them, updates the cache, calls the attention
function that its config names, and projects the result. So an HLA layer is the architecture's attention module with
    - a config that names the attention function "hla", which calls back `HLAAttention.mix` with q, k and v;
    - `HLAAttention` mixed into its class, which holds the few new parameters and hands on this layer's cache.
Parameter names stay those of the base model, so converting is loading. Layers that keep softmax attention are
untouched, with whatever attention implementation the user asked for.
"""

import copy
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as cached

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .cache_hla import load_cache, new_cache, save_cache, use_hla_layers
from .configuration_hla import ARCHITECTURES, CONFIG_CLASSES, HLAConfigMixin, base_class_names
from .ops_hla import ahla, causal_linear_attention, feature_map, hla2, hla3, tokens_seen, windowed_attention


_PURE_OPERATORS = {"linear": causal_linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}
# Transformers renamed the argument after 5.20.
_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def _cache_of(arguments: dict):
    return arguments.get("cache", arguments.get("past_key_values"))


def hla_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    hla_mask=None,
    hla_cache=None,
    hla_segment_ids=None,
    hla_rotation=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function "hla": q `[B, H, T, d]`, k and v `[B, Hkv, T, d]` as softmax attention takes them.

    `hla_mask` is the `[B, T]` padding mask of these T tokens (None: no padding), `hla_cache` this layer's cache,
    `hla_segment_ids` `[B, T]` the documents of a packed batch (None: one per row), `hla_rotation` the cos and sin by
    which q and k were rotated.
    """
    query, key = module.with_unrotated(query, key, hla_rotation)
    if hla_cache is None:
        out, _ = module.mix(query, key, value, hla_mask, None, hla_segment_ids)
    else:
        out = hla_cache.attend(module.mix, query, key, value, hla_mask)
    return out.transpose(1, 2), None


AttentionInterface.register("hla", hla_attention_forward)


def base_functions(attention: nn.Module) -> dict:
    """What the file of Transformers defines that has the architecture of an attention module."""
    base = next(cls for cls in type(attention).__mro__ if cls.__module__.startswith("transformers."))
    return vars(sys.modules[base.__module__])


class HLAParameters(nn.Module):
    """The parameters that an HLA layer adds to its attention, as one module that PEFT's `modules_to_save` can name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], like: Tensor):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=like.device, dtype=like.dtype)))

    @torch.no_grad()
    def reset(self) -> None:
        """Feature maps start as the identity, sizes as 1, mixes as 0 (first order), decays as 1 - 2^-5 to 1 - 2^-12."""
        for name, parameter in self.named_parameters():
            if name in ("q_map", "k_map"):
                init.copy_(parameter, torch.eye(parameter.shape[-1]).expand(parameter.shape))
            elif name == "decay_logit":
                init.copy_(parameter, torch.linspace(5, 12, parameter.numel()) * math.log(2))
            elif name == "gate":
                # Measured on SmolLM2-135M: untrained maps in a pretrained model disturb it least near e^-1.
                init.constant_(parameter, -1.0)
            else:
                init.zeros_(parameter)

    def get(self, name: str) -> Tensor | None:
        """The parameter, under tensor parallelism this rank's heads of it, or None if the layer has no such one."""
        parameter = getattr(self, name, None)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _HeadsParallel(TensorParallelLayer):
    """Tensor parallelism of a parameter whose first dimension is its heads."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        full = getattr(module, param)
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        setattr(module, param, nn.Parameter(sharded, requires_grad=full.requires_grad))


ALL_PARALLEL_STYLES.register("hla_heads", _HeadsParallel())


class HLAAttention:
    """Mixed over an architecture's attention class: the parameters of an HLA layer and its mixing of tokens."""

    config: HLAConfigMixin

    def add_hla_parameters(self, like: Tensor) -> None:
        """Creates the layer's parameters as `self.hla`, on the device and in the dtype of `like`."""
        config = self.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, self.head_dim
        shapes = {}
        if config.hla_feature_map == "hedgehog":
            shapes |= {"q_map": (heads, dim, dim), "k_map": (kv_heads, dim, dim), "k_size": (kv_heads, dim)}
            if config.hla_window > 0:  # without one the size of a query cancels in its own mass
                shapes["q_size"] = (heads, dim)
        if config.hla_window > 0:
            shapes["gate"] = (heads,)  # log g: the weight of what lies beyond the window
            if config.hla_operator in ("ahla", "hla3"):
                shapes["value_mix"] = (heads,)
        if config.hla_operator in ("hla2", "hla3") and config.hla_accumulator == "key":
            shapes["key_mix"] = (kv_heads,)
        if config.hla_decay == "learned":
            shapes["decay_logit"] = (kv_heads,)
        self.hla = HLAParameters(shapes, like)
        self.hla.reset()

    def forward(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        cache = _cache_of(kwargs)
        if cache is not None and self.config._attn_implementation == "hla":
            kwargs["hla_cache"] = cache.layers[self.layer_idx]
        if self.config._attn_implementation.startswith("hla"):
            kwargs["hla_rotation"] = kwargs["position_embeddings"]
        return super().forward(*args, **kwargs)

    def with_unrotated(self, q: Tensor, k: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What `mix` takes: q and k, if there is a window followed by what they were before their rotation.

        The far part has its order from the window: its features see no position, so none that is new to them.
        """
        if self.config.hla_window == 0:
            return q, k
        unrotated = q, k
        if getattr(self, "use_rope", True):
            cos, sin = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in rotation)
            energy = cos.square() + sin.square()  # 1, or more where the rotation also scales
            rotate = base_functions(self)["apply_rotary_pos_emb"]
            unrotated = (x.to(q.dtype) for x in rotate(q, k, cos / energy, -sin / energy))
        return tuple(torch.cat(pair, -1) for pair in zip((q, k), unrotated, strict=True))

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: tuple[Tensor, ...] | None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Out `[B, H, T, d]` and the new state: the number of real tokens seen, then what the operator remembers.

        q and k are those of `with_unrotated`.
        """
        config = self.config
        near_dim = self.head_dim if config.hla_window > 0 else 0
        operator, name = config.hla_operator, config.hla_feature_map
        scale = self.scaling
        feature_scale = scale if name in ("identity", "elu", "relu") else 1.0

        def query_map(q):
            return feature_map(name, q[..., near_dim:], self.hla.get("q_map"), self.hla.get("q_size")) * feature_scale

        def key_map(k):
            return feature_map(name, k[..., near_dim:], self.hla.get("k_map"), self.hla.get("k_size"))

        if config.hla_decay == "learned":
            log_decay = nn.functional.logsigmoid(self.hla.get("decay_logit").float())
        else:
            log_decay = None if config.hla_decay is None else math.log(config.hla_decay)
        accumulators = {
            "query": query_map,
            "key": None,
            "softmax_query": lambda q: (q[..., near_dim:] * scale).softmax(-1),
        }
        accumulator = accumulators[config.hla_accumulator]
        second_order = {}
        if operator in ("hla2", "hla3"):
            second_order["ridge"] = config.hla_ridge + (accumulator is None)
            second_order["coefficient"] = self.hla.get("key_mix").float() if accumulator is None else 1.0

        if config.hla_window > 0:
            return windowed_attention(
                q, k, v, near_dim=near_dim, window=config.hla_window, num_sinks=config.hla_num_sinks, operator=operator,
                query_map=query_map, key_map=key_map, accumulator_map=accumulator,
                gate=self.hla.get("gate").float().exp(),
                value_mix=self.hla.get("value_mix").float() if operator in ("ahla", "hla3") else 1.0,
                scale=scale, softcap=getattr(self, "attn_logit_softcapping", None),
                log_decay=log_decay, attention_mask=mask, segment_ids=segment_ids, initial_state=state,
                return_state=True, chunk_size=config.hla_chunk_size, **second_order,
            )  # fmt: skip

        features_k = key_map(k)
        if second_order:
            second_order["e"] = features_k if accumulator is None else accumulator(q)
        seen, *state = (q.new_zeros(q.shape[0], dtype=torch.long),) if state is None else state
        out, state = _PURE_OPERATORS[operator](
            query_map(q), features_k, v, scale=1.0, log_decay=log_decay, attention_mask=mask,
            segment_ids=segment_ids, normalize=config.hla_normalizer == "mass", initial_state=state or None,
            return_state=True, chunk_size=config.hla_chunk_size, **second_order,
        )  # fmt: skip
        steps = torch.ones_like(q[:, 0, :, 0], dtype=torch.long) if mask is None else mask.long()
        count = seen[:, None] + steps.cumsum(1)
        if segment_ids is not None:
            count = tokens_seen(segment_ids, mask, seen)
        if config.hla_normalizer == "count":
            out = out / count.clamp(min=1)[:, None, :, None].to(out.dtype)
        elif config.hla_normalizer == "rms":
            out = nn.functional.rms_norm(out, out.shape[-1:])
        return out, (count[:, -1], *state)


@cached
def _attention_class(base: type) -> type:
    return type(f"HLA{base.__name__}", (HLAAttention, base), {"__module__": __name__})


class HLAModelMixin:
    """Over a Transformers model class: its chosen attention layers become HLA layers."""

    def __init__(self, config):
        super().__init__(config)
        self._add_hla()

    def _add_hla(self) -> None:
        decoder = self.base_model
        decoder.__class__ = _hla_class(type(decoder))
        config = decoder.config
        decoder.softmax_implementation = "sdpa" if decoder._supports_sdpa else "eager"
        if config._attn_implementation != "hla":
            decoder.softmax_implementation = config._attn_implementation
        # HLA layers have a config that names their attention function whatever the softmax layers use.
        decoder.hla_config = copy.copy(config)
        decoder.hla_config._attn_implementation = "hla"
        if len(config.hla_layer_ids) == config.num_hidden_layers:
            config._attn_implementation = "hla"  # no softmax layer: no T x T mask is made
        for i in config.hla_layer_ids:
            attention = decoder.layers[i].self_attn
            attention.__class__ = _attention_class(type(attention))
            attention.config = decoder.hla_config
            attention.add_hla_parameters(like=next(attention.parameters()))
        names = {
            name for module in decoder.modules() if isinstance(module, HLAParameters) for name in module._parameters
        }
        for model, prefix in {decoder: "", self: "" if self is decoder else f"{self.base_model_prefix}."}.items():
            if model._tp_plan:
                model._tp_plan |= {f"{prefix}layers.*.self_attn.hla.{name}": "hla_heads" for name in names}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HLAParameters):
            module.reset()

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, *args, **kwargs) -> dict | Tensor | None:
        """`generate` calls this for a static cache: masks whose shapes do not change from token to token."""
        hla_mask = attention_mask
        if attention_mask is not None:  # cloned, as strides count too
            hla_mask = attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)
        if len(config.hla_layer_ids) == config.num_hidden_layers:
            return hla_mask
        masks = create_masks_for_generate(config, inputs_embeds, attention_mask, *args, **kwargs)
        return (masks if isinstance(masks, dict) else {"softmax": masks}) | {"hla": hla_mask}

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = _cache_of(model_kwargs)
        if cache is not None and self.base_model.hla_config._attn_implementation == "hla":
            use_hla_layers(cache, self.config.hla_layer_ids)
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def fingerprint(self) -> str:
        """Identifies the model by its config and a few values of each weight: what a saved cache belongs to."""
        config = self.config.to_dict()
        for name in ("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "use_cache"):
            config.pop(name, None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, parameter in sorted(self.base_model.named_parameters()):
            values = parameter.detach().flatten()
            values = values[:: max(1, len(values) // 16)].float().cpu().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + values.tobytes())
        return digest.hexdigest()[:16]

    def save_cache(self, cache: Cache, path: str | os.PathLike) -> None:
        """Saves the cache of a text that was read once, to go on from later with `load_cache`, in any process.

        Args:
            cache: the `cache` of this model's output, or that of `generate(..., return_dict_in_generate=True)`.
            path: one safetensors file. Its size does not depend on the length of the text, unless softmax layers
                keep their keys and values.
        """
        save_cache(cache, path, self.fingerprint())

    def load_cache(self, path: str | os.PathLike) -> Cache:
        """The cache that `save_cache` wrote, for `model(..., cache=)` and `generate(..., cache=)`.

        To go on with n questions at once, call its `batch_repeat_interleave(n)`. Pass the new tokens only, with an
        `attention_mask` that covers those read before too: `cache.get_seq_length()` of them.
        Raises: FileNotFoundError; ValueError if the file is not a saved cache, or of another version or model.
        """
        return load_cache(path, self.config, self.fingerprint(), self.device)


class HLADecoderMixin(HLAModelMixin):
    """Over the decoder (`LlamaModel` and so on): gives each HLA layer its padding mask and its cache."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache=None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        cache_argument = "past_key_values" if "past_key_values" in kwargs else _CACHE_ARGUMENT
        if cache is None:
            cache = kwargs.pop("past_key_values", None)
        if self.hla_config._attn_implementation == "hla":
            config = self.config
            if len(config.hla_layer_ids) == config.num_hidden_layers and kwargs.get(
                "output_attentions", config.output_attentions
            ):
                raise ValueError(
                    "output_attentions=True: HLA layers have no attention weights and this model has no other layers; "
                    "within hla_hf.softmax_attention(model, 'eager') it has those of its base model"
                )
            segment_ids, position_ids, attention_mask = self._packing(
                input_ids if inputs_embeds is None else inputs_embeds, position_ids, attention_mask,
                cache is not None or use_cache, **kwargs,
            )  # fmt: skip
            if segment_ids is not None:
                kwargs["hla_segment_ids"], use_cache = segment_ids, False
            use_cache = config.use_cache if use_cache is None else use_cache
            if cache is not None:
                use_hla_layers(cache, config.hla_layer_ids)
            elif use_cache and not (self.training and self.is_gradient_checkpointing):
                cache = new_cache(config)
            hla_mask = attention_mask
            if isinstance(attention_mask, dict):  # from `create_masks_for_generate`
                hla_mask = attention_mask["hla"]
                attention_mask = attention_mask.get("softmax", attention_mask)
            if hla_mask is not None:
                batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
                kwargs["hla_mask"] = self._padding_mask(hla_mask, batch, length, cache)
        kwargs[cache_argument] = cache
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip

    def _packing(
        self, inputs: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, has_cache: bool | None,
        cu_seq_lens_q: Tensor | None = None, seq_idx: Tensor | None = None, **_,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The documents `[B, T]` of a packed batch or None, the position_ids and the mask that softmax layers need.

        Documents are those of `cu_seq_lens_q` or `seq_idx`, else, as Transformers does it without a mask and a cache,
        they begin where `position_ids` do not go up by one.
        """
        batch, length = inputs.shape[:2]
        compiling = torch.compiler.is_compiling()
        inferred, is_explicit = None, cu_seq_lens_q is not None or seq_idx is not None
        if position_ids is not None and position_ids.ndim == 2:
            inferred = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1).expand(batch, -1)
        if cu_seq_lens_q is not None:
            ends = cu_seq_lens_q[1:].to(inputs.device)
            if not compiling and (batch > 1 or cu_seq_lens_q[0] != 0 or ends[-1] != length or (ends.diff() < 0).any()):
                raise ValueError(
                    f"cu_seq_lens_q must rise from 0 to T={length}, for a batch of one row, "
                    f"got {cu_seq_lens_q.tolist()} for {batch} rows"
                )
            segment_ids = torch.searchsorted(ends, torch.arange(length, device=ends.device), right=True)[None]
        elif seq_idx is not None:
            if seq_idx.shape != (batch, length):
                raise ValueError(f"seq_idx must be [B, T] = {(batch, length)}, got {tuple(seq_idx.shape)}")
            segment_ids = seq_idx
        else:
            segment_ids = inferred if attention_mask is None and not has_cache else None

        if is_explicit:  # softmax layers, and the rotation, have only position_ids to go by
            changes = segment_ids.diff(dim=1, prepend=segment_ids[:, :1]) != 0
            if compiling or inferred is None or not torch.equal(inferred, changes.cumsum(1)):
                index = torch.arange(length, device=inputs.device)
                position_ids = index - torch.where(changes, index, 0).cummax(1).values
        if segment_ids is None or (not compiling and bool((segment_ids == segment_ids[:, :1]).all())):
            return None, position_ids, attention_mask
        if has_cache:
            raise ValueError(
                "a packed batch (cu_seq_lens_q, seq_idx, or position_ids that restart) has no single text that a cache "
                "could continue: pass use_cache=False and no cache"
            )
        if attention_mask is not None and len(self.config.hla_layer_ids) < self.config.num_hidden_layers:
            if not bool(attention_mask.all()):
                raise ValueError(
                    "attention_mask must be None or all ones in a packed batch of a model that keeps softmax layers "
                    "(hla_layers), which find the documents in position_ids; pack without padding"
                )
            attention_mask = None
        return segment_ids, position_ids, attention_mask

    @staticmethod
    def _padding_mask(attention_mask: Tensor, batch: int, length: int, cache) -> Tensor | None:
        """The part of a `[B, past + T]` mask that belongs to these T tokens, or None if none of them is padding."""
        past = 0 if cache is None else cache.get_seq_length()
        compiling = torch.compiler.is_compiling()
        lengths = (length,) if compiling and isinstance(past, Tensor) else (length, int(past) + length)
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in lengths:
            raise ValueError(
                f"attention_mask must be [B, T] with B={batch} and T={lengths[-1]} (past and new tokens), "
                f"got {tuple(attention_mask.shape)}"
            )
        mask = attention_mask[:, -length:]
        return None if not compiling and bool(mask.all()) else mask


_HLA_CLASSES: dict[type, type] = {}


def _hla_class(cls: type) -> type:
    return _HLA_CLASSES.get(cls, cls)


def _model_class(model_type: str, base: type, mixin: type, auto_class: str) -> type:
    attributes = {
        "config_class": CONFIG_CLASSES[model_type],
        "_auto_class": auto_class,  # saving copies this file and those it imports
        "__module__": __name__,
        "__doc__": f"[`{base.__name__}`] whose attention layers are higher-order linear attention.",
    }
    cls = type(f"HLA{base.__name__}", (mixin, base), attributes)
    setattr(sys.modules[__name__], cls.__name__, cls)
    _CAN_RECORD_REGISTRY.update({str(cls): base._can_record_outputs})  # for `output_hidden_states`
    _HLA_CLASSES[base] = cls
    return cls


MODEL_CLASSES, CAUSAL_LM_CLASSES = {}, {}
for _model_type in ARCHITECTURES:
    if (_conversions := get_checkpoint_conversion_mapping(_model_type)) is not None:  # experts are fused on loading
        register_checkpoint_conversion_mapping(f"hla_{_model_type}", _conversions, overwrite=True)
    _, _decoder, _causal_lm = (getattr(transformers, name) for name in base_class_names(_model_type))
    MODEL_CLASSES[_model_type] = _model_class(_model_type, _decoder, HLADecoderMixin, "AutoModel")
    CAUSAL_LM_CLASSES[_model_type] = _model_class(_model_type, _causal_lm, HLAModelMixin, "AutoModelForCausalLM")


def to_hla(model: PreTrainedModel, **hla_settings) -> PreTrainedModel:
    """Turns a softmax model into the HLA model of its architecture, in place: the weights are not copied.

    Args:
        model: a `LlamaForCausalLM`, `Qwen3Model` and so on, of an architecture in `ARCHITECTURES`.
        hla_settings: the `hla_*` fields of its new config.
    Raises: ValueError if the architecture is not supported or a setting is wrong; `model` is then as it was.
    """
    model_type = model.config.model_type
    if type(model) not in _HLA_CLASSES:
        raise ValueError(
            f"{type(model).__name__} (model_type {model_type!r}) cannot be converted; supported are the base and "
            f"causal language models of {', '.join(ARCHITECTURES)}"
        )
    _replace_config(model, CONFIG_CLASSES[model_type], **hla_settings)
    model.__class__ = _HLA_CLASSES[type(model)]
    model._add_hla()
    return model


def to_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """The inverse of `to_hla`, in place: the base architecture with this model's weights, less those of HLA.

    Raises: ValueError if `model` is not an HLA model.
    """
    if not isinstance(model, HLAModelMixin):
        raise ValueError(f"{type(model).__name__} is not an HLA model, so it cannot be turned back")
    decoder = model.base_model
    implementation = decoder.softmax_implementation
    _replace_config(model, type(model.config).__mro__[2])
    model.config._attn_implementation = implementation
    for layer in decoder.layers:
        if isinstance(layer.self_attn, HLAAttention):
            del layer.self_attn.hla
            layer.self_attn.config = model.config
            layer.self_attn.__class__ = type(layer.self_attn).__mro__[2]
    bases = {hla: base for base, hla in _HLA_CLASSES.items()}
    for module in {decoder, model}:
        module.__class__ = bases[type(module)]
        module._tp_plan = {name: style for name, style in (module._tp_plan or {}).items() if style != "hla_heads"}
    del decoder.hla_config, decoder.softmax_implementation
    return model


def _replace_config(model: PreTrainedModel, config_class: type, **settings) -> None:
    """Gives a model and its modules a config of another class with the same settings."""
    old = model.config
    kept = {
        name: value
        for name, value in old.to_dict().items()
        if not name.startswith("hla_")
        and name not in ("model_type", "architectures", "auto_map", "transformers_version", "quantization_config")
    }
    new = config_class(**kept, **settings)
    new.name_or_path = old.name_or_path
    new._attn_implementation = old._attn_implementation
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


@contextmanager
def softmax_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the HLA layers compute their base model's softmax attention, with the same weights."""
    decoder = model.base_model
    implementation = decoder.softmax_implementation
    before = decoder.config._attn_implementation, decoder.hla_config._attn_implementation
    decoder.config._attn_implementation = decoder.hla_config._attn_implementation = implementation
    try:
        yield
    finally:
        decoder.config._attn_implementation, decoder.hla_config._attn_implementation = before
