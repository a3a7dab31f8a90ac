"""Files that one process writes and another process makes visible.

    staged = make_staged(root)
    place = staged.make()            # a hidden folder, or a URL
    ...                              # another process publishes files there, as below any root
    staged.move(place, names)        # the files with these names are now below the root
    staged.remove(place)

Owns:  Staged (protocol), `make_staged`.
Runs:  in the process that decides which files are visible, on one thread.
To:    harvests with several engines.

Promise: a complete file is either below the hidden place where it was written, or below the root.
Only the process that calls `move` makes files visible. A file written after the last `move` stays
hidden.
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
from vllm_scope.files.publish import folder_mode, fsync_folder
from vllm_scope.files.remote import RemoteStaged

#: The name of the folder, below a root, that contains the hidden folders (the places). Readers
#: ignore hidden folders.
FOLDER = ".engines"


class Staged(Protocol):
    """The hidden folders below one root. Each of these folders is called a place."""

    def make(self) -> str:
        """Make a place. Returns an absolute path, or a URL. Raises FileError."""
        ...

    def places(self) -> list[str]:
        """All places, including places that earlier processes made. Raises FileError."""
        ...

    def move(self, place: str, names: Iterable[str]) -> None:
        """Make these files of a place visible, in the order of `names`. Raises FileError."""
        ...

    def remove(self, place: str) -> None:
        """Remove a place and all files of the place. Errors are ignored."""
        ...


def make_staged(root: str, fsync: bool, mode: int) -> Staged:
    """A Staged for an existing folder, or for a URL that fsspec supports. Raises ConfigError."""
    return RemoteStaged(root, FOLDER) if "://" in root else LocalStaged(Path(root), fsync, mode)


class LocalStaged:
    """The places below a local folder.

    Args:
        mode: the permissions of files, as for LocalPublisher.
    """

    def __init__(self, root: Path, fsync: bool, mode: int) -> None:
        self._root, self._fsync = root.absolute(), fsync
        self._folder_mode = folder_mode(mode)

    def make(self) -> str:
        place = self._root / FOLDER / secrets.token_hex(8)
        try:
            for folder in (place.parent, place):
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
                    folder.chmod(self._folder_mode)  # the umask must not change the mode
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
        with suppress(OSError):  # raises OSError if the folder still has other places
            (self._root / FOLDER).rmdir()
