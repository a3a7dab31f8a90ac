"""Results that are too large for an answer: safetensors files with a time to live.

Owns:  Store, Kept.
Runs:  in each API server process. The processes of one server share a folder. Therefore each
       process can serve every file. When the time to live of a file is over, the process that has
       written the file deletes it.

Promise: a file is found only by its id together with its owner (a digest of the API key). The id
has 192 random bits, and the owner is part of the file's name. The files of a process never take
more bytes than the limit. The files of one API key leave room for files of other keys. A file that
is older than its time to live is not served. The cost of `check_room` does not grow with the number
of files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

from starlette.responses import StreamingResponse
from torch import Tensor

from vllm_scope.files.tensors import write_tensors
from vllm_scope.server.exchange import running
from vllm_scope.server.held_folder import HeldFolder
from vllm_scope.server.room import LEAST_BYTES, Room

logger = logging.getLogger("vllm.vllm_scope")

_ID = re.compile(r"[A-Za-z0-9_-]{32}")
KIND = "results"
_PIECE_BYTES = 1 << 20
#: Bytes of a tensor's entry in a file's header (dtype, shape, offsets), without the tensor's name.
_HEADER_BYTES = 200
#: Files that expire within this number of seconds of each other are removed together.
SLACK_S = 0.2
#: If there are more files than FEW, `forget_deleted` runs for at most LOOK_PART of the time.
FEW, LOOK_PART = 256, 0.05


@dataclass(frozen=True)
class Kept:
    """A file: its id, its size, and its time to live."""

    id: str
    num_bytes: int
    ttl_s: float


@dataclass
class _File:
    """A file of this process.

    Attributes:
        charged: bytes that are counted for the file, LEAST_BYTES or more.
        ends_at: the end of the file's time to live, in seconds of time.monotonic().
    """

    path: Path
    owner: str
    charged: int
    ends_at: float


def owner_of(authorization: str | None) -> str:
    """A digest of a request's API key. Every request with the same key can fetch this request's
    files. As in vLLM, the scheme of the Authorization header can be in upper or lower case."""
    scheme, space, key = (authorization or "").partition(" ")
    return hashlib.sha256(f"{scheme.lower()}{space}{key}".encode()).hexdigest()[:32]


class Store:
    """Files of one API server process.

    Args:
        parent: the folder in which the store creates its folder, with mode 700.
        run: the name of this run of the server, which is the same in all processes of the server.
        most_bytes: limit of the bytes of all files. `budget.fits` decides which part of the limit
            one API key can use.
        ttl_s: a file's time to live in seconds.
    """

    def __init__(self, parent: Path, run: str, most_bytes: int, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._lock = threading.Lock()
        #: Written files, the oldest first.
        self._files: OrderedDict[str, _File] = OrderedDict()
        #: Counts the bytes of written files, and of files that are being written.
        self.room = Room(most_bytes)
        self._num_writing = 0
        self._timer: threading.Timer | None = None
        self._look_at = 0.0
        self._folder = HeldFolder(parent, KIND, run)
        # API server processes are started by multiprocessing, and do not call the functions of
        # atexit when they end.
        Finalize(None, self.close, exitpriority=0)

    def folder(self) -> Path:
        """The folder of this server's processes. If the folder is missing, it is created again."""
        with self._lock:
            self._folder.make()
        return self._folder.path

    @property
    def num_bytes(self) -> int:
        """The bytes that are counted for all files together."""
        return self.room.num_bytes

    def __len__(self) -> int:
        return len(self._files) + self._num_writing

    def check_room(self, num_bytes: int, owner: str) -> None:
        """Raises CapacityError if the store has no room for a file of `num_bytes` bytes now."""
        charged = max(num_bytes, LEAST_BYTES)
        if len(self._files) <= FEW:
            self._make_room(charged, owner)
        self.room.check(charged, owner)

    def _make_room(self, charged: int, owner: str) -> None:
        if not self.room.fits(charged, owner):
            self.sweep()
            self.forget_deleted()

    def put(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], owner: str) -> Kept:
        """Write a file. The call blocks.

        Raises:
            CapacityError: the store has no room for the file.
            OSError: the file cannot be written.
        """
        size = len(json.dumps([*tensors, dict(metadata)])) + _HEADER_BYTES
        size += sum(tensor.nbytes + _HEADER_BYTES for tensor in tensors.values())
        charged = max(size, LEAST_BYTES)
        self._make_room(charged, owner)
        with self._lock:
            self.room.check(charged, owner)
            self._folder.make()
            self.room.charge(owner, charged)
            self._num_writing += 1
        name = secrets.token_urlsafe(24)
        path = self._path(name, owner)
        try:
            num_bytes = _write(path, tensors, metadata)
        except BaseException:
            with self._lock:
                self._num_writing -= 1
                self.room.charge(owner, -charged)
            raise
        file = _File(path, owner, max(num_bytes, LEAST_BYTES), time.monotonic() + self.ttl_s)
        with self._lock:
            self._num_writing -= 1
            self.room.charge(owner, file.charged - charged)
            self._files[name] = file
            self._arm()
        return Kept(name, num_bytes, self.ttl_s)

    def open(self, name: str, owner: str) -> BinaryIO | None:
        """Open the file with this id and this owner. Returns None if the file is missing or has
        expired."""
        if _ID.fullmatch(name) is None:
            return None
        try:
            file = self._path(name, owner).open("rb")
        except FileNotFoundError:
            return None
        # The process that must delete an expired file can be late.
        if time.time() - os.fstat(file.fileno()).st_mtime > self.ttl_s:
            file.close()
            return None
        return file

    def sent(
        self, file: BinaryIO, name: str, owner: str, delete: bool, **headers: str
    ) -> StreamingResponse:
        """An HTTP answer with the bytes of an open file, from the file's current position to the
        file's end.

        Args:
            delete: True to delete the file after all bytes were sent. If the server disconnects the
                client, the file stays.
        """
        exchange = running(owner)

        def pieces() -> Iterator[bytes]:
            with file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
            if delete and not exchange.gone:
                self.delete(name, owner)

        size = os.fstat(file.fileno()).st_size - file.tell()
        headers["Content-Length"] = str(size)
        return StreamingResponse(pieces(), 200, headers, "application/octet-stream")

    def delete(self, name: str, owner: str) -> None:
        if _ID.fullmatch(name):
            path = self._path(name, owner)
            path.unlink(missing_ok=True)
            with self._lock:
                known = self._files.get(name)
                if known is not None and known.path == path:
                    self._forget(name)

    def sweep(self) -> None:
        """Delete the files whose time to live is over. The call blocks.

        If a file cannot be deleted, its bytes count again, and the file gets another time to live.
        After this time, a later call tries to delete the file again.
        """
        left: dict[str, _File] = {}
        while gone := self._ended():
            for name, file in gone.items():
                if not _deleted(file.path):
                    left[name] = file
        if left:
            with self._lock:
                for name, file in left.items():
                    self.room.charge(file.owner, file.charged)
                    self._files[name] = replace(file, ends_at=time.monotonic() + self.ttl_s)
                self._arm()

    def _ended(self) -> dict[str, _File]:
        """Stop counting the bytes of at most FEW files whose time to live is over. Returns these
        files by id."""
        found: dict[str, _File] = {}
        now = time.monotonic()
        with self._lock:
            while self._files and len(found) < FEW:
                name, file = next(iter(self._files.items()))
                if file.ends_at > now:
                    break
                found[name] = self._forget(name)
        return found

    def _forget(self, name: str) -> _File:
        """Stop counting the bytes of a file, and return the file. The caller holds the lock."""
        file = self._files.pop(name)
        self.room.charge(file.owner, -file.charged)
        return file

    def _arm(self) -> None:
        """Start the timer that deletes the oldest file, if no timer runs. The caller holds the
        lock."""
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
        """Stop counting the bytes of files that another process has deleted at a client's request
        (`?delete=true`).

        The call blocks for a time in proportion to the number of files. If there are more files
        than FEW, some calls do nothing, so that all calls together run for at most LOOK_PART of the
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
        """Remove this process's files, and the folder if no other process holds a lock on it."""
        with self._lock:
            files = [self._forget(name) for name in list(self._files)]
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for file in files:
            _deleted(file.path)
        self._folder.release()

    def _path(self, name: str, owner: str) -> Path:
        return self._folder.path / f"{name}.{owner}.safetensors"


def _deleted(path: Path) -> bool:
    """Delete a file. If the file cannot be deleted, log the reason and return False."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "vllm-scope: a file in %s cannot be deleted: %s", path.parent, error.strerror
        )
        return False
    return True


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write a file under another name, then rename the file, so that readers see only whole files.
    Returns the file's size in bytes."""
    hidden = path.with_suffix(".part")
    try:
        with open(hidden, "xb", buffering=0) as raw:
            write_tensors(raw, {key: [tensor] for key, tensor in tensors.items()}, metadata)
        num_bytes = hidden.stat().st_size
        os.utime(hidden)  # the time to live begins now, for other processes too
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    return num_bytes
