"""Files that one process writes and another process makes visible.

    staged = make_staged(root)
    place = staged.make()            # a hidden folder, or a URL
    ...                              # another process publishes files there, as below any root
    staged.move(place, names)        # from here on they are below the root
    staged.remove(place)

Owns:  the protocol Staged, `make_staged`.
Runs:  in the process that decides which files are visible, on one thread.
To:    harvests with several engines.

Promise: a whole file is either below its place or below the root. Only the process that moves files
decides what the root holds: a file that another process writes after the last move is never
visible.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vllm_scope.errors import FileError
from vllm_scope.files.publish import fsync_folder
from vllm_scope.files.remote import RemoteStaged

#: The folder of places below a root, hidden from readers.
FOLDER = ".engines"


class Staged(Protocol):
    """Hidden places below one root."""

    def make(self) -> str:
        """A new place: an absolute path, or a URL. Raises FileError."""
        ...

    def places(self) -> list[str]:
        """All places, including those of earlier processes. Raises FileError."""
        ...

    def move(self, place: str, names: Iterable[str]) -> None:
        """Make these files of a place visible, in this order. Raises FileError."""
        ...

    def remove(self, place: str) -> None:
        """Remove a place and its files. A file that cannot be removed stays, and raises nothing."""
        ...


def make_staged(root: str, fsync: bool, mode: int) -> Staged:
    """Places below a folder that exists, or below a URL that fsspec knows. Raises ConfigError."""
    return RemoteStaged(root, FOLDER) if "://" in root else LocalStaged(Path(root), fsync, mode)


class LocalStaged:
    """Places below a local folder.

    Args:
        mode: the mode of files, as for LocalPublisher.
    """

    def __init__(self, root: Path, fsync: bool, mode: int) -> None:
        self._root, self._fsync = root.absolute(), fsync
        self._folder_mode = 0o700 | mode | (mode & 0o444) >> 2

    def make(self) -> str:
        place = self._root / FOLDER / secrets.token_hex(8)
        try:
            for folder in (place.parent, place):
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
                    folder.chmod(self._folder_mode)  # whatever the umask is
        except OSError as error:
            raise FileError(f"{place} cannot be made: {error}") from None
        return str(place)

    def places(self) -> list[str]:
        try:
            return sorted(str(place) for place in (self._root / FOLDER).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"{self._root / FOLDER} cannot be read: {error}") from None

    def move(self, place: str, names: Iterable[str]) -> None:
        try:
            for name in names:
                os.replace(Path(place) / name, self._root / name)
            if self._fsync:
                fsync_folder(self._root)
        except OSError as error:
            raise FileError(f"{place} cannot be moved to {self._root}: {error}") from None

    def remove(self, place: str) -> None:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # other places are there
            (self._root / FOLDER).rmdir()
