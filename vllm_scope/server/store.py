"""Results that are too large for an answer: safetensors files with an end.

Owns:  Store, Kept, `pieces`.
Runs:  in each API server process. Those of one server share a folder, so any of them
       can serve what another has written; each one ends its own files.

Promise: a file is found by its id together with its owner, and by nothing else: an id
is 192 random bits, and the owner is part of the name that is looked up. The files of a
process never have more bytes than the bound, and those of one key leave room for others';
what is older than its time is gone. To check for room takes the same time however many files wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from vllm_scope.errors import CapacityError
from vllm_scope.files.tensors import write_tensors
from vllm_scope.results.budget import fits, most_of_one
from vllm_scope.transport.folders import hold, is_held, prefix, release, remove_abandoned

_ID = re.compile(r"[A-Za-z0-9_-]{32}")
KIND = "results"
_PIECE_BYTES = 1 << 20
#: What a tensor's entry takes in a file's header beside its name: dtype, shape, offsets.
_ENTRY_BYTES = 200
#: Every file counts for at least so many bytes, which bounds the number of files.
LEAST_BYTES = 64 << 10
#: Files that end within this time of each other are removed together.
SLACK_S = 0.2
#: With more files than this, the store looks for deleted ones only for LOOK_PART of the time.
FEW, LOOK_PART = 256, 0.05


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
    """A file of this process.

    Attributes:
        charged: bytes that it counts for.
        ends_at: monotonic seconds.
    """

    path: Path
    owner: str
    charged: int
    ends_at: float


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
        #: What is written, the oldest first; all files have the same time to live.
        self._files: OrderedDict[str, _File] = OrderedDict()
        #: Bytes that files count for, those that are being written too: of each key, and of all.
        self._held: dict[str, int] = {}
        self._num_bytes = self._num_writing = 0
        self._timer: threading.Timer | None = None
        self._look_at = 0.0
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
        """What the files count for."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._files) + self._num_writing

    def check_room(self, num_bytes: int, owner: str) -> None:
        """Raises CapacityError where a file of so many bytes could not be kept now."""
        charged = max(num_bytes, LEAST_BYTES)
        if not self._fits(charged, owner) and len(self._files) <= FEW:
            self.sweep()
            self.forget_deleted()
        self._check(charged, owner)

    def _fits(self, charged: int, owner: str) -> bool:
        return fits(self._held.get(owner, 0), self._num_bytes, charged, self.most_bytes)

    def _charge(self, owner: str, more: int) -> None:
        """With the lock."""
        self._num_bytes += more
        self._held[owner] = self._held.get(owner, 0) + more
        if not self._held[owner]:
            del self._held[owner]

    def _check(self, num_bytes: int, owner: str) -> None:
        most = most_of_one(self.most_bytes)
        if num_bytes > most:
            raise CapacityError(
                f"the result takes {num_bytes:,} bytes; this server keeps at most {most:,} of one "
                "key (3/4 of VLLM_SCOPE_RESULTS_MIB). Read fewer tokens or layers."
            )
        if not self._fits(num_bytes, owner):
            own = self._held.get(owner, 0)
            raise CapacityError(
                f"results of {own:,} bytes of this key wait to be fetched, and one more takes "
                f"{num_bytes:,}; a key's may be three times what is free of "
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
        charged = max(size, LEAST_BYTES)
        if not self._fits(charged, owner):
            self.sweep()
            self.forget_deleted()
        with self._lock:
            self._check(charged, owner)
            self._hold()
            self._charge(owner, charged)
            self._num_writing += 1
        name = secrets.token_urlsafe(24)
        path = self._path(name, owner)
        try:
            num_bytes = _write(path, tensors, metadata)
        except BaseException:
            with self._lock:
                self._num_writing -= 1
                self._charge(owner, -charged)
            raise
        file = _File(path, owner, max(num_bytes, LEAST_BYTES), time.monotonic() + self.ttl_s)
        with self._lock:
            self._num_writing -= 1
            self._charge(owner, file.charged - charged)
            self._files[name] = file
            self._arm()
        return Kept(name, num_bytes, self.ttl_s)

    def open(self, name: str, owner: str) -> BinaryIO | None:
        """The file, or None where there is none of this id and owner."""
        if _ID.fullmatch(name) is None:
            return None
        try:
            file = self._path(name, owner).open("rb")
        except FileNotFoundError:
            return None
        # Who ends it may be late.
        if time.time() - os.fstat(file.fileno()).st_mtime > self.ttl_s:
            file.close()
            return None
        return file

    def delete(self, name: str, owner: str) -> None:
        if _ID.fullmatch(name):
            path = self._path(name, owner)
            path.unlink(missing_ok=True)
            with self._lock:
                known = self._files.get(name)
                if known is not None and known.path == path:
                    self._forget(name)

    def sweep(self) -> None:
        """End the files whose time is over. Blocks; a timer's thread does it when it is due."""
        while gone := self._ended():
            for path in gone:
                path.unlink(missing_ok=True)

    def _ended(self) -> list[Path]:
        """Some files whose time is over, which are not counted any more."""
        found: list[Path] = []
        now = time.monotonic()
        with self._lock:
            while self._files and len(found) < FEW:
                name, file = next(iter(self._files.items()))
                if file.ends_at > now:
                    break
                found.append(file.path)
                self._forget(name)
        return found

    def _forget(self, name: str) -> None:
        """With the lock."""
        file = self._files.pop(name)
        self._charge(file.owner, -file.charged)

    def _arm(self) -> None:
        """Have the oldest file ended in time. With the lock."""
        if self._timer is None and self._files:
            first = next(iter(self._files.values()))
            wait = max(0.0, first.ends_at - time.monotonic()) + SLACK_S
            self._timer = threading.Timer(wait, self._due)
            self._timer.daemon = True
            self._timer.start()

    def _due(self) -> None:
        self.sweep()
        with self._lock:
            self._timer = None
            self._arm()

    def forget_deleted(self) -> None:
        """Give room back for files that another process has deleted for who read them.

        Blocks for a time in proportion to the number of files; with many it does not look each
        time.
        """
        with self._lock:
            written = [(name, file.path) for name, file in self._files.items()]
        started = time.monotonic()
        if len(written) > FEW and started < self._look_at:
            return
        for name, path in written:
            if not path.exists():
                with self._lock:
                    if name in self._files:
                        self._forget(name)
        ended = time.monotonic()
        self._look_at = ended + (ended - started) / LOOK_PART

    def close(self) -> None:
        """Remove this process's files, and the folder if no other process holds it."""
        with self._lock:
            paths = [file.path for file in self._files.values()]
            for name in list(self._files):
                self._forget(name)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for path in paths:
            path.unlink(missing_ok=True)
        if self._holder >= 0:
            release(self._folder, self._holder)
            self._holder = -1

    def _path(self, name: str, owner: str) -> Path:
        return self._folder / f"{name}.{owner}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write a file that is whole as soon as it is seen; its bytes."""
    hidden = path.with_suffix(".part")
    try:
        with open(hidden, "xb", buffering=0) as raw:
            write_tensors(raw, {key: [tensor] for key, tensor in tensors.items()}, metadata)
        num_bytes = hidden.stat().st_size
        os.utime(hidden)  # its time begins now, for other processes too
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    return num_bytes
