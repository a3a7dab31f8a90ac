"""Opens roots for writing and reading. A root is a folder of this host, one file, or a URL.

Owns:  `make_publisher` (writes below a root), `find_folder` and `read_file` (read below a root).
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_scope.errors import ConfigError, FileError, shown
from vllm_scope.files.folder import Folder, LocalFolder
from vllm_scope.files.publish import LocalPublisher, Publisher
from vllm_scope.files.remote import RemoteFolder, RemotePublisher, read_remote


def make_publisher(root: str, fsync: bool, mode: int = 0o600) -> Publisher:
    """A publisher for a folder, or for a URL that fsspec supports.

    Args:
        mode: the permissions of local files.

    Raises:
        FileError: the root cannot be written to.
        ConfigError: fsspec is missing or cannot open the URL, or `fsync` is true for a URL.
    """
    if "://" in root:
        if fsync:
            raise ConfigError(f"fsync is true and root is {shown(root)}; URLs have no fsync.")
        return RemotePublisher(root)
    return LocalPublisher(Path(root), fsync, mode)


def find_folder(path: str | os.PathLike[str]) -> Folder:
    """The Folder of a root, for reading files.

    Raises:
        FileError: the root does not exist, or cannot be read.
        ConfigError: fsspec is missing or cannot open the URL.
    """
    text = os.fspath(path)
    if "://" in text:
        return RemoteFolder(text)
    root = Path(text)
    try:
        if root.is_dir():
            return LocalFolder(root)
        if root.is_file():
            return LocalFolder(root.parent, root.name)
    except OSError as error:  # for example, this process may not enter a parent folder
        raise FileError(f"{shown(text)} cannot be read: {error.strerror}") from None
    raise FileError(f"{text} does not exist; name a file or a folder of captured rows.")


def read_file(root: str, name: str) -> bytes | None:
    """The content of a small file below a root. None if the file does not exist. Raises FileError
    if the file cannot be read, and ConfigError for the same reasons as `find_folder`."""
    if "://" in root:
        return read_remote(root, name)
    try:
        return (Path(root) / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{Path(root) / name} cannot be read: {error}") from None
