"""One harvest at a time writes into a folder, which other users can reach as its mode says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_scope.errors import FileError
from vllm_scope.files.publish import LocalPublisher
from vllm_scope.harvests.manifest import locked


def refusal_in_thread(root):
    """What a second thread of this process is told."""
    found = []

    def run():
        try:
            with locked(str(root)):
                found.append("locked")
        except FileError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def refusal_in_process(root):
    code = f"from vllm_scope.harvests.manifest import locked\nwith locked({str(root)!r}): pass"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found.stderr.strip().rpartition("\n")[2]


@pytest.mark.long
def test_a_second_thread_is_refused_and_the_lock_stays(tmp_path):
    root, link = tmp_path / "a" / "rows", tmp_path / "link"
    with locked(str(root)):
        link.symlink_to(root)
        assert "this process already harvests into" in refusal_in_thread(root)
        assert "this process already harvests into" in refusal_in_thread(link)
        assert "another process harvests into" in refusal_in_process(root)
    assert refusal_in_thread(root) == "locked"
    assert refusal_in_process(root) == ""


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_folder_is_made_as_a_writer_of_files_makes_it(mode, tmp_path):
    LocalPublisher(tmp_path / "sink" / "rows", False, mode).close()
    with locked(str(tmp_path / "harvest" / "rows"), False, mode):
        modes = [modes_of(tmp_path / name) for name in ("sink", "harvest")]
    assert modes[0] == modes[1]


def modes_of(root: Path) -> list[str]:
    return [oct(stat.S_IMODE(os.stat(folder).st_mode)) for folder in (root, root / "rows")]
