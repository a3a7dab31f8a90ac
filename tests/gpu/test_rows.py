"""Exactly one right row per position under CUDA graphs, in every mode, on both runners."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import asking
from tests.asking import run
from tests.checkpoints import check_completion, reference
from tests.conftest import local_engine
from vllm_scope import Read, scope

pytestmark = pytest.mark.gpu

READ_ALL = scope(Read("resid_post"), Read("embed"))
params = partial(asking.params, max_tokens=24)
GRAPHS = {
    "full-and-piecewise": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full-decode-only": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
}
OPTIONS = {
    # Of a size that is told, so that tests can share a GPU: none measures what is free.
    "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.08,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 512, "max_num_seqs": 32, "distributed_executor_backend": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def ref(llama):
    return reference(llama, torch.bfloat16)


IDS = [range(3, 40), [7] * 5, range(400, 380, -1), range(100, 300), range(50, 54)]


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_rows_in_every_mode(graphs, runner, llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    with local_engine(llama, **(OPTIONS | GRAPHS[graphs])) as llm:
        (described,) = llm.collective_rpc("scope_describe")
        assert described["runner"] == runner
        for _ in range(2):
            specs = [READ_ALL, None, READ_ALL, READ_ALL, READ_ALL]
            outputs = run(llm, IDS, [params(spec) for spec in specs])
            for spec, output in zip(specs, outputs, strict=True):
                if spec is None:
                    assert output.scope is None
                    continue
                ids = list(output.outputs[0].token_ids)
                check_completion(output.scope, output.prompt_token_ids, ids, ref)


def test_graphs_do_not_change_a_bit(llama):
    """The same step with and without CUDA graphs: the same rows."""
    found = {}
    for mode in ("full-and-piecewise", "none"):
        options = GRAPHS.get(mode, {"compilation_config": {"cudagraph_mode": "NONE"}})
        with local_engine(llama, **(OPTIONS | options)) as llm:
            outputs = run(llm, [range(8 * i, 8 * i + 8) for i in range(8)], params(READ_ALL))
        found[mode] = outputs
    for a, b in zip(*found.values(), strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        for stream in a.scope.keys():
            assert torch.equal(a.scope[stream], b.scope[stream]), stream


def test_a_prefill_larger_than_the_arena_is_drained_tap_by_tap(llama, ref):
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 16, "max_model_len": 1024}
    options |= {"additional_config": {"scope": {"arena_mib": 2.2}}}
    options |= {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
    with local_engine(llama, **(OPTIONS | options)) as llm:
        ids = [[(7 * i + j) % 500 + 3 for j in range(900)] for i in range(9)]
        outputs = run(llm, ids, params(READ_ALL, max_tokens=4))
    for output in outputs:
        check_completion(
            output.scope, output.prompt_token_ids, list(output.outputs[0].token_ids), ref
        )


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_ngram_speculation(runner, llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    method = "ngram" if runner == "V1" else "ngram_gpu"
    config = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with local_engine(llama, **OPTIONS, speculative_config=config) as llm:
        outputs = run(llm, [[1, 2, 3, 4] * 8, [11, 12] * 10, range(50, 80)], params(READ_ALL))
    for output in outputs:
        check_completion(
            output.scope, output.prompt_token_ids, list(output.outputs[0].token_ids), ref
        )
