"""Rows inside the attention, and of what it and the MLP add, under CUDA graphs, on both runners."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import reference
from tests.conftest import local_engine
from tests.engine import test_attention_sites as attention
from tests.engine import test_branch_sites as branches
from tests.gpu.test_rows import GRAPHS, OPTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("sites", [attention, branches], ids=["attention", "branches"]),
]


@pytest.fixture(scope="module")
def ref(llama):
    return reference(llama, torch.bfloat16)


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize("graphs", ["full-and-piecewise", "full-decode-only"])
def test_rows_equal_hugging_face(graphs, runner, sites, llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    options = OPTIONS | GRAPHS[graphs] | {"additional_config": {"scope": sites.CONFIG}}
    with local_engine(llama, **options) as llm:
        asked = [sites.params(*sites.EVERYTHING)] * 3 + [sites.params()]
        outputs = run(llm, [*sites.PROMPTS, sites.PROMPTS[0]], asked)
    assert outputs[3].scope is None
    for prompt, output in zip(sites.PROMPTS, outputs, strict=False):
        sites.check(output.scope, prompt, output.outputs[0].token_ids, ref)


def test_graphs_do_not_change_a_bit(sites, llama):
    found = []
    for mode in ("full-and-piecewise", "none"):
        options = GRAPHS.get(mode, {"compilation_config": {"cudagraph_mode": "NONE"}})
        options = OPTIONS | options | {"additional_config": {"scope": sites.CONFIG}}
        with local_engine(llama, **options) as llm:
            found.append(run(llm, sites.PROMPTS, sites.params(*sites.EVERYTHING)))
    for a, b in zip(*found, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        for stream in a.scope:
            assert torch.equal(a.scope[stream], b.scope[stream]), stream
