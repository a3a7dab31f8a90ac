"""Rows inside the attention under CUDA graphs, on both runners."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import TOLERANCE, reference
from tests.conftest import local_engine
from tests.engine.test_attention_sites import CONFIG, EVERYTHING, PROMPTS, check, params
from tests.gpu.test_rows import GRAPHS, OPTIONS
from tests.requests import run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ref(llama):
    return reference(llama, torch.bfloat16)


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize("graphs", ["full-and-piecewise", "full-decode-only"])
def test_rows_equal_hugging_face(graphs, runner, llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    options = OPTIONS | GRAPHS[graphs] | {"additional_config": {"scope": CONFIG}}
    with local_engine(llama, **options) as llm:
        outputs = run(llm, [*PROMPTS, PROMPTS[0]], [params(*EVERYTHING)] * 3 + [params()])
    assert outputs[3].scope is None
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        ids = output.outputs[0].token_ids
        check(output.scope, prompt, ids, ref, tolerance=TOLERANCE[torch.bfloat16])


def test_graphs_do_not_change_a_bit(llama):
    found = []
    for mode in ("full-and-piecewise", "none"):
        options = GRAPHS.get(mode, {"compilation_config": {"cudagraph_mode": "NONE"}})
        options = OPTIONS | options | {"additional_config": {"scope": CONFIG}}
        with local_engine(llama, **options) as llm:
            found.append(run(llm, PROMPTS, params(*EVERYTHING)))
    for a, b in zip(*found, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        for stream in a.scope:
            assert torch.equal(a.scope[stream], b.scope[stream]), stream
