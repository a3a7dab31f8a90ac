"""A feed's batches have each row once, whoever is slow and whoever dies."""

from __future__ import annotations

import datetime
import fcntl
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch

import vllm_scope
from tests.recorded import RecordedEngine, Rows
from tests.recorded_feeder import DIES, STARTS, stand_in
from vllm_scope import Read, ScopeError, SpecError
from vllm_scope.errors import FileError
from vllm_scope.feeds import row_feed, start
from vllm_scope.feeds.feeder import run
from vllm_scope.feeds.messages import Channel, Ended, Failed, Settings

READ = Read("resid_post", layers=[1, 3])
TEXTS = ["y" * (20 + i % 50) for i in range(150)]
DEADLINE_S = 60


class LLM(RecordedEngine):
    """An engine in this process, given as an object."""


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_scope.engine.offline", stand_in())
    monkeypatch.setattr(start, "COMMAND", ("-m", "tests.recorded_feeder"))


def stream(*reads, model="recorded", texts=TEXTS, **options):
    return vllm_scope.stream(
        texts, *(reads or (READ,)), model=model,
        **({"batch_size": 64, "buffer_rows": 512} | options),
    )  # fmt: skip


def expected(engine=None, texts=TEXTS):
    """(token ids, positions, rows of layer 3) of all texts, sorted."""
    engine = engine or RecordedEngine()
    found = []
    for ids in engine.encode(texts):
        for first in range(0, len(ids), engine.most_tokens):
            some = ids[first : first + engine.most_tokens]
            column = Rows(some, (Read("resid_post", layer=3),), engine.table).columns()[0]
            found += zip(some, range(len(some)), column.source.tolist(), strict=True)
    return sorted(found)


def taken(batches):
    return sorted(
        (token, position, row)
        for batch in batches
        for token, position, row in zip(
            batch.token_ids.tolist(), batch.positions.tolist(),
            batch["resid_post", 3].tolist(), strict=True,
        )
    )  # fmt: skip


def wait_until(true):
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def feeders():
    return [p for p in psutil.Process().children() if "tests.recorded_feeder" in p.cmdline()]


@pytest.mark.parametrize("model", ["recorded", LLM()], ids=["process", "llm"])
def test_each_row_comes_once_in_all_its_places(model):
    feed = stream(model=model)
    batches = list(feed)
    assert taken(batches) == expected()
    assert [len(batch) for batch in batches[:-1]] == [64] * (len(batches) - 1)
    assert feed.num_rows == len(expected())
    for batch in batches:
        assert batch["resid_post", 1].dtype == torch.bfloat16
        assert torch.equal(batch["resid_post", 1] * 2, batch["resid_post", 3])
    with pytest.raises(KeyError, match=r"the feed has \[\('resid_post', 1\)"):
        batches[0]["resid_post", 2]
    assert repr(batches[0]) == "<Batch of 64 tokens: resid_post 1, resid_post 3>"
    assert list(feed) == []
    assert not feeders()


def test_the_same_arguments_give_the_same_batches_in_another_order_than_the_documents():
    def ids(**options):
        return [batch.token_ids.tolist() for batch in stream(model=LLM(), **options)]

    slow = []
    for batch in stream(model=LLM(), texts=[f"{i:>30}" for i in range(99)], seed=3):
        time.sleep(0.01)
        slow.append(batch.token_ids.tolist())
    again = ids(texts=[f"{i:>30}" for i in range(99)], seed=3)
    assert again == slow
    assert again != ids(texts=[f"{i:>30}" for i in range(99)], seed=4)


def test_the_engine_waits_for_a_slow_trainer_and_nothing_is_lost():
    llm = LLM()
    feed = stream(model=llm, buffer_rows=128)
    batches = [next(feed)]
    wait_until(lambda: feed._memory.num_written == 128 + 64)
    computed = len(llm.computed)
    time.sleep(0.2)  # more could come; nothing may
    assert len(llm.computed) == computed < 20
    assert taken([*batches, *feed]) == expected()


def test_batches_are_the_callers():
    kept, copies = [], []
    for batch in stream(model=LLM()):
        kept.append(batch)
        copies.append(batch["resid_post", 3].clone())
    for batch, copy in zip(kept, copies, strict=True):
        assert torch.equal(batch["resid_post", 3], copy)


