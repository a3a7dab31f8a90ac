"""Rows go where reads say, whole, and a sink in trouble is nobody else's."""

from __future__ import annotations

import pytest
import torch

import vllm_scope
from tests.conftest import local_engine
from vllm_scope import Read, SpecError, scope


def params(*actions, **options):
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(defaults | options), extra_args=scope(*actions) if actions else None)


def prompts(*ids):
    return [{"prompt_token_ids": list(p)} for p in ids]


def run(llm, ids, parameters):
    return llm.generate(prompts(*ids), parameters, use_tqdm=False)


def flush(llm):
    for answers in llm.collective_rpc("scope_flush"):
        assert not any(answers.values()), answers


def check_equal(result, request):
    """What is on disk is what came back in memory, byte for byte."""
    assert request.status == "ok", request.manifest
    assert request.keys() == sorted(result.keys())
    for stream in result.keys():
        assert request.positions(*stream).tolist() == result.positions(*stream).tolist()
        assert request[stream].dtype == result[stream].dtype
        assert torch.equal(request[stream].view(torch.uint8), result[stream].view(torch.uint8))


@pytest.fixture(scope="module")
def llama(checkpoints):
    return checkpoints("llama")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(llama, root):
    files = {"root": str(root), "layout": "sharded", "file_mib": 8, "threads": 4}
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=128, max_num_seqs=64, block_size=32,
        additional_config={"scope": {"sinks": {"filesystem": files}}},
    ) as llm:  # fmt: skip
        yield llm


def both(**options):
    return [
        action
        for to, extra in (("memory", {}), ("filesystem", options))
        for action in (Read("resid_post", to=to, **extra), Read("embed", to=to, **extra))
    ]


def test_a_thousand_requests_of_all_layers_are_on_disk_as_they_are_in_memory(llm, root):
    count = 1000
    ids = [range(i % 400, i % 400 + 3 + i % 23) for i in range(count)]
    parameters = [
        params(*both(tag="many", name=f"r{i}"), max_tokens=1 + i % 7) for i in range(count)
    ]
    outputs = run(llm, ids, parameters)
    flush(llm)
    capture = vllm_scope.open(root)
    assert len(capture.find(tag="many")) == count
    for i, output in enumerate(outputs):
        result = output.scope
        assert result.status == "complete"
        check_equal(result, capture[f"r{i}"])
        manifest = result.manifests["filesystem"]
        assert manifest.status == "ok"
        assert manifest.expected == manifest.delivered == result.expected
        request = capture[f"r{i}"]
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert request.token_ids.tolist() == ids
    (counters,) = llm.collective_rpc("scope_counters")
    assert counters["sinks"]["filesystem"]["queue_bytes"] == 0
    assert counters["sinks"]["filesystem"]["held_bytes"] == 0


def test_a_sink_that_is_not_there_is_refused_with_what_is(llm):
    with pytest.raises(SpecError, match=r"reads\[0\]\.to is 'kafka'.* has memory, filesystem"):
        run(llm, [[5, 6]], params(Read("embed", to="kafka")))
