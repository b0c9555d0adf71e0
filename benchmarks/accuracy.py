"""Relative error of each operator against float64, beside the paper's five-summary recurrence in the same precision.

    python benchmarks/accuracy.py --lengths 1024 8192 65536

Error: norm(out - exact) / norm(exact) over the last 64 tokens; q and k random, of norm 1, signed ("signed") or not
("positive"), scale 1. The inputs are rounded first: what is measured is the arithmetic. The operators sum in fp32
whatever the dtype of their inputs and outputs, the five summaries in that dtype.
"""

import argparse

import torch
from torch.nn.functional import normalize

from hla_hf.ops_hla import OPERATORS, ahla, causal_linear_attention, hla2, hla3


FUNCTIONS = dict(zip(OPERATORS, (causal_linear_attention, ahla, hla2, hla3), strict=True))
TAIL = 64


def five_summaries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """S C - G of the paper, token by token, in the inputs' dtype; the last `TAIL` tokens."""
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    dim = q.shape[1]
    S, C, G = (q.new_zeros(dim, n) for n in (dim, v.shape[1], v.shape[1]))
    out = []
    for t in range(len(q)):
        G = G + torch.outer(k[t], k[t] @ C)
        S, C = S + torch.outer(k[t], k[t]), C + torch.outer(q[t], v[t])
        if t >= len(q) - TAIL:
            out.append((q[t] @ S) @ C - q[t] @ G)
    return torch.stack(out)[None, None]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out[:, :, -TAIL:].double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192, 65536])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.manual_seed(0)
    columns = ["chunk", "recurrent", "five summaries"]
    print(f"{'inputs':9} {'dtype':9} {'T':>6} {'operator':9}" + "".join(f"{x:>16}" for x in columns), flush=True)
    for kind in ("signed", "positive"):
        for length in args.lengths:
            exact_inputs = [torch.randn(1, 1, length, args.dim, dtype=torch.float64) for _ in range(3)]
            if kind == "positive":
                exact_inputs[:2] = [x.abs() for x in exact_inputs[:2]]
            exact_inputs[:2] = [normalize(x, dim=-1) for x in exact_inputs[:2]]
            for dtype in (getattr(torch, name) for name in args.dtypes):
                inputs = [x.to(dtype) for x in exact_inputs]
                doubles = [x.double() for x in inputs]
                for name, function in FUNCTIONS.items():
                    with torch.no_grad():
                        exact = function(*doubles, scale=1.0)[:, :, -TAIL:]
                        forms = [function(*inputs, scale=1.0, form=form) for form in ("chunk", "recurrent")]
                        outs = [*forms, five_summaries(*inputs)] if name == "hla2" else forms
                    errors = "".join(f"{relative_error(out, exact):16.1e}" for out in outs)
                    print(f"{kind:9} {str(dtype)[6:]:9} {length:6} {name:9}{errors}", flush=True)


if __name__ == "__main__":
    main()
