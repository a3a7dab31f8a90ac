"""The road from workers to the front-end: what heavy tensors travel on.

Owns:  the messages, the sockets, who may connect.
Runs:  `Sender` on a worker's drain thread, `Receiver` on a thread of the front-end.
From:  sinks.memory.   To: result.

Each front-end process binds one receiving socket and tells the workers about it
through vLLM's own control channel; workers connect. So results come straight
from the rank that has them (any stage, any data-parallel replica), and not
through vLLM's message queue, which pickles and caps a message at 4 GiB.

Promise: on one host the socket is a file in a folder that only this user may
enter. Nothing is unpickled: a message is a small typed header and raw rows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from vllm_scope.errors import CompatError
from vllm_scope.plan import Labels
from vllm_scope.program import Program

#: Row messages that may lie in a socket before the sender waits.
HIGH_WATER = 64


class Address(msgspec.Struct, frozen=True):
    """How workers find a front-end.

    Attributes:
        frontend: identity of the front-end; part of every request's handle.
        path: the socket's file; its folder also holds a file named `frontend`,
            by which a worker sees that it is on the same host.
    """

    frontend: str
    path: str


class RowsHeader(msgspec.Struct, array_like=True, tag="rows"):
    """Describes the frame of rows that follows. Arrays are raw little-endian bytes."""

    dtype: str
    hidden_size: int
    boundary: int | None
    programs: list[tuple[int, ...]]
    keys: bytes
    positions: bytes
    program_of: bytes


class FinishHeader(msgspec.Struct, array_like=True, tag="finish"):
    """A stage has sent everything it will send for this request."""

    key: int
    stage: int
    error: str | None


class RowsMessage(msgspec.Struct):
    """A received step: labels, and rows in memory that this process owns."""

    keys: np.ndarray
    positions: np.ndarray
    program_of: np.ndarray
    programs: list[Program]
    boundary: int | None
    rows: torch.Tensor


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RowsHeader | FinishHeader)


class Sender:
    """A worker's end: one socket to one front-end. Not thread-safe."""

    def __init__(self, address: Address) -> None:
        if not (Path(address.path).parent / address.frontend).exists():
            raise CompatError(
                f"the front-end's socket {address.path} is not on this host; "
                "engines that span hosts are not supported yet."
            )
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        # A front-end that died must not hold a worker: undelivered rows go with it.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{address.path}")

    def send_rows(self, labels: Labels, rows: torch.Tensor, boundary: int | None) -> None:
        """Send one batch. `rows` may be reused once this returns."""
        header = RowsHeader(
            str(rows.dtype).removeprefix("torch."),
            rows.shape[1],
            boundary,
            [p.boundaries for p in labels.programs],
            labels.keys.tobytes(),
            labels.positions.tobytes(),
            labels.program_of.tobytes(),
        )
        payload = rows.contiguous().view(torch.uint8).numpy()
        self._socket.send(_encoder.encode(header), zmq.SNDMORE)
        self._socket.send(payload, copy=True)

    def send_finish(self, key: int, stage: int, error: str | None) -> None:
        self._socket.send(_encoder.encode(FinishHeader(key, stage, error)))

    def close(self) -> None:
        self._socket.close(linger=1000)


class Receiver:
    """The front-end's end: binds, and hands messages to callbacks on its own thread."""

    def __init__(
        self,
        on_rows: Callable[[RowsMessage], None],
        on_finish: Callable[[FinishHeader], None],
    ) -> None:
        folder = Path(tempfile.mkdtemp(prefix="vllm-scope-"))  # mode 0700
        self.address = Address(uuid.uuid4().hex, str(folder / "rows"))
        (folder / self.address.frontend).touch()
        self._on_rows, self._on_finish = on_rows, on_finish
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.bind(f"ipc://{self.address.path}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-scope-inbox", daemon=True)
        self._thread.start()
        self._cleanup = weakref.finalize(self, _remove_own, folder, os.getpid())

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._cleanup()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(200):
                continue
            frames = self._socket.recv_multipart(copy=False)
            header = _decoder.decode(frames[0].buffer)
            if isinstance(header, FinishHeader):
                self._on_finish(header)
            else:
                self._on_rows(_unpack(header, frames[1].buffer))
        self._socket.close(linger=0)
        self._context.term()


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _unpack(header: RowsHeader, payload: memoryview) -> RowsMessage:
    dtype = getattr(torch, header.dtype)
    rows = torch.frombuffer(bytearray() if not payload else payload, dtype=dtype)
    return RowsMessage(
        np.frombuffer(header.keys, np.int64),
        np.frombuffer(header.positions, np.int64),
        np.frombuffer(header.program_of, np.int32),
        [Program(tuple(p)) for p in header.programs],
        header.boundary,
        rows.view(-1, header.hidden_size),
    )
