"""What each part of an HLA layer is worth: variants of the far part, layer by layer, in dense form.

    python benchmarks/ablation.py BASE --data TRAIN.txt --eval-file EVAL.txt

For a few layers of a softmax model, trains each variant to give the layer's softmax output from the same q, k and v, on
rows of 512 tokens, as attention transfer does. Prints the squared error over the output's energy on rows of 4,096
tokens by the number of tokens before, and the state in floats per layer. The dense form is slow, but a variant that the
library does not have is one line here.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from conversion.convert import load_base
from conversion.text import read_tokens
from conversion.transfer import normalized_error, visit_attention
from hla_hf import feature_map, to_hla
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import hla_attentions


POSITIONS = (128, 512, 1024, 2048, 4096)
VARIANTS = {
    "window only": {"steps": 0},
    # first order, one part after the other
    "first order: rotated features, no sizes, n^0": {"rotated": True, "sizes": False, "exponent": 0.0},
    "n^-1/2": {"rotated": True, "sizes": False},
    "unrotated": {"sizes": False, "exponent": 0.0},
    "unrotated, n^-1/2": {"sizes": False},
    "unrotated, n^-1/2, sizes (the default)": {},
    # around the default
    "n^0": {"exponent": 0.0},
    "n^-1": {"exponent": 1.0},
    "n^-p, p learned per head from 1/2": {"learned_exponent": True},
    "maps from 2 times the identity": {"map_scale": 2.0},
    "maps from half the identity": {"map_scale": 0.5},
    "rotated": {"rotated": True},
    "decay per head": {"decay": True},
    "decay per head, n^0": {"decay": True, "exponent": 0.0},
    "2 x 32 features": {"features": 32},
    "2 x 128 features": {"features": 128},
    "key maps per query head": {"own_keys": True},
    "1 sink": {"sinks": 1},
    "16 sinks": {"sinks": 16},
    "window 32": {"window": 32},
    "window 128": {"window": 128},
    "window 256": {"window": 256},
    # higher orders
    "ahla, shared b": {"order": "ahla", "coefficient": "shared"},
    "ahla, b per head": {"order": "ahla"},
    "ahla, b per token": {"order": "ahla", "coefficient": "token"},
    "ahla, normalised at the end": {"order": "ahla", "per_pass": False},
    "hla2, e = k, shared b": {"order": "hla2", "coefficient": "shared"},
    "hla2, e = k, b per head": {"order": "hla2"},
    "hla2, e = k, b per token": {"order": "hla2", "coefficient": "token"},
    "hla2, e = k, normalised at the end": {"order": "hla2", "per_pass": False},
    "hla2, e = q": {"order": "hla2", "e": "q"},
    "hla3, e = k": {"order": "hla3"},
    "hla3, e = q": {"order": "hla3", "e": "q"},
}


class DenseLayer(nn.Module):
    """`windowed_attention` as T x T matrices, with the choices that a variant makes."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, *, window: int = 64, sinks: int = 4, rotated: bool = False,
        sizes: bool = True, exponent: float = 0.5, learned_exponent: bool = False, decay: bool = False,
        features: int | None = None, map_scale: float = 1.0, own_keys: bool = False, order: str = "linear",
        e: str = "k", coefficient: str = "head", per_pass: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.window, self.sinks = heads, kv_heads, dim, window, sinks
        self.rotated, self.exponent, self.e, self.per_pass = rotated, exponent, e, per_pass
        if learned_exponent:
            self.exponent = nn.Parameter(torch.full((heads, 1, 1), exponent))
        features = features or dim
        key_heads = heads if own_keys else kv_heads
        self.q_map = nn.Parameter(map_scale * torch.eye(dim, features).repeat(heads, 1, 1))
        self.k_map = nn.Parameter(map_scale * torch.eye(dim, features).repeat(key_heads, 1, 1))
        self.q_size = nn.Parameter(torch.zeros(heads, dim)) if sizes else None
        self.k_size = nn.Parameter(torch.zeros(key_heads, dim)) if sizes else None
        # from a rate at which 500 tokens weigh the same whatever the exponent
        self.gate = nn.Parameter(torch.full((heads,), -1.0 + 6.2 * (exponent - 0.5)))
        self.decay = nn.Parameter(torch.linspace(9, 14, kv_heads) * 0.693) if decay else None
        orders = {"ahla": ["value"], "hla2": ["key"], "hla3": ["key", "value"]}.get(order, [])
        self.mix = nn.ParameterDict({x: torch.zeros(1 if coefficient == "shared" else heads) for x in orders})
        self.mix_map = nn.ParameterDict({x: torch.zeros(heads, dim) for x in orders if coefficient == "token"})

        # key-value pairs under phi(k) or u, then phi(k) under e, then the window's k, unrotated k, v, r and q
        rows, mixed = 2 * features, order in ("ahla", "hla3")
        self.state_size = rows * (dim + 1) * (heads if own_keys or order != "linear" else kv_heads)
        self.state_size += mixed * rows * (dim + 1) * key_heads + (order in ("hla2", "hla3")) * rows**2 * key_heads
        self.state_size += window * dim * (kv_heads * (2 if rotated else 3) + heads * (mixed + (e == "q")))
        self.state_size += sinks * dim * kv_heads * 2

    def coefficient(self, name: str, keys: Tensor) -> Tensor:
        """`[H or 1, 1 or T, 1]`, from 0."""
        value = self.mix[name][:, None, None]
        return value + (keys @ self.mix_map[name][..., None]) if name in self.mix_map else value

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k `[B, H or Hkv, T, 2 d]`, rotated then not, v `[B, Hkv, T, d]`: out `[B, H, T, d]`."""
        length, dim = q.shape[2], self.dim
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        q_seen, k_seen = (x[..., :dim] if self.rotated else x[..., dim:] for x in (q, k))
        index = torch.arange(length)
        distance = index[:, None] - index
        stored = index >= self.sinks
        near = (distance >= 0) & ((distance < self.window) | ~stored)
        far = (distance >= self.window) & stored
        scores = (q[..., :dim] @ k[..., :dim].mT * dim**-0.5).masked_fill(~near, -torch.inf)
        near = (scores - scores.amax(-1, keepdim=True)).exp()

        def features(x, weight, size):
            group = self.heads // len(weight)
            size = None if size is None else size.repeat_interleave(group, 0)
            return feature_map("hedgehog", x, weight.repeat_interleave(group, 0), size)

        phi_q, phi_k = features(q_seen, self.q_map, self.q_size), features(k_seen, self.k_map, self.k_size)
        keys = phi_k
        if "key" in self.mix:
            e = phi_k if self.e == "k" else phi_q
            inner = e @ phi_k.mT * ((distance >= 0) & stored)
            u = inner @ phi_k
            if self.per_pass:
                u = u / inner.sum(-1, keepdim=True).clamp(min=1e-6)
            keys = phi_k + self.coefficient("key", k_seen) * u if self.e == "k" else u
        weights = phi_q @ keys.mT * far
        if self.decay is not None:
            rate = F.logsigmoid(self.decay).repeat_interleave(self.heads // self.kv_heads)
            weights = weights * (rate[:, None, None] * distance.clamp(min=0)).exp()
        count = (index - (self.window + self.sinks - 1)).clamp(min=1)[:, None]
        weights = weights * (self.gate.exp()[:, None, None] * count**-self.exponent)
        both = near + weights
        if "value" not in self.mix:
            return both @ v / both.sum(-1, keepdim=True)
        b = self.coefficient("value", k_seen)
        first = both @ v
        if self.per_pass:
            r = first / both.sum(-1, keepdim=True)
            return (near @ v + weights @ ((1 - b) * v + b * r)) / both.sum(-1, keepdim=True)
        mass = both.sum(-1, keepdim=True)
        return (first + weights @ (b * first)) / (mass + weights @ (b * mass))


def attention_inputs(model: PreTrainedModel, row: Tensor, layers: list[int]) -> dict[int, tuple[Tensor, ...]]:
    """q, k, v and the softmax output of some layers on `row [T]`."""
    inputs = {}

    def visit(attention, tokens, out):
        if attention.layer_idx in layers:
            q, k = (torch.cat(pair, -1) for pair in ((tokens.q, tokens.far_q), (tokens.k, tokens.far_k)))
            inputs[attention.layer_idx] = q, k, tokens.v, out

    visit_attention(model, row[None], visit)
    return inputs


def train(layer: nn.Module, rows: list[tuple[Tensor, ...]], options: argparse.Namespace) -> None:
    """One cycle of AdamW on the normalised error, as attention transfer does it."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    order = torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        batch = torch.randperm(len(rows), generator=order)[: options.batch_size].tolist()
        q, k, v, target = (torch.cat(x) for x in zip(*(rows[i] for i in batch), strict=True))
        normalized_error(layer(q, k, v), target).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", metavar="BASE", help="a softmax model: a Hub id, a directory or a .gguf file")
    parser.add_argument("--data", nargs="+", required=True, help="text to train on")
    parser.add_argument("--eval-file", required=True, help="text to measure on")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 14, 26])
    parser.add_argument("--tokens", type=int, default=24576, help="to train on (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-rows", type=int, default=1)
    parser.add_argument("--eval-len", type=int, default=POSITIONS[-1], help="tokens of each (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()

    model, tokenizer = load_base(options.base, "float32")
    rows = read_tokens(options.data, tokenizer, options.tokens // options.seq_len, options.seq_len)
    eval_rows = read_tokens([options.eval_file], tokenizer, options.eval_rows, options.eval_len)
    to_hla(model, hla_operator="linear")
    training, held_out = ([attention_inputs(model, row, options.layers) for row in x] for x in (rows, eval_rows))
    config = model.config
    sizes = config.num_attention_heads, config.num_key_value_heads, hla_attentions(model)[0].head_dim
    attention = hla_attentions(model)[options.layers[0]]
    q, k, v, _ = training[0][options.layers[0]]
    (near_q, far_q), (near_k, far_k) = q.chunk(2, -1), k.chunk(2, -1)
    tokens = LayerTokens(near_q, near_k, v, far_q, far_k)
    with torch.no_grad():  # what is varied here is what the library computes
        torch.testing.assert_close(
            DenseLayer(*sizes)(q, k, v),
            attention.hla(tokens)[0],
            atol=1e-4,
            rtol=1e-3,
        )
    ranges = [(a, b) for a, b in itertools.pairwise(POSITIONS) if a < options.eval_len]
    print(f"{'':46}" + "".join(f"{f'-{b}':>8}" for _, b in ranges) + "   state")
    results = {}
    for name in options.variants:
        start, settings = time.perf_counter(), dict(VARIANTS[name])
        steps = settings.pop("steps", options.steps)
        errors = []
        for i in options.layers:
            torch.manual_seed(0)
            layer = DenseLayer(*sizes, **settings)
            if steps:
                train(layer, [row[i] for row in training], options)
            else:
                layer.gate.data.fill_(-torch.inf)
            with torch.no_grad():
                for row in held_out:
                    q, k, v, target = row[i]
                    out = layer(q, k, v)
                    errors.append([normalized_error(out[:, :, a:b], target[:, :, a:b]) for a, b in ranges])
        mean = torch.tensor(errors).mean(0).tolist()
        results[name] = {"errors": mean, "state": layer.state_size, "layers": torch.tensor(errors).tolist()}
        print(
            f"{name:46}" + "".join(f"{x:8.4f}" for x in mean) + f"{layer.state_size:8,}"
            f"   ({time.perf_counter() - start:.0f} s)", flush=True,
        )  # fmt: skip
    if options.output:
        Path(options.output).write_text(json.dumps(vars(options) | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
