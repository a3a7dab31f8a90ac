#!/usr/bin/env bash
# Tests of the GPU code on a CPU: Triton's interpreter, and Model Runner V2 on it.
# Apart from the other tests, because vLLM behaves differently where it finds Triton.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/tests/interpreter/site:$PWD/.venv/interpreter${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_SCOPE_TEST_INTERPRETER=1
exec .venv/bin/python -m pytest tests/interpreter "$@"
