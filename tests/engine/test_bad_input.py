"""Bad input is met at the door with a sentence; the engine and its neighbours go on."""

from __future__ import annotations

import json

import pytest
import torch

from tests.asking import params, prompts
from tests.checkpoints import check_completion, reference
from tests.conftest import local_engine
from vllm_scope import ConfigError, Read, SpecError, scope

GOOD = scope(Read("resid_post", layers=[1]))


def raw(body) -> dict:
    return {"scope": body if isinstance(body, str) else json.dumps(body)}


@pytest.fixture(scope="module")
def llm(checkpoints):
    with local_engine(checkpoints("llama"), dtype="float32") as llm:
        yield llm


BAD = [
    pytest.param(raw({"reads": [{"site": "residual"}]}), "'residual'; sites are", id="site"),
    pytest.param(
        raw({"reads": [{"site": "logits"}]}),
        "which is not a site: vLLM itself returns logits",
        id="logits",
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "layers": [99]}]}),
        r"reads\[0\]\.layers has 99; this model has layers 0 to 2",
        id="layer-99",
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "layers": [-1]}]}), "cannot be negative", id="minus-1"
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "layers": ["3"]}]}), "whole numbers", id="layer-type"
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "layers": []}]}), "is empty", id="no-layers"
    ),
    pytest.param(raw({"reads": []}), "asks for nothing", id="no-reads"),
    pytest.param(raw({"reads": 3}), "reads is 3; it must be a list", id="reads-type"),
    pytest.param(raw({"read": []}), "the spec has 'read'; the fields are reads", id="field"),
    pytest.param(raw("{"), "is not JSON", id="json"),
    pytest.param({"scope": 5}, "is a int; it must be a JSON string", id="not-a-string"),
    pytest.param(raw(" " * 70_000_000), "70,000,000 characters; at most", id="seventy-megabytes"),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "tokens": [40]}]}),
        "last position that can be processed is 30",
        id="position-never-processed",
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "tokens": [-21]}]}),
        "this prompt has 20 tokens",
        id="position-before-the-prompt",
    ),
    pytest.param(
        raw({"reads": [{"site": "resid_post", "tokens": "first"}]}), "the words are", id="word"
    ),
]


@pytest.mark.parametrize(("spec", "sentence"), BAD)
def test_a_bad_spec_is_refused_with_a_sentence_and_the_engine_goes_on(
    spec, sentence, llm, checkpoints
):
    with pytest.raises(SpecError, match=sentence) as caught:
        llm.generate(prompts(range(20)), params(spec), use_tqdm=False)
    assert len(str(caught.value)) < 300
    (output,) = llm.generate(prompts(range(20)), params(GOOD), use_tqdm=False)
    ref = reference(checkpoints("llama"), torch.float32)
    check_completion(output.scope, list(range(20)), list(output.outputs[0].token_ids), ref)


def test_the_prompt_of_several_that_is_refused_is_named(llm):
    wrong = params(scope(Read("resid_post", tokens=[35])))
    with pytest.raises(SpecError, match=r"^prompts\[1\]: reads\[0\]\.tokens has 35"):
        llm.generate(prompts(range(40), range(20)), wrong, use_tqdm=False)
    for output in llm.generate(prompts(range(40), range(20)), params(GOOD), use_tqdm=False):
        assert output.scope.status == "complete"


def test_prompt_embeddings_are_refused(checkpoints):
    with local_engine(checkpoints("llama"), dtype="float32", enable_prompt_embeds=True) as llm:
        with pytest.raises(SpecError, match="prompt embeddings cannot be tapped"):
            llm.generate({"prompt_embeds": torch.randn(5, 128)}, params(GOOD), use_tqdm=False)
        (output,) = llm.generate(prompts(range(5)), params(GOOD), use_tqdm=False)
        assert output.scope.status == "complete"


@pytest.mark.long
def test_a_model_of_unknown_convention_serves_plainly_and_refuses_reads(checkpoints, monkeypatch):
    """A layer whose source contradicts what its model does with the output."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def forward(self, positions, hidden_states, residual):
        if residual is not None:
            hidden_states = hidden_states + 0 * residual
        return original(self, positions, hidden_states, residual)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    with local_engine(checkpoints("llama"), dtype="float32") as llm:
        (output,) = llm.generate(prompts(range(9)), params(), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12
        with pytest.raises(SpecError, match="this model cannot be tapped: LlamaModel does not use"):
            llm.generate(prompts(range(9)), params(GOOD), use_tqdm=False)
        (output,) = llm.generate(prompts(range(9)), params(), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param({"layer": [1]}, "'scope'].layer .*options are", id="option"),
        pytest.param({"sites": ["resid"]}, "sites are embed", id="site"),
        pytest.param({"layers": [7]}, "layers has 7; this model has layers 0 to 2", id="layer"),
        pytest.param({"arena_mib": 0.01}, "at least .* are needed", id="arena"),
        pytest.param(
            {"vectors_mib": 1e8},
            r"scope'\].vectors_mib is 1e\+08, which takes 100,000,000.0 MiB, and this host has .* "
            "MiB free. Give a smaller vectors_mib",
            id="vectors-beyond-the-memory",
        ),
        pytest.param(
            {"arena_mib": 1e8},
            "this host has .* MiB free beside what other options take. Give a smaller arena_mib",
            id="arena-beyond-the-memory",
        ),
    ],
)
def test_a_wrong_configuration_stops_the_start(options, sentence, checkpoints):
    with (
        pytest.raises(ConfigError, match=sentence),
        local_engine(checkpoints("llama"), additional_config={"scope": options}),
    ):
        pass
