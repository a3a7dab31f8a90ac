"""The manifest `harvest.json`, which a harvest writes into the folder of its shards.

Owns:  HarvestManifest, Run, `check_same`, and the lock of a local folder.
From:  shards.   To: job, views, and programs that read the manifest.

A harvest writes the settings before the first shard. Each run computes the counts and figures from
the shards again. The hash of an earlier run's shard is in the manifest. A run computes this hash
again only if the manifest does not have the shard, or has another size for the shard.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vllm_scope import __version__
from vllm_scope.errors import ConfigError, FileError, shown
from vllm_scope.files.publish import LocalPublisher
from vllm_scope.files.roots import read_file
from vllm_scope.harvests.shards import Shard

NAME, PAGE, MEANS = "harvest.json", "harvest.html", "harvest-statistics.safetensors"
_LOCK = ".harvest.lock"
FORMAT = 1


class Run(msgspec.Struct, frozen=True):
    """The entry of one run in the manifest. The run makes the entry when it starts.

    Attributes:
        started: the time of the start in UTC, as ISO 8601.
        versions: maps packages to their versions.
        options: a digest of the options that start the engine, or None if the caller gave an LLM.
    """

    started: str
    versions: dict[str, str]
    options: str | None = None


class HarvestManifest(msgspec.Struct, frozen=True):
    """The content of `harvest.json`.

    Attributes:
        settings: the settings that change the rows. A run with other settings is refused.
        dataset: the name or path of the data set.
        documents: the number of documents in the data set.
        complete: True if each document that has tokens is in the shards, or was skipped.
        totals: for each number in a Shard, the sum over all shards. The sum of `num_bytes` has the
            name `bytes`. The totals of a complete harvest also have `empty` (the number of
            documents without tokens) and `skipped` (the number of skipped texts and contexts).
        skipped: for a complete harvest, maps the names of the first 20 skipped texts and contexts
            to the reasons.
        streams: maps `site.layer` to the figures of this stream (`Statistics.to_json`).
    """

    settings: dict[str, Any]
    dataset: str
    documents: int
    runs: list[Run]
    complete: bool = False
    totals: dict[str, int] = {}
    streams: dict[str, Any] = {}
    shards: dict[str, Shard] = {}
    skipped: dict[str, str] = {}
    format: int = FORMAT

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def versions() -> dict[str, str]:
    """Maps the imported packages that affect rows or shards to their versions."""
    found = {"vllm_scope": __version__}
    for name in ("vllm", "torch", "datasets", "pyarrow", "ray"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def read_manifest(root: str) -> HarvestManifest | None:
    """The manifest of a folder or URL, or None if there is no manifest. Raises FileError if the
    manifest cannot be read or has another format."""
    body = read_file(root, NAME)
    if body is None:
        return None
    try:
        found = msgspec.json.decode(body, type=HarvestManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{root}/{NAME} cannot be read: {error}") from None
    if found.format != FORMAT:
        raise FileError(f"{root}/{NAME} is of format {found.format}; this version reads {FORMAT}.")
    return found


def check_same(manifest: HarvestManifest, settings: Mapping[str, Any], root: str) -> None:
    """Raise ConfigError if one of `settings` differs from the setting in the manifest.

    Settings that only the manifest has are not compared.
    """
    for name, value in settings.items():
        if manifest.settings.get(name) != value:
            raise ConfigError(
                f"{root} was harvested with {name} {shown(manifest.settings.get(name))}, and now "
                f"{name} is {shown(value)}; give the same value, or another folder."
            )


#: The folders that this process has locked. Maps the real path of each folder to the lock's holder.
#: The kernel's lock alone does not suffice, because it belongs to the whole process. The kernel
#: would give the lock to a second thread of this process too. The kernel also releases the lock
#: when this process closes any descriptor of the file.
_held: dict[str, object] = {}


@contextmanager
def locked(root: str, fsync: bool = False, mode: int = 0o600) -> Iterator[None]:
    """Lock a local folder against other harvests. A URL is not locked.

    The kernel releases the lock when this process ends. Child processes do not hold the lock.
    Therefore vLLM's processes, which can run a little longer, do not stop the next harvest.

    Args:
        fsync, mode: the options of LocalPublisher, which creates the folder if it is missing.

    Raises:
        FileError: another harvest writes into the folder, or this process cannot write into it.
    """
    if "://" in root:
        yield
        return
    LocalPublisher(Path(root), fsync, mode).close()
    path, own = os.path.realpath(root), object()
    if _held.setdefault(path, own) is not own:
        raise FileError(
            f"this process already harvests into {root}; wait until that harvest ends, or name "
            "another folder."
        )
    try:
        with _locked_file(root, mode):
            yield
    finally:
        del _held[path]


@contextmanager
def _locked_file(root: str, mode: int) -> Iterator[None]:
    try:
        fd = os.open(Path(root) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except OSError as error:
        raise FileError(f"{root} cannot be written to: {error}") from None
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FileError(
                f"another process harvests into {root}; wait for its end, or name another folder."
            ) from None
        yield
    finally:
        os.close(fd)
