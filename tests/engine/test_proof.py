"""The numbers of a dummy forward bear out a model's anatomy, or it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.asking import run
from tests.conftest import local_engine
from tests.engine.test_attention_sites import PROMPTS, params
from vllm_scope import ConfigError, Read, SpecError
from vllm_scope.engine import model
from vllm_scope.engine.worker import proving
from vllm_scope.graph.anatomy import tapped
from vllm_scope.graph.anatomy.convention import Convention

MIDDLE = {"sites": ["embed", "resid_mid", "resid_post", "attn_out", "mlp_out"]}


@pytest.fixture
def found(monkeypatch):
    """What the numbers of each engine showed."""
    every, original = [], proving.find_faults

    def recorded(*args):
        every.append(original(*args))
        return every[-1]

    monkeypatch.setattr(proving, "find_faults", recorded)
    return every


@pytest.mark.parametrize(
    ("family", "options", "num_equal"),
    [
        # Three layers: what each gets, what two of them hand on, what the last one leaves.
        pytest.param("gpt2", {}, 6, id="one-tensor"),
        pytest.param("cohere", {}, 6, id="a-norm-that-leaves-the-residual"),
        pytest.param(
            "llama",
            {"scope": MIDDLE, "load_format": "dummy"},
            15,
            id="dummy-weights",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "llama",
            {"scope": MIDDLE, "dtype": "bfloat16"},
            15,
            id="rounding",
            marks=pytest.mark.long,
        ),
    ],
)
def test_numbers_bear_out_the_source(family, options, num_equal, checkpoints, found):
    options = {"dtype": "float32", "scope": {}} | options
    config = {"scope": options.pop("scope")}
    with local_engine(checkpoints(family), additional_config=config, **options):
        pass
    (one,) = found
    assert (one.wrong_sites, one.moved, one.untold) == ({}, (), {})
    assert one.num_equal == num_equal


def test_a_wrong_convention_is_served_plainly_and_refuses_reads(llama, monkeypatch):
    original = model.find_anatomy

    def forced(*args):
        return replace(original(*args), convention=Convention.DEAD_RESIDUAL)

    monkeypatch.setattr(model, "find_anatomy", forced)
    words = (
        r"by numbers the input of layer 1 is not the input of its first norm: a row differs by "
        r"[0-9.]+"
    )
    with local_engine(llama, dtype="float32", additional_config={"scope": {}}) as llm:
        with pytest.raises(SpecError, match=words):
            run(llm, PROMPTS[:1], params(Read("resid_post")))
        (plain,) = run(llm, PROMPTS[:1], params())
    assert plain.outputs[0].token_ids


def test_a_site_at_the_wrong_norm_ends_the_start(llama, monkeypatch):
    monkeypatch.setattr(tapped, "norm_before_mlp", lambda layer, convention: "input_layernorm")
    words = (
        r"sites has '(resid_mid|attn_out|mlp_out)', which cannot be tapped on this model: by "
        r"numbers, resid_mid of layer \d .* a row differs by [0-9.]+ of its length\. Leave it out"
    )
    with (
        pytest.raises(ConfigError, match=words),
        local_engine(llama, dtype="float32", additional_config={"scope": MIDDLE}),
    ):
        pass


@pytest.mark.long
def test_a_forward_that_fails_leaves_the_source_alone_as_the_proof(llama, monkeypatch, found):
    original, calls = proving.runners.dummy_forward, []

    def fails_first(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no forward yet")
        return original(*args, **kwargs)

    monkeypatch.setattr(proving.runners, "dummy_forward", fails_first)
    with local_engine(llama, dtype="float32", additional_config={"scope": {}}) as llm:
        (output,) = run(llm, PROMPTS[:1], params(Read("resid_post")))
    assert not found
    assert torch.isfinite(output.scope["resid_post", 2]).all()
