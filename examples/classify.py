"""Classify texts with a linear head on what a converted model makes of their last token.

    python examples/classify.py MODEL --data labelled.jsonl

Each line of the data is {"text": ..., "label": ...}; every fourth is held out. The model stays as it is, and its state,
unlike a cache of keys and values, does not grow with the texts.
"""

import argparse

import torch
from datasets import load_dataset
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm
from transformers import AutoModel, AutoTokenizer


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", help="converted model: a directory or Hub id")
parser.add_argument("--data", required=True)
parser.add_argument("--batch-size", type=int, default=16)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True, padding_side="right")
model = AutoModel.from_pretrained(options.model, trust_remote_code=True, dtype="float32").eval()


@torch.no_grad()
def features(texts: list[str]) -> Tensor:
    """What the model makes of the last token of each text, `[len(texts), hidden_size]`."""
    rows = []
    for start in range(0, len(texts), options.batch_size):
        inputs = tokenizer(texts[start : start + options.batch_size], padding=True, return_tensors="pt")
        hidden_states = model(inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False).last_hidden_state
        rows.extend(hidden_states[range(len(hidden_states)), inputs.attention_mask.sum(1) - 1])
    return layer_norm(torch.stack(rows), rows[0].shape)


data = load_dataset("json", data_files=options.data, split="train")
names = sorted(set(data["label"]))
labels = torch.tensor([names.index(label) for label in data["label"]])
inputs = features(data["text"][:])
held_out = torch.arange(len(labels)) % 4 == 3

head = torch.nn.Linear(inputs.shape[1], len(names))
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=1e-2)
for _ in range(300):
    optimizer.zero_grad()
    cross_entropy(head(inputs[~held_out]), labels[~held_out]).backward()
    optimizer.step()
accuracy = (head(inputs[held_out]).argmax(-1) == labels[held_out]).float().mean()
print(f"accuracy on {int(held_out.sum())} held-out texts: {accuracy:.3f}")
