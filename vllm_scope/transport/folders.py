"""Folders of a process, which are removed even if the process is killed.

Owns:  `hold`, and the removal of folders that no process has locked.
Runs:  in an API server (for the folder of results) and in a front-end (for the folder of its
       socket).

A process locks its folder. The kernel releases the lock when the process ends. A process that exits
normally removes its own folder. When a server ends, the process that started the API servers kills
them, and then removes their folders. If a whole server is killed, its folders stay until another
process makes a folder of the same kind. That process removes the folders of the killed server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

#: Environment variable with the identity of the run, which is one start of a server. The server's
#: first process sets the variable. All other processes of the server inherit the variable.
RUN = "VLLM_SCOPE_RUN"
#: `remove_abandoned` keeps folders that are younger than _NEW_S seconds, because the processes of
#: these folders may not have locked the folders yet.
_NEW_S = 60.0
#: `end_run` waits at most _LAST_S seconds until killed processes have released their locks.
_LAST_S, _POLL_S = 5.0, 0.02
#: Folders that this process has locked.
_own: set[Path] = set()


def prefix(kind: str) -> str:
    """The prefix of the names of all folders of this kind and this user."""
    return f"vllm-scope-{kind}-{os.getuid()}-"


def short(run: str) -> str:
    """The first characters of a run's identity, for a folder's name.

    The whole identity is too long, because the path of a socket can have at most 107 bytes.
    """
    return run[:8]


def hold(folder: Path) -> int:
    """Lock a folder. No process removes the folder before the returned descriptor is closed."""
    holder = _opened(folder)
    fcntl.flock(holder, fcntl.LOCK_SH)
    _own.add(folder)
    return holder


def is_held(folder: Path, holder: int) -> bool:
    """True if the path `folder` still names the folder that the descriptor `holder` has open."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(holder))
    except FileNotFoundError:
        return False


def release(folder: Path, holder: int) -> None:
    """Close the descriptor `holder`, and remove the folder if no other process has locked it."""
    _own.discard(folder)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_held(folder, holder):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # a running process has locked the folder
    finally:
        os.close(holder)


def remove_abandoned(parent: Path, kind: str) -> None:
    """Remove the folders of this kind that no process has locked, and that are at least _NEW_S
    seconds old. Killed processes have left these folders."""
    _remove_free(parent.glob(f"{prefix(kind)}*"), _NEW_S)


def end_run(run: str, owner: int, *parents: str | None) -> None:
    """Remove the folders of the processes that this process started for the run.

    Args:
        owner: The process id of the process that started the run. If another process calls this
            function, such as a fork of the owner, the call removes nothing.
        parents: Folders to search, in addition to the system's temporary folder.
    """
    if os.getpid() != owner:
        return
    limit = time.monotonic() + _LAST_S
    while left := _left(run, {tempfile.gettempdir(), *filter(None, parents)}):
        _remove_free(left, 0.0)
        if not any(folder.exists() for folder in left) or time.monotonic() > limit:
            return
        time.sleep(_POLL_S)


def _left(run: str, parents: set[str]) -> list[Path]:
    """The run's folders, without the folders that this process has locked."""
    name = f"vllm-scope-*-{os.getuid()}-{short(run)}*"
    return [
        folder for parent in parents for folder in Path(parent).glob(name) if folder not in _own
    ]


def _remove_free(folders: Iterable[Path], least_age_s: float) -> None:
    for folder in folders:
        try:
            age_s = time.time() - folder.lstat().st_mtime
            if age_s >= least_age_s and not folder.is_symlink():
                release(folder, _opened(folder))
        except OSError:
            continue  # another user owns the folder, or the folder does not exist any more


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
