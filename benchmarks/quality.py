"""What a converted model has kept of its base, and what its HLA part adds to the window.

    python benchmarks/quality.py MODEL --base BASE --eval-file FILE

Measures the base, the converted model, and the converted model with its HLA part switched off (its gates at 0, so that
only window and sinks are left): perplexity by context and by position, KL and top-1 agreement with the base, passkey
retrieval by length and depth, cache bytes and speed. Prints tables; writes them as JSON to --output.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from serving import measure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hla_hf  # noqa: F401  registers the HLA architectures
from conversion.convert import load_base
from conversion.evaluate import divergence, mean_over_rows, token_losses
from conversion.text import read_tokens
from conversion.transfer import hla_parameters


POSITIONS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
SUBJECTS = ["base", "HLA", "window only"]


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
def passkey(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, trials: int
) -> float:
    """Share of trials in which the model's greedy continuation is the key that stood at `depth` of `length` tokens."""
    found = 0
    for trial in range(trials):
        key = str(torch.randint(10000, 100000, (1,), generator=torch.Generator().manual_seed(trial)).item())
        parts = [tokenizer(text, add_special_tokens=False).input_ids for text in (PASSKEY.format(key=key), QUESTION)]
        room = length - sum(map(len, parts))
        filler = tokenizer(FILLER * (length // 16 + 1), add_special_tokens=False).input_ids
        before = int(depth * room)
        ids = torch.tensor([filler[:before] + parts[0] + filler[before:room] + parts[1]], device=model.device)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        found += tokenizer.decode(answer[0, ids.shape[1] :]).strip().startswith(key)
    return found / trials


@torch.no_grad()
def agreement(model: PreTrainedModel, base: PreTrainedModel, rows: Tensor) -> dict[str, float]:
    """KL from the base in nats per token and share of equal top-1 tokens, over rows `[N, T]`."""
    results = []
    for row in rows.split(1):
        logits = (m(row.to(m.device), use_cache=False).logits[0].float() for m in (base, model))
        results.append(divergence(*(x.log_softmax(-1) for x in logits)))
    return mean_over_rows(results)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a converted model")
    parser.add_argument("--base", required=True, help="its base: a Hub id, a directory or a .gguf file")
    parser.add_argument("--eval-file", required=True, help="text for perplexity and agreement")
    parser.add_argument("--eval-tokens", type=int, default=8192, help="tokens of it (default %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--passkey-trials", type=int, default=1, help="per length and depth; 0 skips (default 1)")
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
            for length in options.contexts if options.passkey_trials else ():
                for depth in options.depths:
                    share = passkey(subject, tokenizer, length, depth, options.passkey_trials)
                    result[f"passkey at {length}, depth {depth:g}"] = share
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
