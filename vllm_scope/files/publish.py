"""Writes files that become visible only when they are complete.

Owns:  LocalPublisher, and the lock file of each publisher. While a lock file is locked, its writer
       still runs.
Runs:  in every process that writes files. Several publishers may share a root.

Promise: a visible file is complete. A file is first written under a hidden temporary name in its
folder, and is then renamed. A `.json` index becomes visible after the rows that the index names. A
killed writer leaves complete files and hidden files. The next writer of the root removes the
hidden files.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from vllm_scope.errors import FileError

Write = Callable[[BinaryIO], None]

_LOCK = re.compile(r"\.scope-([0-9a-f]{16})\.lock")
_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{16})\.tmp", re.DOTALL)


class Publisher(Protocol):
    """Writes files below one root. Several threads may call `publish` at the same time."""

    def publish(self, files: Mapping[str, Write]) -> None:
        """Write files, then make them visible in the order of `files`.

        Existing files of the same names are replaced.

        Args:
            files: for each name, a function that writes the content to an empty, unbuffered file.
                A name is a path relative to the root, with `/` between folders. All files must be
                in one folder.

        Raises:
            FileError: a file cannot be written. If a rename fails, files that were already renamed
                stay visible, because the files that they replaced are gone. If the fsync of the
                folder fails, all files stay visible. After any other failure, no new file is
                visible.
        """
        ...

    def close(self) -> None: ...


@contextmanager
def whole_writes(file: BinaryIO) -> Iterator[BinaryIO]:
    """A buffered writer for `file`. When the `with` block ends, all bytes are written, or OSError
    is raised. Libraries that do not check how many bytes `file.write` has written need this
    writer."""
    buffer = io.BufferedWriter(file, 1 << 20)
    try:
        yield buffer
    finally:
        buffer.detach()  # flushes


def write_bytes(file: BinaryIO, body: bytes | memoryview) -> None:
    """Write all of `body`. An unbuffered file may need several calls of `write`."""
    view = memoryview(body)
    while view:
        view = view[file.write(view) :]


class LocalPublisher:
    """Publishes files below a local folder. The folder is made if it does not exist.

    Args:
        mode: the permissions of the files. If a user may read the files, the user may also enter
            the new folders. By default, only the user of this process may read the files, because
            files can have private text.

    Attributes:
        identity: part of the names of this writer's temporary files and lock file.
    """

    def __init__(self, root: Path, fsync: bool = False, mode: int = 0o600) -> None:
        self._root = root
        self._fsync = fsync
        self._mode, self._folder_mode = mode, folder_mode(mode)
        self._lock, self._relocking = -1, threading.Lock()
        try:
            self._make_root()
            self.identity, self._lock = _lock(root, mode)
            _remove_leftovers(root, self.identity)
        except OSError as error:
            self.close()
            raise FileError(f"{root} cannot be written to: {error}") from None

    def publish(self, files: Mapping[str, Write]) -> None:
        targets = [self._root / name for name in files]
        folder = targets[0].parent
        hidden = [t.with_name(f".{t.name}.{self.identity}.tmp") for t in targets]
        try:
            self._keep_lock()
            self._make_folder(folder)
            for temporary, write in zip(hidden, files.values(), strict=True):
                self._write(temporary, write)
            for target, temporary in zip(targets, hidden, strict=True):
                os.replace(temporary, target)
            if self._fsync:
                fsync_folder(folder)
        except BaseException as error:
            for temporary in hidden:
                with suppress(OSError):
                    temporary.unlink()
            if isinstance(error, OSError):
                raise FileError(f"{targets[0]} cannot be written: {error}") from error
            raise

    def _write(self, temporary: Path, write: Write) -> None:
        with suppress(FileNotFoundError):
            temporary.unlink()
        # The path must not be a link that another user made.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb", buffering=0) as file:
            os.fchmod(file.fileno(), self._mode)  # the umask must not change the mode
            write(file)
            if self._fsync:
                os.fdatasync(file.fileno())

    def _keep_lock(self) -> None:
        """If the lock file is gone, for example because someone removed the root, make it again.
        Without a lock file, the next writer would remove this writer's temporary files."""
        path = self._root / f".scope-{self.identity}.lock"
        with self._relocking:
            while self._lock >= 0 and not path.exists():
                if (fd := _locked(path, self._mode)) is not None:
                    os.close(self._lock)
                    self._lock = fd

    def _make_root(self) -> None:
        missing = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self._make(folder)
        if not self._root.is_dir():
            raise NotADirectoryError(f"{self._root} is not a folder")

    def _make(self, folder: Path) -> None:
        """Make a folder with the permissions of this publisher's folders. Raises
        FileExistsError."""
        folder.mkdir(0o700)
        folder.chmod(self._folder_mode)  # the umask must not change the mode
        if self._fsync:
            fsync_folder(folder.parent)

    def _make_folder(self, folder: Path) -> None:
        inside = folder.relative_to(self._root)
        for part in [*reversed(inside.parents), inside][1:]:  # without the root
            made = self._root / part
            if made.is_symlink():
                raise FileError(
                    f"{made} is a symbolic link; files go into folders of the root only. "
                    "Remove it, or choose another tag."
                )
            with suppress(FileExistsError):
                self._make(made)

    def close(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):
                (self._root / f".scope-{self.identity}.lock").unlink()
            os.close(self._lock)
            self._lock = -1


def _lock(root: Path, mode: int) -> tuple[str, int]:
    """Returns a new identity, and the file descriptor of the locked lock file. The kernel releases
    the lock when this process ends or is killed."""
    while True:
        identity = secrets.token_hex(8)
        if (fd := _locked(root / f".scope-{identity}.lock", mode)) is not None:
            return identity, fd


def _locked(path: Path, mode: int) -> int | None:
    """Make and lock a lock file. Returns the file descriptor, or None if another writer has removed
    the file before this function could lock the file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove_leftovers(root: Path, own: str) -> None:
    """Remove the lock files and the temporary files of writers that no longer run. A file that this
    process may not remove stays."""
    for file in list(os.scandir(root)):
        found = _LOCK.fullmatch(file.name)
        if found and found[1] != own:
            _removed(file.path)
    for folder, folders, names in os.walk(root.resolve()):
        # Hidden folders are roots of other writers, with separate locks (`files.staged`).
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            found = _TEMPORARY.fullmatch(name)
            if found and not _is_locked(Path(folder), found[1]):
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _is_locked(folder: Path, identity: str) -> bool:
    """True if the writer of a temporary file in `folder` has a lock file.

    A writer makes its lock file before its temporary files. The lock file is in the writer's root.
    The root can be `folder` or a folder above it, so this function looks in all these folders.
    """
    name = f".scope-{identity}.lock"
    return any(os.path.exists(above / name) for above in (folder, *folder.parents))


def _removed(path: str) -> bool:
    """Remove a lock file if no process holds the lock. Returns True if the file is gone.

    This process holds the lock while it removes the file. Perhaps another writer has made the file,
    and has not locked it yet. When the other writer then locks the file, it sees that the file is
    gone, and makes a new one.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def folder_mode(mode: int) -> int:
    """The permissions of a folder whose files have the permissions `mode`. A user who may read the
    files may also list and enter the folder."""
    return 0o700 | mode | (mode & 0o444) >> 2


def fsync_folder(folder: Path) -> None:
    """Call fsync on a folder, so that the names in the folder are on the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
