"""Folders of a process, which go with it however it ends.

Owns:  `hold` and what removes folders that nobody holds any more.
Runs:  in every process that makes one: API servers (results, sockets of rows).

A process holds its folder by a lock on it, which the kernel lets go of. A process that ends by
itself removes its folder; API servers are killed by the process that started them, so that one
removes theirs; what a server leaves that was killed as a whole, the next one removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

#: Set by the first process of a server; the processes that it starts inherit it.
RUN = "VLLM_SCOPE_RUN"
#: A folder without a holder that is younger may be one that is just being made.
_NEW_S = 60.0
#: How long a process that was killed may take to let go.
_LAST_S, _POLL_S = 5.0, 0.02
#: What this process holds.
_own: set[Path] = set()


def prefix(kind: str) -> str:
    """What the names of this user's folders of a kind begin with."""
    return f"vllm-scope-{kind}-{os.getuid()}-"


def short(run: str) -> str:
    """Of a run, for names: the path of a socket has 107 bytes."""
    return run[:8]


def hold(folder: Path) -> int:
    """Keep others from removing it while the descriptor that is returned is open."""
    holder = _opened(folder)
    fcntl.flock(holder, fcntl.LOCK_SH)
    _own.add(folder)
    return holder


def is_held(folder: Path, holder: int) -> bool:
    """Whether the folder of this name is the one that `holder` has open."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(holder))
    except FileNotFoundError:
        return False


def release(folder: Path, holder: int) -> None:
    """Remove the folder that is open as `holder`, which is closed, unless others hold it."""
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
    """Folders of servers that were killed."""
    _remove_free(parent.glob(f"{prefix(kind)}*"), _NEW_S)


def end_run(run: str, owner: int, *parents: str | None) -> None:
    """What the processes of a server have left that this one started.

    Args:
        owner: this process; nothing is done in one that was forked from it.
        parents: where there may be folders beside the system's temporary one.
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
    """Folders of other processes of the run; this one's go with what made them."""
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
            continue  # another's, or gone


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
