"""Fine-tune a converted model with a classification head on labelled texts.

    python examples/classify.py MODEL --data labelled.jsonl --output classifier

Each line of the data is {"text": ..., "label": ...}; every fourth is held out. The result loads by
`pipeline("text-classification", "classifier", trust_remote_code=True)`, without the package.
"""

import argparse

from datasets import ClassLabel, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", help="converted model: a directory or Hub id")
parser.add_argument("--data", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--learning-rate", type=float, default=2e-5)
options = parser.parse_args()

data = load_dataset("json", data_files=options.data, split="train")
names = sorted(set(data["label"]))
data = data.rename_column("label", "labels").cast_column("labels", ClassLabel(names=names))

tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(
    options.model, trust_remote_code=True, dtype="float32", id2label=dict(enumerate(names)),
    label2id={name: i for i, name in enumerate(names)}, pad_token_id=tokenizer.pad_token_id,
)  # fmt: skip

rows = data.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True, remove_columns=["text"])
held_out = range(3, len(rows), 4)
trainer = Trainer(
    model,
    TrainingArguments(
        options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=rows.select(sorted(set(range(len(rows))) - set(held_out))),
    eval_dataset=rows.select(held_out),
    processing_class=tokenizer,  # pads
    compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(-1) == result.label_ids).mean()},
)
trainer.train()
trainer.save_model()
print(f"accuracy on {len(held_out)} held-out texts: {trainer.evaluate()['eval_accuracy']:.3f}")
