"""A sink in trouble, on a real engine: its requests say why, and nobody else notices."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

import vllm_scope
from tests.asking import run
from tests.conftest import local_engine
from tests.engine.test_sinks import check_equal, params
from tests.unit.recording import Live, Other, Whole, install, nobody, small_disk
from vllm_scope import Read
from vllm_scope.files import FileOptions
from vllm_scope.sinks.filesystem import FilesystemSink


class Files(FilesystemSink):
    """A second, third ... filesystem sink."""

    def __init__(self, **own) -> None:
        super().__init__(FileOptions.parse(own))


class Stuck(Live):
    made: ClassVar[list] = []


class Full(Stuck):
    """Its queue is full as soon as it hangs."""

    made: ClassVar[list] = []


class Block(Live):
    made: ClassVar[list] = []


class Drop(Live):
    made: ClassVar[list] = []


class Spill(Live):
    made: ClassVar[list] = []


class Slow(Whole):
    made: ClassVar[list] = []


PATIENCE_S = 1.5


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roots")
    roots = {name: folder / name for name in ("healthy", "removed", "denied", "full")}
    roots["full"].mkdir()
    with small_disk(roots["full"], 512 << 10):
        yield SimpleNamespace(**roots)


@pytest.fixture(scope="module")
def llm(checkpoints, roots):
    plugins = {
        **dict.fromkeys(("removed", "denied", "full"), Files), "broken": Other, "stuck": Stuck,
        "stuckfull": Full, "block": Block, "drop": Drop, "spill": Spill, "slow": Slow,
    }  # fmt: skip
    sinks = {
        "filesystem": {"root": str(roots.healthy)},
        **{n: {"root": str(getattr(roots, n)), "layout": "npz"} for n in ("removed", "denied")},
        "full": {"root": str(roots.full), "layout": "sharded", "flush_s": 0.2},
        "broken": {"fail": "write"},
        "stuck": {"patience_s": PATIENCE_S},
        "stuckfull": {"patience_s": PATIENCE_S, "queue_mib": 0.01},
        **{p: {"on_overload": p, "queue_mib": 0.05} for p in ("block", "drop", "spill")},
        "slow": {"on_overload": "drop", "queue_mib": 1, "held_mib": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        install(patch, plugins)
        with local_engine(
            checkpoints("llama"), dtype="float32", max_num_batched_tokens=1024,
            enable_prefix_caching=False, additional_config={"scope": {"sinks": sinks}},
        ) as llm:  # fmt: skip
            run(llm, [range(60)] * 8, params(Read("resid_post")))  # warm
            yield llm


def read(*to, **options):
    return params(*(Read("resid_post", to=t) for t in to), **options)


def counters(llm, sink):
    return llm.collective_rpc("scope_counters")[0]["sinks"][sink]


def check_failed(output, sink, reason):
    manifest = output.scope.manifests[sink]
    assert (manifest.status, manifest.delivered) == ("error", 0)
    assert manifest.dropped == manifest.expected > 0
    assert reason in manifest.reason
    assert output.scope.status == "failed"
    assert output.scope.error == manifest.reason


@contextmanager
def root_removed(roots):
    shutil.rmtree(roots.removed)
    yield
    roots.removed.mkdir()


@contextmanager
def permission_denied(roots):
    with nobody(roots.denied, roots.healthy):
        roots.denied.chmod(0o500)
        yield
        roots.denied.chmod(0o700)


@contextmanager
def disk_full(roots):
    ballast = roots.full / "ballast"
    ballast.write_bytes(bytes(500 << 10))
    yield
    ballast.unlink()


@pytest.mark.parametrize(
    ("harm", "sink", "reason"),
    [
        pytest.param(root_removed, "removed", "No such file or directory", id="root-removed"),
        pytest.param(permission_denied, "denied", "Permission denied", id="permission-denied"),
        pytest.param(disk_full, "full", "No space left on device", id="disk-full"),
    ],
)
def test_a_root_that_goes_wrong_ends_its_requests_with_the_reason(llm, roots, harm, sink, reason):
    """Requests name it, a healthy sink and memory; some are plain. It comes back, too."""
    ids = [range(i, i + 30) for i in range(12)]
    plain = [o.outputs[0].token_ids for o in run(llm, ids, params())]
    kinds = (read(sink, "filesystem", "memory"), params(), read("filesystem"))
    with harm(roots):
        outputs = run(llm, ids, [kinds[i % 3] for i in range(12)])
    assert [o.outputs[0].token_ids for o in outputs] == plain
    stored = vllm_scope.open(roots.healthy)
    for i, output in enumerate(outputs):
        if i % 3 == 0:
            check_failed(output, sink, reason)
            check_equal(output.scope, stored[output.request_id])
        elif i % 3 == 2:
            assert output.scope.status == "complete"
    (output,) = run(llm, [range(30)], read(sink))
    assert output.scope.status == "complete", output.scope.error


def test_a_sink_that_raises_ends_its_requests_with_the_reason(llm):
    outputs = run(llm, [range(i, i + 9) for i in range(8)], [read("broken", "filesystem")] * 8)
    for output in outputs:
        check_failed(output, "broken", "OSError: disk full")
        assert output.scope.manifests["filesystem"].status == "ok"


def seconds(llm, parameters, count=6):
    """Of one request after another, the best: others have these cores, too."""
    took = []
    for i in range(count):
        started = time.perf_counter()
        (output,) = run(llm, [range(i, i + 40)], parameters)
        took.append(time.perf_counter() - started)
        assert output.scope is None or output.scope.status == "complete"
    return min(took)


@pytest.mark.long
def test_a_sink_that_hangs_is_given_up_and_nobody_else_notices(llm):
    kinds = {"plain": params(), "memory": read("memory"), "filesystem": read("filesystem")}
    before = {kind: seconds(llm, asked) for kind, asked in kinds.items()}
    for sink, kind in (("stuck", Stuck), ("stuckfull", Full)):
        kind.made[0].go_on.clear()
        started = time.perf_counter()
        outputs = run(llm, [range(i, i + 40) for i in range(8)], read(sink))
        took = time.perf_counter() - started
        for output in outputs:
            check_failed(output, sink, f"did not return from a call within {PATIENCE_S} s")
        # One wait for all of them.
        assert PATIENCE_S < took < PATIENCE_S + 1.5
        during = {kind: seconds(llm, asked) for kind, asked in kinds.items()}
        print(sink, {kind: (before[kind], during[kind]) for kind in kinds})
        for name in kinds:
            # To notice would take PATIENCE_S, or as long as it hangs.
            assert during[name] < before[name] + 0.5, (sink, name)
        started = time.perf_counter()
        check_failed(run(llm, [range(40)], read(sink))[0], sink, "did not return")
        assert time.perf_counter() - started < 1
        kind.made[0].go_on.set()
        time.sleep(0.3)
        (output,) = run(llm, [range(40)], read(sink))
        assert output.scope.status == "complete"


def test_each_policy_keeps_its_promise_at_a_tenth_of_the_needed_speed(llm):
    ids = [range(i, i + 20) for i in range(8)]
    started = time.perf_counter()
    (reading,) = [run(llm, ids, read("memory", max_tokens=20))]
    needed_s = time.perf_counter() - started
    num_rows = sum(o.scope.expected for o in reading)
    for kind in (Block, Drop, Spill):
        kind.made[0].row_s = 10 * needed_s / num_rows

    def served(policy):
        """Seconds until a request that came second has its rows in memory, and until all end."""
        started = time.perf_counter()
        # It comes in the middle, and is fed by the same drain.
        outputs = run(llm, [*ids, range(30)], [read(policy, max_tokens=20)] * 8
                      + [read("memory", max_tokens=30)])  # fmt: skip
        manifests = [o.scope.manifests[policy] for o in outputs[:8]]
        assert outputs[8].scope.status == "complete"
        assert sum(m.expected for m in manifests) == num_rows
        return outputs, manifests, time.perf_counter() - started

    _, manifests, took = served("block")
    assert {(m.status, m.dropped) for m in manifests} == {("ok", 0)}
    assert counters(llm, "block")["waits"] > 0
    assert took > 7 * needed_s

    outputs, manifests, took = served("drop")
    assert counters(llm, "drop")["waits"] == 0
    delivered = sum(m.delivered for m in manifests)
    assert all(m.delivered + m.dropped == m.expected for m in manifests)
    assert 0 < delivered < 0.6 * num_rows
    assert counters(llm, "drop")["drops"] == num_rows - delivered
    assert {o.scope.status for o in outputs[:8]} == {"incomplete"}
    assert {m.reason for m in manifests} == {"the queue of sink 'drop' was full"}
    given = sum(len(rows) for rows in Drop.made[0].rows.values())
    assert given == delivered

    _, manifests, took = served("spill")
    assert {(m.status, m.dropped) for m in manifests} == {("ok", 0)}
    assert counters(llm, "spill")["waits"] == 0
    assert counters(llm, "spill")["spilled_bytes"] > 0
    for rows in Spill.made[0].rows.values():
        assert [position for position, _ in rows] == list(range(39))


@contextmanager
def growth():
    """By how much this process's memory grows at most meanwhile; without the ring, which
    is shared, of fixed size, and touched bit by bit."""
    done, found = threading.Event(), SimpleNamespace(most=0)
    gc.collect()
    # What was freed before must not make room for what comes.
    ctypes.CDLL(None).malloc_trim(0)

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))

    before = anonymous()

    def look():
        while not done.wait(0.01):
            found.most = max(found.most, anonymous() - before)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        done.set()
        looking.join()


@pytest.mark.long
def test_memory_stays_bounded_behind_a_sink_a_hundred_times_slower(llm):
    ids = [[(7 * i + j) % 500 for j in range(480)] for i in range(256)]
    started = time.perf_counter()
    outputs = run(llm, ids, read("memory", max_tokens=2))
    num_rows = sum(o.scope.expected for o in outputs)
    Slow.made[0].row_s = 100 * (time.perf_counter() - started) / num_rows
    num_bytes = num_rows * 128 * 4
    assert num_bytes > 160 << 20
    del outputs
    with growth() as plain:
        run(llm, ids, params(max_tokens=2))
    # The queue's 1 MiB, the 2 MiB held, the request that is put together, the handles.
    most = plain.most + (32 << 20)
    for _ in range(3):  # what the allocator keeps for threads differs by 15 MiB from run to run
        with growth() as grown:
            outputs = run(llm, ids, read("slow", max_tokens=2))
        sizes = {"rows": num_bytes, "plain": plain.most, "slow": grown.most}
        print({what: f"{size >> 20} MiB" for what, size in sizes.items()})
        if grown.most < most:
            break
    assert grown.most < most
    dropped = sum(o.scope.manifests["slow"].dropped for o in outputs)
    assert 0 < dropped < num_rows
    assert {o.scope.status for o in outputs} <= {"incomplete", "complete"}
