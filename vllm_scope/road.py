"""The road from workers to the front-end: what heavy tensors travel on.

Owns:  the messages, the sockets, who may connect.
Runs:  `Sender` on a worker's drain thread, `Receiver` on a thread of the front-end.
From:  sinks.memory.   To: result.

Each front-end process binds one receiving socket and tells the workers about it
through vLLM's own control channel; workers connect. So results come straight
from the rank that has them (any stage, any data-parallel replica), and not
through vLLM's message queue, which pickles and caps a message at 4 GiB. A message
names rows in the worker's HostRing; the rows themselves are copied once, by the
front-end, into the tensors that the caller gets.

Promise: the socket is a file in a folder that only this user may enter. Nothing is
unpickled: a message is a small typed header.
"""

from __future__ import annotations

import logging
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
from vllm_scope.host_ring import RingReader, RingRef
from vllm_scope.plan import Labels
from vllm_scope.program import Layout

logger = logging.getLogger(__name__)


class Address(msgspec.Struct, frozen=True):
    """How workers find a front-end.

    Attributes:
        frontend: identity of the front-end; part of every request's handle.
        path: the socket's file; its folder also holds a file named `frontend`,
            by which a worker sees that it is on the same host.
        pid: the front-end's process.
    """

    frontend: str
    path: str
    pid: int

    def check_local(self) -> None:
        """Raises CompatError where this process is on another host."""
        if not (Path(self.path).parent / self.frontend).exists():
            raise CompatError(
                "the front-end is on another host than this worker, and rows travel "
                "through shared memory; run them on one host"
            )

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()


class RowsHeader(msgspec.Struct, array_like=True, tag="rows"):
    """A batch that lies in the sender's ring. Arrays are raw little-endian bytes.

    Attributes:
        ring: where the rows are.
        start, stop: which slots of the ring.
        reader: this front-end's counter in the ring.
        message: what to set it to when the rows are read.
        boundary: the one tap that the rows are of, or None for whole tokens.
        row_bytes: of one row, without what fills its last slot.
        layouts: points and scores of each.
    """

    ring: RingRef
    start: int
    stop: int
    reader: int
    message: int
    boundary: int | None
    row_bytes: int
    layouts: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]
    keys: bytes
    positions: bytes
    layout_of: bytes


class FinishHeader(msgspec.Struct, array_like=True, tag="finish"):
    """A stage has sent everything it will send for this request."""

    key: int
    stage: int
    error: str | None


class RowsMessage(msgspec.Struct):
    """A received batch. `slots` is the sender's ring: valid during the callback.

    Attributes:
        keys, positions: int64 [num_tokens].
        layout_of: int32 [num_tokens], index into `layouts`.
        row_bytes: of one row.
        slots: uint8 [num_slots, SLOT_BYTES].
    """

    keys: np.ndarray
    positions: np.ndarray
    layout_of: np.ndarray
    layouts: list[Layout]
    boundary: int | None
    row_bytes: int
    slots: torch.Tensor


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RowsHeader | FinishHeader)


class Sender:
    """A worker's end: one socket to one front-end. Not thread-safe."""

    def __init__(self, address: Address, reader: int) -> None:
        address.check_local()
        self.reader = reader
        self.num_sent = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # Headers are small, and what they name is bounded by the ring.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # A front-end that died must not hold a worker.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{address.path}")

    def send_rows(
        self,
        labels: Labels,
        row_bytes: int,
        ring: RingRef,
        start: int,
        stop: int,
        boundary: int | None,
    ) -> int:
        """Tell of rows in the ring; the number that the reader will acknowledge."""
        self.num_sent += 1
        header = RowsHeader(
            ring, start, stop, self.reader, self.num_sent, boundary, row_bytes,
            [(layout.points, layout.scores) for layout in labels.layouts],
            labels.keys.tobytes(), labels.positions.tobytes(), labels.layout_of.tobytes(),
        )  # fmt: skip
        self._socket.send(_encoder.encode(header))
        return self.num_sent

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
        self.address = Address(uuid.uuid4().hex, str(folder / "rows"), os.getpid())
        (folder / self.address.frontend).touch()
        self._on_rows, self._on_finish = on_rows, on_finish
        self._rings: dict[RingRef, RingReader] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
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
            frame = self._socket.recv()
            try:
                header = _decoder.decode(frame)
                if isinstance(header, FinishHeader):
                    self._on_finish(header)
                else:
                    self._read(header)
            except Exception:
                # One bad message costs its own rows; they are reported as dropped.
                logger.exception("vllm-scope: a message could not be read")
        self._socket.close(linger=0)
        self._context.term()

    def _read(self, header: RowsHeader) -> None:
        ring = self._rings.get(header.ring)
        if ring is None:
            # Workers come and go with their engines; keep the rings of those alive.
            self._rings = {
                ref: reader for ref, reader in self._rings.items()
                if Path(f"/proc/{ref.pid}").exists()
            }  # fmt: skip
            ring = self._rings[header.ring] = RingReader(header.ring)
        try:
            self._on_rows(
                RowsMessage(
                    np.frombuffer(header.keys, np.int64),
                    np.frombuffer(header.positions, np.int64),
                    np.frombuffer(header.layout_of, np.int32),
                    [Layout(points, scores) for points, scores in header.layouts],
                    header.boundary,
                    header.row_bytes,
                    ring.slots(header.start, header.stop),
                )
            )
        finally:
            ring.acknowledge(header.reader, header.message)


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
