"""What a request may ask of an engine, as its front-end checks it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.strategies import sentence
from vllm_scope import CompatError, Replace, Spec
from vllm_scope.engine.connection import Connection
from vllm_scope.engine.model import check_engine
from vllm_scope.engine.sizes import Limits
from vllm_scope.sites import Sites

SITES = Sites(2, 4, "float32", (0, 2, 4))
IDS = np.arange(5)


def _connection(optimistic: bool) -> Connection:
    limits = Limits((16,), 0, 100, 100, 100, 100, optimistic)
    return Connection(SITES, None, 1, 1.0, limits, {}, {})


def _replace(positions: list[int]):
    rows = np.arange(1.0, 1.0 + 4 * len(positions)).reshape(-1, 4)
    return Spec(edits=(Replace(rows, positions, layer=1),)).resolve(SITES)


@pytest.mark.parametrize(
    ("positions", "max_tokens"),
    [
        pytest.param([5, 6], 3, id="every-generated-one"),
        pytest.param([0, 5, 6], 3, id="and-one-of-the-prompt"),
        pytest.param([5, 6], 9, id="some-of-them"),
    ],
)
def test_drafts_and_a_replacement_of_several_generated_tokens_do_not_mix(positions, max_tokens):
    said = sentence(lambda: _connection(True).check(_replace(positions), IDS, max_tokens))
    assert "edits[0].positions has several generated tokens" in said
    assert "start without speculation" in said
    _connection(False).check(_replace(positions), IDS, max_tokens)


@pytest.mark.parametrize("positions", [[0, -1], [4], [5], [-2, 5]])
def test_with_drafts_tokens_of_the_prompt_and_the_only_generated_one_are_replaced(positions):
    _connection(True).check(_replace(positions), IDS, 2)


def test_engines_whose_rows_are_not_in_the_order_of_the_plan_have_no_taps():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        speculative_config=None,
        model_config=SimpleNamespace(runner_type="generate"),
    )
    check_engine(config)
    config.speculative_config = SimpleNamespace(enable_adaptive_verification=True)
    with pytest.raises(CompatError, match="adaptive verification"):
        check_engine(config)
