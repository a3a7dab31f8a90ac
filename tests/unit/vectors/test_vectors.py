"""Steering modules: content, digest and errors."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from vllm_scope.errors import SpecError
from vllm_scope.vectors import Provenance, SteeringModule

STREAM = ("resid_post", 5)
VALUES = [0.5, -2.0, 3.0]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(VALUES, id="list"),
        pytest.param(tuple(VALUES), id="tuple"),
        pytest.param(np.array(VALUES, np.float16), id="numpy-f16"),
        pytest.param(np.array(VALUES, ">f8"), id="numpy-f64-big-endian"),
        pytest.param(np.array([VALUES, VALUES]).T[:, 0], id="numpy-strided"),
        pytest.param(torch.tensor(VALUES), id="torch-f32"),
        pytest.param(torch.tensor(VALUES, dtype=torch.bfloat16), id="torch-bf16"),
        pytest.param(torch.tensor(VALUES, requires_grad=True), id="torch-with-gradient"),
        pytest.param(torch.nn.Parameter(torch.tensor(VALUES)), id="torch-parameter"),
    ],
)
def test_a_vector_is_the_same_module_in_any_form(value):
    module = SteeringModule({STREAM: value})
    assert module == SteeringModule({STREAM: VALUES})
    assert module[STREAM].dtype == np.float32
    assert module[STREAM].tolist() == VALUES


def test_integers_are_numbers():
    assert SteeringModule({STREAM: [1, 2]})[STREAM].tolist() == [1.0, 2.0]


def test_the_digest_is_of_keys_and_values_and_nothing_else():
    module = SteeringModule({STREAM: VALUES, ("embed", 0): VALUES})
    same = SteeringModule(
        {("embed", 0): VALUES, ("post_block", 5): VALUES}, Provenance(model="another", scale=9.0)
    )
    assert module.digest == same.digest
    assert hash(module) == hash(same)
    # Fixed: workers and files of another version must agree on it.
    assert SteeringModule({STREAM: VALUES}).digest == (
        "sha256:135f61c6a2a0cce99db593686ead9c39a6c99d0ad02abf7cadbb72b15463b06f"
    )


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({("resid_post", 4): VALUES}, id="another-layer"),
        pytest.param({("resid_pre", 5): VALUES}, id="another-site"),
        pytest.param({STREAM: [0.5, -2.0, np.nextafter(np.float32(3), np.float32(4))]}, id="a-bit"),
        pytest.param({STREAM: [*VALUES, 0.0]}, id="longer"),
        pytest.param({STREAM: VALUES, ("resid_post", 6): VALUES}, id="one-more"),
    ],
)
def test_other_content_has_another_digest(other):
    assert SteeringModule(other) != SteeringModule({STREAM: VALUES})


def test_a_module_is_read_only_and_its_own():
    values = np.array(VALUES, np.float32)
    module = SteeringModule({STREAM: values})
    values[:] = 0
    assert module[STREAM].tolist() == VALUES
    with pytest.raises(ValueError, match="read-only"):
        module[STREAM][0] = 1
    with pytest.raises(TypeError):
        module.vectors[STREAM] = values
    with pytest.raises(AttributeError):
        module.vectors = {}


def test_a_module_is_a_mapping_in_the_order_of_the_model():
    module = SteeringModule(
        {("resid_post", 10): VALUES, ("resid_post", 9): VALUES, ("embed", 0): VALUES}
    )
    assert list(module) == [("embed", 0), ("resid_post", 9), ("resid_post", 10)]
    assert module.sites == ("embed", "resid_post")
    assert module.hidden_size == 3
    assert ("post_block", 9) in module
    assert ("resid_post", 8) not in module
    with pytest.raises(KeyError, match=r"has embed\.0, resid_post\.9"):
        module["resid_post", 8]


def test_a_copy_through_pickle_is_the_same_and_as_read_only():
    module = SteeringModule({STREAM: VALUES}, Provenance(model="m"))
    copy = pickle.loads(pickle.dumps(module))
    assert copy == module
    assert copy.provenance == module.provenance
    assert not copy[STREAM].flags.writeable


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        pytest.param({}, "no vectors", id="nothing"),
        pytest.param({STREAM: []}, r"resid_post\.5 has shape \[0\]", id="empty-vector"),
        pytest.param({STREAM: 1.0}, r"resid_post\.5 has shape \[\]", id="a-number"),
        pytest.param({STREAM: [VALUES]}, r"shape \[1, 3\]", id="a-matrix"),
        pytest.param({STREAM: [[1.0], [1.0, 2.0]]}, "rows differ in length", id="ragged"),
        pytest.param({STREAM: "abc"}, "list of numbers", id="text"),
        pytest.param({STREAM: [True, False]}, "list of numbers", id="truth-values"),
        pytest.param({STREAM: [1.0, None]}, "list of numbers", id="a-none"),
        pytest.param({STREAM: [1.0, float("nan")]}, r"resid_post\.5 has nan at index 1", id="nan"),
        pytest.param({STREAM: [float("-inf")]}, "has -inf at index 0", id="inf"),
        pytest.param({STREAM: [1e39]}, r"has 1e\+39 at index 0", id="inf-in-float32"),
        pytest.param(
            {STREAM: VALUES, ("embed", 0): [1.0]},
            r"resid_post\.5 has 3 values and embed\.0 has 1",
            id="two-sizes",
        ),
        pytest.param({("resid_post", -1): VALUES}, "has layer -1", id="negative-layer"),
        pytest.param({("resid_post", True): VALUES}, "layer True", id="truth-as-layer"),
        pytest.param({("resid_post", "5"): VALUES}, "layer '5'", id="text-as-layer"),
        pytest.param({("embed", 1): VALUES}, "go from 0 to 0", id="embed-at-a-layer"),
        pytest.param({("attn_out", 1): VALUES}, "has site 'attn_out'", id="no-site-of-the-stream"),
        pytest.param({("resid_pots", 1): VALUES}, "has site 'resid_pots'", id="a-typo"),
        pytest.param({5: VALUES}, "5 is no", id="a-bare-layer"),
        pytest.param({STREAM: VALUES, ("post_block", 5): VALUES}, "twice", id="an-alias-twice"),
    ],
)
def test_wrong_vectors_are_refused(vectors, message):
    with pytest.raises(SpecError, match=message):
        SteeringModule(vectors)


def test_importing_vectors_imports_no_torch():
    code = (
        "import sys; from vllm_scope.vectors import SteeringModule, from_bytes, to_bytes;"
        "from_bytes(to_bytes(SteeringModule({('embed', 0): [1.0]})));"
        "print([m for m in ('torch', 'vllm', 'gguf', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_module_of_tiers_is_a_mapping_of_its_vectors_for_every_token():
    module = SteeringModule({STREAM: VALUES}, tiers={"generated": {("post_block", 7): VALUES}})
    assert list(module) == [STREAM]
    assert [place for place, _ in module.placed()] == [STREAM, ("resid_post", 7, "generated")]
    assert list(module.tiers) == ["generated"]
    with pytest.raises(TypeError):
        module.tiers["prompt"] = {}
    assert "generated:resid_post.7" in repr(module)
    alone = SteeringModule({}, tiers={"prompt": {STREAM: VALUES}})
    assert (len(alone), alone.hidden_size, alone.sites) == (0, 3, ("resid_post",))
    assert alone != SteeringModule({STREAM: VALUES})


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        pytest.param({"decode": {STREAM: VALUES}}, "has the tier 'decode'; tiers are", id="word"),
        pytest.param({"prompt": {STREAM: [1.0]}}, r"prompt:resid_post\.5 has 1 values", id="size"),
        pytest.param({"prompt": {("mlp_out", 1): VALUES}}, "has site 'mlp_out'", id="site"),
    ],
)
def test_wrong_tiers_are_refused(tiers, message):
    with pytest.raises(SpecError, match=message):
        SteeringModule({STREAM: VALUES}, tiers=tiers)
