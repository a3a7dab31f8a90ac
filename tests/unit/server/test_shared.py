"""The file through which the processes of a server share a text."""

from __future__ import annotations

import shutil

import pytest

from vllm_scope.server.shared import Shared


@pytest.fixture
def folder(tmp_path):
    def made():
        (tmp_path / "run").mkdir(exist_ok=True)
        return tmp_path / "run"

    return made


def test_each_process_learns_each_text_once(folder):
    one, other = Shared(folder), Shared(folder)
    assert (one.news(), other.news()) == (None, None)
    for text in (b"1", b"2", b"2", b"3"):  # within one tick of the file system's clock
        one.set(text)
        assert [shared.news() for shared in (one, other, one, other)] == [text, text, None, None]
    assert Shared(folder).news() == b"3", "a process that started later"


def test_a_folder_that_was_removed_changes_nothing_until_the_next_text(folder):
    one, other = Shared(folder), Shared(folder)
    one.set(b"1")
    assert other.news() == b"1"
    shutil.rmtree(folder())
    assert other.news() is None
    one.set(b"2")
    assert other.news() == b"2"


def test_a_text_that_cannot_be_written_or_read_leaves_the_earlier_one(folder, monkeypatch):
    one, other = Shared(folder), Shared(folder)
    one.set(b"1")

    def full(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            one.set(b"2")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", lambda path: full(path, b""))
        assert other.news() is None
    assert other.news() == b"1"