@pytest.mark.parametrize("model", ["recorded", LLM()], ids=["process", "llm"])
def test_a_feed_that_is_closed_or_forgotten_ends_what_it_started(model):
    with stream(model=model) as feed:
        next(feed)
    assert list(feed) == []
    forgotten = stream(model=model)
    next(forgotten)
    del forgotten
    gc.collect()
    assert not feeders()
    assert not [t for t in threading.enumerate() if t.name == "vllm-scope-feed"]
    assert len(list(stream(model=model))) > 3  # an LLM goes on


@pytest.mark.parametrize("model", ["recorded", LLM()], ids=["process", "llm"])
def test_a_fork_of_the_trainer_that_ends_does_not_end_the_feed(model):
    feed = stream(model=model)
    first = next(feed)
    if not (child := os.fork()):
        feed.close()  # as Python does at the end of a process
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert taken([first, *feed]) == expected()


def test_what_is_wrong_with_the_documents_is_told_at_the_first_batch():
    model = LLM()
    with pytest.raises(SpecError, match="has the token id 1000; the ids of recorded are 0 to 299"):
        list(stream(model=model, texts=[[5, 1000]]))
    with pytest.raises(SpecError, match="row 0 of a list of 1 has x"):
        list(stream(model=model, texts=[{"x": 3}]))
    assert list(stream(model=model, texts=[])) == []


@pytest.mark.parametrize("model", ["recorded", LLM()], ids=["process", "llm"])
def test_an_error_that_names_a_path_that_is_no_utf8_is_told(model, tmp_path):
    path = tmp_path / os.fsdecode(b"set\xff.jsonl")
    path.write_text('{"text": "a"}\n{"text"')
    with pytest.raises(FileError, match=r"line 2 of .*set\?\.jsonl cannot be read"):
        list(stream(model=model, texts=str(path)))


@pytest.mark.parametrize("model", ["recorded", LLM()], ids=["process", "llm"])
def test_a_text_with_half_of_a_surrogate_pair_is_passed_over(model):
    feed = stream(model=model, texts=["abc", "a\ud800", "z\U0001f600"])
    found = sorted(token for batch in feed for token in batch.token_ids.tolist())
    assert found == sorted(1 + byte for byte in "abcz\U0001f600".encode())
    assert feed.num_skipped == 1


def test_a_trainer_with_a_thousand_open_files_hears_its_feeder():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = Channel.pair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours.close()
    trainer, feeder = Channel(socket.socket(fileno=high)), Channel(theirs)
    assert trainer.receive(0) is None
    feeder.send(Ended(5, 0))
    assert trainer.receive(1) == Ended(5, 0)
    feeder.close()
    with pytest.raises(EOFError, match="the other end is closed"):
        trainer.receive(1)
    trainer.close()
    with pytest.raises(EOFError):
        trainer.receive(1)


def test_a_feed_that_is_forgotten_on_its_feeders_thread_closes_its_memory():
    ours, theirs = Channel.pair()
    memory, failed = os.memfd_create("of a feed"), []

    def forget():
        try:
            row_feed._end(Channel(ours), memory, threading.current_thread(), os.getpid())
        except RuntimeError as error:
            failed.append(error)

    feeder = threading.Thread(target=forget)
    feeder.start()
    feeder.join()
    theirs.close()
    assert not failed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)


def test_a_processor_that_changes_the_order_of_stores_is_refused(monkeypatch):
    monkeypatch.setattr(start.platform, "machine", lambda: "aarch64")
    with pytest.raises(SpecError, match="this processor is aarch64; a feed's memory needs one of"):
        stream()


def test_an_engine_that_dies_is_told_in_a_sentence_after_the_batches_that_are_there():
    feed = stream(engine={DIES: 60})
    with pytest.raises(ScopeError, match="the feed failed: the graphics card is on fire"):
        list(feed)
    assert feed.num_rows > 5 * 64
    assert not feeders()


def test_a_process_that_is_killed_is_told_in_a_sentence():
    feed = stream()
    next(feed)
    (feeder,) = feeders()
    feeder.kill()
    sentence = r"the process of the engine has died \(exit code -9\) after \d+ rows; the output"
    with pytest.raises(ScopeError, match=sentence):
        list(feed)
    with pytest.raises(StopIteration):
        next(feed)


