"""Speculative decoding on a recurrent state: the same tokens as greedy decoding, and how much sooner.

    python benchmarks/speculative.py [SOURCE]

Without SOURCE: a random model of 12 layers, of which those after the second do nothing, so that its first two layers
are an assistant that is always right, and with noise in its output weights one that is right sometimes. With SOURCE
(a Hub id, a directory or a .gguf file): that model, converted untrained if it is not an HLA model, and prompt lookup
on a text that repeats itself. Times are medians of interleaved runs.
"""

import argparse
import copy
import statistics
import time

import torch
from transformers import PreTrainedModel

import hla_hf
from conversion.convert import load_base


def silent_after(layers: int, window: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model whose layers from `layers` on add nothing, and the model of the layers before."""
    torch.manual_seed(0)
    config = hla_hf.HLALlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=None,
        hla_window=window,
    )  # fmt: skip
    model = hla_hf.HLALlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    small = hla_hf.HLALlamaForCausalLM(
        type(config)(**config.to_dict() | {"num_hidden_layers": layers, "architectures": None})
    )
    small.load_state_dict(model.state_dict(), strict=False)
    return model, small.eval()


def compare(model: PreTrainedModel, ids: torch.Tensor, ways: dict[str, dict], new: int, repeats: int = 3) -> None:
    """Prints a line for each way to decode: tokens per second, forward passes, whether the tokens are greedy's."""
    times, calls, tokens = {name: [] for name in ways}, {}, {}
    count = []
    hook = model.register_forward_hook(lambda *_: count.append(1))
    for _ in range(repeats):
        for name, settings in ways.items():
            count.clear()
            start = time.perf_counter()
            tokens[name] = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                **settings,
            )[0, ids.shape[1] :]  # fmt: skip
            times[name].append(time.perf_counter() - start)
            calls[name] = len(count)
    hook.remove()
    greedy = next(iter(ways))
    print(f"{'':32}{'tok/s':>8}{'speed':>8}{'forward passes':>16}{'same tokens':>13}")
    for name in ways:
        seconds = statistics.median(times[name])
        speed = statistics.median(times[greedy]) / seconds
        same = (tokens[name] == tokens[greedy]).float().mean().item()
        print(f"{name:32}{new / seconds:8.1f}{speed:7.2f}x{calls[name]:16}{same:13.1%}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    if options.source is None:
        for window in (0, 64):
            model, assistant = silent_after(2, window)
            ways = {"greedy": {}}
            for noise in (0.0, 0.02, 0.05):
                other = copy.deepcopy(assistant)
                with torch.no_grad():
                    other.lm_head.weight.add_(noise * torch.randn_like(other.lm_head.weight))
                other.generation_config.update(num_assistant_tokens=8, num_assistant_tokens_schedule="constant")
                other.generation_config.assistant_confidence_threshold = 0.0
                ways[f"assistant, noise {noise:g}"] = {"assistant_model": other}
            print(f"\nrandom model, window {window}")
            compare(model, torch.randint(3, 8192, (1, 200)), ways, options.new_tokens)
        return
    model, tokenizer = load_base(options.source)
    if not model.config.model_type.startswith("hla_"):
        model = hla_hf.to_hla(model)
    text = "1. Read the question. 2. Find the place. 3. Write the answer down. 4. Check it once more.\n" * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    compare(model.eval(), ids, {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}, options.new_tokens)


if __name__ == "__main__":
    main()
