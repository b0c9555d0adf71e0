"""Read a document once and keep its state: the file's size, and the time to the first token against reading again.

    python benchmarks/prompt_state.py SOURCE [--tokens 16384] [--question-tokens 20]

SOURCE is a Hub id, a directory or a .gguf file; a model that is not HLA is converted, untrained: times and sizes do not
depend on the weights.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

import hla_hf
from conversion.convert import load_base
from hla_hf.modeling_hla import _CACHE_ARGUMENT


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, cache: object = None) -> tuple[torch.Tensor, object]:
    """Logits `[1, 1, V]` after the last of `ids` `[1, T]`, and the cache."""
    output = model(ids, logits_to_keep=1, use_cache=True, **{_CACHE_ARGUMENT: cache})
    return output.logits, output[_CACHE_ARGUMENT]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--question-tokens", type=int, default=20)
    parser.add_argument("--window", type=int, default=64)
    options = parser.parse_args()
    model, _ = load_base(options.source)
    if not model.config.model_type.startswith("hla_"):
        model = hla_hf.to_hla(model, hla_window=options.window)
    model.eval()
    ids = torch.randint(5, model.config.vocab_size, (1, options.tokens + options.question_tokens))
    document, question = ids.split([options.tokens, options.question_tokens], 1)

    start = time.perf_counter()
    cache = read(model, document)[1]
    reading = time.perf_counter() - start
    print(f"read {options.tokens:,} tokens once in {reading:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.safetensors"
        model.save_cache(cache, path)
        print(f"file: {path.stat().st_size:,} bytes")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            logits, _ = read(model, question, model.load_cache(path))
            times.append(time.perf_counter() - start)
    start = time.perf_counter()
    expected, _ = read(model, ids)
    again = time.perf_counter() - start
    loaded = statistics.median(times)
    print(
        f"first token of the answer: {loaded:.3f} s from the file, {again:.2f} s reading again ({again / loaded:.0f}x)"
    )
    print(f"largest difference of the logits: {(logits - expected).abs().max():.2e}")


if __name__ == "__main__":
    main()
