"""Evaluate a converted model with lm-evaluation-harness on questions of your own.

    pip install lm-eval
    python examples/evaluate_lm_eval.py MODEL --data questions.jsonl

Each line of the data is {"question": ..., "choices": [...], "answer": index}. For a task that the harness has:
lm_eval --model hf --model_args pretrained=MODEL,trust_remote_code=True --tasks NAME
"""

import argparse

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", help="converted model: a directory or Hub id")
parser.add_argument("--data", required=True)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--device", default="cpu")
options = parser.parse_args()

task = {
    "task": "questions",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": options.data}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
model = HFLM(options.model, trust_remote_code=True, batch_size=options.batch_size, device=options.device)
results = simple_evaluate(model, tasks=[task], bootstrap_iters=0)
print(f"accuracy on {results['n-samples']['questions']['effective']} questions: ", end="")
print(f"{results['results']['questions']['acc,none']:.3f}")
