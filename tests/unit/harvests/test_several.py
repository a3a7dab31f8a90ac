"""Several engines write what one writes, whichever of them, or the harvest itself, is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_scope
from tests import recorded
from tests.recorded import READS, RecordedEngine
from tests.several import LoggedEngine, harvest
from tests.unit.harvests.test_kills import check_manifest, contents, write_documents
from vllm_scope.errors import ConfigError, FileError, ScopeError, SpecError
from vllm_scope.files import FileOptions
from vllm_scope.files.publish import LocalPublisher
from vllm_scope.files.staged import FOLDER, make_staged
from vllm_scope.harvests.member import Setup
from vllm_scope.harvests.pools import EngineLostError
from vllm_scope.harvests.processes import Processes, _runs
from vllm_scope.harvests.progress import Progress
from vllm_scope.harvests.ray_pool import RayPool, room
from vllm_scope.harvests.several import SeveralEngines
from vllm_scope.harvests.shards import HashingPublisher

LONGEST_S = 120


def lines_of(log) -> list[tuple[int, str]]:
    """(process, context) of each context that was computed, in order."""
    text = Path(log).read_text() if Path(log).exists() else ""
    return [(int(pid), name) for pid, name in (line.split() for line in text.splitlines())]


def wait_until(condition):
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.long
@pytest.mark.parametrize("long", ["split", "pack"])
def test_two_engines_write_what_one_writes(long, tmp_path):
    dataset, log = write_documents(tmp_path / "rows.jsonl", 400), tmp_path / "log"
    whole = recorded.harvest(dataset, tmp_path / "one", long=long, id_column="id")
    make = partial(LoggedEngine, str(log), wait_s=0.001)
    found = harvest(dataset, tmp_path / "two", make, long=long, id_column="id")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    check_manifest(tmp_path / "two", whole)
    assert found.computed == whole.computed
    assert len({pid for pid, _ in lines_of(log)}) == 2
    assert set(Counter(name for _, name in lines_of(log)).values()) == {1}
    assert not (tmp_path / "two" / FOLDER).exists()
    # One process goes on with what several began, and the other way round.
    next((tmp_path / "two").glob("shard-*.safetensors")).unlink()
    assert recorded.harvest(dataset, tmp_path / "two", long=long, id_column="id").computed
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.long
def test_engines_that_are_killed_are_replaced_and_nothing_is_lost_or_doubled(tmp_path):
    dataset, out, log = write_documents(tmp_path / "rows.jsonl"), tmp_path / "out", tmp_path / "log"
    whole = recorded.harvest(dataset, tmp_path / "one", id_column="id")
    killed: list[int] = []
    #: Contexts of visible shards, and how many lines the log had when they were.
    seen: list[tuple[set[str], int]] = []
    done = threading.Event()

    def kill():
        chosen = random.Random(7)
        for number in (40, 300):
            wait_until(lambda n=number: done.is_set() or len(lines_of(log)) > n)
            time.sleep(chosen.random() / 50)
            pid = lines_of(log)[-1][0]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            files = out.glob("shard-*.safetensors")
            names = {name for file in files for name in names_in(file)}
            seen.append((names, len(lines_of(log))))

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        make = partial(LoggedEngine, str(log), wait_s=0.002)
        found = harvest(dataset, out, make, id_column="id")
    finally:
        done.set()
        killing.join()
    assert contents(out) == contents(tmp_path / "one")
    check_manifest(out, whole)
    assert found.computed == whole.computed
    lines = lines_of(log)
    assert {pid for pid, _ in lines} > set(killed)
    # What the killed ones had not finished was computed by others, and nothing else twice.
    twice = {name for name, count in Counter(name for _, name in lines).items() if count > 1}
    assert twice
    of_killed = {name for pid, name in lines if pid in killed}
    assert twice <= of_killed
    for names, num_lines in seen:
        assert names.isdisjoint(name for _, name in lines[num_lines:]), "of a visible shard"
    assert any(names for names, _ in seen)


@pytest.mark.long
def test_a_harvest_that_takes_answers_late_tells_each_context_once(tmp_path, monkeypatch):
    """Two answers of an engine may wait, and are then taken in any order."""
    told: Counter[bytes] = Counter()

    def add(self, context, skipped):
        told[context.key] += 1
        time.sleep(0.002)

    monkeypatch.setattr(Progress, "add", add)
    make = partial(LoggedEngine, str(tmp_path / "log"), most_tokens=80)
    found = harvest([f"{i:080}" for i in range(1500)], tmp_path / "out", make)
    assert found.computed == len(told) == 1500
    assert set(told.values()) == {1}


class LateKilled(LoggedEngine):
    """Killed once it has a whole shard."""

    def _kills(self) -> bool:
        if super()._kills():
            wait_until(lambda: list(Path(self._once).parent.glob(f"out/{FOLDER}/*/shard-*.json")))
            return True
        return False


@pytest.mark.long
def test_what_a_lost_engine_had_finished_and_not_told_is_counted(tmp_path):
    """Fewer contexts than wait for an engine: it tells of none before it is asked to finish."""
    make = partial(
        LateKilled, str(tmp_path / "log"), "-50", once=str(tmp_path / "once"), most_tokens=80
    )
    found = harvest([f"{i:080}" for i in range(60)], tmp_path / "out", make, count=1)
    assert found.computed == found.manifest.totals["contexts"] == 60
    assert len(lines_of(tmp_path / "log")) < 110, "the lost engine had finished a shard"


def names_in(file) -> set[str]:
    return {request.name for request in vllm_scope.open(file)}


@pytest.mark.long
def test_a_harvest_that_is_killed_goes_on_with_what_its_engines_had_finished(tmp_path):
    dataset, out, log = write_documents(tmp_path / "rows.jsonl"), tmp_path / "out", tmp_path / "log"
    whole = recorded.harvest(dataset, tmp_path / "one", id_column="id")
    options = json.dumps({"id_column": "id"})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.several", str(dataset), str(out), str(log), options]
    )
    wait_until(
        lambda: list(out.glob(f"{FOLDER}/*/shard-*.safetensors")) or process.poll() is not None
    )
    process.kill()
    process.wait()
    pids = {pid for pid, _ in lines_of(log)}
    wait_until(lambda: not any(runs(pid) for pid in pids))  # they end with the harvest
    kept = set()
    for file in [*out.glob("shard-*.safetensors"), *out.glob(f"{FOLDER}/*/shard-*.safetensors")]:
        kept |= names_in(file)
    found = recorded.harvest(dataset, out, id_column="id")
    assert found.computed == whole.computed - len(kept)
    assert contents(out) == contents(tmp_path / "one")
    check_manifest(out, whole)
    assert not (out / FOLDER).exists()


def runs(pid: int) -> bool:
    try:
        return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def test_what_a_lost_engine_still_writes_is_never_visible(tmp_path):
    """As a host does that the cluster has given up, and that still runs."""
    whole = recorded.harvest(["y" * 30] * 50, tmp_path / "one")
    make = partial(LoggedEngine, str(tmp_path / "log"))
    recorded.harvest(["y" * 30] * 50, tmp_path / "two")
    staged = make_staged(str(tmp_path / "two"), False, 0o600)
    place = Path(staged.make())
    for file in (tmp_path / "one").glob("shard-*"):
        (place / file.name).write_bytes(file.read_bytes())
    again = harvest(["y" * 30] * 50, tmp_path / "two", make, 1)
    assert (again.computed, again.manifest.totals["contexts"]) == (0, whole.computed)
    assert not place.exists()


def test_a_second_process_that_is_refused_leaves_what_engines_write(tmp_path):
    place = Path(make_staged(str(tmp_path), False, 0o600).make())
    hidden = place / ".shard-0.safetensors.0123456789abcdef.tmp"
    hidden.write_bytes(b"half of it")
    LocalPublisher(tmp_path).close()
    assert hidden.exists()


@pytest.mark.long
def test_a_document_that_kills_its_engine_ends_the_harvest_with_a_sentence(tmp_path):
    make = partial(LoggedEngine, str(tmp_path / "log"), killer="-33")
    texts = ["y" * 30] * 50
    with pytest.raises(ScopeError, match="4 engines were lost one after another, and no shard was"):
        harvest(texts, tmp_path / "out", make, count=1)
    once = partial(LoggedEngine, str(tmp_path / "log"), killer="-33", once=str(tmp_path / "killed"))
    assert harvest(texts, tmp_path / "out", once, count=1).computed == 50


class Refusing(RecordedEngine):
    def compute(self, prompts, reads):
        raise SpecError("the engine cannot read this")


def test_what_an_engine_refuses_is_refused_at_once(tmp_path):
    with pytest.raises(SpecError, match="the engine cannot read this"):
        harvest(["one", "two"], tmp_path / "out", Refusing, 1)
    with pytest.raises(SpecError, match="has the token id 1000000; the ids of"):
        harvest([[5], [10**6]], tmp_path / "other", RecordedEngine, 1)
    assert recorded.harvest(["one", "two"], tmp_path / "out").computed == 2


class Unwritable(RecordedEngine):
    """In a process whose shards cannot be written, for a reason that nobody foresaw."""

    def compute(self, prompts, reads):
        HashingPublisher.publish = fail
        return super().compute(prompts, reads)


def fail(*args, **options):
    raise ZeroDivisionError("in a shard")


@pytest.mark.long
def test_shards_that_cannot_be_written_end_the_harvest_with_a_sentence(tmp_path):
    with pytest.raises(ScopeError, match=r"4 engines were lost .*ZeroDivisionError: in a shard"):
        harvest(["y" * 40] * 400, tmp_path / "out", Unwritable, 1)


def test_an_engine_whose_shards_cannot_be_shown_does_not_lose_those_of_others(
    tmp_path, monkeypatch
):
    """The harvest ends with an error after both engines have computed rows."""
    dataset = write_documents(tmp_path / "rows.jsonl", 400)
    with dataset.open("a") as file:
        file.write("no JSON\n")
    shown, take_over = [], SeveralEngines._take_over

    def failing(self, seat):
        shown.append(seat.number)
        found = take_over(self, seat)
        if len(shown) == 1:
            raise FileError("a shard is damaged")
        return found

    monkeypatch.setattr(SeveralEngines, "_take_over", failing)
    with pytest.raises(FileError, match="damaged"):
        harvest(dataset, tmp_path / "out", RecordedEngine, id_column="id")
    assert sorted(shown) == [0, 1]
    assert len(list((tmp_path / "out").glob("shard-*.safetensors"))) >= 2


@pytest.mark.parametrize("count", [1, 2])
def test_engines_whose_arguments_cannot_travel_are_refused_and_leave_no_process(count, tmp_path):
    make = partial(RecordedEngine, more={"lock": threading.Lock()})
    with pytest.raises(SpecError, match=r"cannot be sent to another process \(cannot pickle '_thr"):
        harvest(["one"], tmp_path / "out", make, count)
    with pytest.raises(SpecError, match=r"cannot be sent to another process \(Can't pickle local"):
        harvest(["one"], tmp_path / "out", lambda: RecordedEngine(), count)
    assert multiprocessing.active_children() == []
    assert not (tmp_path / "out" / FOLDER).exists()


def killed_while_it_starts(folder: str) -> RecordedEngine:
    """With two processes, as vLLM's: one of another program, and one that is forked."""
    started = subprocess.Popen(["sleep", "1000"])
    forked = os.fork()
    if not forked:
        time.sleep(1000)
        os._exit(0)
    Path(folder, "pids").write_text(f"{started.pid} {forked}")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_the_processes_of_an_engine_that_is_killed_while_it_starts_end(tmp_path):
    with pytest.raises(EngineLostError, match="its process ended with code -9"):
        harvest(["one"], tmp_path / "out", partial(killed_while_it_starts, str(tmp_path)), 1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(runs(pid) for pid in pids))


