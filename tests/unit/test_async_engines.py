"""What is for an LLM says what to call with an AsyncLLM; a star import leaves Python's names."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

import vllm_scope
from vllm_scope import LogitDifference, SpecError, Sweep


class AsyncLLM:
    """As far as these functions look at it."""

    def __repr__(self) -> str:
        return "<AsyncLLM>"


SWEEP = Sweep(np.zeros(8, np.float32), mode="add", metric=LogitDifference(5, 6))


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda engine: vllm_scope.set_monitors(engine, {}), "engine.monitors.set_on_async"),
        (lambda engine: vllm_scope.moments(engine), "engine.moments.moments_of_async"),
        (lambda engine: vllm_scope.drop_moments(engine), "engine.moments.drop_moments_of_async"),
        (lambda engine: vllm_scope.sweep(engine, "a", SWEEP), "sweep_async"),
    ],
    ids=["set_monitors", "moments", "drop_moments", "sweep"],
)
def test_an_async_llm_is_refused_with_what_to_call(call, instead):
    with pytest.raises(
        SpecError,
        match=r"the engine is <AsyncLLM>; it must be a vllm\.LLM",
    ) as error:
        call(AsyncLLM())
    assert f"await vllm_scope.{instead}(engine" in str(error.value)


def test_a_star_import_replaces_no_builtin():
    assert not set(vllm_scope.__all__) & set(dir(builtins))
    assert callable(vllm_scope.open)
