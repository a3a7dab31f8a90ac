"""The ring of host memory for rows, shared with front-ends on this host.

Owns:  HostRing (the worker's side) and RingReader (a front-end's side).
Runs:  `acquire` on the worker's main thread, `RingReader` on the front-end's receiving thread.
       Leases are released on the drain thread, on the main thread while `acquire` waits, and on the
       thread of a TcpSender.
From:  worker.filler (writes).   To: messages (they name spans), receiver (reads the spans).

The memory is a memfd. A memfd has no name in any file system. Only processes of the same user can
open the memfd, through /proc. The kernel frees the memory when all processes that have opened the
memfd have ended. For a GPU, the memory is registered with CUDA: the device then copies directly
into the memory that the front-end reads. If a process is in another pid namespace, or if the mount
option hidepid hides the worker, the process cannot open the memfd. In another pid namespace, the
same path in /proc can name another file. Therefore a reader compares the identity in the ring's
header with the identity in the RingRef.

Promise: the worker writes a span again only after every lease on the span is released. Each reader
has a counter in the ring's header. The reader reads messages in order, and sets the counter to the
number of the last message that it has read. A counter gets a new reader only after the counter's
old reader cannot write to it any more. If the worker waits for a running reader for `patience_s`
and the reader makes no progress, the worker sets the reader's revoked flag, and then reuses the
slots. A reader that sees the revoked flag must discard its copy of the rows.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import CapacityError
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.spans import SpanRing

#: Size of the header before the rows. The header contains int64 numbers: the counters (each reader
#: writes one counter), the revoked flags (the worker writes all flags), and the ring's identity.
HEADER_BYTES = 4096
MAX_READERS = (HEADER_BYTES // 8 - 1) // 2
#: A reader that closes sets its counter to this value. All messages then count as read.
CLOSED = 1 << 62
Ints = NDArray[np.int64]
#: How long `acquire` sleeps before it reads the counters again.
POLL_S = 0.0002


class RingRef(msgspec.Struct, array_like=True, frozen=True):
    """The data with which another process finds the ring.

    Attributes:
        identity: a random number. Another ring with the same `pid` and `fd` has another identity.
    """

    identity: int
    pid: int
    fd: int
    num_slots: int


class Lease:
    """A span of the ring. The span is in use until every holder has released the lease."""

    def __init__(self, start: int, stop: int, ring: Tensor, lock: threading.Lock) -> None:
        self.start, self.stop = start, stop
        self._ring = ring
        self._lock = lock
        self._holders = 1

    @property
    def slots(self) -> Tensor:
        """uint8 [stop - start, SLOT_BYTES]."""
        return self._ring[self.start : self.stop]

    def retain(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1

    @property
    def free(self) -> bool:
        return self._holders == 0

    def overlaps(self, other: Lease) -> bool:
        return self.start < other.stop and other.start < self.stop


class JoinedLease(Lease):
    """Adjacent leases as one lease."""

    def __init__(self, parts: list[Lease], ring: HostRing) -> None:
        self._parts = parts
        self.start, self.stop = parts[0].start, parts[-1].stop
        self._ring = ring.slots

    def retain(self) -> None:
        for part in self._parts:
            part.retain()

    def release(self) -> None:
        for part in self._parts:
            part.release()

    @property
    def free(self) -> bool:
        return all(part.free for part in self._parts)


class HostRing(SpanRing[Lease]):
    """A ring of slots in shared memory.

    Attributes:
        ref: the RingRef that another process needs to map the ring.
        slots: uint8 [num_slots, SLOT_BYTES].
        num_slots: the number of slots.
        counters: int64 [MAX_READERS]. Readers write the counters.
        reclaim: `acquire` calls this function while it waits. The function releases the leases
            whose rows have been read.
        give_up: While `acquire` waits for a lease, it calls this function with the lease every
            patience_s / 2 seconds. The function revokes each reader that has made no progress since
            the last call with the same lease.
        patience_s: if a reader makes no progress for this many seconds of waiting, `give_up`
            revokes the reader.
        wait_ms: how long `acquire` has waited for readers in total, in milliseconds.
    """

    def __init__(self, num_slots: int, cuda: bool) -> None:
        super().__init__(num_slots)
        self._fd = os.memfd_create("vllm-scope-ring", os.MFD_CLOEXEC)
        size = HEADER_BYTES + num_slots * SLOT_BYTES
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self.counters, self._revoked, identity, self.slots = _parts(self._map, num_slots)
        self._free_readers = list(range(MAX_READERS - 1, -1, -1))
        self._leaving: list[tuple[int, Callable[[], bool]]] = []
        self._registered = 0
        if cuda:
            address = self.slots.data_ptr() - HEADER_BYTES
            status = torch.cuda.cudart().cudaHostRegister(address, size, 0)
            if int(status) != 0:
                raise MemoryError(f"{size >> 20} MiB of host memory could not be pinned: {status}")
            self._registered = address
        self.ref = RingRef(secrets.randbits(62), os.getpid(), self._fd, num_slots)
        identity[0] = self.ref.identity
        self.reclaim: Callable[[], None] = lambda: None
        self.give_up: Callable[[Lease], None] = lambda _: None
        self.patience_s = 60.0
        self.wait_ms = 0.0
        self._lock = threading.Lock()

    def num_used(self) -> int:
        """The number of slots in use. Call this method on the thread that calls `acquire`."""
        return sum(lease.stop - lease.start for lease in self._spans if not lease.free)

    def add_reader(self) -> int:
        """Allocate a counter and a revoked flag for one more reader, and set both to zero. Returns
        the index of the counter and of the flag.

        Raises:
            CapacityError: all counters are in use.
        """
        gone = [reader for reader, is_gone in self._leaving if is_gone()]
        self._leaving = [(r, is_gone) for r, is_gone in self._leaving if r not in gone]
        self._free_readers += gone
        if not self._free_readers:
            raise CapacityError(
                f"{MAX_READERS} front-ends read from this worker, which is the largest number. "
                "Close one of these front-ends, or start another engine"
            )
        reader = self._free_readers.pop()
        self.counters[reader] = self._revoked[reader] = 0
        return reader

    def revoke(self, reader: int) -> None:
        """Set the revoked flag. Call this method before the reader's leases are released."""
        self._revoked[reader] = 1

    def free_reader(self, reader: int) -> None:
        """Free the counter of a reader that has closed, or whose process has ended."""
        self._free_readers.append(reader)

    def free_reader_later(self, reader: int, is_gone: Callable[[], bool]) -> None:
        """Free the counter of a reader after `is_gone` has returned True. Until then, the reader
        can still write to the counter."""
        if is_gone():
            self.free_reader(reader)
        else:
            self._leaving.append((reader, is_gone))

    def _new_span(self, start: int, stop: int) -> Lease:
        return Lease(start, stop, self.slots, self._lock)

    def _wait_for(self, span: Lease) -> None:
        if span.free:
            return
        started = time.monotonic()
        limit = started + self.patience_s / 2
        while True:
            self.reclaim()
            if span.free:
                break
            if time.monotonic() > limit:
                self.give_up(span)
                limit = time.monotonic() + self.patience_s / 2
            time.sleep(POLL_S)
        self.wait_ms += 1e3 * (time.monotonic() - started)

    def close(self) -> None:
        """Undo the registration with CUDA, and close the memfd. The kernel frees the memory when
        this process and all readers have dropped their mappings."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _parts(memory: mmap.mmap, num_slots: int) -> tuple[Ints, Ints, Ints, Tensor]:
    """Views of the ring's memory: the counters, the revoked flags, the identity [1], the slots."""
    header = np.frombuffer(memory, np.int64, 2 * MAX_READERS + 1)
    slots = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES)
    counters, revoked, identity = np.split(header, [MAX_READERS, 2 * MAX_READERS])
    return counters, revoked, identity, slots.view(num_slots, SLOT_BYTES)