def with_a_process(folder: str, starts_s: float) -> LoggedEngine:
    """With a process, as vLLM's, that has written its id."""
    started = subprocess.Popen(["sleep", "1000"])
    with open(Path(folder, "pids"), "a") as file:
        file.write(f"{started.pid} {os.getpid()}\n")
    time.sleep(starts_s)
    return LoggedEngine(str(Path(folder, "log")), wait_s=0.01)


#: A shell that starts pytest in the background has it ignore SIGINT, and a process inherits that. A
#: command in a terminal does not ignore it.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from functools import partial
from tests.several import harvest
from tests.unit.harvests.test_several import with_a_process
harvest(["y" * 30] * 3000, "{0}/out", partial(with_a_process, "{0}", {1}))
"""


@pytest.mark.long
@pytest.mark.parametrize("presses", [1, 3])
@pytest.mark.parametrize("starts_s", [0, 1000], ids=["computing", "starting"])
def test_ctrl_c_ends_the_processes_of_all_engines_with_the_command(starts_s, presses, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(tmp_path, starts_s)],
        start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def pids():
        path = tmp_path / "pids"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    try:
        wait_until(lambda: process.poll() is not None or len(pids()) == 4)
        wait_until(
            lambda: process.poll() is not None or starts_s or len(lines_of(tmp_path / "log")) > 50
        )
        for _ in range(presses):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                time.sleep(0.05)
        errors = process.communicate(timeout=LONGEST_S)[1]
        left = [pid for pid in pids() if runs(pid)]
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors
        assert len(pids()) == 4
        # Pressed again, the command does not wait for them.
        assert not left or presses > 1
        wait_until(lambda: not any(runs(pid) for pid in left))
    finally:
        process.kill()
        process.communicate(timeout=LONGEST_S)  # its engines have its pipe for errors
        for leader in pids()[1::2]:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)


def test_a_group_runs_until_its_last_process_has_ended():
    leader = subprocess.Popen(["sh", "-c", "sleep 1000 & exit 0"], start_new_session=True)
    try:
        leader.wait()
        assert _runs(leader.pid)
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
    wait_until(lambda: not _runs(leader.pid))


def test_a_process_that_nobody_has_waited_for_does_not_run():
    ended = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(ended.pid, 0)  # there is a group still
    assert not _runs(ended.pid)
    ended.wait()


def test_a_killed_process_takes_its_whole_group_with_it(tmp_path):
    pool = Processes(1, 1)
    member = pool.start(0)
    place = tmp_path / "place"
    place.mkdir()
    files = FileOptions.parse({"root": str(place)})
    make = partial(with_a_process, str(tmp_path), 0)
    try:
        facts = member.call("start", Setup(make, READS, files, str(Path.cwd())))
        assert facts.result(timeout=LONGEST_S).model
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert _runs(pids[1])
    finally:
        member.kill()
    assert not _runs(pids[1])
    assert not any(runs(pid) for pid in pids)


class UnreadableError(ScopeError):
    """Pickled by its one argument, and made of two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Unreadable(RecordedEngine):
    def compute(self, prompts, reads):
        raise UnreadableError("one", "two")


