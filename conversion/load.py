"""Models and tokenizers from a Hub id, a directory or a GGUF file, or one clear error."""

import copy
from pathlib import Path

import torch
import transformers
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from hla_hf import ARCHITECTURES


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "tekken.json", "sentencepiece.bpe.model",
)  # fmt: skip


def file_beside(source: str, name: str) -> Path | None:
    """A file in the directory or Hub repository of a model, or None if there is none."""
    if Path(source).exists():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        path = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
    except (OSError, ValueError):  # no such repository, or no name of one: who loads the model says so
        return None
    return None if path is None else Path(path)


def load_model(source: str, name: str, dtype: str = "auto", device: str = "cpu", **options) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Raises: ValueError, which calls it `name`, if it cannot be read or lacks weights.
    """
    if device == "auto":
        options["device_map"] = "auto"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"the weights of {name} {source!r} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        more = " ..." if len(missing) > 5 else ""
        raise ValueError(
            f"{name} {source!r} lacks {len(missing)} of the model's weights: {', '.join(missing[:5])}{more}"
        )
    return (model if device == "auto" else model.to(device)).eval()


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """What samples text and learns its attention: a bfloat16 copy of a float32 model where a CPU multiplies that three
    times as fast, else `model` itself."""
    if model.dtype != torch.float32 or model.device.type != "cpu" or not torch.cpu._is_avx512_bf16_supported():
        return model
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # and not the buffers: a frequency in bfloat16 loses its position
        parameter.data = parameter.data.bfloat16()
    return model


def load_tokenizer(
    source: str, name: str, model: PreTrainedModel, required: bool = True, **options
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, or None if there is none and it is not required.

    Raises: ValueError, which calls the source `name`, if it is missing or unreadable or has more tokens than the model.
    """
    if not options and not any(file_beside(source, file) for file in TOKENIZER_FILES):
        if required:
            raise ValueError(f"{name} {source!r} has no tokenizer: put the base model's tokenizer files beside it")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise ValueError(f"the tokenizer of {name} {source!r} cannot be read: {error}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer of {name} {source!r} has {len(tokenizer)} tokens, the model only {rows}")
    return tokenizer


def load_base(
    source: str, dtype: str = "auto", device: str = "cpu", dequantize: bool = False, needs_tokenizer: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The base model and tokenizer of a Hub id, a GGUF file or a directory: safetensors or `pytorch_model.bin`,
    sharded or not, or a PEFT adapter, which is merged into the base that it names.

    Raises: ValueError if the architecture is not supported, a weight is missing or unreadable, the weights are
    quantised and not to be restored, the tokenizer has more tokens than the model, or there is none and it is needed.
    """
    if file_beside(source, "adapter_config.json"):
        return _load_adapted(source, dtype, device, dequantize, needs_tokenizer)
    options, name = {}, ""
    directory = source
    if source.endswith(".gguf"):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"SOURCE {source!r} does not exist")
        directory, options, name = str(path.parent), {"gguf_file": path.name}, f", file {path.name!r},"
    try:
        config = AutoConfig.from_pretrained(directory, **options)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"SOURCE {directory!r}{name} has no configuration that can be read: {error}") from error
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"SOURCE {source!r} is a {config.model_type!r} model, which is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization and not options and not dequantize:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"SOURCE {source!r} is quantised ({method}); training and merging need its weights in full precision: "
            "take the checkpoint it was made from, or pass --dequantize to restore them with what the format has lost"
        )
    restore = {"quantization_config": transformers.GgufConfig(dequantize=True)} if options else {}
    model = load_model(directory, "SOURCE", dtype, device, **options, **restore)
    if quantization and dequantize:
        model = model.dequantize()
    return model, load_tokenizer(directory, "SOURCE", model, needs_tokenizer, **options)


def _load_adapted(source: str, dtype: str, device: str, dequantize: bool, needs_tokenizer: bool) -> tuple:
    adapter = PeftConfig.from_pretrained(source)
    own_tokenizer = file_beside(source, "tokenizer_config.json") is not None
    model, tokenizer = load_base(
        adapter.base_model_name_or_path, dtype, device, dequantize, needs_tokenizer and not own_tokenizer
    )
    try:
        model = PeftModel.from_pretrained(model, source).merge_and_unload()
    except Exception as error:
        raise ValueError(f"the adapter of SOURCE {source!r} cannot be read: {error}") from error
    if own_tokenizer:
        tokenizer = load_tokenizer(source, "SOURCE", model)
    return model.eval(), tokenizer
