"""Distil a model's own softmax attention into its HLA parameters with Transformers' Trainer.

    python examples/distil.py MODEL --data FILE --output DIR

All other weights stay as they are, so the teacher is the same model with softmax attention: nothing is loaded twice.
`python -m training.finetune` is the whole recipe: adapters, evaluation, several processes.
"""

import argparse

import torch
from datasets import load_dataset
from torch.nn.functional import kl_div
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hla_hf import softmax_attention


class Distiller(Trainer):
    """A Trainer whose loss is KL(softmax attention || HLA) in nats per token."""

    def compute_loss(self, model: PreTrainedModel, inputs: dict, return_outputs: bool = False, **_) -> torch.Tensor:
        real = inputs["attention_mask"].bool()
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad(), softmax_attention(self.accelerator.unwrap_model(model)):
            teacher = model(**inputs).logits.log_softmax(-1)
        student = model(**inputs)
        loss = kl_div(student.logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)[real].mean()
        return (loss, student) if return_outputs else loss


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", help="converted model: a directory or Hub id")
parser.add_argument("--data", required=True, help="text file, a row per line")
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--max-length", type=int, default=512)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
for name, parameter in model.named_parameters():
    parameter.requires_grad_(".hla." in name)

rows = load_dataset("text", data_files=options.data, split="train").filter(lambda row: row["text"].strip())
rows = rows.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=options.max_length),
    batched=True, remove_columns="text",
)  # fmt: skip
trainer = Distiller(
    model,
    TrainingArguments(
        options.output, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=3e-3,
        lr_scheduler_type="cosine", logging_steps=10, save_strategy="no", report_to="none",
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)  # fmt: skip
trainer.train()
trainer.save_model(options.output)
tokenizer.save_pretrained(options.output)
