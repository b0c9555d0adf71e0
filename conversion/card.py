"""The model card of a conversion."""

from importlib.resources import files
from string import Template


def fill(template: str, **values: str) -> str:
    """A file of `model_cards/` with its names filled in."""
    return Template((files("model_cards") / template).read_text()).substitute(values)


def settings_table(settings: dict) -> str:
    """The rows of a card's table of settings."""
    return "\n".join(f"| `{name}` | `{value}` |" for name, value in settings.items())


def model_card(report: dict) -> str:
    """The model card of a conversion, from `model_cards/template.md` and its report."""
    rows = []
    for title, key in (
        ("KL to the base model (nats per token)", "kl"),
        ("top-1 agreement with the base model", "top1"),
        ("perplexity", "perplexity"),
    ):
        if key in report["after"]:
            base = report["base"].get(key, "")
            values = (base, report["before"][key], report["after"][key])
            rows.append(f"| {title} | " + " | ".join(f"{x:.4g}" if x != "" else "" for x in values) + " |")
    return fill(
        "template.md", name=report["name"], base_model=report["source"], command=report["command"],
        rows="\n".join(rows), settings=settings_table(report["hla"]), text=report["text"],
        evaluation=report["evaluation"],
        losses=", ".join(f"{x:.3f}" for x in report["layer_losses"]) or "not trained",
    )  # fmt: skip
