"""What a converted model has kept of its base, and what its HLA part adds to the window.

    python benchmarks/quality.py MODEL --base BASE --eval-file FILE

Measures the base, the converted model, and the converted model with its HLA part switched off (its gates at 0, so that
only window and sinks are left): perplexity by context and by position, KL and top-1 agreement with the base, passkey
retrieval by length and depth, cache bytes and speed. Prints tables; writes them as JSON to --output.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hla_hf  # noqa: F401  registers the HLA architectures
from conversion.convert import load_base
from conversion.evaluate import divergence, mean_over_rows, token_losses
from conversion.recall import WORDINGS, encode, evenly_spaced_rows, recall
from conversion.serving import measure
from conversion.text import read_tokens
from conversion.transfer import hla_parameters


POSITIONS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SUBJECTS = ["base", "HLA", "window only"]


IN_FILLER = {"passkey in filler": WORDINGS["passkey"]._replace(question="What is the pass key? The pass key is")}


@contextmanager
def window_only(model: PreTrainedModel) -> Iterator[None]:
    """Within this context nothing beyond the window and the sinks counts: every gate is exp(-inf) = 0."""
    gates = [p for name, p in hla_parameters(model).items() if name.endswith("gate")]
    if not gates:
        raise ValueError("the model has no window (hla_window=0), so its HLA part cannot be switched off")
    before = [p.detach().clone() for p in gates]
    for p in gates:
        p.data.fill_(-torch.inf)
    try:
        yield
    finally:
        for p, value in zip(gates, before, strict=True):
            p.data.copy_(value)


def by_position(losses: Tensor) -> dict[str, float]:
    """Perplexity of the tokens whose number of predecessors lies in each range, from losses `[N, T - 1]`."""
    ranges = [(a, b) for a, b in itertools.pairwise(POSITIONS) if a < losses.shape[1]]
    return {f"{a}-{b}": losses[:, a:b].mean().exp().item() for a, b in ranges}


@torch.no_grad()
def agreement(model: PreTrainedModel, base: PreTrainedModel, rows: Tensor) -> dict[str, float]:
    """KL from the base in nats per token and share of equal top-1 tokens, over rows `[N, T]`."""
    results = []
    for row in rows.split(1):
        logits = (m(row.to(m.device), use_cache=False).logits[0].float() for m in (base, model))
        results.append(divergence(*(x.log_softmax(-1) for x in logits)))
    return mean_over_rows(results)


def recall_results(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[int, dict[str, Tensor]],
    depths: Sequence[float],
) -> dict[str, float]:
    """`recall` in the texts of each length, as named shares; and the bytes of the cache."""
    results = {}
    for length, kinds in texts.items():
        found, size = recall(model, tokenizer, kinds["text"], depths)
        easy, _ = recall(model, tokenizer, kinds["filler"], depths, IN_FILLER)
        shares = [share for at in found.values() for share in at.values()]
        for name, at in (found | easy).items():
            results |= {f"recall at {length}, {name}, depth {depth:g}": share for depth, share in at.items()}
        results |= {f"recall at {length}": sum(shares) / len(shares), f"cache bytes at {length}": size}
    return results


def recall_texts(
    text: Tensor, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], trials: int
) -> dict[int, dict[str, Tensor]]:
    """For every length the running text of the trials, from `text [T]`, and a row of repeated filler."""
    filler = torch.tensor([encode(tokenizer, FILLER * (max(lengths) // 16 + 1))])
    return {n: {"text": evenly_spaced_rows(text, trials, n), "filler": filler[:, :n]} for n in lengths}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a converted model")
    parser.add_argument("--base", required=True, help="its base: a Hub id, a directory or a .gguf file")
    parser.add_argument("--eval-file", required=True, help="text for perplexity, agreement and recall")
    parser.add_argument("--eval-tokens", type=int, default=8192, help="tokens of it (default %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument(
        "--recall-trials", type=int, default=3, help="per length, depth and wording; 0 skips (default %(default)s)"
    )
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--serving-context", type=int, default=8192, help="for cache and speed; 0 skips")
    parser.add_argument("--subjects", nargs="+", default=SUBJECTS, choices=SUBJECTS, help="all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).to(options.device).eval()
    base, _ = load_base(options.base, str(model.dtype).removeprefix("torch."), options.device)
    rows = {
        n: read_tokens([options.eval_file], tokenizer, max(1, options.eval_tokens // n), n) for n in options.contexts
    }
    texts = {}
    if options.recall_trials:
        text = read_tokens([options.eval_file], tokenizer, None, 1).flatten()
        texts = recall_texts(text, tokenizer, options.contexts, options.recall_trials)
    results = {}
    for name in options.subjects:
        subject = base if name == "base" else model
        with window_only(model) if name == "window only" else nullcontext():
            losses = {n: token_losses(subject, x) for n, x in rows.items()}
            result = {f"perplexity at {n}": x.mean().exp().item() for n, x in losses.items()}
            longest = max(losses)
            result |= {f"perplexity at {longest}, tokens {k}": x for k, x in by_position(losses[longest]).items()}
            if subject is model:
                result |= agreement(model, base, rows[min(rows)])
            result |= recall_results(subject, tokenizer, texts, options.depths)
            if options.serving_context and name != "window only":
                prefill, decode, size = measure(subject, options.serving_context)
                result |= {"prefill tokens/s": prefill, "decode tokens/s": decode, "cache bytes": size}
        results[name] = result
        print(f"measured {name}", flush=True)

    print(f"\n{'':40}" + "".join(f"{name:>14}" for name in results))
    for key in dict.fromkeys(itertools.chain(*results.values())):
        values = [results[name].get(key) for name in results]
        print(f"{key:40}" + "".join(f"{'':>14}" if x is None else f"{x:14,.4g}" for x in values))
    if options.output:
        Path(options.output).write_text(json.dumps(vars(options) | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
