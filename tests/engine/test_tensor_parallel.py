"""Two tensor-parallel ranks give the same rows as one, each exactly once, in files too."""

from __future__ import annotations

import pytest
import torch

import vllm_scope
from tests.checkpoints import check_completion, reference
from tests.conftest import process_engine
from tests.engine.test_sinks import check_equal
from vllm_scope import Read, scope


def test_two_ranks_give_each_row_once(checkpoints, tmp_path, monkeypatch: pytest.MonkeyPatch):
    from vllm import SamplingParams

    path = checkpoints("llama")
    # Without it two ranks ask for two NUMA nodes.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False,
        extra_args=scope(*(
            Read(site, to=to) for site in ("resid_post", "embed") for to in ("memory", "filesystem")
        )),
    )  # fmt: skip
    with process_engine(
        path, dtype="float32", tensor_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=True, max_num_batched_tokens=64,
        additional_config={"scope": {"sinks": {"filesystem": {"root": str(tmp_path)}}}},
    ) as llm:  # fmt: skip
        ranks = llm.collective_rpc("scope_describe")
        prompts = [{"prompt_token_ids": list(range(i, i + 90))} for i in range(6)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [rank["drains"] for rank in ranks] == [True, False]
    ref = reference(path, torch.float32)
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        check_completion(output.scope, output.prompt_token_ids, ids, ref)
    # One rank drains, and so writes.
    stored = vllm_scope.open(tmp_path)
    assert len(stored) == len(outputs)
    for output in outputs:
        check_equal(output.scope, stored[output.request_id])
