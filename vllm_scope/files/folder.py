"""The protocol of folders from which files are read, and the implementation for folders of this
host.

Owns:  the Folder protocol, LocalFolder.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

from vllm_scope.errors import FileError

#: The endings of data files. Readers ignore all other files in a folder.
SUFFIXES = (".safetensors", ".npz")


def not_read(error: OSError) -> None:
    """Raise FileError if `os.walk` cannot read a folder. Callers pass this function to `os.walk`,
    which otherwise leaves out such a folder without an error.

    Two kinds of folders raise no error: a folder that was removed meanwhile, and `lost+found`,
    which belongs to the system.
    """
    is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    if not is_gone and Path(error.filename).name != "lost+found":
        raise FileError(f"{error.filename} cannot be read: {error.strerror}") from None


class Folder(Protocol):
    """The data files below a root, for reading. Several threads may call the methods at the same
    time."""

    def names(self) -> list[str]:
        """The names of the data files, in sorted order. A name is a path relative to the root.
        Raises FileError if a folder cannot be read."""
        ...

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """Returns a data file that is open for reading at its first byte, and the size of the file
        in bytes. Raises FileError."""
        ...

    def local(self, name: str) -> Path:
        """The path of a file on this host with the content of the data file `name`. Raises
        FileError."""
        ...


class LocalFolder:
    """The data files of a folder and of all its subfolders. If `only` is given, the LocalFolder has
    only one file: the file named `only` in the folder."""

    def __init__(self, root: Path, only: str | None = None) -> None:
        self._root = root
        self._only = only
        #: For the name of each opened file: the inode, the size and the modification time that the
        #: file had when it was first opened.
        self._seen: dict[str, tuple[int, int, int]] = {}

    def names(self) -> list[str]:
        if self._only is not None:
            return [self._only]
        found: list[str] = []
        # `os.walk` does not follow links to folders. Hidden files, and files in hidden folders, are
        # left out, because they are not published yet.
        for folder, folders, names in os.walk(self._root, onerror=not_read):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = Path(folder).relative_to(self._root)
            found += [
                (below / name).as_posix()
                for name in names
                if name.endswith(SUFFIXES) and not name.startswith(".")
            ]
        return sorted(found)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        path = self._root / name
        # Without O_NONBLOCK, `os.open` of a named pipe waits for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        if self._only is None:  # follow a link only if the caller named this file
            flags |= os.O_NOFOLLOW
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FileError(
                    f"{path} is a symbolic link; links inside a folder are not followed. Remove "
                    "it, or open this file by its own name."
                ) from None
            raise FileError(f"{path} cannot be read: {error}") from None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise FileError(f"{path} is not a regular file.")
        identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._seen.setdefault(name, identity) != identity:
            os.close(fd)
            raise FileError(f"{path} was replaced after it was listed; open the folder again.")
        return os.fdopen(fd, "rb"), found.st_size

    def local(self, name: str) -> Path:
        return self._root / name