class Unsendable(RecordedEngine):
    def settings(self, reads):
        return super().settings(reads) | {"lock": threading.Lock()}


@pytest.mark.long
def test_an_answer_that_cannot_be_read_or_sent_ends_its_call_with_a_sentence(tmp_path):
    with pytest.raises(ScopeError, match=r"an engine's answer cannot be read here \(.*'second'"):
        harvest(["one"], tmp_path / "out", Unreadable, 1)
    with pytest.raises(
        ScopeError, match=r"cannot be sent to another process: cannot pickle '_thread.lock'"
    ):
        harvest(["one"], tmp_path / "out", Unsendable, 1)


@pytest.mark.parametrize(
    ("address", "variable", "joined"),
    [
        pytest.param(None, None, "local", id="a-new-one"),
        pytest.param(None, "10.0.0.1:6379", "10.0.0.1:6379", id="of-the-variable"),
        pytest.param("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379", id="the-argument-first"),
    ],
)
def test_no_cluster_is_joined_that_nobody_named(address, variable, joined, monkeypatch):
    """Ray without an address joins the latest cluster that `ray start` began on this host."""
    asked = []

    def init(address):
        asked.append(address)
        raise ConnectionError("nobody answers")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    where = "a new cluster on this host" if joined == "local" else joined
    with pytest.raises(ConfigError, match=f"Ray cannot reach {where}: nobody answers"):
        RayPool(address, 1, 1)
    assert asked == [joined]


