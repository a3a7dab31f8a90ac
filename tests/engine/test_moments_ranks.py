"""With several ranks one of them keeps the sums of a layer. A file of its own: vLLM remembers its
environment once an engine has run in this process."""

from __future__ import annotations

import pytest

import vllm_scope
from tests.conftest import process_engine
from tests.engine.test_moments import CONFIG, PROMPTS, asked_of, expected, same
from vllm_scope import Moments

pytestmark = pytest.mark.long


def test_two_ranks_keep_each_row_once(llama, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, dtype="float32", tensor_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=True, max_num_batched_tokens=64, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        asked = asked_of(llm, PROMPTS, [[Moments(by=by)] for by in "abab"])
        same(vllm_scope.moments(llm), expected(asked))


def test_two_stages_keep_their_own_layers(llama, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, dtype="float32", pipeline_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=True, max_num_batched_tokens=64, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        asked = asked_of(llm, PROMPTS, [[Moments(by=by)] for by in "abab"])
        found = vllm_scope.moments(llm)
        assert {layer for _, layer, _ in found} == {0, 1, 2}
        same(found, expected(asked))
