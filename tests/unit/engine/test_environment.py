"""vLLM is not alarmed by our environment variables."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from vllm_scope.engine import plugin
from vllm_scope.engine.environment import VARIABLES

ROOT = Path(__file__).parents[3]


@pytest.fixture
def validate(monkeypatch):
    """vLLM's check, which raises; of no variables but the test's own."""
    plugin.register()
    from vllm import envs
    from vllm.platforms import current_platform

    check = getattr(envs, "validate_environ", None) or current_platform.validate_environ
    for name in os.environ:
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    return lambda: check(hard_fail=True)


def test_vllm_accepts_the_variables_that_we_document(monkeypatch, validate):
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    documented = set(re.findall(r"VLLM_(?:SCOPE|ACT)(?:_[A-Z]+)*\b(?![_*])", pages))
    assert "VLLM_SCOPE_ADMIN_KEY" in documented
    for name in documented | set(VARIABLES):
        monkeypatch.setenv(name, "1")
    validate()


def test_a_misspelt_variable_of_ours_is_unknown(monkeypatch, validate):
    monkeypatch.setenv("VLLM_SCOPE_ADMINKEY", "1")
    with pytest.raises(ValueError, match="VLLM_SCOPE_ADMINKEY"):
        validate()


def test_our_variables_are_no_part_of_the_compile_cache_key(monkeypatch, validate):
    from vllm.envs import compile_factors

    validate()
    assert not set(VARIABLES) & set(compile_factors())
