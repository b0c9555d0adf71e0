"""Seconds of the first call of a compiled model, and whether a second length needs another compilation.

    python benchmarks/compile_time.py [--layers 4] [--device cpu]

Models of SmolLM2-135M's shapes with random weights: its base (Llama with softmax attention), HLA with a window, and
with slots beside it. Each is told that the length changes (`torch._dynamo.mark_dynamic`); no compiler cache is used.
The first call compiles forward and backward for training, forward with the cache for prefill.
"""

import argparse
import time

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

import hla_hf


SHAPES = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"base": None, "windowed": {}, "slots": {"hla_slots": 32, "hla_slot_score": "learned"}}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 131])
    options = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    print(f"{'':10}{'':10}{'first call s':>14}{'next s':>10}{'graphs':>8}")
    for what in ("training", "prefill"):
        for name, settings in MODELS.items():
            torch._dynamo.reset()
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, **SHAPES)).to(options.device)
            if settings is not None:
                model = hla_hf.to_hla(model, **settings)
            model.train(what == "training")
            counter, seconds = CompileCounterWithBackend("inductor"), []
            compiled = torch.compile(model, fullgraph=True, backend=counter)
            for length in options.lengths:
                ids = torch.randint(0, SHAPES["vocab_size"], (1, length), device=options.device)
                torch._dynamo.mark_dynamic(ids, 1)
                start = time.perf_counter()
                if what == "training":
                    compiled(ids, labels=ids, use_cache=False).loss.backward()
                else:
                    with torch.no_grad():
                        compiled(ids, use_cache=True)
                seconds.append(time.perf_counter() - start)
            print(f"{what:10}{name:10}{seconds[0]:14.1f}{seconds[1]:10.1f}{counter.frame_count:8}", flush=True)


if __name__ == "__main__":
    main()
