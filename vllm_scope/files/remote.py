"""Writes and reads files below URLs of object stores, of other hosts or of memory, through fsspec.

Owns:  RemotePublisher, RemoteStaged, RemoteFolder, `read_remote`.

A publisher writes each file to a local temporary folder, uploads the file under a temporary name,
and then moves the file to its name. When rows of a file are used for the first time, a reader
downloads the file to a temporary folder. The temporary folder is removed together with the reader.
The reader maps the downloaded files into memory like other local files.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from vllm_scope.errors import ConfigError, FileError
from vllm_scope.files.folder import SUFFIXES
from vllm_scope.files.publish import LocalPublisher, Write

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def _file_system(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"{url} is a URL, which needs the package fsspec; pip install 'vllm-scope[files]', "
            "or name a local folder."
        ) from None
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be opened: {error}") from None
    return system, root.rstrip("/")


def _move(system: AbstractFileSystem, source: str, target: str) -> None:
    """Move a file.

    fsspec's default `mv` treats a path with `*`, `?` or `[` as a pattern. Therefore, if a file
    system has only this `mv`, the file is copied and then removed.
    """
    from fsspec import AbstractFileSystem

    if type(system).mv is AbstractFileSystem.mv:
        system.cp_file(source, target)
        system.rm_file(source)
    else:
        system.mv(source, target)


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Raise each exception of the block as a FileError, because each file system of fsspec raises
    exceptions of its own.

    Args:
        what: the first words of the error's text, such as "s3://a/b cannot be read".
    """
    try:
        yield
    except Exception as error:
        raise FileError(f"{what}: {error}") from None


def read_remote(url: str, name: str) -> bytes | None:
    """The content of a small file below a URL. None if the file does not exist. Raises FileError,
    and ConfigError if fsspec is missing or cannot open the URL."""
    system, root = _file_system(url)
    body: bytes | None = None
    with _file_errors(f"{url}/{name} cannot be read"), suppress(FileNotFoundError):
        system.invalidate_cache()
        body = system.cat_file(f"{root}/{name}")
    return body


class RemotePublisher:
    """Publishes files below a URL."""

    def __init__(self, url: str) -> None:
        self._system, self._root = _file_system(url)
        self._staging = tempfile.TemporaryDirectory(prefix="vllm-scope-")
        self._local = LocalPublisher(Path(self._staging.name))

    def publish(self, files: Mapping[str, Write]) -> None:
        self._local.publish(files)
        names = [f"{self._root}/{name}" for name in files]
        folder = names[0].rpartition("/")[0]
        staged = [Path(self._staging.name) / name for name in files]
        hidden = [f"{folder}/.{path.name}.{secrets.token_hex(8)}.tmp" for path in staged]
        try:
            self._system.makedirs(folder, exist_ok=True)
            for path, temporary in zip(staged, hidden, strict=True):
                self._system.put_file(str(path), temporary)
            for temporary, name in zip(hidden, names, strict=True):
                _move(self._system, temporary, name)
        except Exception as error:  # each file system of fsspec raises exceptions of its own
            for temporary in hidden:
                with suppress(Exception):
                    self._system.rm_file(temporary)
            raise FileError(f"{names[0]} cannot be written: {error}") from error
        finally:
            for path in staged:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._local.close()
        self._staging.cleanup()


class RemoteStaged:
    """Hidden folders below a URL. See `files.staged`."""

    def __init__(self, url: str, folder: str) -> None:
        self._system, self._root = _file_system(url)
        self._url, self._folder = url.rstrip("/"), folder

    def make(self) -> str:
        return f"{self._url}/{self._folder}/{secrets.token_hex(8)}"

    def places(self) -> list[str]:
        start = f"{self._root}/{self._folder}/"
        with _file_errors(f"{self._url} cannot be read"):
            self._system.invalidate_cache()
            files = self._system.find(start.rstrip("/"))
        found = {file[len(start) :].partition("/")[0] for file in files if file.startswith(start)}
        return sorted(f"{self._url}/{self._folder}/{name}" for name in found)

    def move(self, place: str, names: Iterable[str]) -> None:
        inside = f"{self._root}/{self._folder}/{place.rpartition('/')[2]}"
        with _file_errors(f"{place} cannot be moved to {self._url}"):
            for name in names:
                _move(self._system, f"{inside}/{name}", f"{self._root}/{name}")

    def remove(self, place: str) -> None:
        with suppress(Exception):
            inside = f"{self._root}/{self._folder}/{place.rpartition('/')[2]}"
            self._system.rm(inside, recursive=True)


class _Reading:
    """A file that is open for reading. A read that fails raises FileError."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        with _file_errors(f"{self._path} cannot be read"):
            return self._file.read(size)

    def seekable(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteFolder:
    """The files below a URL, or the file at the URL."""

    def __init__(self, url: str) -> None:
        self._system, root = _file_system(url)
        self._only: str | None = None
        with _file_errors(f"{url} cannot be read"):
            is_file = self._system.isfile(root)
            is_there = is_file or self._system.isdir(root)
        if not is_there:
            raise FileError(f"{url} does not exist; name a file or a folder of captured rows.")
        if is_file:
            root, _, self._only = root.rpartition("/")
        self._root = root
        self._fetched = tempfile.TemporaryDirectory(prefix="vllm-scope-")
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        if self._only is not None:
            return [self._only]
        found: list[str] = []
        with _file_errors(f"{self._root} cannot be read"):
            self._system.invalidate_cache()  # other processes may write files below this URL now
            paths = self._system.find(self._root)
        for path in paths:
            name = path[len(self._root) :].lstrip("/")
            hidden = any(part.startswith(".") for part in name.split("/"))
            if name.endswith(SUFFIXES) and not hidden:
                found.append(name)
        return sorted(found)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        path = f"{self._root}/{name}"
        with _file_errors(f"{path} cannot be read"):
            size = int(self._system.size(path))
            return cast(BinaryIO, _Reading(self._system.open(path, "rb"), path)), size

    def local(self, name: str) -> Path:
        folder = Path(self._fetched.name)
        # A name in a listing could be a path that leads out of the folder.
        path = folder / name
        if ".." in Path(name).parts or not path.is_relative_to(folder):
            raise FileError(f"{name!r} is not a name below {self._root}")
        with self._lock:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                arriving = path.with_name(f".{path.name}.tmp")
                with _file_errors(f"{self._root}/{name} cannot be read"):
                    self._system.get_file(f"{self._root}/{name}", str(arriving))
                arriving.rename(path)
        return path
