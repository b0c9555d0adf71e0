"""Supervised fine-tuning on chats with TRL, packed: a document does not see those beside it in its row.

    pip install trl
    python examples/sft_trl.py MODEL --data chats.jsonl --output DIR

Each line of the data is {"messages": [{"role": ..., "content": ...}, ...]}.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", help="converted model: a directory or Hub id")
parser.add_argument("--data", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--max-length", type=int, default=1024)
options = parser.parse_args()

trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True, dtype="float32"),
    processing_class=AutoTokenizer.from_pretrained(options.model, trust_remote_code=True),
    args=SFTConfig(
        options.output, max_steps=options.steps, max_length=options.max_length, packing=True, learning_rate=1e-4,
        per_device_train_batch_size=2, logging_steps=10, save_strategy="no", report_to="none", bf16=False,
    ),
    train_dataset=load_dataset("json", data_files=options.data, split="train"),
)  # fmt: skip
trainer.train()
trainer.save_model(options.output)
