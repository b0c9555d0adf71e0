"""The least time that Llama-3.1-8B can take on an H100, by arithmetic: HLA beside flash attention, nothing measured.

    python benchmarks/expect.py [--contexts 4096 32768 131072] [--slots 160] [--batch 16]

A pass takes the sum over its parts of the greater of operations / 989 TFLOP/s (bfloat16, dense; the far part's float32
products as TF32, half of that) and bytes moved / 3.35 TB/s. Launches, the host, and what a unit does not reach of its
rate come on top, for both. Training is forward and backward of every product; HLA's layers and flash attention compute
their forward pass twice. Prefill and training are one row of the context, decoding a token of each of `--batch` rows.
"""

import argparse


LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
WINDOW, SINKS, CHUNK, FEATURES = 64, 4, 64, 2 * DIM
FLOPS, TF32_FLOPS, BANDWIDTH = 989e12, 494e12, 3.35e12
SCORE_BYTES = (
    34  # per score of the window, by plain PyTorch: product, float32, mask, softmax, its maximum, cast, product
)
WEIGHTS = LAYERS * (2 * HIDDEN * (HIDDEN + KV_HEADS * DIM) + 3 * HIDDEN * INTERMEDIATE)
MAC = 2  # operations of a multiplication with its addition


def flash_attention(context: int) -> tuple[float, float]:
    """Seconds of all layers per token, forward and backward, at a causal context."""
    forward = MAC * 2 * HEADS * DIM * context / 2 / FLOPS * LAYERS
    return forward, 2.5 * forward  # five products instead of two


def hla(slots: int) -> tuple[float, float]:
    """The same, whatever the context."""
    columns = slots + SINKS + WINDOW + CHUNK
    near = max(MAC * 2 * HEADS * DIM * columns / FLOPS, SCORE_BYTES * HEADS * columns / BANDWIDTH)
    maps = MAC * (HEADS + KV_HEADS) * DIM * DIM / FLOPS
    state = HEADS * FEATURES * (DIM + 1)  # kernels are given k and v for every query head
    operations = MAC * (HEADS * CHUNK * (FEATURES + DIM + 1) + 2 * state)
    moved = 2 * 4 * (state / CHUNK + HEADS * (2 * FEATURES + DIM + 1))  # float32, written and read
    forward = (near + maps + max(operations / TF32_FLOPS, moved / BANDWIDTH)) * LAYERS
    return forward, 3 * forward  # its forward pass again, and two products for each


def decoding(context: int, slots: int | None, batch: int) -> float:
    """Seconds of one token for each row: weights, and each row's cache or state, are read once; states are written."""
    row = context * 2 * KV_HEADS * DIM * 2
    if slots is not None:
        state = KV_HEADS * FEATURES * (DIM + 1) * 4
        row = 2 * KV_HEADS * DIM * 2 * (SINKS + WINDOW + slots) + 2 * state
    return (2 * (WEIGHTS + HIDDEN * VOCABULARY) + batch * LAYERS * row) / BANDWIDTH


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--slots", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16, help="rows of decoding (default %(default)s)")
    options = parser.parse_args()
    print(f"{'context':>8}  {'':22}{'flash':>12}{'HLA':>12}{'flash/HLA':>11}")
    linear = MAC * WEIGHTS / FLOPS
    for context in options.contexts:
        flash, ours = flash_attention(context), hla(options.slots)
        decode = (decoding(context, slots, options.batch) for slots in (None, options.slots))
        for what, unit, (base, other) in (
            ("attention, forward", "us/token", (flash[0] * 1e6, ours[0] * 1e6)),
            ("prefill", "s", [context * (linear + x[0]) for x in (flash, ours)]),
            ("training step", "s", [context * (3 * linear + sum(x)) for x in (flash, ours)]),
            (f"decoding, {options.batch} rows", "ms", [1e3 * x for x in decode]),
        ):
            print(f"{context:8,}  {what:22}{base:12.3g}{other:12.3g}{base / other:11.2f}  {unit}")


if __name__ == "__main__":
    main()
