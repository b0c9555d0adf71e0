"""Does a second-order quantity pay beside exact slots? Whole models, the same state, the same attention transfer.

    python benchmarks/order.py BASE --data TRAIN.txt --eval-file EVAL.txt

`linear` has `--slots` slots per layer on average, spread by what each layer costs. Every other variant has as many
fewer as its own state takes, unless it says otherwise, and 0 where that is too large:

    delta      stores w_j = v_j - c LA(phi(k_j); phi(k), w)_j / mass: what the state already gives back is taken out
    residual   the same of v: w_j = v_j - c LA(phi(k_j); phi(k), v)_j / mass, which takes a second state, of v
    metric     reads with q + c S q, S the second moment of the absorbed keys over its mean eigenvalue
    hla2, ahla the library's operators, hla2 with e = phi(k)

c is learned from 0, one number per key-value head, of `metric` per query head. What the library does not have is
computed in dense form. Prints perplexity by length of context and the error of attention transfer on text held out.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from conversion.convert import RANKING_LENGTH, load_base
from conversion.evaluate import perplexity
from conversion.keep import layer_costs, spread_slots
from conversion.text import read_tokens
from conversion.transfer import layer_losses, transfer_attention, visit_attention
from hla_hf import softmax_attention, to_hla, to_softmax
from hla_hf.cache_hla import LayerTokens
from hla_hf.layer_hla import HLALayer, LayerSettings, hla_attentions
from hla_hf.ops_hla import repeat_heads, safe_divide
from hla_hf.slots_hla import choose, take


EVAL_LENGTHS = (1024, 2048)
VARIANTS = {  # the operator, what `DenseLayer` adds, whether it has as many slots as `linear` whatever its own state
    "linear": ("linear", None, False),
    "delta": ("linear", "delta", False),
    "metric": ("linear", "metric", False),
    "hla2, as many slots": ("hla2", None, True),
    "residual": ("linear", "residual", False),
    "hla2": ("hla2", None, False),
    "ahla": ("ahla", None, False),
}


class DenseLayer(HLALayer):
    """First order beside window and slots as T x T matrices, of rows without padding, with one quantity of second order
    or none."""

    def __init__(self, settings: LayerSettings, quantity: str | None):
        super().__init__(settings)
        self.reset()
        self.quantity = quantity
        if quantity:
            self.c = nn.Parameter(torch.zeros(settings.heads if quantity == "metric" else settings.key_value_heads))

    def own_state(self) -> int:
        """Floats of state beyond the library's."""
        heads, dim = self.settings.key_value_heads, self.settings.head_dim
        return {"metric": heads * dim**2, "residual": heads * 2 * dim * dim}.get(self.quantity, 0)

    def choice(self, tokens: LayerTokens, scores: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Who is in a slot at each step, `[B, Hkv, T, T]`, and who is absorbed, `[B, Hkv, T]`, from the scores over
        window and sinks."""
        window, score = self.settings.window, self._scores(tokens)
        if score is None:
            received = scores.softmax(-1).masked_fill(distance >= window.window, 0).sum(2)
            score = received.unflatten(1, (tokens.k.shape[1], -1)).sum(2)
        leaving = pad(score.float(), (window.window, 0))[..., : tokens.length]
        leaving[..., : window.window + window.num_sinks] = -torch.inf
        pool = pad(leaving, (window.slots, 0), value=-torch.inf)
        choice = choose(pool, torch.ones(len(pool), 1, dtype=torch.bool), window.slots)
        before = window.slots + window.window
        return pad(choice.alive, (0, window.window))[..., before:], (choice.absorbed - before).clamp(min=0)

    def forward(self, tokens: LayerTokens, *args, **kwargs) -> tuple[Tensor, None]:
        """Out `[B, H, T, d]`."""
        q, k, v, far_q, far_k = tokens[:5]
        window, parameters, heads = self.settings.window, self._far_parameters(), q.shape[1]
        index = torch.arange(tokens.length)
        distance = index[:, None] - index
        local = (distance >= 0) & ((distance < window.window) | (index < window.num_sinks))
        scores = window.scale * q @ repeat_heads(k, heads).mT
        with torch.no_grad():
            in_slots, absorbed = self.choice(tokens, scores.masked_fill(~local, -torch.inf), distance)
        scores = scores.masked_fill(~(local | repeat_heads(in_slots, heads)), -torch.inf)
        near = (scores - scores.amax(-1, keepdim=True)).exp()

        far_tokens = index - (window.window + window.num_sinks + window.slots - 1)
        stored = (distance >= 0) & (far_tokens > 0)
        absorbed_k, value = take(far_k, absorbed), take(v, absorbed)
        key = parameters.key_map(absorbed_k)
        if self.quantity == "metric":
            keys = repeat_heads(absorbed_k, heads)
            trace = (keys.square() * (far_tokens > 0)[:, None]).sum(-1, keepdim=True).cumsum(2)
            moment = (far_q @ keys.mT * stored) @ keys
            far_q = far_q + self.c[:, None, None] * safe_divide(moment * keys.shape[-1], trace)
        elif self.quantity:
            earlier = key @ key.mT * (stored & (distance > 0))
            recall = self.c[:, None, None] * safe_divide(earlier, earlier.sum(-1, keepdim=True))
            if self.quantity == "residual":
                value = value - recall @ value
            else:
                value = torch.linalg.solve_triangular(recall + torch.eye(len(index)), value, upper=False)
        weight = parameters.gate[:, None, None] * far_tokens.clamp(min=1)[:, None] ** -0.5
        far = weight * (parameters.query_map(far_q) @ repeat_heads(key, heads).mT * stored)
        total = near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)
        return (near @ repeat_heads(v, heads) + far @ repeat_heads(value, heads)) / total, None


def check_dense(model: PreTrainedModel, row: Tensor) -> None:
    """Raises: AssertionError unless what is varied here is what the library computes, in every layer."""

    def visit(attention, tokens, out):
        dense = DenseLayer(attention.hla.settings, None)
        dense.load_state_dict(attention.hla.state_dict())
        torch.testing.assert_close(dense(tokens)[0], attention.hla(tokens)[0], atol=1e-3, rtol=1e-3)

    visit_attention(model, row[None], visit)


@torch.no_grad()
def state_floats(settings: LayerSettings, slots: int) -> int:
    """Floats that a layer with some slots remembers of one row."""
    layer = HLALayer(replace(settings, window=replace(settings.window, slots=slots)))
    layer.reset()
    q, k = (torch.zeros(1, n, 1, settings.head_dim) for n in (settings.heads, settings.key_value_heads))
    _, state = layer(LayerTokens(q, k, k, q, k))
    return sum(x.numel() for x in state if x is not None and x.is_floating_point())


def build(model: PreTrainedModel, name: str, costs: Tensor, options: argparse.Namespace) -> tuple[float, float]:
    """Makes `model` a variant, in place. Returns its slots and its floats of state, per layer on average."""
    operator, quantity, as_many = VARIANTS[name]

    def convert(slots: int | list[int], operator: str = operator) -> list[nn.Module]:
        torch.manual_seed(0)
        to_hla(
            to_softmax(model), hla_operator=operator, hla_accumulator="key", hla_window=options.window,
            hla_slots=slots, hla_slot_score=options.slot_score,
        )  # fmt: skip
        return hla_attentions(model)

    budget = state_floats(convert(options.slots, "linear")[0].hla.settings, options.slots)
    settings = convert(1)[0].hla.settings
    own = DenseLayer(settings, quantity).own_state() if quantity else 0
    one, two = (own + state_floats(settings, n) for n in (1, 2))
    slots = options.slots if as_many else max(0, (budget - 2 * one + two) // (two - one))
    for attention in convert(spread_slots(costs, slots) if slots else 0):
        if quantity:
            learned = attention.hla.state_dict()
            attention.hla = DenseLayer(attention.hla.settings, quantity)
            attention.hla.load_state_dict(learned, strict=False)
    floats = [own + state_floats(x.hla.settings, x.hla.settings.window.slots) for x in hla_attentions(model)]
    return slots, sum(floats) / len(floats)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", metavar="BASE", help="a softmax model: a Hub id, a directory or a .gguf file")
    parser.add_argument("--data", nargs="+", required=True, help="text to train on; its end is held out")
    parser.add_argument("--eval-file", required=True, help="text for the perplexity")
    parser.add_argument("--slots", type=int, default=160, help="of `linear`, per layer (default %(default)s)")
    parser.add_argument("--slot-score", choices=("attention", "learned"), default="attention")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of the one row per step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--eval-tokens", type=int, default=2048, help="per length of context (default %(default)s)")
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=EVAL_LENGTHS)
    parser.add_argument("--held-out", type=int, default=2, help="rows for the error (default %(default)s)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()

    model, tokenizer = load_base(options.base, "float32")
    rows = read_tokens(options.data, tokenizer, options.steps + options.held_out, options.seq_len)
    if len(rows) < options.steps + options.held_out:
        parser.error(
            f"--data has {len(rows)} rows of {options.seq_len} tokens, fewer than one per step and the held-out"
        )
    training, held_out = rows[: -options.held_out], rows[-options.held_out :]
    texts = {n: read_tokens([options.eval_file], tokenizer, options.eval_tokens // n, n) for n in options.eval_lengths}
    with softmax_attention(to_hla(model)):
        base = [perplexity(model, text) for text in texts.values()]
    costs = layer_costs(model, held_out[:1, :RANKING_LENGTH])
    build(model, "linear", costs, options)
    check_dense(model, held_out[0])

    heads = "".join(f"{f'at {n:,}':>10}" for n in options.eval_lengths)
    print(f"{'':22}{'slots':>6}{'state':>10}{heads}{'error':>10}")
    print(f"{'base':38}" + "".join(f"{x:10.3f}" for x in base), flush=True)
    results = {}
    for name in options.variants:
        start = time.perf_counter()
        slots, floats = build(model, name, costs, options)
        transfer_attention(model, training, steps=options.steps, batch_size=1, learning_rate=options.learning_rate)
        error = torch.stack([layer_losses(model, row[None]) for row in held_out]).mean().item()
        measured = [perplexity(model, text) for text in texts.values()]
        c = [x.hla.c.tolist() for x in hla_attentions(model) if isinstance(x.hla, DenseLayer)]
        results[name] = {"slots": slots, "state": floats, "perplexity": measured, "error": error, "c": c}
        print(
            f"{name:22}{slots:6}{floats:10,.0f}" + "".join(f"{x:10.3f}" for x in measured) + f"{error:10.4f}"
            f"   ({time.perf_counter() - start:.0f} s)", flush=True,
        )  # fmt: skip
    if options.output:
        Path(options.output).write_text(json.dumps(vars(options) | {"base": base, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
