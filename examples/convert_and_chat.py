"""Convert a checkpoint, load it as anyone would, and stream an answer.

python examples/convert_and_chat.py SOURCE --output DIR [--prompt TEXT] [any option of conversion.convert]
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from conversion.convert import main as convert


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
parser.add_argument("source", help="Hub id, local directory or .gguf file")
parser.add_argument("--output", required=True, help="new directory for the converted model")
parser.add_argument("--prompt", default="Name three rivers in France.")
options, conversion_options = parser.parse_known_args()

convert([options.source, "--output", options.output, *conversion_options])

model = AutoModelForCausalLM.from_pretrained(options.output)  # without this package: trust_remote_code=True
tokenizer = AutoTokenizer.from_pretrained(options.output)
chat = [{"role": "user", "content": options.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(f"\n> {options.prompt}")
model.generate(**inputs, max_new_tokens=100, streamer=TextStreamer(tokenizer, skip_prompt=True))
