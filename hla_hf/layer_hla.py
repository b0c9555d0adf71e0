"""One HLA layer: what an attention module of Transformers gets instead of softmax attention.

Every decoder's attention in Transformers 5 projects q, k, v, rotates them, updates the cache, calls the attention
function that its config names, and projects the result. So an HLA layer is the architecture's attention module, of its
own class, with
    - a config that names the attention function below, which reads the layer's state, computes and writes it back;
    - a child module `hla`, an `HLALayer`, with the few new parameters and what the layer is set to.
Parameters are read in the child's `forward` only, so that whatever loads weights around a `forward` finds them.
"""

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers import initialization as init
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from .cache_hla import HLACacheLayer, LayerTokens
from .near_hla import use_triton
from .ops_hla import ahla, causal_linear_attention, compute_dtype, feature_map, hedgehog, hla2, hla3, tokens_seen
from .step_hla import MAX_GROUP, MAX_PLACES, fused_step
from .window_hla import (
    FarParameters,
    LayerState,
    StepPlaces,
    StepTokens,
    Tokens,
    WindowSettings,
    decode_step,
    step_places,
    step_tokens,
    windowed_attention,
)


SCORE_UNITS = 64  # of the network behind learned scores
_OPERATORS = {"linear": causal_linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}
# The registry is one per process: each copy of this file, such as a checkpoint's own, has a name of its own there.
ATTENTION = "hla" if __name__.startswith("hla_hf.") else f"hla_{zlib.crc32(__name__.encode()):08x}"


@dataclass(frozen=True)
class LayerSettings:
    """What one layer is set to: the `hla_*` fields of its config, and what its attention module is."""

    operator: str
    feature_map: str
    normalizer: str
    decay: float | str | None
    accumulator: str
    ridge: float
    chunk_size: int
    heads: int
    key_value_heads: int
    head_dim: int
    scale: float
    window: WindowSettings | None
    learns_scores: bool
    most_places: int  # of the layers of a model: of tokens that one sees by softmax

    @classmethod
    def of(cls, config: PreTrainedConfig, attention: nn.Module) -> "LayerSettings":
        operator, accumulator = config.hla_operator, config.hla_accumulator
        ridge, window = config.hla_ridge + (accumulator == "key"), None
        if config.hla_window > 0:
            slots = config.hla_slots_of_layers[config.hla_layer_ids.index(attention.layer_idx)]
            signed = config.hla_feature_map == "identity" or operator in ("hla2", "hla3")
            window = WindowSettings(
                config.hla_window, config.hla_num_sinks, operator, attention.scaling,
                getattr(attention, "attn_logit_softcapping", None), ridge, config.hla_chunk_size, signed,
                slots, "attention" if config.hla_slot_score == "learned" else config.hla_slot_score,
            )  # fmt: skip
        return cls(
            operator, config.hla_feature_map, config.hla_normalizer, config.hla_decay, accumulator, ridge,
            config.hla_chunk_size, config.num_attention_heads, config.num_key_value_heads, attention.head_dim,
            attention.scaling, window, window is not None and window.slots > 0 and config.hla_slot_score == "learned",
            config.hla_num_sinks + config.hla_window + max(config.hla_slots_of_layers, default=0),
        )  # fmt: skip

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, kv_heads, dim, shapes = self.heads, self.key_value_heads, self.head_dim, {}
        if self.feature_map == "hedgehog":
            shapes |= {"q_map": (heads, dim, dim), "k_map": (kv_heads, dim, dim), "k_size": (kv_heads, dim)}
            if self.window:  # without one the size of a query cancels in its own mass
                shapes["q_size"] = (heads, dim)
        if self.window:
            shapes["gate"] = (heads,)  # log g: the weight of what lies beyond the window
            if self.operator in ("ahla", "hla3"):
                shapes["value_mix"] = (heads,)
        if self.learns_scores:
            shapes |= {"score_in": (kv_heads, 2 * dim, SCORE_UNITS), "score_bias": (kv_heads, SCORE_UNITS)}
            shapes["score_out"] = (kv_heads, SCORE_UNITS)
        if self.operator in ("hla2", "hla3") and self.accumulator == "key":
            shapes["key_mix"] = (kv_heads,)
        if self.decay == "learned":
            shapes["decay_logit"] = (kv_heads,)
        return shapes


