"""A folder that the processes of one server share, and that other servers do not remove.

Owns:  HeldFolder.
Runs:  in each API server process. The caller makes one call at a time.
From:  transport.folders (the lock).   To: store.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_scope.transport.folders import hold, is_held, prefix, release, remove_abandoned


class HeldFolder:
    """A folder with mode 700. The constructor first removes folders that killed servers have left.

    Args:
        parent: the folder in which this folder is created.
        kind: a word for the kind of the content. The word is part of the folder's name.
        run: the name of this run of the server, which is the same in all processes of the server.

    Attributes:
        path: the folder's path.

    Raises:
        PermissionError: the path is a link, or other users own or can use the folder.
    """

    def __init__(self, parent: Path, kind: str, run: str) -> None:
        remove_abandoned(parent, kind)
        self.path = parent / f"{prefix(kind)}{run}"
        self._holder = -1
        self.make()

    def make(self) -> None:
        """Create the folder if it is missing, and lock the folder. A program that cleans /tmp can
        have removed the folder in spite of the lock."""
        if self._holder >= 0 and is_held(self.path, self._holder):
            return
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or self.path.is_symlink():
            raise PermissionError(
                f"{self.path} belongs to another user, is a link, or can be used by other users; "
                "set VLLM_SCOPE_RESULTS_DIR to another folder."
            )
        gone, self._holder = self._holder, hold(self.path)
        if gone >= 0:
            os.close(gone)

    def release(self) -> None:
        """Remove the folder if no other process holds a lock on it."""
        if self._holder >= 0:
            release(self.path, self._holder)
            self._holder = -1
