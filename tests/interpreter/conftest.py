"""These tests run where Triton's interpreter is on (tests/interpreter/run.sh)."""

import os

import pytest

if not os.environ.get("VLLM_SCOPE_TEST_INTERPRETER"):
    pytest.skip("run tests/interpreter/run.sh", allow_module_level=True)