def _wide(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x))


class HLALayer(nn.Module):
    """The parameters that HLA adds to an attention module, and its mixing of tokens.

    One module, so that PEFT's `modules_to_save` can name it. The parameters have the device and dtype given, or those
    that a model is being made with.
    """

    def __init__(self, settings: LayerSettings, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.settings = settings
        self._of_steps: tuple[list, FarParameters, dict[str, Tensor]] | None = None
        for name, shape in settings.parameter_shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

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
            elif name in ("score_in", "score_out"):
                init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                init.zeros_(parameter)

    def forward(
        self, tokens: LayerTokens, state: LayerState | None = None, in_place: bool = False, memo: dict | None = None
    ) -> tuple[Tensor, LayerState]:
        """Out `[B, H, T, d]` and the new state; with `in_place`, one token's may be the old one, written over.

        `memo` is shared by the layers of one forward pass, for what does not differ between them.
        """
        window = self.settings.window
        if window is None:
            return self._operator_alone(tokens, state, self._own())
        one_token = tokens.q.shape[2] == 1 and state is not None and tokens.segment_ids is None
        if not one_token or torch.is_grad_enabled():
            self._of_steps, own = None, self._own()
            return windowed_attention(
                tokens.q, tokens.k, tokens.v, self._far_parameters(own), window, far_q=tokens.far_q, far_k=tokens.far_k,
                attention_mask=tokens.mask, segment_ids=tokens.segment_ids, slot_scores=self._scores(tokens, own),
                initial_state=state, return_state=True,
            )  # fmt: skip
        if not in_place:
            state = state.map(Tensor.clone)
        token: StepTokens = remembered(
            memo, (window.window, window.num_sinks), None,
            lambda: step_tokens(state, tokens.mask, window, self.settings.most_places),
        )  # fmt: skip
        parameters, own = self._step_parameters()
        if use_triton(tokens.q) and self._step_is_fused(state):
            return fused_step(Tokens(*tokens[:5]), state, own, window, token), state
        places: StepPlaces = remembered(memo, window, None, lambda: step_places(token, window))
        scores = self._scores(tokens, own)
        return decode_step(Tokens(*tokens[:5]), state, parameters, window, places, scores), state

    def _step_is_fused(self, state: LayerState) -> bool:
        settings = self.settings
        return (
            (settings.operator, settings.feature_map, settings.decay) == ("linear", "hedgehog", None)
            and settings.learns_scores == (settings.window.slots > 0)
            and settings.window.places <= MAX_PLACES
            and settings.heads // settings.key_value_heads <= MAX_GROUP
            and all(x is None or x.is_contiguous() for x in state)
        )

    def slot_scores(self, k: Tensor, v: Tensor, own: dict[str, Tensor] | None = None) -> Tensor:
        """The learned scores `[B, Hkv, T]` of tokens, k before its rotation and v `[B, Hkv, T, d]`; for training them,
        with gradients."""
        own = own or self._own()
        weight = own["score_in"]
        hidden = nn.functional.gelu(torch.cat([k, v], -1).to(weight.dtype) @ weight + own["score_bias"][:, None])
        return (hidden @ own["score_out"][..., None])[..., 0]

    def _scores(self, tokens: LayerTokens, own: dict[str, Tensor] | None = None) -> Tensor | None:
        if not self.settings.learns_scores:
            return None
        with torch.no_grad():  # rounded, as the same token twice must not be told apart by how its k was computed
            return self.slot_scores(tokens.far_k, tokens.v, own).bfloat16()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_of_steps": None}

    def _own(self) -> dict[str, Tensor]:
        """The layer's parameters, under tensor parallelism this rank's heads of them."""
        own = {name: getattr(self, name) for name in self.settings.parameter_shapes}  # an adapter may stand for one
        return {n: p.to_local() if isinstance(p, DTensor) else p for n, p in own.items()}

    def _step_parameters(self) -> tuple[FarParameters, dict[str, Tensor]]:
        """Those of decoding, kept from one token to the next: what a step asks of them is done once."""
        values = list(self.parameters() if self._modules else self._parameters.values())  # the latter is much faster
        if torch.compiler.is_compiling() or any(p.is_inference() for p in values):
            own = self._own()
            return self._far_parameters(own), own
        versions = [(p.data_ptr(), p._version) for p in values]
        if self._of_steps is None or self._of_steps[0] != versions:
            own = self._own()
            self._of_steps = versions, self._far_parameters(own, at_once=True), own
        return self._of_steps[1:]

    def _maps(self, own: dict[str, Tensor]) -> tuple[Callable, Callable, Callable | None]:
        """Of queries, of keys, and of queries as accumulators (None: e = phi(k))."""
        name, scale = self.settings.feature_map, self.settings.scale
        query_scale = scale if name in ("identity", "relu", "elu") else 1.0

        def query_map(q: Tensor) -> Tensor:
            features = feature_map(name, q, own.get("q_map"), own.get("q_size"))
            return features if query_scale == 1 else features * query_scale

        def key_map(k: Tensor) -> Tensor:
            return feature_map(name, k, own.get("k_map"), own.get("k_size"))

        accumulators = {"query": query_map, "key": None, "softmax_query": lambda q: (q * scale).softmax(-1)}
        return query_map, key_map, accumulators[self.settings.accumulator]

    def _log_decay(self, own: dict[str, Tensor]) -> float | Tensor | None:
        if self.settings.decay == "learned":
            return nn.functional.logsigmoid(_wide(own["decay_logit"]))
        return None if self.settings.decay is None else math.log(self.settings.decay)

    def _far_parameters(self, own: dict[str, Tensor] | None = None, at_once: bool = False) -> FarParameters:
        """With `at_once` the features of q and k are one product of one weight, their maps and sizes side by side."""
        own = own or self._own()
        query_map, key_map, accumulator_map = self._maps(own)
        both_maps = None
        if at_once and "q_map" in own:
            weight = torch.cat([torch.cat([own[f"{x}_map"], own[f"{x}_size"][..., None]], -1) for x in "qk"])

            def both_maps(q: Tensor, k: Tensor) -> Sequence[Tensor]:
                both = torch.cat([q, k], 1)
                y = (both @ weight.to(both.dtype)).to(compute_dtype(both))
                return hedgehog(y[..., :-1], y[..., -1:]).split([q.shape[1], k.shape[1]], 1)

        return FarParameters(
            query_map, key_map, _wide(own["gate"]).exp(), accumulator_map,
            _wide(own["key_mix"]) if "key_mix" in own else 1.0,
            _wide(own["value_mix"]) if "value_mix" in own else 1.0,
            self._log_decay(own), both_maps,
        )  # fmt: skip

    def _operator_alone(
        self, tokens: LayerTokens, state: LayerState | None, own: dict[str, Tensor]
    ) -> tuple[Tensor, LayerState]:
        """The operator without a window."""
        settings, (q, k, v), mask = self.settings, tokens[:3], tokens.mask
        query_map, key_map, accumulator_map = self._maps(own)
        features_k, second_order = key_map(k), {}
        passes = {"linear": ["out"], "ahla": ["r", "out"], "hla2": ["u", "out"], "hla3": ["u", "r", "out"]}
        names = passes[settings.operator]
        if "u" in names:
            second_order = {
                "e": features_k if accumulator_map is None else accumulator_map(q), "ridge": settings.ridge,
                "coefficient": _wide(own["key_mix"]) if "key_mix" in own else 1.0,
            }  # fmt: skip
        initial = None if state is None or state.out is None else tuple(getattr(state, name) for name in names)
        out, states = _OPERATORS[settings.operator](
            query_map(q), features_k, v, scale=1.0, log_decay=self._log_decay(own), attention_mask=mask,
            segment_ids=tokens.segment_ids, normalize=settings.normalizer == "mass", initial_state=initial,
            return_state=True, chunk_size=settings.chunk_size, **second_order,
        )  # fmt: skip
        seen = q.new_zeros(q.shape[0], dtype=torch.long) if state is None else state.seen
        if tokens.segment_ids is not None:
            count = tokens_seen(tokens.segment_ids, mask, seen)
        else:
            steps = torch.ones_like(q[:, 0, :, 0], dtype=torch.long) if mask is None else (mask != 0).long()
            count = seen[:, None] + steps.cumsum(1)
        if settings.normalizer == "count":
            out = out / count.clamp(min=1)[:, None, :, None].to(out.dtype)
        elif settings.normalizer == "rms":
            out = nn.functional.rms_norm(out, out.shape[-1:])
        return out, LayerState(count[:, -1], **dict(zip(names, states, strict=True)))


class _HeadsParallel(TensorParallelLayer):
    """Tensor parallelism of a parameter whose first dimension is its heads."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh, **_) -> None:
        full = getattr(module, param)
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        setattr(module, param, nn.Parameter(sharded, requires_grad=full.requires_grad))


ALL_PARALLEL_STYLES.register("hla_heads", _HeadsParallel())


# ---- the attention function ----------------------------------------


def remembered(memo: dict | None, name: object, key: Tensor | None, make: Callable[[], Any]) -> Any:
    """`make()`, once per forward pass and `key`."""
    if memo is None:
        return make()
    if name not in memo or memo[name][0] is not key:
        memo[name] = key, make()
    return memo[name][1]


def base_functions(attention: nn.Module) -> dict:
    """What the file of Transformers defines that has the architecture of an attention module."""
    base = next(cls for cls in type(attention).__mro__ if cls.__module__.startswith("transformers."))
    return vars(sys.modules[base.__module__])


def hla_attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model that are HLA layers, first layer first."""
    return [module for module in model.modules() if "hla_hook" in vars(module)]


def note_call(attention: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """A hook before an attention module's forward: hands what only that sees on to its attention function."""
    implementation = attention.config._attn_implementation
    if implementation.startswith("hla"):
        cache = options.get("cache", options.get("past_key_values"))
        if cache is not None and implementation == ATTENTION:
            options["hla_cache"] = cache.layers[attention.layer_idx]
        options["hla_rotation"] = options["position_embeddings"]
    return arguments, options


def unrotated(
    attention: nn.Module, q: Tensor, k: Tensor, rotation: tuple[Tensor, Tensor], memo: dict | None = None
) -> tuple[Tensor, Tensor]:
    """What q and k were before `rotation`, its cos and sin.

    The far part has its order from the window: its features see no position, so none that is new to them.
    """
    if not getattr(attention, "use_rope", True):
        return q, k
    rotate = base_functions(attention)["apply_rotary_pos_emb"]

    def inverse() -> tuple[Tensor, Tensor]:
        cos, sin = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in rotation)
        energy = cos.square() + sin.square()  # 1, or more where the rotation also scales
        return cos / energy, -sin / energy

    def as_matrix() -> Tensor:
        unit = torch.eye(q.shape[-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        unit = unit[None, :, None].expand(len(rotation[0]), -1, -1, -1)
        return rotate(unit, unit, *inverse())[0].squeeze(2).to(q.dtype)  # [B, d, d], or one for all rows

    if q.shape[2] == 1 and memo is not None:  # one product with one matrix for all layers
        matrix = remembered(memo, "matrix", rotation[0], as_matrix)
        both = torch.cat([q, k], 1).squeeze(2) @ matrix
        return both.unsqueeze(2).split([q.shape[1], k.shape[1]], 1)
    return tuple(x.to(q.dtype) for x in rotate(q, k, *remembered(memo, "inverse", rotation[0], inverse)))


def hla_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    hla_mask: Tensor | None = None,
    hla_cache: HLACacheLayer | None = None,
    hla_segment_ids: Tensor | None = None,
    hla_rotation: tuple[Tensor, Tensor] | None = None,
    hla_memo: dict | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function: q `[B, H, T, d]`, k and v `[B, Hkv, T, d]` as softmax attention takes them.

    `hla_mask` is the `[B, T]` padding mask of these T tokens (None: no padding), `hla_cache` this layer's cache,
    `hla_segment_ids` `[B, T]` the documents of a packed batch (None: one per row), `hla_rotation` the cos and sin by
    which q and k were rotated.
    """
    far = None, None
    if module.config.hla_window > 0:
        far = unrotated(module, query, key, hla_rotation, hla_memo)
    tokens = LayerTokens(query, key, value, *far, hla_mask, hla_segment_ids)
    if hla_cache is None:
        return module.hla(tokens)[0].transpose(1, 2), None
    outs = []
    for part in hla_cache.parts(tokens):
        state = hla_cache.read(module.hla)
        out, new = module.hla(part, state, in_place=hla_cache.in_place, memo=hla_memo)
        hla_cache.write(part, new)
        outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).transpose(1, 2), None


AttentionInterface.register(ATTENTION, hla_attention)
