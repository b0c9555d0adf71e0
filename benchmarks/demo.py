"""Load a converted model where hla_hf cannot be imported, stream an answer, and compare it with its base model.

    python benchmarks/demo.py CONVERTED --base BASE

Prints, for both, prefill and decoding speed and the bytes of the cache at two contexts, and the agreement with the base
that the conversion measured.
"""

import argparse
import json
import sys
from pathlib import Path


sys.modules["hla_hf"] = None  # from here on importing the package fails: the directory must be enough

import torch  # noqa: E402
from serving import measure  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TextStreamer  # noqa: E402


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="the converted directory")
    parser.add_argument("--base", required=True, help="the base model: a Hub id, a directory or a .gguf file")
    parser.add_argument("--prompt", default="Give me three tips for writing clearly.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
    hla = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True).eval()
    print(f"\nloaded {type(hla).__module__}.{type(hla).__name__}\n\n> {options.prompt}")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    hla.generate(
        **chat, max_new_tokens=80, do_sample=True, temperature=0.2, repetition_penalty=1.1,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )  # fmt: skip

    source = Path(options.base)
    gguf = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
    gguf = gguf if source.suffix == ".gguf" else {}
    base = AutoModelForCausalLM.from_pretrained(str(source.parent) if gguf else options.base, dtype=hla.dtype, **gguf)

    print(f"\n{'':8}{'context':>8}{'prefill tok/s':>15}{'decode tok/s':>14}{'cache bytes':>14}")
    for context in options.contexts:
        for name, model in (("base", base.eval()), ("HLA", hla)):
            prefill, decode, size = measure(model, context)
            print(f"{name:8}{context:8,}{prefill:15.0f}{decode:14.1f}{size:14,}", flush=True)
    report = json.loads((Path(options.model) / "conversion.json").read_text())
    print(f"\n{'agreement with the base':28}{'before':>8}{'after':>8}")
    for title, key in (("KL (nats per token)", "kl"), ("same top-1 token (share)", "top1")):
        print(f"{title:28}{report['before'][key]:8.3f}{report['after'][key]:8.3f}")


if __name__ == "__main__":
    main()
