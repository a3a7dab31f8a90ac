"""Folders of a process, which are removed however the process ends.

Owns:  `hold`, and the removal of folders that no process holds.
Runs:  in every process that makes such a folder: an API server (results), a front-end (socket).

A process holds a lock on its folder, which the kernel releases when the process ends. A process
that ends by itself removes its folder. API servers are killed by the process that started them,
which then removes their folders. If a whole server is killed, the next server removes its folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

#: Environment variable with the run's identity. The first process of a server sets it; the
#: processes that it starts inherit it.
RUN = "VLLM_SCOPE_RUN"
#: A folder younger than this may have no holder yet, because a process is just making it.
_NEW_S = 60.0
#: How long a killed process may take to release its lock.
_LAST_S, _POLL_S = 5.0, 0.02
#: Folders that this process holds.
_own: set[Path] = set()


def prefix(kind: str) -> str:
    """The prefix of the names of all folders of this kind and this user."""
    return f"vllm-scope-{kind}-{os.getuid()}-"


def short(run: str) -> str:
    """The first characters of a run's identity, for a folder's name.

    The whole identity would be too long: the path of a socket has at most 107 bytes.
    """
    return run[:8]


def hold(folder: Path) -> int:
    """Lock a folder. Other processes do not remove it while the returned descriptor is open."""
    holder = _opened(folder)
    fcntl.flock(holder, fcntl.LOCK_SH)
    _own.add(folder)
    return holder


def is_held(folder: Path, holder: int) -> bool:
    """True if the path `folder` still names the folder that `holder` has open."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(holder))
    except FileNotFoundError:
        return False


def release(folder: Path, holder: int) -> None:
    """Close `holder`, and remove its folder unless another process holds it."""
    _own.discard(folder)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_held(folder, holder):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # held by a living process
    finally:
        os.close(holder)


def remove_abandoned(parent: Path, kind: str) -> None:
    """Remove the folders of this kind that no process holds, left by servers that were killed."""
    _remove_free(parent.glob(f"{prefix(kind)}*"), _NEW_S)


def end_run(run: str, owner: int, *parents: str | None) -> None:
    """Remove the folders of the run's other processes, which this process started.

    Args:
        owner: pid of the process that started the others. A call in any process but the owner,
            such as a fork of it, removes nothing.
        parents: folders that are searched, besides the system's temporary folder.
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
    """Folders of the run's other processes. This process removes its own folders by `release`."""
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
            continue  # the folder is another user's, or gone


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
