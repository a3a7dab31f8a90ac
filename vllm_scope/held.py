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
    return holder


def is_held(folder: Path, holder: int) -> bool:
    """Whether the folder of this name is the one that `holder` has open."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(holder))
    except FileNotFoundError:
        return False


def release(folder: Path, holder: int) -> None:
    """Remove the folder that is open as `holder`, which is closed, unless others hold it."""
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
    for parent in {tempfile.gettempdir(), *filter(None, parents)}:
        _remove_free(Path(parent).glob(f"vllm-scope-*-{os.getuid()}-{short(run)}*"), 0.0)


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
