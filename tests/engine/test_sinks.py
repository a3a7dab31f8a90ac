"""Rows go where reads say, whole, and a sink in trouble is nobody else's."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import contextmanager

import pytest
import torch

import vllm_scope
from tests import asking
from tests.asking import run
from tests.conftest import TOYWORLD, async_engine, local_engine, preempted_in
from vllm_scope import Add, Probe, Read, SpecError, scope


def params(*actions, **options):
    return asking.params(scope(*actions) if actions else None, **options)


def check_equal(result, request):
    """What is on disk is what came back in memory, byte for byte."""
    assert request.status == "ok", request.manifest
    assert request.keys() == sorted(result.keys())
    for stream in result.keys():
        assert request.positions(*stream).tolist() == result.positions(*stream).tolist()
        assert request[stream].dtype == result[stream].dtype
        assert torch.equal(request[stream].view(torch.uint8), result[stream].view(torch.uint8))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(root):
    files = {"root": str(root), "layout": "sharded", "file_mib": 8, "threads": 4}
    with local_engine(
        TOYWORLD, dtype="float32", max_num_batched_tokens=128, max_num_seqs=64, block_size=32,
        additional_config={"scope": {"sinks": {"filesystem": files}}},
    ) as llm:  # fmt: skip
        # Of engines that this process had before.
        llm.rows_before = rows_on_the_page()
        yield llm


def rows_on_the_page():
    from prometheus_client import generate_latest

    lines = generate_latest().decode().splitlines()
    name = 'vllm_scope_sink_rows_total{sink="filesystem"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def both(**options):
    return [
        action
        for to, extra in (("memory", {}), ("filesystem", options))
        for action in (Read("resid_post", to=to, **extra), Read("embed", to=to, **extra))
    ]


@pytest.mark.long
def test_a_thousand_requests_of_all_of_toy_world_are_on_disk_as_they_are_in_memory(llm, root):
    count = 1000
    ids = [range(i % 400, i % 400 + 3 + i % 23) for i in range(count)]
    parameters = [
        params(*both(tag="many", name=f"r{i}"), max_tokens=1 + i % 7) for i in range(count)
    ]
    outputs = run(llm, ids, parameters)
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


def test_scores_cannot_go_to_files(llm):
    probe = Probe([1.0] * 256, layer=1, name="p", to="filesystem")
    sentence = r"probes\[0\]\.to is 'filesystem', which takes reads and features, not probes"
    with pytest.raises(SpecError, match=sentence):
        run(llm, [[5, 6]], params(probe))


def test_rows_that_go_to_files_alone_are_not_in_memory(llm, root):
    read = Read("resid_post", layer=2, tokens="generated", to="filesystem", name="alone")
    (output,) = run(llm, [range(20)], params(read, Read("embed", tokens=[3])))
    assert output.scope.status == "complete"
    assert output.scope.keys() == [("embed", 0)]
    assert output.scope.manifests["filesystem"].streams["resid_post.2"]["shape"] == [11, 256]
    (output,) = run(llm, [range(20)], params(Read("resid_post", to="filesystem")))
    assert (output.scope.status, output.scope.keys()) == ("complete", [])
    assert output.scope.manifests["filesystem"].delivered == 6 * 31
    assert vllm_scope.open(root)["alone"].positions("resid_post", 2).tolist() == list(range(20, 31))


def test_every_completion_of_n_has_its_own_file(llm, root):
    parameters = params(*both(tag="n", name="three"), n=3, temperature=1.0, max_tokens=10)
    (output,) = run(llm, [range(60, 100)], parameters)
    found = {request.manifest.child: request for request in vllm_scope.open(root).find(tag="n")}
    assert len({request.manifest.uid for request in found.values()}) == 1
    for i, completion in enumerate(output.outputs):
        check_equal(completion.scope, found[i])
        assert found[i].output_ids.tolist() == list(completion.token_ids)


def test_a_request_that_is_aborted_keeps_the_rows_of_its_tokens(llm, root):
    (whole,) = run(llm, [range(50)], params(Read("resid_post"), max_tokens=40))
    engine = llm.llm_engine
    reads = params(Read("resid_post", to="filesystem", name="gone"), max_tokens=40)
    request_id = engine.add_request("gone", {"prompt_token_ids": list(range(50))}, reads)
    for _ in range(12):
        engine.step()
    engine.abort_request([request_id or "gone"], internal=True)
    run(llm, [[7]], params())
    llm.collective_rpc("scope_flush")
    request = vllm_scope.open(root)["gone"]
    assert request.status == "partial"
    assert "abort" in request.manifest.reason
    num_rows = 50 + len(request.output_ids) - 1
    assert 50 < num_rows < 89
    for stream in whole.scope.keys():
        assert request.positions(*stream).tolist() == list(range(num_rows))
        torch.testing.assert_close(request[stream], whole.scope[stream][:num_rows])


def test_a_full_disk_fails_its_requests_with_the_reason_and_no_others(llm, root):
    """A file may have 64 KiB at most, as on a full disk; a shard has more."""
    plain = run(llm, [range(30)], params())[0].outputs[0].token_ids
    with no_file_larger_than(1 << 16):
        outputs = run(llm, [range(100)] * 2, params(*both()))
        assert run(llm, [range(30)], params())[0].outputs[0].token_ids == plain
    for output in outputs:
        assert output.scope.status == "failed"
        assert "cannot be written" in output.scope.error
        assert output.scope.manifests["filesystem"].delivered == 0
        assert len(output.scope.positions("resid_post", 2)) == 111
    run(llm, [range(100)], params(*both(name="after")))
    assert vllm_scope.open(root)["after"].status == "ok"


@contextmanager
def no_file_larger_than(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_sinks_do_is_on_the_metrics_page(llm):
    run(llm, [range(30)], params(Read("resid_post", to="filesystem")))

    def rows():
        return rows_on_the_page() - llm.rows_before

    (counters,) = llm.collective_rpc("scope_counters")
    deadline = time.monotonic() + 5
    while rows() < counters["sinks"]["filesystem"]["rows"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rows() == counters["sinks"]["filesystem"]["rows"] > 0


@pytest.mark.long
def test_preempted_requests_are_whole(llama, tmp_path):
    files = {"root": str(tmp_path), "layout": "per_request"}
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=9, block_size=32,
        max_model_len=128, max_num_seqs=4,
        additional_config={"scope": {"sinks": {"filesystem": files}}},
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 20)) for i in (10, 50, 90, 130)]
        parameters = [params(*both(name=f"{i}"), max_tokens=80) for i in range(4)]
        outputs = run(llm, ids, parameters)
    assert preempted, "the cache was large enough; the test shows nothing"
    capture = vllm_scope.open(tmp_path)
    for i, output in enumerate(outputs):
        check_equal(output.scope, capture[f"{i}"])


def test_global_sinks_have_every_request_plain_ones_too(llama, tmp_path):
    reads = [{"site": "resid_post", "layers": [1], "tokens": "prompt"}]
    sinks = {"filesystem": {"root": str(tmp_path), "layout": "per_request", "reads": reads}}
    ids = [range(i, i + 40) for i in range(5)]
    with local_engine(llama, dtype="float32") as llm:
        expected = run(llm, ids, params(Read("resid_post", layers=[1], tokens="prompt")))
    with local_engine(
        llama, dtype="float32", additional_config={"scope": {"global_sinks": sinks}}
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time the prefix cache has them
            run(llm, ids, params())
        run(llm, ids, params(Read("embed")))
        llm.collective_rpc("scope_flush")
        capture = vllm_scope.open(tmp_path)
        assert len(capture) == 15
        for request in capture:
            place = request.prompt_ids[0].item()
            assert request.status == "ok"
            rows = expected[place].scope["resid_post", 1]
            torch.testing.assert_close(request["resid_post", 1], rows)


@pytest.mark.long
def test_a_global_sink_has_the_tokens_of_all_pieces_of_streamed_input(llama, ref, tmp_path):
    reads = [{"site": "resid_post", "layers": [1]}]
    sinks = {"filesystem": {"root": str(tmp_path), "layout": "per_request", "reads": reads}}
    pieces = [list(range(5, 25)), list(range(60, 71)), [7, 8, 9]]
    edits = [Add([0.5] * 128, layer=1, tokens=tokens) for tokens in ("all", "prompt")]

    async def go():
        from vllm.engine.protocol import StreamingInput
        from vllm.sampling_params import RequestOutputKind

        engine = async_engine(
            llama, skip_tokenizer_init=True, additional_config={"scope": {"global_sinks": sinks}}
        )
        sampling = params(max_tokens=4)
        sampling.output_kind = RequestOutputKind.DELTA

        async def session(name):
            ended, outputs, reasons = asyncio.Event(), [], []

            async def each():
                for ids in pieces:
                    yield StreamingInput({"type": "token", "prompt_token_ids": [*ids]})
                    await ended.wait()
                    ended.clear()

            async for output in engine.generate(each(), sampling, name):
                outputs += output.outputs[0].token_ids
                if output.outputs[0].finish_reason is not None:
                    reasons.append(output.outputs[0].stop_reason)
                    ended.set()
            return outputs, reasons

        try:
            outputs, _ = await session("plain")
            await engine.collective_rpc("scope_set_edits", args=(scope(edits[0])["scope"],))
            await session("edited")
            await engine.collective_rpc("scope_set_edits", args=(scope(edits[1])["scope"],))
            refused = await session("refused")
            await engine.collective_rpc("scope_set_edits", args=(None,))
            await engine.collective_rpc("scope_flush")
            return outputs, refused
        finally:
            engine.shutdown()

    outputs, (of_refused, reasons) = asyncio.run(go())
    assert of_refused == []
    assert reasons
    assert all("a later piece of streamed input cannot be told from" in one for one in reasons)
    assert len(outputs) == 12
    # vLLM drops the last token of each answer before the next piece.
    ids = [
        *pieces[0], *outputs[:3], *pieces[1], *outputs[4:7], *pieces[2], *outputs[8:]
    ]  # fmt: skip
    found = {one.manifest.request_id.rsplit("-", 1)[0]: one for one in vllm_scope.open(tmp_path)}
    plain, edited = found["plain"], found["edited"]
    for one in (plain, edited):
        assert one.positions("resid_post", 1).tolist() == list(range(len(ids) - 1))
        rows = ref.streams(one.token_ids.tolist()[:-1])[2]
        rows = rows + 0.5 if one is edited else rows
        torch.testing.assert_close(one["resid_post", 1], rows, rtol=1e-3, atol=1e-3)
    assert plain.token_ids.tolist() == ids