def broken():
    raise ScopeError("vLLM cannot start recorded: no memory")


@pytest.mark.long
def test_engines_that_cannot_start_or_differ_are_refused(tmp_path):
    with pytest.raises(ScopeError, match="cannot start recorded: no memory"):
        harvest(["one"], tmp_path / "out", broken, 1)
    with pytest.raises(
        ConfigError, match=r"host .* has dtype '\w+', and the engine on host .* has '\w+'; these"
    ):
        harvest(["one"], tmp_path / "out", partial(differing, str(tmp_path / "first")))
    assert not (tmp_path / "out" / FOLDER).exists()


def differing(path: str) -> RecordedEngine:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        wait_until(lambda: Path(path).stat().st_size == 0)
        return RecordedEngine(dtype="float32")
    return RecordedEngine()


def test_a_host_that_does_not_see_the_folder_is_refused(tmp_path, monkeypatch):
    class Elsewhere(Processes):
        def start(self, number):
            handle = super().start(number)
            call = handle.call

            def to_other_disk(method, *args):
                if method == "start":
                    os.rmdir(args[0].files.root)
                return call(method, *args)

            handle.call = to_other_disk
            return handle

    with pytest.raises(FileError, match=r"host .* does not see .*; name a folder that all hosts"):
        harvest(["one"], tmp_path / "out", RecordedEngine, 1, Elsewhere(1, 1))


