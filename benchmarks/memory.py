"""What training keeps of one decoder layer at Llama-3.1-8B's shapes: HLA beside the layer's own attention.

    python benchmarks/memory.py [--tokens 2048] [--dtype bfloat16] [--device cpu]

Bytes per token of the context: what lives after the layer's forward pass, which is kept for its backward pass, and the
peak of both; a weight's gradient is dropped once it is there, as if it were added to one made before. With gradient
checkpointing a layer keeps its input alone, and the peak is that of the one layer whose backward pass runs.
"""

import argparse

import torch
from ops import Device
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hla_hf import to_hla


SHAPES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 1, "vocab_size": 8, "rope_theta": 5e5,
}  # fmt: skip
MODELS = {
    "softmax (sdpa)": None,
    "HLA, no slots": {},
    "HLA, 160 learned slots": {"hla_slots": 160, "hla_slot_score": "learned"},
}


def kept_and_peak(settings: dict | None, tokens: int, dtype: torch.dtype, device: Device) -> tuple[int, int]:
    """Bytes."""
    with torch.device(device.name):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES)).to(dtype)
    if settings is not None:
        to_hla(model, **settings)
    decoder = model.train().model
    for parameter in decoder.parameters():
        parameter.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    hidden_states = torch.randn(1, tokens, SHAPES["hidden_size"], dtype=dtype, device=device.name).requires_grad_()
    rotation = decoder.rotary_emb(hidden_states, torch.arange(tokens, device=device.name)[None])

    def forward() -> Tensor:
        return decoder.layers[0](hidden_states, position_embeddings=rotation)

    return device.memory(forward)[1], device.memory(lambda: forward().float().square().sum().backward())[0]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the one row (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(
        f"{options.tokens} tokens, {options.dtype}, {options.device}\n{'':24}{'kept':>12}{'peak':>12}  bytes per token"
    )
    for name, settings in MODELS.items():
        found = kept_and_peak(settings, options.tokens, getattr(torch, options.dtype), Device(options.device))
        print(f"{name:24}{''.join(f'{x / options.tokens:12,.0f}' for x in found)}", flush=True)


if __name__ == "__main__":
    main()
