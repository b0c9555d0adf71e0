"""HLA models: each architecture's own classes plus one mixin, no decoder code.

Parameter names stay those of the base model, so converting is loading. Layers that keep softmax attention are
untouched, with whatever attention implementation the user asked for.
"""

import copy
import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache as cached
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .cache_hla import HLACacheLayer, load_cache, new_cache, save_cache, use_hla_layers
from .configuration_hla import HLAConfigMixin, available_architectures, base_class_names, config_class, no_such_name
from .layer_hla import ATTENTION, HLALayer, LayerSettings, hla_attentions, note_call


# Transformers renamed the argument after 5.20.
_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class HLAModelMixin:
    """Over a Transformers model class: its chosen attention layers become HLA layers."""

    _supports_attention_backend = False  # an engine that swaps the config's attention function reaches no HLA layer

    def __init__(self, config):
        super().__init__(config)
        self._add_hla()

    def _add_hla(self) -> None:
        decoder, config = self.base_model, self.base_model.config
        config.validate_hla()  # fields may have been set since it was made, as by from_pretrained(..., hla_window=)
        if not isinstance(decoder, HLADecoderMixin):
            _become(decoder, hla_class(type(decoder)))
        decoder.softmax_implementation = "sdpa" if decoder._supports_sdpa else "eager"
        # HLA layers have a config that names their attention function whatever the softmax layers use.
        decoder.hla_config = copy.copy(config)
        decoder.hla_config._attn_implementation = ATTENTION
        if config._attn_implementation != ATTENTION:
            decoder.softmax_implementation = config._attn_implementation
        decoder._keep_masks_away()
        for i in config.hla_layer_ids:
            attention = decoder.layers[i].self_attn
            attention.config = decoder.hla_config
            attention.hla = HLALayer(LayerSettings.of(config, attention), *_place_for_parameters(attention, decoder))
            attention.hla.reset()
            attention.hla_hook = attention.register_forward_pre_hook(note_call, with_kwargs=True)
        names = {name for module in decoder.modules() if isinstance(module, HLALayer) for name in module._parameters}
        for model, prefix in {decoder: "", self: "" if self is decoder else f"{self.base_model_prefix}."}.items():
            if model._tp_plan:
                model._tp_plan |= {f"{prefix}layers.*.self_attn.hla.{name}": "hla_heads" for name in names}

    def to_softmax(self) -> PreTrainedModel:
        """See `hla_hf.to_softmax`."""
        decoder = self.base_model
        implementation = decoder.softmax_implementation
        _replace_config(self, type(self.config).base_class)
        self.config._attn_implementation = implementation
        for attention in hla_attentions(decoder):
            attention.hla_hook.remove()
            del attention.hla, attention.hla_hook
            attention.config = self.config
        for module in {decoder, self}:
            _become(module, type(module).base_class)
            module._tp_plan = {name: style for name, style in (module._tp_plan or {}).items() if style != "hla_heads"}
        del decoder.hla_config, decoder.softmax_implementation
        return self

    @contextmanager
    def softmax_attention(self, implementation: str | None = None) -> Iterator[None]:
        """See `hla_hf.softmax_attention`."""
        decoder = self.base_model
        before = decoder.config._attn_implementation, decoder.hla_config._attn_implementation
        implementation = implementation or decoder.softmax_implementation
        decoder.config._attn_implementation = decoder.hla_config._attn_implementation = implementation
        try:
            yield
        finally:
            decoder.config._attn_implementation, decoder.hla_config._attn_implementation = before

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.base_class._can_set_experts_implementation()  # found out from the source of a class's module

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        path = Path(save_directory, "README.md")
        self._own_card = path.read_bytes() if path.is_file() else None  # push_to_hub=True writes another over it
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            own = self.__dict__.pop("_own_card")
            if own is not None and path.read_bytes() != own:
                path.write_bytes(own)
        if Path(save_directory, "config.json").exists():
            write_card(self, Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args, **kwargs) -> Any:
        path, own = Path(working_dir, "README.md"), getattr(self, "_own_card", None)
        if own is not None and _is_empty_card(path):
            path.write_bytes(own)
        write_card(self, Path(working_dir), repo_id)  # where Transformers has put an empty one
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HLALayer):
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
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if cache is not None and self.base_model.hla_config._attn_implementation == ATTENTION:
            use_hla_layers(cache, self.config.hla_layer_ids)
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def init_continuous_batching(self, *args, **kwargs) -> None:
        """Raises: ValueError, before `generate_batch` and its like have begun."""
        raise ValueError(
            f"{type(self).__name__} cannot be generated from by continuous batching (generate_batch, "
            "cache_implementation='paged'): it swaps the attention function and the cache of every layer, and HLA "
            "layers need their own; use generate() with another cache_implementation, or without"
        )

    def fingerprint(self) -> str:
        """Identifies the model by its config and a few values of each weight: what a saved cache belongs to."""
        config = self.config.to_dict()
        for name in ("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "use_cache"):
            config.pop(name, None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, parameter in sorted(self.base_model.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            for tensor in _plain_tensors(parameter.detach()):
                values = tensor.flatten()
                digest.update(values[:: max(1, len(values) // 16)].float().cpu().numpy().tobytes())
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
        if self.hla_config._attn_implementation == ATTENTION:
            inputs, config = input_ids if inputs_embeds is None else inputs_embeds, self.config
            self._keep_masks_away()
            self._refuse_attention_weights(**kwargs)
            hla_mask = attention_mask
            if isinstance(attention_mask, dict):  # from `create_masks_for_generate`
                hla_mask = attention_mask["hla"]
                attention_mask = attention_mask.get("softmax", attention_mask)
            segment_ids, facts = self._documents(
                inputs, position_ids, hla_mask, cache is not None or use_cache, **kwargs
            )
            known = _known(facts | self._padding(hla_mask, inputs.shape[1], cache))
            segment_ids, position_ids, no_mask = self._packing(
                inputs, segment_ids, position_ids, hla_mask, known, cache is not None or use_cache, **kwargs
            )
            if segment_ids is not None:
                kwargs["hla_segment_ids"], use_cache = segment_ids, False
            if no_mask:
                attention_mask = hla_mask = None
            use_cache = config.use_cache if use_cache is None else use_cache
            if cache is not None:
                use_hla_layers(cache, config.hla_layer_ids)
            elif use_cache and not (self.training and self.is_gradient_checkpointing):
                cache = new_cache(config)
            if hla_mask is not None:
                mask, positions = self._padding_mask(hla_mask, *inputs.shape[:2], cache, known)
                kwargs["hla_mask"] = mask
                position_ids = positions if position_ids is None else position_ids
            if not torch.compiler.is_compiling():
                kwargs["hla_memo"] = {}
        elif cache is not None and any(isinstance(layer, HLACacheLayer) for layer in cache.layers):
            raise ValueError(
                "the cache holds HLA layers, which softmax attention cannot continue from: within softmax_attention "
                "pass a new cache, or none to let the model make its own"
            )
        kwargs[cache_argument] = cache
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip

    def _keep_masks_away(self) -> None:
        """A model without softmax layers makes no T x T mask, whatever implementation its user has asked for since."""
        config = self.config
        if len(config.hla_layer_ids) == config.num_hidden_layers and config._attn_implementation != ATTENTION:
            self.softmax_implementation = config._attn_implementation or self.softmax_implementation
            config._attn_implementation = ATTENTION

    def _refuse_attention_weights(self, output_attentions: bool | None = None, **_) -> None:
        config = self.config
        wanted = config.output_attentions if output_attentions is None else output_attentions
        if wanted and len(config.hla_layer_ids) == config.num_hidden_layers:
            raise ValueError(
                "output_attentions=True: HLA layers have no attention weights and this model has no other layers; "
                "within hla_hf.softmax_attention(model, 'eager') it has those of its base model"
            )

    @staticmethod
    def _documents(
        inputs: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, has_cache: bool | None,
        cu_seq_lens_q: Tensor | None = None, seq_idx: Tensor | None = None, **_,
    ) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
        """The documents `[B, T]` of a packed batch or None, and what to know of them.

        They are those of `cu_seq_lens_q` or `seq_idx`, else, as Transformers does it without a mask and a cache, they
        begin where `position_ids` do not go up by one.
        """
        (batch, length), facts = inputs.shape[:2], {}
        if cu_seq_lens_q is not None:
            cu_seq_lens_q = cu_seq_lens_q.to(inputs.device)
            ends = cu_seq_lens_q[1:]
            rises = (cu_seq_lens_q[0] == 0) & (ends[-1] == length) & (cu_seq_lens_q.diff() >= 0).all()
            facts["cu_seq_lens_q is wrong"] = ~rises if batch == 1 else torch.ones_like(rises)
            index = torch.arange(length, device=ends.device)
            segment_ids = torch.searchsorted(ends, index, right=True).expand(batch, -1)
        elif seq_idx is not None:
            if seq_idx.shape != (batch, length):
                raise ValueError(f"seq_idx must be [B, T] = {(batch, length)}, got {tuple(seq_idx.shape)}")
            segment_ids = seq_idx
        elif attention_mask is None and not has_cache and position_ids is not None and position_ids.ndim == 2:
            segment_ids = _runs_of_positions(position_ids).expand(batch, -1)
        else:
            return None, {}
        return segment_ids, facts | {"one document": (segment_ids == segment_ids[:, :1]).all()}

    def _packing(
        self, inputs: Tensor, segment_ids: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None,
        known: dict[str, int | None], has_cache: bool | None, cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None, **_,
    ) -> tuple[Tensor | None, Tensor | None, bool]:  # fmt: skip
        """The documents, None if there is one; the position_ids that softmax layers need; whether those must not get
        the mask."""
        if known.get("cu_seq_lens_q is wrong"):
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to T={inputs.shape[1]}, for a batch of one row, "
                f"got {cu_seq_lens_q.tolist()} for {inputs.shape[0]} rows"
            )
        if cu_seq_lens_q is not None or seq_idx is not None:  # softmax layers, and the rotation, see position_ids only
            changes = segment_ids.diff(dim=1, prepend=segment_ids[:, :1]) != 0
            index = torch.arange(inputs.shape[1], device=inputs.device)
            given, position_ids = position_ids, index - torch.where(changes, index, 0).cummax(1).values
            if given is not None and given.ndim == 2:
                agree = (_runs_of_positions(given) == changes.cumsum(1)).all()
                position_ids = torch.where(agree, given, position_ids)
        if segment_ids is None or known["one document"]:
            return None, position_ids, False
        if has_cache:
            raise ValueError(
                "a packed batch (cu_seq_lens_q, seq_idx, or position_ids that restart) has no single text that a cache "
                "could continue: pass use_cache=False and no cache"
            )
        keeps_softmax = len(self.config.hla_layer_ids) < self.config.num_hidden_layers
        if attention_mask is not None and keeps_softmax and known["padding"]:
            raise ValueError(
                "attention_mask must be None or all ones in a packed batch of a model that keeps softmax layers "
                "(hla_layers), which find the documents in position_ids; pack without padding"
            )
        return segment_ids, position_ids, keeps_softmax

    @staticmethod
    def _padding(attention_mask: Tensor | None, length: int, cache) -> dict[str, Tensor]:
        """What to know of a mask: whether it has padding, whether its last T tokens have, and how many came before."""
        if attention_mask is None:
            return {}
        padding, past = attention_mask == 0, 0 if cache is None else cache.get_seq_length()
        facts = {"padding": padding.any(), "padding now": padding[..., -length:].any()}
        return facts | {"past": past} if isinstance(past, Tensor) else facts  # a static cache counts on its device

    @staticmethod
    def _padding_mask(
        attention_mask: Tensor, batch: int, length: int, cache, known: dict[str, int | None]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The part of a `[B, past + T]` mask that belongs to these T tokens, None if none of them is padding; and their
        positions, the real tokens before each, also in the past. None, which Transformers takes for no padding, if
        there is none or if the mask leaves the past out.
        """
        past = 0 if cache is None else cache.get_seq_length()
        past = known.get("past", 0) if isinstance(past, Tensor) else past
        lengths = (length,) if past is None else (length, past + length)
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in lengths:
            raise ValueError(
                f"attention_mask must be [B, T] with B={batch} and T={lengths[-1]} (past and new tokens), "
                f"got {tuple(attention_mask.shape)}"
            )
        mask = None if known["padding now"] == 0 else attention_mask[:, -length:]
        if known["padding"] == 0 or past is None or attention_mask.shape[1] != past + length:
            return mask, None
        return mask, ((attention_mask != 0).long().cumsum(1) - 1).clamp(min=0)[:, -length:]


def _runs_of_positions(position_ids: Tensor) -> Tensor:
    """`[B, T]`: 0, and 1 more wherever positions do not go up by one."""
    return (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)


def _known(facts: dict[str, Tensor]) -> dict[str, int | None]:
    """The values of tensors of one element: the one place where a forward pass waits for its device. None where there
    are none: while compiling, and on the meta device."""
    if not facts:
        return {}
    values = [x.long() for x in facts.values()]
    if torch.compiler.is_compiling() or any(x.is_meta for x in values):
        return dict.fromkeys(facts)
    return dict(zip(facts, torch.stack(values).tolist(), strict=True))


class HLAHeadMixin(HLAModelMixin):
    """Over a sequence, token or question-answering head, whose decoder comes from `AutoModel`, with its HLA layers."""

    def __init__(self, config):
        # In a saved directory's own code configs are of another copy of their class than the one known here.
        decoder_class = model_class(config.model_type.removeprefix("hla_"), "AutoModel")
        transformers.AutoModel.register(type(config), decoder_class, exist_ok=True)
        super(HLAModelMixin, self).__init__(config)


def model_class(model_type: str, auto_class: str = "AutoModelForCausalLM") -> type:
    """`HLALlamaForCausalLM`, with `auto_class="AutoModel"` `HLALlamaModel`, and so on, made when first asked for.

    Raises: ValueError if the architecture is not supported or has no such class.
    """
    return _model_class(model_type, auto_class)


@cached  # which tells a default from the same argument given: a second class would not pickle
def _model_class(model_type: str, auto_class: str) -> type:
    names = _model_names(model_type)
    if auto_class not in names:
        raise ValueError(f"auto_class={auto_class!r}: {model_type} has {', '.join(names)}")
    base = getattr(transformers, names[auto_class])
    mixin = {"AutoModel": HLADecoderMixin, "AutoModelForCausalLM": HLAModelMixin}.get(auto_class, HLAHeadMixin)
    attributes = {
        "config_class": config_class(model_type),
        "base_class": base,
        "_auto_class": auto_class,  # saving copies this file and those it imports
        "__module__": __name__,
        "__doc__": f"[`{base.__name__}`] whose attention layers are higher-order linear attention.",
    }
    cls = type(f"HLA{base.__name__}", (mixin, base), attributes)
    _CAN_RECORD_REGISTRY.update({str(cls): base._can_record_outputs})  # for `output_hidden_states`
    if (conversions := get_checkpoint_conversion_mapping(model_type)) is not None:  # experts are fused on loading
        register_checkpoint_conversion_mapping(f"hla_{model_type}", conversions, overwrite=True)
    if base.base_model_prefix != "model":
        renaming = _PrefixOnLoading(r"^model\.", f"{base.base_model_prefix}.")
        register_checkpoint_conversion_mapping(cls.__name__, [renaming], overwrite=True)
    return cls


def _model_names(model_type: str) -> dict[str, str]:
    names = base_class_names(model_type)
    del names["AutoConfig"]
    return names


class _PrefixOnLoading(WeightRenaming):
    """Some question-answering heads call their decoder `transformer`, and would start from a random one where a
    language model's weights are loaded, which are of a `model`. They are saved under the names that they have."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        name = self.target_patterns[0]
        return WeightRenaming(f"^{name}", name)


def hla_class(base: type) -> type:
    """The HLA class over a model class of Transformers. Raises: ValueError if there is none."""
    model_type = getattr(base.config_class, "model_type", None)
    if model_type in available_architectures():
        for auto_class in _model_names(model_type):
            cls = model_class(model_type, auto_class)
            if cls.base_class is base:
                return cls
    raise ValueError(
        f"{base.__name__} (model_type {model_type!r}) cannot be converted; supported are the base and causal language "
        "models, and the sequence, token and question-answering heads as far as Transformers has them, of "
        f"{', '.join(available_architectures())}"
    )


def __getattr__(name: str) -> type:
    for model_type in available_architectures():
        for auto_class, base_name in _model_names(model_type).items():
            if name == f"HLA{base_name}":
                return model_class(model_type, auto_class)
    raise no_such_name(__name__, name)


def _become(module: nn.Module, cls: type) -> None:
    """Gives a module another class with the same contents, in place: weights, hooks and whoever holds it stay, and a
    model is converted without a copy. The classes differ by a mixin that adds methods only."""
    module.__class__ = cls
    if "_old_forward" in vars(module):  # Accelerate's hooks keep the forward of the class that it had
        module._old_forward = cls.forward.__get__(module)


def _place_for_parameters(attention: nn.Module, decoder: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Where an attention module computes and in which dtype: its own weights may be packed, or away on disk."""
    like = next(itertools.chain(attention.parameters(), attention.buffers()))
    device = like.device
    for module in attention.modules():
        if device.type == "meta" and hasattr(module, "_hf_hook"):
            device = torch.device(getattr(module._hf_hook, "execution_device", None) or device)
    is_packed = not like.dtype.is_floating_point or like.dtype.itemsize == 1
    return device, decoder.dtype if is_packed else like.dtype


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that one of a quantising library is made of; any other is itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def to_hla(model: PreTrainedModel, **hla_settings) -> PreTrainedModel:
    """Turns a softmax model into the HLA model of its architecture, in place: the weights are not copied.

    Args:
        model: a `LlamaForCausalLM`, `Qwen3Model` and so on, of an architecture in `ARCHITECTURES`.
        hla_settings: the `hla_*` fields of its new config.
    Raises: ValueError if the architecture is not supported or a setting is wrong. Whatever it raises, `model` is then
        as it was.
    """
    cls = hla_class(type(model))
    fields = [field.name for field in dataclasses.fields(HLAConfigMixin)]
    for name in hla_settings:
        if name not in fields:
            raise ValueError(f"to_hla has no setting {name!r} (given {hla_settings[name]!r}); it has {fields}")
    with _as_it_was_on_failure(model):
        _replace_config(model, config_class(model.config.model_type), **hla_settings)
        _become(model, cls)
        model._add_hla()
    return model


@contextmanager
def _as_it_was_on_failure(model: nn.Module) -> Iterator[None]:
    """If what is within fails, the modules of `model` get back their class, attributes, children and hooks."""
    before = [
        (module, type(module), {n: (x, x.copy() if isinstance(x, dict) else None) for n, x in vars(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).clear()
            for name, (value, content) in attributes.items():
                if content is not None:  # the same dict: the handles of hooks refer to it
                    value.clear()
                    value.update(content)
                vars(module)[name] = value
        raise


def to_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """The inverse of `to_hla`, in place: the base architecture with this model's weights, less those of HLA.

    Raises: ValueError if `model` is not an HLA model.
    """
    return _hla_method(model, "to_softmax")()


def softmax_attention(model: PreTrainedModel, implementation: str | None = None) -> AbstractContextManager[None]:
    """Within this context the HLA layers compute their base model's softmax attention, with the same weights.

    `implementation` is one of Transformers' (`eager`, `sdpa`, ...), by default the one that the model came with.
    """
    return _hla_method(model, "softmax_attention")(implementation)


def _hla_method(model: PreTrainedModel, name: str):
    # By name: a model that came with its own copy of this code is an HLA model too.
    if not hasattr(model, name):
        raise ValueError(f"{type(model).__name__} is not an HLA model, so it has no {name}")
    return getattr(model, name)


# ---- the card of a model that is saved from Python ----------------------------------------

_TASKS = {
    "ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification", "ForQuestionAnswering": "question-answering",
}  # fmt: skip
_CARD = """---
{data}
---
# {name}

A model whose softmax attention was replaced by Higher-order Linear Attention
([arXiv 2510.27258](https://arxiv.org/abs/2510.27258)): what it remembers of a text does not grow with it.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{repository}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{repository}", trust_remote_code=True)
```

| field | value |
|---|---|
{settings}
"""


def _is_empty_card(path: Path) -> bool:
    return b"This model card has been automatically generated." in path.read_bytes()


def _front_matter(path: Path) -> dict[str, Any]:
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path.is_file() else {}
    except Exception:  # a README that is no model card
        return {}


def write_card(model: PreTrainedModel, directory: Path, repository: str | None = None) -> None:
    """Writes README.md, unless someone has written one: what the model is, whence it comes and how it is loaded."""
    path = directory / "README.md"
    if path.exists() and not _is_empty_card(path):
        return
    origin, source = {"license": "unknown"}, model.config.name_or_path
    if source and Path(source, "README.md").is_file():  # without a name it would be that of the working directory
        inherited = _front_matter(Path(source, "README.md"))
        names = ("base_model", "license", "license_name", "license_link", "language")
        origin |= {name: inherited[name] for name in names if inherited.get(name)}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists():
        origin |= {"base_model": source, "base_model_relation": "finetune"}
    head = next((x for x in _TASKS if type(model).__name__.endswith(x)), "")
    tags = ["hla", "higher-order-linear-attention", "linear-attention", *(_front_matter(path).get("tags") or [])]
    data = ModelCardData(
        library_name="transformers", pipeline_tag=_TASKS.get(head, "feature-extraction"),
        tags=list(dict.fromkeys(tags)), **origin,
    )  # fmt: skip
    fields = ((x.name, getattr(model.config, x.name)) for x in dataclasses.fields(HLAConfigMixin))
    settings = "\n".join(f"| `{name}` | `{value}` |" for name, value in fields)
    card = _CARD.format(
        data=data.to_yaml(), name=(repository or directory.resolve().name).split("/")[-1], settings=settings,
        auto_class=f"AutoModel{head}", repository=repository or "PATH_OR_REPOSITORY",
    )  # fmt: skip
    path.write_text(card)


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
    new._experts_implementation = old._experts_implementation
    if hasattr(old, "quantization_config"):  # as an object: what saves and reloads packed weights asks it
        new.quantization_config = old.quantization_config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
