"""Model cards: their front matter, which the Hub reads, and the card of a conversion."""

import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .load import file_beside


class Origin(NamedTuple):
    """What the card of a model inherits from the one that it was made of."""

    base_model: str | None  # a Hub id
    license: dict[str, str]  # `license`, and of one with a name of its own `license_name` and `license_link`
    language: str | list[str] | None


def origin_of(source: str) -> Origin:
    """The Hub id, license and language of a model that `source` names, from its card or GGUF file."""
    base_model = None if Path(source).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source) else source
    if source.endswith(".gguf"):
        return Origin(base_model, _gguf_license(source), None)
    path = file_beside(source, "README.md")
    if path is None:
        return Origin(base_model, {}, None)
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data
    except Exception:  # a README that is no model card
        return Origin(base_model, {}, None)
    license = {name: data.get(name) for name in ("license", "license_name", "license_link") if data.get(name)}
    return Origin(base_model or (data.get("base_model") if Path(source).exists() else None), license, data.language)


def _gguf_license(path: str) -> dict[str, str]:
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("general.license")
    if field is None:
        return {}
    license = bytes(field.parts[field.data[0]]).decode()
    if re.fullmatch(r"[a-z0-9.-]+", license):
        return {"license": license}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", license.lower()).strip("-")}


class Measure(NamedTuple):
    """A result of an evaluation on a text, for the card's `model-index`."""

    metric: str
    title: str
    value: float
    text: str


def front_matter(name: str, origin: Origin, data: Sequence[str], measures: Sequence[Measure]) -> str:
    """The YAML of a card: of `data`, what training read, the datasets of the Hub alone are named."""
    results = [
        EvalResult(
            task_type="text-generation", dataset_type=re.sub(r"[^\w./-]+", "-", x.text), dataset_name=x.text,
            metric_type=x.metric, metric_name=x.title, metric_value=round(x.value, 4),
        )
        for x in measures
        if math.isfinite(x.value)
    ]  # fmt: skip
    datasets = [x.partition(":")[0] for x in data if x != "self" and not Path(x).exists()]
    fields: dict[str, Any] = {
        "base_model": origin.base_model,
        "base_model_relation": "finetune" if origin.base_model else None,
        "datasets": [x for x in datasets if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", x)] or None,
        "language": origin.language,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hla", "higher-order-linear-attention", "linear-attention"],
        "model_name": name if results else None,
        "eval_results": results or None,
    }
    return ModelCardData(**({"license": "unknown"} | origin.license), **fields).to_yaml()


def describe_license(origin: Origin) -> str:
    """The card's sentence on its license."""
    license = origin.license.get("license_name") or origin.license.get("license")
    if license is None:
        return "The license is unknown: neither the base model's files nor its card name one."
    return f"The license is that of the base model, {license}."


def fill(template: str, **values: str) -> str:
    """A file of `model_cards/` with its names filled in."""
    return Template((files("model_cards") / template).read_text()).substitute(values)


def settings_table(settings: dict) -> str:
    """The rows of a card's table of settings."""
    return "\n".join(f"| `{name}` | `{value}` |" for name, value in settings.items())


def describe_memory(size: dict[str, int]) -> str:
    """What is remembered beside what the base remembers: `context` tokens, bytes of the `model` and the `base`."""
    model, base = (size[x] / 1e6 for x in ("model", "base"))
    return f"Of {size['context']:,} tokens it remembers {model:.3g} MB, the base model {base:.3g} MB."


MEASURES = {
    "kl": "KL to the base model (nats per token)",
    "top1": "top-1 agreement with the base model",
    "perplexity": "perplexity",
    "recall": "facts found in running text (share)",
}


def model_card(report: dict, origin: Origin, data: Sequence[str], repository: str | None = None) -> str:
    """The model card of a conversion, from `model_cards/template.md` and its report.

    Args:
        data: what it was trained on.
        repository: where it will be uploaded to.
    """
    measured = {key: title for key, title in MEASURES.items() if key in report["after"]}
    rows = []
    for key, title in measured.items():
        values = (report[when].get(key, "") for when in ("base", "before", "after"))
        rows.append(f"| {title} | " + " | ".join(f"{x:.4g}" if x != "" else "" for x in values) + " |")
    texts = dict.fromkeys(measured, "held-out text") | dict.fromkeys(("perplexity", "recall"), report["eval_text"])
    measures = [Measure(key, title, report["after"][key], texts[key]) for key, title in measured.items()]
    return fill(
        "template.md", front_matter=front_matter(report["name"], origin, data, measures), name=report["name"],
        base_model=origin.base_model or report["source"], license=describe_license(origin), command=report["command"],
        repository=repository or "PATH_OR_REPOSITORY", rows="\n".join(rows), settings=settings_table(report["hla"]),
        text=report["text"], evaluation=report["evaluation"], memory=describe_memory(report["bytes"]),
        losses=", ".join(f"{x:.3f}" for x in report["layer_losses"]) or "not trained",
    )  # fmt: skip
