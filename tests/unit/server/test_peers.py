"""What each process tells the others: soon after a change, at most so often, and whole files."""

from __future__ import annotations

import copy

import pytest

from tests.unit.waiting import until
from vllm_scope.server import peers
from vllm_scope.server.peers import Peers


@pytest.fixture
def told(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "EVERY_S", 0.05)
    return lambda pid, text: _of(monkeypatch, tmp_path, pid, text)


def _of(monkeypatch, folder, pid, text):
    monkeypatch.setattr("os.getpid", lambda: pid)
    return Peers(lambda: folder, text)


def test_a_process_has_what_the_others_told_and_not_its_own(told, tmp_path):
    texts = {1: b"one", 2: b"two"}
    first, second = (told(pid, lambda pid=pid: texts[pid]) for pid in texts)
    assert first.others() == []
    first.changed()
    second.changed()
    until(lambda: first.others() == [b"two"] and second.others() == [b"one"], 60)
    texts[2] = b"more"
    copy.deepcopy(second).changed()
    until(lambda: first.others() == [b"more"], 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["activity.1", "activity.2"]


def test_many_changes_are_told_in_few_writes(told):
    texts = []

    def text():
        texts.append(b"x")
        return b"x" * len(texts)

    one, other = told(1, text), told(2, bytes)
    until(lambda: one.changed() or len(texts) >= 3, 60)
    for _ in range(10_000):
        one.changed()
    until(lambda: len(texts) >= 4 and other.others() == [b"x" * len(texts)], 60)
    assert len(texts) < 1000


def test_a_folder_that_cannot_be_written_or_read_ends_nothing(told, tmp_path, monkeypatch):
    one = told(1, lambda: b"text")
    (tmp_path / "activity.2").mkdir()  # no file
    assert one.others() == []
    wrong = [True]
    write = type(tmp_path).write_bytes

    def full(path, text):
        if wrong.pop(0) if wrong else False:
            raise OSError(28, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    one.changed()
    until(lambda: not wrong, 60)
    one.changed()
    until((tmp_path / "activity.1").exists, 60)
