# Everything runs from .venv, which the first command makes from pinned locks.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS = 1
export HF_HUB_OFFLINE = 1

.PHONY: demo test lint bench clean test-gpu bench-gpu

demo: .venv/.ready
	$(BIN)/python -m examples.demo

test: .venv/.ready
	$(BIN)/python -m pytest tests --ignore=tests/interpreter
	PYTHONPATH=.venv/inspect $(BIN)/python -m pytest tests/faces/test_inspect.py
	tests/interpreter/run.sh

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/python -m benchmarks.throughput

# On a machine with a GPU and vllm-scope[gpu,dev]; PYTHON names its interpreter.
test-gpu:
	$(PYTHON) -m pytest tests/gpu tests/engine/test_compile_cache.py

bench-gpu:
	$(PYTHON) -m benchmarks.throughput --gpu --shape 8b --beside eager
	$(PYTHON) -m benchmarks.throughput --gpu --shape 0.5b --beside eager huggingface
	$(PYTHON) -m benchmarks.budget --gpu --shape 0.5b
	$(PYTHON) -m benchmarks.taps

# The lock holds every package, so nothing is resolved: vLLM's own requirements
# would bring torchvision, torchaudio, torchcodec and triton built for CUDA, and
# with a CPU torch `import transformers` then fails.
.venv/.ready: requirements/cpu.txt requirements/interpreter.txt requirements/inspect.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/interpreter -r requirements/interpreter.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/inspect -r requirements/inspect.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf .venv build *.egg-info