class RingReader:
    """A front-end's view of a worker's ring.

    Raises:
        OSError: this process is not allowed to open the ring, or the ring does not exist.
        ValueError: the descriptor in `ref` belongs to another file.
    """

    def __init__(self, ref: RingRef) -> None:
        self._path = f"/proc/{ref.pid}/fd/{ref.fd}"
        fd = os.open(self._path, os.O_RDWR)
        try:
            self._inode = os.fstat(fd).st_ino
            self._map = mmap.mmap(fd, HEADER_BYTES + ref.num_slots * SLOT_BYTES)
        finally:
            os.close(fd)
        self._counters, self._revoked, identity, self._slots = _parts(self._map, ref.num_slots)
        if int(identity[0]) != ref.identity:
            raise ValueError(f"the file {ref.fd} of process {ref.pid} is not the worker's ring")

    @property
    def gone(self) -> bool:
        """True if the worker has closed the ring, or has ended. This method compares inodes,
        because the worker can reuse the descriptor for another file."""
        try:
            return os.stat(self._path).st_ino != self._inode
        except OSError:
            return True

    def slots(self, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, SLOT_BYTES], valid until the slots' message is acknowledged."""
        return self._slots[start:stop]

    def revoked(self, reader: int) -> bool:
        """True if the worker has revoked the reader. Call this method after you have copied rows.
        If the result is True, the copy can contain rows of other requests."""
        return bool(self._revoked[reader])

    def acknowledge(self, reader: int, message: int) -> None:
        """Tell the worker that all messages up to number `message` are read. If `message` is
        CLOSED, all messages count as read."""
        self._counters[reader] = message
