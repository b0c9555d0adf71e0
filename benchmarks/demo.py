"""Load a converted model where hla_hf cannot be imported, chat with it, and compare it with its base model.

    python benchmarks/demo.py CONVERTED --base BASE

Streams an answer; asks both models for a fact that was given some thousand tokens earlier; prints, for both, the speed
of prefill and decoding and the bytes of the cache at two contexts, and the agreement that the conversion measured.
"""

import argparse
import json
import sys
from pathlib import Path


sys.modules["hla_hf"] = None  # from here on importing the package fails: the directory must be enough

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from conversion.serving import cache_bytes, measure, read  # noqa: E402


FACT = "\nThe wifi password of the guest house is 74163.\n"
QUESTION = "\nWhat is the wifi password of the guest house? The wifi password of the guest house is"


def load_base(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The base model of a Hub id, a directory or a .gguf file."""
    source = Path(name)
    if source.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    options = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=dtype, **options).eval()


def chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> None:
    """Streams an answer."""
    print(f"\n> {prompt}")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    model.generate(
        **ids, max_new_tokens=80, do_sample=True, temperature=0.2, repetition_penalty=1.1,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )  # fmt: skip


def answer_later(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, text: str, distance: int
) -> None:
    """States a fact, lets `distance` tokens of `text` follow, and prints how each model completes the answer."""
    tokens = tokenizer(text).input_ids[:distance]
    fact, question = (tokenizer(x, add_special_tokens=False).input_ids for x in (FACT, QUESTION))
    print(f"\n{FACT.strip()}\n[... {len(tokens):,} tokens of other text ...]{QUESTION}")
    for name, model in models.items():
        token, cache = read(model, torch.tensor([fact + tokens + question]))
        size, answer = cache_bytes(cache), [token]
        for _ in range(7):
            token, cache = read(model, token, cache)
            answer.append(token)
        line = tokenizer.decode(torch.cat(answer, 1)[0]).strip().partition("\n")[0]
        print(f"{name:6}{line:40} from {size:,} bytes of cache", flush=True)


def compare_speed(models: dict[str, PreTrainedModel], contexts: list[int]) -> None:
    """Prints speed and cache of each model at each context."""
    print(f"\n{'':8}{'context':>8}{'prefill tok/s':>15}{'decode tok/s':>14}{'cache bytes':>14}")
    for context in contexts:
        for name, model in models.items():
            prefill, decode, size = measure(model, context)
            print(f"{name:8}{context:8,}{prefill:15.0f}{decode:14.1f}{size:14,}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="the converted directory")
    parser.add_argument("--base", required=True, help="the base model: a Hub id, a directory or a .gguf file")
    parser.add_argument("--prompt", default="Give me three tips for writing clearly.")
    parser.add_argument(
        "--distances", type=int, nargs="+", default=[1000, 3000], help="tokens from the fact to its question"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
    hla = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True).eval()
    print(f"\nloaded {type(hla).__module__}.{type(hla).__name__}")
    chat(hla, tokenizer, options.prompt)
    models = {"base": load_base(options.base, hla.dtype), "HLA": hla}
    project = Path(__file__).parents[1]
    text = "\n".join(path.read_text() for path in (project / "README.md", *sorted(project.glob("docs/*.md"))))
    for distance in options.distances:
        answer_later(models, tokenizer, text, distance)
    compare_speed(models, options.contexts)
    report = json.loads((Path(options.model) / "conversion.json").read_text())
    print(f"\n{'agreement with the base':28}{'before':>8}{'after':>8}")
    for title, key in (("KL (nats per token)", "kl"), ("same top-1 token (share)", "top1")):
        print(f"{title:28}{report['before'][key]:8.3f}{report['after'][key]:8.3f}")


if __name__ == "__main__":
    main()