TRAINER = """
import sys, time
import vllm_scope
from vllm_scope.feeds import start
start.COMMAND = ("-m", "tests.recorded_feeder")
feed = vllm_scope.stream(
    ["y" * 30] * 10000, vllm_scope.Read("resid_post", layer=1), model="recorded", batch_size=64,
    engine={ENGINE},
)
{BEFORE}
print(feed._feeder.pid, flush=True)
{AFTER}
"""
ENDS = "the trainer has closed its feed or is gone; the engine ends."


def trainer(engine, before="", after="time.sleep(1000)"):
    """A process that trains, and the process of its engine."""
    text = TRAINER.replace("{ENGINE}", repr(engine))
    process = subprocess.Popen(
        [sys.executable, "-c", text.replace("{BEFORE}", before).replace("{AFTER}", after)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    line = process.stdout.readline()
    assert line, process.communicate()
    return process, psutil.Process(int(line))


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_trainer_that_is_killed_ends_its_engine():
    process, feeder = trainer({}, before="next(feed)")
    process.send_signal(signal.SIGKILL)
    errors = process.communicate(timeout=DEADLINE_S)[1]  # the feeder has the pipe, too
    assert ENDS in errors
    wait_until(lambda: has_ended(feeder))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_a_trainer_that_ends_while_the_engine_starts_ends_the_engine_at_once(sent):
    """With None it closes the feed. The engine would take ten minutes."""
    process, feeder = trainer({STARTS: 600}, after="time.sleep(1000)" if sent else "feed.close()")
    if sent:
        assert process.stderr.readline() == "an engine starts\n"
        process.send_signal(sent)
    errors = process.communicate(timeout=DEADLINE_S)[1]
    wait_until(lambda: has_ended(feeder))
    assert errors.endswith(f"vllm-scope: {ENDS}\n")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be an int of at least 1"),
        ({"batch_size": 8.0}, "batch_size is 8.0; it must be an int"),
        ({"buffer_rows": 127}, "buffer_rows is 127; it must be an int of at least 128, twice"),
        ({"seed": -1}, "seed is -1"),
        ({"texts": object()}, "another process reads it, so give a path, a name or a list"),
        ({"engine": {"dtype": torch.float32}}, "are no JSON"),
        ({"engine": [1]}, r"engine is \[1\]; it must be a dict of arguments of LLM"),
        ({"texts": [b"abc"]}, "are no JSON"),
        ({"texts": ["a", datetime.date(2026, 1, 1)]}, "are no JSON"),
        ({"texts": [{"text": uuid.UUID(int=1)}]}, "are no JSON"),
        ({"split": None}, "split is None; it must be a split's name"),
        ({"column": 3}, "column is 3; it must be a column's name or None"),
        ({"config": b"a"}, "config is b'a'; it must be"),
        ({"context": True}, "context is True; it must be an int of at least 1 or None"),
        ({"long": "cut"}, "long is 'cut'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(options, sentence):
    with pytest.raises(SpecError, match=sentence):
        stream(**options)
    assert not feeders()
    with pytest.raises(SpecError, match="the reads name different tokens"):
        stream(READ, Read("embed", tokens="last"))
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SpecError):
            stream(**options)
    assert len(os.listdir("/proc/self/fd")) == num_open


class _Heard:
    """A channel that notes whether `started` was set when a message was sent."""

    def __init__(self, started: threading.Event) -> None:
        self.started, self.sent = started, []

    def send(self, message) -> None:
        self.sent.append((message, self.started.is_set()))


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [("nowhere.jsonl", "nowhere.jsonl"), (TEXTS, "vLLM cannot start it")],
    ids=["no-documents", "no-engine"],
)
def test_a_feeder_that_cannot_start_is_not_interrupted_while_it_ends(dataset, reason, monkeypatch):
    """The trainer closes its feed when it hears of the failure. `_watch` interrupts the process
    only before `started` is set, and the interrupt of an ending process prints a traceback."""

    def refuse(*_):
        raise SpecError("vLLM cannot start it")

    engines = stand_in()
    engines.OfflineEngine = refuse
    monkeypatch.setitem(sys.modules, "vllm_scope.engine.offline", engines)
    started = threading.Event()
    heard = _Heard(started)
    settings = Settings(64, 512, 1, None, "train", None, "split", None)
    run(dataset, [READ], "no such model", {}, settings, heard, 0, started)
    ((message, was_set),) = heard.sent
    assert isinstance(message, Failed)
    assert reason in message.sentence
    assert was_set