def test_shards_of_several_engines_go_to_a_url(tmp_path):
    pytest.importorskip("fsspec")
    texts = ["y" * (20 + i % 50) for i in range(150)]
    recorded.harvest(texts, tmp_path / "one")
    url = f"file://{tmp_path}/two"
    make = partial(LoggedEngine, str(tmp_path / "log"), killer="-77", once=str(tmp_path / "once"))
    found = harvest(texts, url, make)
    assert found.manifest.complete
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert recorded.harvest(texts, tmp_path / "two").computed == 0


def test_arguments_that_name_no_engines_are_refused(tmp_path, monkeypatch):
    def harvest(**options):
        return vllm_scope.harvest(
            ["one"], *READS, out=tmp_path / "out", progress=False, **{"model": "m"} | options
        )

    with pytest.raises(SpecError, match="engines is 0; it must be 1 to 4096"):
        harvest(engines=0)
    with pytest.raises(SpecError, match="ray is 7; it must be True, False, or the address"):
        harvest(ray=7)
    with pytest.raises(SpecError, match="the model is an LLM, and engines or ray is given"):
        harvest(model=object(), engines=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ConfigError, match="3 engines need 6 GPUs, and this host has 4; take 2"):
        harvest(engines=3, engine={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="each engine needs 8 GPUs, and this host has 4; give sm"):
        harvest(engines=1, engine={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray; pip install 'vllm-scope\[ray\]"):
        harvest(ray=True)


@pytest.mark.parametrize(
    ("hosts", "gpus", "engines"),
    [
        pytest.param([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}], 1, 16, id="one-gpu-each"),
        pytest.param([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}], 8, 1, id="all-of-one-host"),
        pytest.param([{"CPU": 64, "GPU": 7}], 2, 3, id="one-left-over"),
        pytest.param([{"CPU": 2, "GPU": 8}], 1, 2, id="few-cpus"),
        pytest.param([{"CPU": 2}, {"CPU": 1}, {}], 0, 3, id="no-gpus"),
    ],
)
def test_engines_are_as_many_as_whole_hosts_have_room_for(hosts, gpus, engines):
    assert room(hosts, gpus) == engines
