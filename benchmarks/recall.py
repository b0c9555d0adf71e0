"""Does the order pay? Associative recall from scratch, at equal bytes of state.

    python benchmarks/recall.py

A sequence is key-value pairs, one token each (the embedding of the key plus that of the value), then the keys in
another order, each to be answered with its value. So nothing but the memory is tested: a pair of two tokens has to be
bound first, which models of this size do not learn in minutes. Two-layer models (Qwen3's, whose q and k are normalised)
learn it with each operator; heads are chosen so that all hold the same number of state entries per layer (first order
d d per head, second order 2 d d, third 3 d d). Prints the share of right answers on new sequences; softmax attention,
whose cache grows, is the reference.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hla_hf import HLAQwen3Config, HLAQwen3ForCausalLM


VARIANTS = {
    "softmax": None,
    "first order": {"hla_operator": "linear"},
    "ahla": {"hla_operator": "ahla"},
    "hla2, e = q": {"hla_operator": "hla2"},
    "hla2, e = k": {"hla_operator": "hla2", "hla_accumulator": "key"},
    "hla3": {"hla_operator": "hla3"},
    "hla3, e = k": {"hla_operator": "hla3", "hla_accumulator": "key"},
}
MATRICES = {"linear": 1, "ahla": 2, "hla2": 2, "hla3": 3}


def sequences(count: int, pairs: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens `[count, 2 pairs, 2]`: (key, value), then (key, question mark); answers `[count, pairs]`."""
    keys = torch.stack([torch.randperm(vocabulary, generator=generator)[:pairs] for _ in range(count)])
    values = torch.randint(vocabulary, 2 * vocabulary, keys.shape, generator=generator)
    order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(count)])
    questions = torch.stack([keys.gather(1, order), torch.full_like(keys, 2 * vocabulary)], 2)
    return torch.cat([torch.stack([keys, values], 2), questions], 1), values.gather(1, order)


def build(settings: dict | None, options: argparse.Namespace) -> PreTrainedModel:
    """A two-layer model with `heads` d d state entries per layer, or with softmax attention."""
    heads = options.heads // MATRICES[settings["hla_operator"]] if settings else options.heads
    sizes = {
        "vocab_size": 2 * options.vocabulary + 1, "hidden_size": options.width, "intermediate_size": 2 * options.width,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": options.head_dim, "max_position_embeddings": 1024,
    }  # fmt: skip
    if settings is None:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    common = {"hla_window": 0, "hla_feature_map": options.feature_map, "hla_normalizer": options.normalizer}
    return HLAQwen3ForCausalLM(HLAQwen3Config(**sizes, **common, **settings))


def train(model: PreTrainedModel, options: argparse.Namespace, seed: int) -> float:
    """Trains on fresh sequences; the share of right answers on 512 new ones."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)

    def answer_logits(tokens):
        embeddings = model.get_input_embeddings()(tokens).sum(2)
        return model(inputs_embeds=embeddings, use_cache=False).logits[:, options.pairs :]

    model.train()
    for _ in range(options.steps):
        tokens, answers = sequences(options.batch_size, options.pairs, options.vocabulary, generator)
        F.cross_entropy(answer_logits(tokens).flatten(0, 1), answers.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    generator.manual_seed(10_000 + seed)
    tokens, answers = sequences(512, options.pairs, options.vocabulary, generator)
    with torch.no_grad():
        return (answer_logits(tokens).argmax(-1) == answers).float().mean().item()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=64, help="keys, and as many values (default %(default)s)")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--heads", type=int, default=12, help="of first order and softmax (default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=8)
    parser.add_argument("--feature-map", default="identity")
    parser.add_argument("--normalizer", default="rms")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    results = {}
    for name in options.variants:
        start = time.perf_counter()
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            results.setdefault(name, []).append(train(build(VARIANTS[name], options), options, seed))
        seconds = time.perf_counter() - start
        print(f"{name:14}" + "".join(f"{x:8.3f}" for x in results[name]) + f"   ({seconds:.0f} s)", flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(vars(options) | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
