"""The copy of SamplingParams that belongs to one request: vLLM need not copy it deeply again, and
the caller's parameters do not change."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_scope.engine.frontend.translators import Decorators
from vllm_scope.engine.params import dedicated

SPEC = {"scope": "{}", "scope_decorators": Decorators()}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(extra_args=dict(SPEC), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["a", "b"], "stop_token_ids": [3], "bad_words": ["c"]},
        {"logit_bias": {4: 1.5}, "allowed_token_ids": list(range(1000)), "seed": 5},
        {"output_kind": RequestOutputKind.FINAL_ONLY, "n": 3, "logprobs": 2},
    ],
    ids=["greedy", "stop", "bias", "kind"],
)
def test_what_vllm_changes_in_its_copy_does_not_change_the_callers(fields):
    given = params(**fields)
    before = deepcopy(given)
    own = dedicated(given)
    assert own.skip_clone, "vLLM would copy it again"
    taken = own.clone()
    # vllm.v1.engine.input_processor, InputProcessor.process_inputs
    taken.update_from_generation_config({"eos_token_id": [7, 8]}, eos_token_id=9)
    for value in (getattr(taken, name) for name in taken.__struct_fields__):
        if isinstance(value, list):
            value.append(11)
        elif isinstance(value, set):
            value.add(11)
        elif isinstance(value, dict):
            value["more"] = 11
    assert given == before
    assert not given.skip_clone


@pytest.mark.parametrize(
    "change",
    [
        {"structured_outputs": StructuredOutputsParams(json="{}")},
        {"extra_args": SPEC | {"kv_transfer_params": {"blocks": [1, 2]}}},
        {"extra_args": SPEC | {"of_another_plugin": object()}},
    ],
    ids=["object", "nested", "unknown"],
)
def test_vllm_copies_parameters_with_values_that_may_change_in_place(change):
    given = params()
    for name, value in change.items():
        setattr(given, name, value)
    assert dedicated(given) is given


def test_a_copy_of_the_callers_own_is_taken_as_it_is():
    given = params()
    given.skip_clone = True
    assert dedicated(given) is given
