"""Results that are too large for an answer: safetensors files with an end.

Owns:  Store, Kept, `pieces`.
Runs:  in each API server process. Those of one server share a folder, so any of them
       can serve what another has written; each one ends its own files.

Promise: a file is found by its id together with its owner, and by nothing else: an id
is 192 random bits, and the owner is part of the name that is looked up. The files of a
process never have more bytes than the bound, and those of one key leave room for others';
what is older than its time is gone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from vllm_scope.budget import fits, most_of_one
from vllm_scope.errors import CapacityError
from vllm_scope.files.tensors import write_tensors
from vllm_scope.held import hold, is_held, prefix, release, remove_abandoned

_ID = re.compile(r"[A-Za-z0-9_-]{32}")
KIND = "results"
_PIECE_BYTES = 1 << 20
#: What a tensor's entry takes in a file's header beside its name: dtype, shape, offsets.
_ENTRY_BYTES = 200


@dataclass(frozen=True)
class Kept:
    """A file: its id, its size, and for how many seconds it is kept."""

    id: str
    num_bytes: int
    ttl_s: float


def pieces(file: BinaryIO, done: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """The rest of a file, which is closed; `done` once all of it was taken."""
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
    done()


@dataclass
class _File:
    """What is held of one: where it is, its size, and when it ends.

    Attributes:
        ends_at: by the monotonic clock; never while it is written.
    """

    path: Path
    owner: str
    num_bytes: int
    ends_at: float = math.inf


def owner_of(authorization: str | None) -> str:
    """Who may fetch what a request left: all who send the same key. The scheme's case does not
    matter, as it does not to vLLM: one key is one owner."""
    scheme, space, key = (authorization or "").partition(" ")
    return hashlib.sha256(f"{scheme.lower()}{space}{key}".encode()).hexdigest()[:32]


class Store:
    """Files of one API server process.

    Args:
        parent: where the folder is made, of mode 700.
        run: shared by the processes of one server.
        most_bytes: of all files; of one key's, what `budget.fits` allows of it.
        ttl_s: seconds for which a file is kept.
    """

    def __init__(self, parent: Path, run: str, most_bytes: int, ttl_s: float) -> None:
        self.most_bytes, self.ttl_s = most_bytes, ttl_s
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        remove_abandoned(parent, KIND)
        self._folder = parent / f"{prefix(KIND)}{run}"
        self._holder = -1
        self._hold()
        # Children of multiprocessing, as API servers are, never come to atexit.
        Finalize(None, self.close, exitpriority=0)

    def _hold(self) -> None:
        """Make the folder and keep others from removing it. Again where it is gone: what
        cleans /tmp minds no lock."""
        if self._holder >= 0 and is_held(self._folder, self._holder):
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or self._folder.is_symlink():
            raise PermissionError(f"{self._folder} is another's; set VLLM_SCOPE_RESULTS_DIR.")
        gone, self._holder = self._holder, hold(self._folder)
        if gone >= 0:
            os.close(gone)

    def folder(self) -> Path:
        """Of this server's processes, for nobody else; made again where it is gone."""
        with self._lock:
            self._hold()
        return self._folder

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in list(self._files.values()))

    def __len__(self) -> int:
        return len(self._files)

    def check_room(self, num_bytes: int, owner: str) -> None:
        """Raises CapacityError where a file of so many bytes could not be kept now."""
        self.sweep()
        if not self._fits(num_bytes, owner):
            self.forget_deleted()
        self._check(num_bytes, owner)

    def _fits(self, num_bytes: int, owner: str) -> bool:
        return fits(self._held_by(owner), self.num_bytes, num_bytes, self.most_bytes)

    def _held_by(self, owner: str) -> int:
        return sum(file.num_bytes for file in list(self._files.values()) if file.owner == owner)

    def _check(self, num_bytes: int, owner: str) -> None:
        most = most_of_one(self.most_bytes)
        if num_bytes > most:
            raise CapacityError(
                f"the result takes {num_bytes:,} bytes; this server keeps at most {most:,} of one "
                "key (3/4 of VLLM_SCOPE_RESULTS_MIB). Read fewer tokens or layers."
            )
        if not self._fits(num_bytes, owner):
            raise CapacityError(
                f"results of {self._held_by(owner):,} bytes of this key wait to be fetched, and "
                f"one more takes {num_bytes:,}; a key's may be three times what is free of "
                f"{self.most_bytes:,}. Fetch them with ?delete=true, or send this again later."
            )

    def put(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], owner: str) -> Kept:
        """Write a file; blocks.

        Raises:
            CapacityError: it does not fit.
            OSError: it cannot be written.
        """
        size = len(json.dumps([*tensors, dict(metadata)])) + _ENTRY_BYTES
        size += sum(tensor.nbytes + _ENTRY_BYTES for tensor in tensors.values())
        name = secrets.token_urlsafe(24)
        path = self._path(name, owner)
        with self._lock:
            if not self._fits(size, owner):
                self.forget_deleted()
            self._check(size, owner)
            self._hold()
            file = self._files[name] = _File(path, owner, size)
        hidden = path.with_suffix(".part")
        try:
            with open(hidden, "xb", buffering=0) as raw:
                write_tensors(raw, {key: [tensor] for key, tensor in tensors.items()}, metadata)
            file.num_bytes = hidden.stat().st_size
            os.utime(hidden)  # its time begins now, for other processes too
            hidden.rename(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            self._files.pop(name, None)
            raise
        file.ends_at = time.monotonic() + self.ttl_s
        return Kept(name, file.num_bytes, self.ttl_s)

    def open(self, name: str, owner: str) -> BinaryIO | None:
        """The file, or None where there is none of this id and owner."""
        self.sweep()
        if _ID.fullmatch(name) is None:
            return None
        try:
            file = self._path(name, owner).open("rb")
        except FileNotFoundError:
            return None
        # Written by another process, which may be late in ending it.
        if time.time() - os.fstat(file.fileno()).st_mtime > self.ttl_s:
            file.close()
            return None
        return file

    def delete(self, name: str, owner: str) -> None:
        if _ID.fullmatch(name):
            path = self._path(name, owner)
            path.unlink(missing_ok=True)
            known = self._files.get(name)
            if known is not None and known.path == path:
                self._files.pop(name, None)

    def sweep(self) -> None:
        """End the files whose time is over."""
        now = time.monotonic()
        for name, file in list(self._files.items()):
            if file.ends_at <= now:
                self._remove(name)

    def forget_deleted(self) -> None:
        """Give room back for files that another process has deleted for who read them."""
        # Before the folder is read: what is written meanwhile is no candidate.
        written = [(n, f) for n, f in list(self._files.items()) if f.ends_at < math.inf]
        try:
            there = set(os.listdir(self._folder))
        except FileNotFoundError:
            there = set()
        for name, file in written:
            if file.path.name not in there:
                self._files.pop(name, None)

    def close(self) -> None:
        """Remove this process's files, and the folder if no other process holds it."""
        for name in list(self._files):
            self._remove(name)
        if self._holder >= 0:
            release(self._folder, self._holder)
            self._holder = -1

    def _path(self, name: str, owner: str) -> Path:
        return self._folder / f"{name}.{owner}.safetensors"

    def _remove(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
