"""Speed and memory of a converted model over its base: prefill, a decoding step, a training step.

    python benchmarks/models.py BASE HLA [--contexts 512 1024 2048 8192] [--batch 1] [--compile] [--json FILE]

Both models are in one process and take turns run by run, so that a busy machine slows both. A training step is forward
and backward of one row of the context, with gradients of all weights; decoding is of `--batch` rows. Prints medians of
tokens per second with their ratio (above 1 HLA is faster), and the memory that a call needs beside the model (below 1
HLA needs less): at its peak, and what stays after reading, which is the cache.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from ops import Device, draw, medians
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel, StaticCache

import hla_hf  # noqa: F401  registers the HLA architectures
from conversion.convert import load_base
from conversion.serving import read


def decoding_step(model: PreTrainedModel, token: Tensor, cache: Cache) -> Callable[[], None]:
    """A function that decodes one more token each time it is called."""

    def step() -> None:
        nonlocal token, cache
        token, cache = read(model, token, cache)

    return step


def compiled_decoding_step(model: PreTrainedModel, ids: Tensor, steps: int) -> Callable[[], None]:
    """The same with the step compiled, after `ids [1, T]`; the static cache has room for `steps` more tokens."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps)
    mode = "reduce-overhead" if ids.is_cuda else None  # one launch of a captured graph per token
    return decoding_step(torch.compile(model, fullgraph=True, mode=mode), *read(model, ids, cache))


def training_step(model: PreTrainedModel, ids: Tensor) -> Callable[[], None]:
    """A function that computes the gradients of the loss of `ids [1, T]`, and drops them."""

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def rows_at(
    context: int, models: dict[str, PreTrainedModel], device: Device, options: argparse.Namespace
) -> list[dict]:
    """The results at one context: `{"context", "what", name of a model: tokens per second or bytes, "ratio"}` each."""
    vocabulary = models["base"].config.vocab_size
    ids = torch.randint(0, vocabulary, (1, context), generator=torch.Generator().manual_seed(0)).to(options.device)
    rows = []

    def add(what: str, base: float, hla: float) -> None:
        rows.append({"context": context, "what": what, "base": base, "HLA": hla, "ratio": hla / base})
        print(f"{context:8,}  {what:26}{base:16,.1f}{hla:16,.1f}{hla / base:10.2f}", flush=True)

    def add_speed(what: str, functions: dict[str, Callable], tokens: int, repeats: int) -> None:
        add(f"{what} tokens/s", *(tokens / x for x in medians(device, functions, repeats, options.limit).values()))

    reading = {name: lambda m=model: read(m, ids) for name, model in models.items()}
    add_speed("prefill", reading, context, options.rounds)
    rows_of_ids = ids.expand(options.batch, -1)
    steps = {name: decoding_step(model, *read(model, rows_of_ids)) for name, model in models.items()}
    add_speed("decode", steps, options.batch, options.steps)
    if options.compile:
        torch._dynamo.reset()
        steps = {name: compiled_decoding_step(model, rows_of_ids, options.steps + 1) for name, model in models.items()}
        add_speed("decode, compiled", steps, options.batch, options.steps)
    del steps
    gc.collect()
    peaks, held = zip(*(device.memory(read_it) for read_it in reading.values()), strict=True)
    add("prefill peak bytes", *peaks)
    add("cache bytes", *held)

    if context <= options.max_training_context:
        training = {name: training_step(model.train(), ids) for name, model in models.items()}
        add_speed("training", training, context, options.rounds)
        add("training peak bytes", *(device.memory(step)[0] for step in training.values()))
        for model in models.values():
            model.eval()
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", metavar="BASE", help="Hub id, directory or .gguf file")
    parser.add_argument("hla", metavar="HLA", help="the converted model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5, help="of prefill and training (default %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="of decoding (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="rows of decoding (default %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=30, help="what takes more seconds runs once (default %(default)s)"
    )
    parser.add_argument(
        "--max-training-context", type=int, default=8192, help="no training step above it; 0 for none (default 8192)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="training steps with gradient checkpointing")
    parser.add_argument("--compile", action="store_true", help="also decode with torch.compile and a static cache")
    parser.add_argument("--threads", type=int, help="default: as PyTorch has it")
    parser.add_argument("--dtype", default="auto", help="default: the base's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens per second there, with matplotlib")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    base, _ = load_base(options.base, options.dtype, options.device)
    hla = AutoModelForCausalLM.from_pretrained(options.hla, dtype=base.dtype).to(options.device).eval()
    if options.checkpointing:
        for model in (base, hla):
            model.gradient_checkpointing_enable()
    threads = torch.get_num_threads()
    print(f"{hla.dtype}, {options.device}, {threads} threads")
    print(f"{'context':>8}  {'':26}{'base':>16}{'HLA':>16}{'HLA/base':>10}")
    device, models = Device(options.device), {"base": base, "HLA": hla}
    rows = []
    for context in options.contexts:
        rows += rows_at(context, models, device, options)
    if options.json:
        Path(options.json).write_text(
            json.dumps(vars(options) | {"threads": threads, "results": rows}, indent=2) + "\n"
        )
    if options.plot:
        speeds = [row for row in rows if row["what"].endswith("tokens/s")]
        draw(((x["what"], name, x["context"], x[name]) for x in speeds for name in models), options.plot, "tokens/s")


if __name__ == "__main__":
    main()
