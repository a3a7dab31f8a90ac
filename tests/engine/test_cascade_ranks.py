"""Cascades on several ranks: all are told of a verdict alike; pipeline stages refuse them."""

from __future__ import annotations

import pytest

from tests.asking import run
from tests.conftest import process_engine
from tests.engine.probing import numbers
from tests.engine.test_cascades import DEAR, READ, body, cheap, check, thresholds
from tests.engine.test_edits import params
from tests.engine.test_verdicts import PROMPT
from vllm_scope import Probe, SpecError, set_monitors

pytestmark = pytest.mark.long


def test_tensor_parallel_ranks_are_told_alike(llama, monkeypatch):
    """One of them finds verdicts."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    stop = Probe(numbers(2, 128), layer=2, name="dear", after="cheap", threshold=-1e30,
                 action="stop")  # fmt: skip
    with process_engine(
        llama, dtype="float32", tensor_parallel_size=2, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        position, threshold = thresholds(llm, PROMPT, 16)[0]
        first = cheap(threshold, tokens="generated")
        outputs = run(llm, [PROMPT] * 2, [params(first, *DEAR, READ, max_tokens=16),
                                          params(first, stop, max_tokens=16)])  # fmt: skip
    check(outputs[0], position)
    assert outputs[1].outputs[0].stop_reason.endswith(f" at position {position + 2}")


def test_pipeline_stages_refuse_it(llama, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, dtype="float32", pipeline_parallel_size=2, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        with pytest.raises(SpecError, match="'cheap' is the first stage of another probe"):
            run(llm, [PROMPT], params(cheap(0.0), *DEAR))
        with pytest.raises(SpecError, match=r"monitors\['b'\].after is 'a', and this engine has 2"):
            set_monitors(llm, {"a": body(1, 0.0), "b": body(1, 0.0, after="a")})
