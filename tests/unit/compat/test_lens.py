"""SteeringVector and Hook with pydantic's methods, and their errors."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch

from vllm_scope.compat.vllm_lens import Hook, SteeringVector, VLLMLensClient
from vllm_scope.compat.vllm_lens.hooks import HookRun
from vllm_scope.errors import SpecError

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
VECTOR = SteeringVector(ROWS, [0, 2], 2.0, True, [1])


def fields(vector):
    rest = (vector.layer_indices, vector.scale, vector.norm_match, vector.position_indices)
    return vector.activations.tolist(), *rest


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda v: v, id="itself"),
        pytest.param(lambda v: v.model_dump(), id="its-dump"),
        pytest.param(lambda v: v.model_dump(mode="python"), id="in-another-mode"),
        pytest.param(lambda v: json.loads(json.dumps(v.model_dump())), id="over-the-wire"),
        pytest.param(lambda v: v.model_dump() | {"activations": ROWS.tolist()}, id="lists"),
        pytest.param(
            lambda v: v.model_dump() | {"activations": ROWS.numpy(),
                                        "position_indices": np.array([1])}, id="arrays",
        ),
    ],
)  # fmt: skip
def test_a_vector_is_validated_from_every_form(form):
    assert fields(SteeringVector.model_validate(form(VECTOR))) == fields(VECTOR)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(
            [1], "SteeringVector is [1]; it must be an object with the fields", id="a-list"
        ),
        pytest.param({"layers": [0]}, "SteeringVector has 'layers'; its fields are", id="unknown"),
        pytest.param({"layer_indices": [0]}, "SteeringVector has no 'activations'", id="missing"),
    ],
)
def test_values_that_are_no_vector_are_refused(made, words):
    with pytest.raises(SpecError) as caught:
        SteeringVector.model_validate(made)
    assert str(caught.value).startswith(words)


def test_a_copy_has_the_updated_fields_and_is_checked():
    copy = VECTOR.model_copy(update={"scale": 3.0, "position_indices": None})
    assert fields(copy) == (ROWS.tolist(), [0, 2], 3.0, True, None)
    assert copy.activations is VECTOR.activations
    assert VECTOR.model_copy(deep=True).activations.data_ptr() != VECTOR.activations.data_ptr()
    assert fields(VECTOR.model_copy()) == fields(VECTOR)
    with pytest.raises(SpecError, match="2 rows for 1 layer_indices"):
        VECTOR.model_copy(update={"layer_indices": [0]})
    with pytest.raises(SpecError, match="SteeringVector has 'layers'"):
        VECTOR.model_copy(update={"layers": [0]})


@pytest.mark.parametrize("positions", [[-1], [3, -2], np.array([-1]), torch.tensor([-5])])
def test_positions_count_from_the_prompts_beginning(positions):
    """vllm-lens ignored negative positions, so nothing was steered."""
    with pytest.raises(SpecError, match=r"position_indices has -\d; positions are absolute"):
        SteeringVector(ROWS, [0, 2], position_indices=positions)


def plus(ctx, rows):
    return rows + 1


def test_a_hook_does_not_become_json():
    hook = Hook(plus, [3])
    with pytest.raises(SpecError, match="functions, which are arbitrary code: a server runs none"):
        hook.model_dump()
    with pytest.raises(SpecError, match="functions, which are arbitrary code"):
        hook.model_dump(mode="json")
    with pytest.raises(SpecError, match="no request can send a function"):
        Hook.model_validate({"fn": {"cloudpickle": "gASV"}, "layer_indices": [0]})


def test_a_hook_is_validated_and_copied():
    hook = Hook.model_validate({"fn": plus, "layer_indices": [3, 4]})
    copy = hook.model_copy(update={"pre": True})
    assert (copy.fn, copy.layer_indices, copy.pre) == (plus, [3, 4], True)
    with pytest.raises(SpecError, match="a list of layers"):
        hook.model_copy(update={"layer_indices": []})


@pytest.mark.parametrize(
    "name", ["clear_hooks", "clear_hook_results", "clear_prefetched", "collect_hook_results"]
)
def test_a_client_says_that_a_server_runs_no_hooks(name):
    with VLLMLensClient("http://nobody") as client, pytest.raises(SpecError, match="runs none"):
        getattr(client, name)()


def test_the_results_of_hooks_do_not_keep_the_engines_model():
    """A caller can keep results after the engine has been deleted."""

    def save(ctx, rows):
        ctx.saved["first"] = float(rows[0, 0])

    run, model = HookRun([Hook(save, [0])], [Hook(save, [1])]), torch.nn.Linear(1, 1)
    gone = weakref.ref(model)
    for layer in (0, 1):
        run.call(0, (layer, False), ROWS + layer, 0, model)
    of_all, own = run.results(0, of_all=True), run.results(0)
    del run, model
    assert gone() is None
    assert dict(of_all) == {"0": {"first": 1.0}}
    assert dict(own) == {"0": {"first": 2.0}}
