"""Rows go where reads say, whole, and a sink in trouble is nobody else's."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

import vllm_scope
from tests.conftest import local_engine
from tests.unit.sinks import Live, Other, Whole, install
from vllm_scope import Probe, Read, SpecError, scope


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


def test_scores_cannot_go_to_files(llm):
    probe = Probe([1.0] * 128, layer=1, name="p", to="filesystem")
    with pytest.raises(SpecError, match=r"probes\[0\]\.to is 'filesystem', which takes rows"):
        run(llm, [[5, 6]], params(probe))


def test_rows_that_go_to_files_alone_are_not_in_memory(llm, root):
    read = Read("resid_post", 2, "generated", to="filesystem", name="alone")
    (output,) = run(llm, [range(20)], params(read, Read("embed", tokens=[3])))
    assert output.scope.status == "complete"
    assert output.scope.keys() == [("embed", 0)]
    assert output.scope.manifests["filesystem"].streams["resid_post.2"]["shape"] == [11, 128]
    (output,) = run(llm, [range(20)], params(Read("resid_post", to="filesystem")))
    assert (output.scope.status, output.scope.keys()) == ("complete", [])
    assert output.scope.manifests["filesystem"].delivered == 3 * 31
    flush(llm)
    assert vllm_scope.open(root)["alone"].positions("resid_post", 2).tolist() == list(range(20, 31))


def test_every_completion_of_n_has_its_own_file(llm, root):
    parameters = params(*both(tag="n", name="three"), n=3, temperature=1.0, max_tokens=10)
    (output,) = run(llm, [range(60, 100)], parameters)
    flush(llm)
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
    flush(llm)
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
        answers = llm.collective_rpc("scope_flush")
        assert "cannot be written" in answers[0]["filesystem"]
        assert run(llm, [range(30)], params())[0].outputs[0].token_ids == plain
    assert all(len(o.scope.positions("resid_post", 2)) == 111 for o in outputs)
    run(llm, [range(100)], params(*both(name="after")))
    flush(llm)
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
    from prometheus_client import generate_latest

    run(llm, [range(30)], params(Read("resid_post", to="filesystem")))

    def rows():
        lines = generate_latest().decode().splitlines()
        name = 'vllm_scope_sink_rows_total{sink="filesystem"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    (counters,) = llm.collective_rpc("scope_counters")
    deadline = time.monotonic() + 5
    while rows() < counters["sinks"]["filesystem"]["rows"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rows() == counters["sinks"]["filesystem"]["rows"] > 0


def test_preempted_requests_are_whole(llama, tmp_path):
    files = {"root": str(tmp_path), "layout": "per_request"}
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=9, block_size=32,
        max_model_len=128, max_num_seqs=4,
        additional_config={"scope": {"sinks": {"filesystem": files}}},
    ) as llm:  # fmt: skip
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            original(request, *a, **k),
        )[1]
        ids = [list(range(i, i + 20)) for i in (10, 50, 90, 130)]
        parameters = [params(*both(name=f"{i}"), max_tokens=80) for i in range(4)]
        outputs = run(llm, ids, parameters)
    assert preempted, "the cache was large enough; the test shows nothing"
    capture = vllm_scope.open(tmp_path)
    for i, output in enumerate(outputs):
        check_equal(output.scope, capture[f"{i}"])


def test_sinks_in_trouble_harm_no_neighbour(llama, tmp_path, monkeypatch):
    """One raises, one hangs, one is a hundred times slower than the engine."""
    install(monkeypatch, {"broken": Other, "stuck": Live, "slow": Whole})
    sinks = {
        "filesystem": {"root": str(tmp_path), "layout": "npz"},
        "broken": {"fail": "write"},
        "stuck": {"patience_s": 0.5},
        "slow": {"delay_s": 0.1, "on_overload": "drop", "queue_mib": 0.1},
    }
    with local_engine(
        llama, dtype="float32", additional_config={"scope": {"sinks": sinks}}
    ) as llm:  # fmt: skip
        ids = [range(i, i + 10) for i in range(20)]
        before = [o.outputs[0].token_ids for o in run(llm, ids, params())]
        Live.made[0].go_on.clear()
        kinds = ["broken", "stuck", "slow", "filesystem", "memory"]
        asked = [
            params(Read("resid_post", to=kinds[i % 5])) if i < 10 else params() for i in range(20)
        ]
        started = time.monotonic()
        outputs = run(llm, ids, asked)
        assert time.monotonic() - started < 10
        assert [o.outputs[0].token_ids for o in outputs] == before
        for i, output in enumerate(outputs[:10]):
            result = output.scope
            if kinds[i % 5] in ("broken", "stuck"):
                assert result.status == "failed"
                manifest = result.manifests[kinds[i % 5]]
                assert (manifest.status, manifest.delivered) == ("error", 0)
                assert result.error == manifest.reason
                assert "disk full" in result.error or "did not return" in result.error
            else:
                assert result.status == "complete", (kinds[i % 5], result.manifests)
        Live.made[0].go_on.set()


def test_global_sinks_have_every_request_plain_ones_too(llama, tmp_path):
    reads = [{"site": "resid_post", "layers": [1], "tokens": "prompt"}]
    sinks = {"filesystem": {"root": str(tmp_path), "layout": "per_request", "reads": reads}}
    ids = [range(i, i + 40) for i in range(5)]
    with local_engine(llama, dtype="float32") as llm:
        expected = run(llm, ids, params(Read("resid_post", [1], "prompt")))
    with local_engine(
        llama, dtype="float32", additional_config={"scope": {"global_sinks": sinks}}
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time the prefix cache has them
            run(llm, ids, params())
        run(llm, ids, params(Read("embed")))
        flush(llm)
        capture = vllm_scope.open(tmp_path)
        assert len(capture) == 15
        for request in capture:
            place = request.prompt_ids[0].item()
            assert request.status == "ok"
            rows = expected[place].scope["resid_post", 1]
            torch.testing.assert_close(request["resid_post", 1], rows)


WORKER = """
import sys
from tests.conftest import local_engine
from tests.engine.test_sinks import files_in, params, run
from vllm_scope import Read

model, root = sys.argv[1:]
reads = params(Read("resid_post", to="filesystem"), Read("embed", to="filesystem"))
with local_engine(model, dtype="float32", additional_config=files_in(root)) as llm:
    while True:
        run(llm, [range(i % 300, i % 300 + 60) for i in range(64)], reads)
"""


def files_in(root):
    files = {"root": str(root), "layout": "sharded", "file_mib": 1, "fsync": True}
    return {"scope": {"sinks": {"filesystem": files}}}


def test_a_killed_worker_leaves_no_half_file_and_the_next_one_goes_on(llama, tmp_path):
    root, log = tmp_path / "root", tmp_path / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(llama), str(root)],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while len(list(root.glob("*.safetensors"))) < 3:
                assert worker.poll() is None, log.read_text()
                time.sleep(0.002)
            # In mid-write: a file is there under its hidden name.
            while not list(root.glob(".*.tmp")):
                assert worker.poll() is None, log.read_text()
        finally:
            worker.kill()
            worker.wait()
    capture = vllm_scope.open(root)
    assert len(capture) > 0
    for request in capture:
        assert request.status == "ok"
        for stream in request.keys():
            assert len(request[stream]) == 71
    before = len(capture)
    with local_engine(llama, dtype="float32", additional_config=files_in(root)) as llm:
        assert not list(root.glob(".*.tmp"))
        run(llm, [range(i, i + 60) for i in range(20)], params(Read("embed", to="filesystem")))
        flush(llm)
        assert len(vllm_scope.open(root)) == before + 20
