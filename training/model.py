"""The model of a run, what of it is trained, and its teacher."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conversion.load import file_beside, load_model, load_tokenizer
from conversion.transfer import hla_parameters
from hla_hf import softmax_attention
from hla_hf.layer_hla import hla_attentions

from .recipe import Recipe


def load_student(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The converted model and its tokenizer. Raises: ValueError if they cannot be trained by this recipe."""
    model = load_model(recipe.model, "model", recipe.dtype)
    if not hla_attentions(model):
        raise ValueError(
            f"model {recipe.model!r} is a {model.config.model_type!r} model without HLA layers: convert it first"
        )
    tokenizer = load_tokenizer(recipe.model, "model", model)
    positions = getattr(model.config, "max_position_embeddings", None)
    for name in ("seq_len", "eval_seq_len"):
        if positions and (getattr(recipe, name) or 0) > positions:
            raise ValueError(f"{name}={getattr(recipe, name)} is longer than the model's {positions} positions")
    return model, tokenizer


def make_trainable(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """Leaves a gradient only to what the recipe trains, in float32; with LoRA the result is a `PeftModel`."""
    if recipe.train == "lora":
        layers = hla_attentions(model)
        projections = {name for layer in layers for name, x in layer.named_children() if isinstance(x, nn.Linear)}
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=recipe.lora_rank, lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
            lora_dropout=recipe.lora_dropout, target_modules=recipe.lora_targets or sorted(projections),
            modules_to_save=["hla"] if hla_parameters(model) else None,
        )  # fmt: skip
        model = get_peft_model(model, settings)
        _untie_adapted(plain(model))
    elif recipe.train == "hla":
        model.requires_grad_(False)
        for parameter in hla_parameters(model).values():
            parameter.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"train={recipe.train!r} leaves nothing to train: the model's HLA layers have no parameters")
    return model


def _untie_adapted(model: PreTrainedModel) -> None:
    # Merging an adapter of one of two tied modules would change the other one too.
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings, head = (x.get_base_layer() if isinstance(x, BaseTunerLayer) else x for x in modules)
    if head is not None and head.weight is embeddings.weight and any(isinstance(x, BaseTunerLayer) for x in modules):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def plain(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def as_base_model(model: nn.Module) -> Iterator[None]:
    """Within this context a model whose LoRA and HLA parameters alone were trained computes exactly what its base model
    does, with the same weights in memory: adapters off, softmax attention on, no dropout.
    """
    adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    training = model.training
    model.eval()
    # Not `disable_adapter()`: it also takes the gradient from the adapters and gives it back, which FSDP2 does not see.
    for module in adapters:
        module._disable_adapters = True
    try:
        with softmax_attention(plain(model)):
            yield
    finally:
        for module in adapters:
            module._disable_adapters = False
        model.train(training)


def load_teacher(recipe: Recipe, model: PreTrainedModel) -> nn.Module | None:
    """None if `model`, before it is made trainable, will still hold the teacher's weights; else a frozen model.

    Raises: ValueError if the model's own weights are to be the teacher but were trained away from their base, or the
    vocabularies differ.
    """
    history = file_beside(recipe.model, "training.json")
    if recipe.kl_weight and recipe.teacher is None and history is not None:
        kind = json.loads(history.read_text())["recipe"]["train"]
        if kind != "hla":
            raise ValueError(
                f"model {recipe.model!r} was fine-tuned with train={kind!r}: its weights with softmax attention are no "
                "longer its base model; name that one as teacher"
            )
    if not recipe.kl_weight or (recipe.teacher is None and recipe.train != "full"):
        return None
    if recipe.teacher is None:
        return copy.deepcopy(model).requires_grad_(False)  # whole on every process, also under FSDP
    teacher = load_model(recipe.teacher, "teacher").requires_grad_(False)
    theirs, ours = teacher.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        raise ValueError(f"teacher {recipe.teacher!r} has a vocabulary of {theirs}, the model one of {ours}")
    return teacher
