"""Rows over TCP are the same rows, and leave nothing behind in the worker."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

from tests.asking import check, params, run
from tests.checkpoints import check_completion, reference
from tests.conftest import TOYWORLD, async_engine, local_engine, process_engine
from vllm_scope import Read, SpecError, scope
from vllm_scope.results.inbox import inbox

SPEC = scope(Read("resid_post"), Read("embed"))
TCP = {"scope": {"road": "tcp", "road_host": "127.0.0.1"}}


def test_rows_of_a_worker_in_another_process_come_over_tcp(llama, ref):
    """Chunked prefill, more rows than the ring holds, half of the requests plain."""
    ids = [range(i, i + 200 + i) for i in range(16)]
    parameters = [params(SPEC if i % 2 else None) for i in range(16)]
    with process_engine(
        llama, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_num_batched_tokens=64,
        additional_config={"scope": {**TCP["scope"], "arena_mib": 0.2}},
    ) as llm:  # fmt: skip
        outputs = run(llm, ids, parameters)
        (counters,) = llm.collective_rpc("scope_counters")
        assert counters["requests"] == 0
        assert counters["roads"] == ["tcp"]
        check([output for i, output in enumerate(outputs) if i % 2], ref)
        assert all(output.scope is None for i, output in enumerate(outputs) if not i % 2)
        # The same rows again, by the connection that is there.
        again = run(llm, ids[1::2], params(SPEC))
        for first, second in zip(outputs[1::2], again, strict=True):
            for stream in first.scope.keys():
                assert torch.equal(first.scope[stream], second.scope[stream])


def test_rows_of_a_worker_in_this_process_come_over_tcp(llama, ref):
    with local_engine(llama, dtype="float32", additional_config=TCP) as llm:
        check(run(llm, [range(5, 90), [7]], params(SPEC)), ref)


@pytest.mark.long
@pytest.mark.parametrize("road", ["auto", "tcp"])
def test_a_front_end_that_does_not_read_holds_the_engine_for_a_while_and_comes_back(
    road, llama, ref
):
    """Its rows are lost, and it says so; the tokens are right, and so is all that comes later."""
    config = {"road": road, "road_host": "127.0.0.1", "arena_mib": 0.2, "deliver_timeout_s": 2.0}
    with process_engine(
        llama, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_num_batched_tokens=64, additional_config={"scope": config},
    ) as llm:  # fmt: skip
        ids = [range(i, i + 200) for i in range(8)]
        whole = run(llm, ids, params(SPEC))
        check(whole, ref)
        receiver, gate = inbox()._receiver, threading.Event()
        reads = receiver._on_rows

        def late(message):
            gate.wait(60)
            reads(message)

        receiver._on_rows = late
        try:
            outputs = run(llm, ids, params(SPEC))
        finally:
            receiver._on_rows = reads
            gate.set()
        for output, before in zip(outputs, whole, strict=True):
            assert output.outputs[0].token_ids == before.outputs[0].token_ids
            assert output.scope.status in ("incomplete", "failed")
        check(run(llm, ids, params(SPEC)), ref)


def test_memory_is_shared_where_it_can_be(llama, ref):
    with local_engine(llama, dtype="float32") as llm:
        check(run(llm, [range(5, 90)], params(SPEC)), ref)
        assert llm.collective_rpc("scope_counters")[0]["roads"] == ["shared"]


def test_a_road_that_leads_nowhere_refuses_the_request_with_the_reason(llama, monkeypatch):
    # This process's inbox may listen already.
    monkeypatch.setattr("vllm_scope.results.inbox._inbox", None)
    options = {"scope": {"road": "tcp", "road_host": "192.0.2.77"}}
    with local_engine(llama, dtype="float32", additional_config=options) as llm:
        with pytest.raises(SpecError, match=r"rows on TCP at '192\.0\.2\.77'.*road_host"):
            run(llm, [[5, 6]], params(SPEC))
        (plain,) = run(llm, [[5, 6]], params(None))
        assert len(plain.outputs[0].token_ids) == 12


@pytest.mark.long
def test_streams_and_clients_that_leave_leave_nothing_behind():
    from vllm import SamplingParams

    ref = reference(TOYWORLD, torch.float32)
    text = "My father told me about the book Goldette. Happily, it was"

    async def stream(engine, name, leave_after=None):
        parameters = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, extra_args=SPEC)
        outputs = []
        generator = engine.generate(text, parameters, name)
        async for output in generator:
            outputs.append(output)
            if leave_after is not None and len(outputs) >= leave_after:
                break
        await generator.aclose()
        return outputs

    async def run():
        engine = async_engine(TOYWORLD, additional_config=TCP)
        try:
            outputs = await stream(engine, "whole")
            await asyncio.gather(*(stream(engine, f"leaves-{i}", 2 + i) for i in range(8)))
            after = await stream(engine, "after")
            (counters,) = await engine.collective_rpc("scope_counters")
            return outputs, after, counters
        finally:
            engine.shutdown()

    outputs, after, counters = asyncio.run(run())
    for last in (outputs[-1], after[-1]):
        ids = list(last.outputs[0].token_ids)
        check_completion(last.scope, last.prompt_token_ids, ids, ref)
    sizes = [len(output.scope.positions("resid_post", 5)) for output in outputs]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= len(outputs) // 4, sizes
    assert counters["requests"] == 0
    assert counters["requests_routed"] == 0
    assert counters["roads"] == ["tcp"]
    del outputs, after, last
    gc.collect()
    assert len(inbox()) == 0
