"""Worker to front-end, over the real sockets and the shared ring."""

from __future__ import annotations

import os
import pickle
import queue
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from vllm_scope import CompatError
from vllm_scope.host_ring import HostRing, Lease, RingRef
from vllm_scope.plan import Labels
from vllm_scope.program import Program
from vllm_scope.road import Address, FinishHeader, Receiver, RowsHeader, RowsMessage, Sender

#: Generous: what must arrive has arrived by then.
PATIENCE_S = 3
READER = 5

_receivers: list[Receiver] = []


class Inbox:
    """A receiver whose messages are kept.

    Attributes:
        during: called with a message while its rows are valid.
    """

    def __init__(self) -> None:
        self.messages: queue.Queue = queue.Queue()
        self.during = lambda message: None
        self.receiver = Receiver(self._on_rows, self.messages.put)
        _receivers.append(self.receiver)

    def _on_rows(self, message: RowsMessage) -> None:
        self.during(message)
        message.rows = message.rows.clone()
        self.messages.put(message)

    def next(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                return self.messages.get(timeout=0.2)
            except queue.Empty:
                assert self.receiver._thread.is_alive(), "the receiver's thread died"
        pytest.fail("no message came")


@pytest.fixture(scope="module", autouse=True)
def _close_all() -> Iterator[None]:
    yield
    with ThreadPoolExecutor(16) as pool:  # each takes as long as the receiver's poll
        list(pool.map(Receiver.close, _receivers))


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def sender(inbox: Inbox) -> Iterator[Sender]:
    sender = Sender(inbox.receiver.address, READER)
    yield sender
    sender.close()


@pytest.fixture
def ring() -> Iterator[HostRing]:
    ring = HostRing(100, 4, torch.float32, cuda=False)
    yield ring
    ring.close()


def _labels(num_tokens: int, num_reads: int = 1) -> Labels:
    return Labels(
        keys=np.arange(num_tokens, dtype=np.int64) + (1 << 40),
        positions=np.arange(num_tokens, dtype=np.int64)[::-1],
        program_of=np.zeros(num_tokens, np.int32),
        programs=(Program(tuple(range(num_reads))),),
        rows=np.arange(num_tokens, dtype=np.int64),
    )


def _write(ring: HostRing, num_rows: int, value: float = 0.0) -> Lease:
    lease = ring.acquire(num_rows)
    lease.rows.fill_(value)
    return lease


def _send(sender: Sender, ring: HostRing, lease: Lease, boundary: int | None = None) -> int:
    labels = _labels(lease.stop - lease.start)
    return sender.send_rows(labels, ring.ref, lease.start, lease.stop, boundary)


def _read_so_far(ring: HostRing, number: int) -> bool:
    """Whether the receiver acknowledges a message, soon."""
    deadline = time.monotonic() + PATIENCE_S
    while ring.counters[READER] < number and time.monotonic() < deadline:
        time.sleep(0.002)
    return ring.counters[READER] == number


@pytest.mark.parametrize("boundary", [None, 3], ids=["whole-programs", "one-tap"])
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size"),
    [
        pytest.param(0, 4, id="no-rows"),
        pytest.param(1, 1, id="one-number"),
        pytest.param(3, 4, id="small"),
        pytest.param(700, 257, id="odd"),
        pytest.param(4096, 2048, id="large"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_arrive_bit_by_bit(dtype, num_tokens, hidden_size, boundary, inbox, sender):
    ring = HostRing(num_tokens + 2, hidden_size, dtype, cuda=False)
    _write(ring, 2, -1.0)
    lease, labels = ring.acquire(num_tokens), _labels(num_tokens, 2)
    bits = torch.randint(-128, 128, (num_tokens, hidden_size * dtype.itemsize), dtype=torch.int8)
    lease.rows.copy_(bits.view(dtype))
    sender.send_rows(labels, ring.ref, lease.start, lease.stop, boundary)
    message = inbox.next()
    assert message.rows.dtype is dtype
    assert message.rows.shape == (num_tokens, hidden_size)
    assert torch.equal(message.rows.view(torch.int8), bits)
    assert message.keys.tolist() == labels.keys.tolist()
    assert message.positions.tolist() == labels.positions.tolist()
    assert message.program_of.tolist() == labels.program_of.tolist()
    assert message.programs == list(labels.programs)
    assert message.boundary == boundary
    ring.close()


def test_rows_are_acknowledged_once_they_are_read_and_not_before(inbox, sender, ring):
    seen = []
    inbox.during = lambda message: seen.append(int(ring.counters[READER]))
    for number in (1, 2, 3):
        assert _send(sender, ring, _write(ring, 2)) == number
        assert _read_so_far(ring, number)
    assert seen == [0, 1, 2]
    assert ring.counters.sum() == 3  # no other reader's


def test_a_ring_in_the_place_of_a_closed_one_is_read_anew(inbox, sender):
    # Engines inside this process come and go; the front-end's inbox stays. The second
    # ring may get the first one's file descriptor.
    for number in (1, 2):
        ring = HostRing(4, 4, torch.float32, cuda=False)
        _send(sender, ring, _write(ring, 3, float(number)))
        assert (inbox.next().rows == number).all()
        assert _read_so_far(ring, number)
        ring.close()


def test_messages_of_one_sender_stay_in_order_and_errors_travel(inbox, sender, ring):
    for position in range(50):
        _send(sender, ring, _write(ring, 1, float(position)))
        sender.send_finish(position, 3, f"reason {position}")
    for position in range(50):
        assert inbox.next().rows[0, 0] == position
        assert inbox.next() == FinishHeader(position, 3, f"reason {position}")


def test_several_senders_reach_one_receiver(inbox):
    senders = [Sender(inbox.receiver.address, i) for i in range(4)]
    for stage, sender in enumerate(senders):
        sender.send_finish(1, stage, None)
    assert {inbox.next().stage for _ in senders} == {0, 1, 2, 3}
    for sender in senders:
        sender.close()


def test_the_socket_lies_in_a_folder_that_only_this_user_enters(inbox):
    path = Path(inbox.receiver.address.path)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (path.parent / inbox.receiver.address.frontend).is_file()


def test_closing_removes_the_folder():
    inbox = Inbox()
    folder = Path(inbox.receiver.address.path).parent
    assert folder.exists()
    inbox.receiver.close()
    assert not folder.exists()


@pytest.mark.parametrize("case", ["another-front-end", "another-host"])
def test_a_front_end_that_is_not_on_this_host_is_refused(case, inbox, tmp_path):
    address = inbox.receiver.address
    wrong = {
        "another-front-end": Address("f" * 32, address.path, address.pid),
        "another-host": Address(address.frontend, str(tmp_path / "rows"), address.pid),
    }[case]
    with pytest.raises(CompatError, match="on another host than this worker"):
        Sender(wrong, 0)


def test_an_address_knows_whether_its_process_lives(inbox):
    address = inbox.receiver.address
    assert address.pid == os.getpid()
    assert address.alive
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not Address(address.frontend, address.path, child.pid).alive


class _Touch:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _header(ring: HostRing, **changes: object) -> bytes:
    """A message of one row, with some fields wrong; those named ring_... are the ring's."""
    fields = {
        "ring": ring.ref, "start": 0, "stop": 1, "reader": READER, "message": 1,
        "boundary": None, "programs": [(0,)],
        "keys": bytes(8), "positions": bytes(8), "program_of": bytes(4),
    }  # fmt: skip
    of_ring = {k[5:]: v for k, v in changes.items() if k.startswith("ring_")}
    fields |= {k: v for k, v in changes.items() if not k.startswith("ring_")}
    fields["ring"] = RingRef(**(msgspec.structs.asdict(ring.ref) | of_ring))
    return msgspec.msgpack.encode(RowsHeader(**fields))


GARBAGE = {
    "no-bytes": lambda ring, path: b"",
    "noise": lambda ring, path: b"\xc1\xff\x00",
    "text": lambda ring, path: b"hello",
    "another-type": lambda ring, path: msgspec.msgpack.encode({"rows": 1}),
    "an-unknown-tag": lambda ring, path: msgspec.msgpack.encode(["stop", 1, 2, None]),
    "too-few-fields": lambda ring, path: msgspec.msgpack.encode(["rows", 1]),
    "an-unknown-dtype": lambda ring, path: _header(ring, ring_dtype="float3"),
    "a-dtype-that-is-a-function": lambda ring, path: _header(ring, ring_dtype="load"),
    "a-process-that-is-not-there": lambda ring, path: _header(ring, ring_pid=1 << 30),
    "a-file-that-is-not-open": lambda ring, path: _header(ring, ring_fd=1 << 20),
    "a-larger-ring-than-there-is": lambda ring, path: _header(ring, ring_num_slots=1 << 40),
    "half-a-key": lambda ring, path: _header(ring, keys=bytes(5)),
    "a-pickle": lambda ring, path: pickle.dumps(_Touch(path)),
    "a-pickle-as-keys": lambda ring, path: _header(
        ring, keys=pickle.dumps(_Touch(path)).ljust(1003)
    ),
}


@pytest.mark.parametrize("case", list(GARBAGE))
def test_garbage_is_neither_run_nor_fatal(case, inbox, sender, ring, tmp_path):
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"ipc://{inbox.receiver.address.path}")
    socket.send_multipart([GARBAGE[case](ring, tmp_path / "touched")])
    # On the same socket, so the garbage is read before.
    socket.send(msgspec.msgpack.encode(FinishHeader(1, 0, None)))
    assert inbox.next() == FinishHeader(1, 0, None)
    socket.close(linger=0)
    _send(sender, ring, _write(ring, 2, 1.0))
    assert (inbox.next().rows == 1).all()
    assert not (tmp_path / "touched").exists()


def test_a_callback_that_fails_loses_its_own_message_only(inbox, sender, ring):
    def fail(message: RowsMessage) -> None:
        inbox.during = lambda message: None
        raise RuntimeError("a callback failed")

    inbox.during = fail
    _send(sender, ring, _write(ring, 2, 1.0))
    number = _send(sender, ring, _write(ring, 2, 2.0))
    assert (inbox.next().rows == 2).all()
    assert _read_so_far(ring, number)
