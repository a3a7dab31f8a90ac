"""The same rows, each exactly once, however many GPUs compute them."""

from __future__ import annotations

import asyncio

import pytest
import torch

import vllm_scope
from tests.checkpoints import check_completion, reference
from tests.conftest import process_engine
from tests.engine.test_sinks import check_equal
from vllm_scope import Add, Read, scope

pytestmark = pytest.mark.gpu

READ_ALL = scope(Read("resid_post"), Read("embed"))
IDS = [range(3, 40), [7] * 5, range(400, 380, -1), range(100, 300), range(50, 54)]
OPTIONS = {
    "dtype": "bfloat16", "gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 1 << 30,
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 128, "max_num_seqs": 32,
}  # fmt: skip


def params():
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, extra_args=READ_ALL
    )


def needs(num_gpus: int):
    return pytest.mark.skipif(torch.cuda.device_count() < num_gpus, reason=f"needs {num_gpus} GPUs")


@pytest.fixture(scope="module")
def ref(llama):
    return reference(llama, torch.bfloat16)


def prompts():
    return [{"prompt_token_ids": list(ids)} for ids in IDS]


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        pytest.param(2, 1, id="tp2", marks=needs(2)),
        pytest.param(1, 2, id="pp2", marks=needs(2)),
        pytest.param(2, 2, id="tp2-pp2", marks=needs(4)),
    ],
)
def test_rows_of_all_ranks_are_put_together(tensor, pipeline, runner, llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with process_engine(llama, **OPTIONS, **sizes) as llm:
        described = llm.collective_rpc("scope_describe")
        assert {d["runner"] for d in described} == {runner}
        assert sorted(b for d in described if d["drains"] for b in d["taps_here"]) == [0, 2, 4, 6]
        for _ in range(2):
            for output in llm.generate(prompts(), params(), use_tqdm=False):
                ids = list(output.outputs[0].token_ids)
                check_completion(output.scope, output.prompt_token_ids, ids, ref)


@pytest.mark.parametrize("runner", ["V2", "V1"])
@needs(2)
def test_an_edit_of_the_first_stage_that_overflows_ends_its_request(runner, llama, monkeypatch):
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    huge = SamplingParams(
        temperature=0, max_tokens=8, extra_args=scope(Add([3e38] * 128, layer=0, scale=3e38))
    )
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with process_engine(llama, **OPTIONS, pipeline_parallel_size=2) as llm:
        before = llm.generate(prompts(), plain, use_tqdm=False)
        bad, *beside = llm.generate([prompts()[0], *prompts()], [huge, *[plain] * len(IDS)])
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite in bfloat16" in bad.outputs[0].scope.error
    for output, alone in zip(beside, before, strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("layout", ["per_request", "sharded"])
@needs(2)
def test_what_two_stages_write_is_what_memory_has(llama, tmp_path, layout):
    from vllm import SamplingParams

    reads = [Read(s, to=to) for s in ("resid_post", "embed") for to in ("memory", "filesystem")]
    sampling = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, extra_args=scope(*reads)
    )
    sinks = {"filesystem": {"root": str(tmp_path), "layout": layout}}
    with process_engine(
        llama, **OPTIONS, pipeline_parallel_size=2, additional_config={"scope": {"sinks": sinks}}
    ) as llm:
        outputs = llm.generate(prompts(), sampling, use_tqdm=False)
    stored = vllm_scope.open(tmp_path)
    assert len(stored) == len(outputs)
    for output in outputs:
        request = stored[output.request_id]
        assert len(request.manifest.files) == 2
        check_equal(output.scope, request)


@needs(2)
def test_rows_come_from_the_replica_that_has_them(llama, ref):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def collect(engine, i):
        prompt = prompts()[i % len(IDS)]
        return [out async for out in engine.generate(prompt, params(), f"request-{i}")][-1]

    async def run():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(str(llama), max_model_len=512, data_parallel_size=2, **OPTIONS)
        )
        try:
            return await asyncio.gather(*(collect(engine, i) for i in range(32)))
        finally:
            engine.shutdown()

    for output in asyncio.run(run()):
        ids = list(output.outputs[0].token_ids)
        check_completion(output.scope, output.prompt_token_ids, ids, ref)
