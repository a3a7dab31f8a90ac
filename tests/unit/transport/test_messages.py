"""Worker to front-end over both roads, with real sockets and the real ring."""

from __future__ import annotations

import os
import pickle
import queue
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at, slots_per_token
from vllm_scope import CompatError
from vllm_scope.batch.labels import Labels
from vllm_scope.control import Decided
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Bank, Encoding, Scored
from vllm_scope.request.sites import point_of
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.messages import (
    DecidedHeader,
    FinishHeader,
    RowsHeader,
    RowsMessage,
    start_of,
)
from vllm_scope.transport.receiver import Receiver
from vllm_scope.transport.ring import CLOSED, HostRing, Lease, RingRef
from vllm_scope.transport.senders import Sender, SharedSender, TcpSender
from vllm_scope.transport.senders.tcp import PIECE_BYTES

#: Generous: what must arrive has arrived by then.
PATIENCE_S = 3

#: Of three probes: one slot.
BANK, SCORED = (kind.of([b"one", b"two", b"three"], 3) for kind in (Bank, Scored))

_receivers: list[Receiver] = []


class Inbox:
    """A receiver whose messages are kept.

    Attributes:
        during: called with a message while its rows are valid.
    """

    def __init__(self) -> None:
        self.messages: queue.Queue = queue.Queue()
        self.during = lambda message: None
        self.receiver = Receiver(
            self._on_rows, self.messages.put, on_decided=self.messages.put,
            on_unread=self.messages.put,
        )  # fmt: skip
        _receivers.append(self.receiver)

    def open(self, road: str, ring: HostRing) -> Sender:
        """A worker's sender to here."""
        if road == "shared":
            return SharedSender(self.receiver.address, ring)
        self.receiver.listen("127.0.0.1")
        return TcpSender(self.receiver.address.tcp, ring)

    def _on_rows(self, message: RowsMessage) -> None:
        self.during(message)
        message.slots = message.slots.clone()
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


@pytest.fixture(params=["shared", "tcp"])
def road(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ring() -> Iterator[HostRing]:
    ring = HostRing(100, cuda=False)
    yield ring
    ring.close()


@pytest.fixture
def sender(road: str, inbox: Inbox, ring: HostRing) -> Iterator[Sender]:
    sender = inbox.open(road, ring)
    yield sender
    sender.close()


def _labels(num_tokens: int, layouts: tuple[Layout, ...] = (reads_at(0),)) -> Labels:
    keys = np.arange(num_tokens) + (1 << 40)
    return labels_of(keys, np.arange(num_tokens)[::-1], layouts=layouts)


def _write(ring: HostRing, num_slots: int, value: float = 0.0) -> Lease:
    lease = ring.acquire(num_slots)
    lease.slots.view(torch.float32).fill_(value)
    return lease


def _value(message: RowsMessage) -> float:
    """The one number that all of its slots hold."""
    words = message.slots.view(torch.float32)
    assert (words == words[0, 0]).all()
    return float(words[0, 0])


def _send(sender: Sender, lease: Lease, boundary: int | None = None) -> None:
    """What the drain does: its own hold on the slots ends when the sender has them."""
    sender.send_rows(
        RowBatch(_labels(lease.stop - lease.start), lease, Widths((ROW_BYTES,)), boundary)
    )
    lease.release()


def _soon(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def _freed(sender: Sender, lease: Lease, patience_s: float = PATIENCE_S) -> bool:
    """Whether a lease is given back, soon."""

    def free() -> bool:
        sender.reclaim()
        return lease.free

    return _soon(free, patience_s)


@pytest.mark.parametrize("boundary", [None, 3], ids=["whole-programs", "one-tap"])
@pytest.mark.parametrize(
    ("num_tokens", "row_bytes"),
    [
        pytest.param(1, 2, id="one-number"),
        pytest.param(3, 16, id="small"),
        pytest.param(700, 514, id="odd"),
        pytest.param(4096, 8192, id="large"),
    ],
)
def test_rows_and_scores_arrive_bit_by_bit(num_tokens, row_bytes, boundary, road, inbox):
    # Two rows and three scores; at boundary 3 one row and no score.
    labels = _labels(num_tokens, (reads_at(0, 3, encoded=((BANK, (point_of(0, 1),)),)),))
    per_token = slots_per_token(labels, boundary, row_bytes)[0]
    assert per_token == -(-row_bytes // 16) * (1 if boundary else 2) + (0 if boundary else 1)
    ring = HostRing(num_tokens * per_token + 2, cuda=False)
    sender = inbox.open(road, ring)
    _write(ring, 2, -1.0)
    lease = ring.acquire(num_tokens * per_token)
    content = torch.randint(0, 256, lease.slots.shape, dtype=torch.uint8)
    lease.slots.copy_(content)
    sender.send_rows(RowBatch(labels, lease, Widths((row_bytes,)), boundary))
    messages, num_here = [], 0
    while num_here < num_tokens:
        messages.append(inbox.next())
        num_here += len(messages[-1].keys)
        assert len(messages[-1].slots) == len(messages[-1].keys) * per_token
        assert messages[-1].layouts == list(labels.layouts)
        assert (messages[-1].boundary, messages[-1].widths) == (boundary, Widths((row_bytes,)))
    assert torch.equal(torch.cat([m.slots for m in messages]), content)
    for name in ("keys", "positions", "layout_of"):
        came = np.concatenate([getattr(m, name) for m in messages])
        assert came.tolist() == getattr(labels, name).tolist()
    if road == "shared" or content.nbytes <= PIECE_BYTES:
        assert len(messages) == 1
    else:  # cut between tokens, so a piece may be a little less than it could
        assert content.nbytes / PIECE_BYTES <= len(messages) <= content.nbytes / PIECE_BYTES + 1
    sender.close()
    ring.close()


def test_layouts_with_heads_arrive_and_their_rows_are_cut_where_they_end(road, inbox):
    int8, half = Encoding('{"codec": "int8"}', 20), Encoding("half", 4096)
    layouts = (
        reads_at(0, encoded=((BANK, (1,)),)),
        Layout((), ((int8, (0, 9)),)),
        Layout((3,), ((half, (3,)), (BANK, (0,)), (int8, (0,)))),
    )
    labels = labels_of(range(9000), range(9000), np.arange(9000) % 3, layouts)
    counts = np.array(slots_per_token(labels, None))
    assert counts[:3].tolist() == [2, 4, 1 + 1 + 256 + 2]
    ring = HostRing(int(counts.sum()), cuda=False)
    sender = inbox.open(road, ring)
    lease = ring.acquire(int(counts.sum()))
    content = torch.randint(0, 256, lease.slots.shape, dtype=torch.uint8)
    lease.slots.copy_(content)
    sender.send_rows(RowBatch(labels, lease, Widths((ROW_BYTES,))))
    messages = []
    while sum(len(m.keys) for m in messages) < 9000:
        messages.append(inbox.next())
        assert messages[-1].layouts == list(layouts)
        heads = [[type(head) for head, _ in x.encoded] for x in messages[-1].layouts]
        assert heads == [[Bank], [Encoding], [Encoding, Bank, Encoding]]
        assert len(messages[-1].slots) == sum(slots_per_token(messages[-1], None))
    assert torch.equal(torch.cat([m.slots for m in messages]), content)
    assert len(messages) == (1 if road == "shared" else 2)


def test_a_message_whose_rows_cannot_be_read_tells_whose_rows_are_lost(
    sender, ring, inbox, monkeypatch
):
    def fail(*_):
        raise MemoryError

    labels = labels_of([5, 6, 5], range(3), layouts=(reads_at(0, encoded=((BANK, (1,)),)),))
    with monkeypatch.context() as broken:
        broken.setattr("vllm_scope.transport.messages.known_head", fail)
        lease = ring.acquire(6)
        sender.send_rows(RowBatch(labels, lease, Widths((ROW_BYTES,))))
        lease.release()
        assert inbox.next().tolist() == [5, 6]
        assert _freed(sender, lease)
    lease = ring.acquire(6)
    sender.send_rows(RowBatch(labels, lease, Widths((ROW_BYTES,))))
    assert inbox.next().keys.tolist() == [5, 6, 5]


def test_layouts_of_which_taps_tell_all_numbers_arrive(road, inbox):
    layouts = reads_at(0, encoded=((SCORED, (1,)),)), Layout((), ((SCORED, (0, 1)),)), reads_at(2)
    labels = labels_of(range(6), range(6), np.arange(6) % 3, layouts)
    assert not labels.encodes
    num_slots = sum(slots_per_token(labels, None))
    assert num_slots == 2 * (2 + 2 + 1)
    ring = HostRing(num_slots, cuda=False)
    sender = inbox.open(road, ring)
    sender.send_rows(RowBatch(labels, ring.acquire(num_slots), Widths((ROW_BYTES,))))
    message = inbox.next()
    assert message.layouts == list(layouts)
    assert [[type(head) for head, _ in x.encoded] for x in message.layouts] == [
        [Scored], [Scored], []
    ]  # fmt: skip


def test_layouts_with_further_names_of_rows_arrive(road, inbox):
    layouts = reads_at(0), Layout((7,), (), ((8, 7),))
    labels = labels_of(range(6), range(6), np.arange(6) % 2, layouts)
    ring = HostRing(6, cuda=False)
    sender = inbox.open(road, ring)
    sender.send_rows(RowBatch(labels, ring.acquire(6), Widths((ROW_BYTES,))))
    assert inbox.next().layouts == list(layouts)


def test_batches_of_different_layouts_are_cut_between_tokens(inbox):
    row_bytes, row_slots = 32_768, 2048
    layouts = (
        reads_at(0),
        reads_at(0, 1, 2),
        reads_at(1, 2, encoded=((BANK, (point_of(1, 0),)),)),
        Layout((), ((BANK, (point_of(1, 0),)),)),
    )
    labels = labels_of(range(600), range(600), np.arange(600) % 4, layouts)
    counts = np.array(slots_per_token(labels, None, row_bytes))
    assert counts[:4].tolist() == [row_slots, 3 * row_slots, 2 * row_slots + 1, 1]
    ring = HostRing(int(counts.sum()), cuda=False)
    sender = inbox.open("tcp", ring)
    lease = ring.acquire(int(counts.sum()))
    words = torch.arange(600.0).repeat_interleave(torch.from_numpy(counts))
    lease.slots.view(torch.float32).copy_(words[:, None])
    sender.send_rows(RowBatch(labels, lease, Widths((row_bytes,))))
    num_here = 0
    while num_here < 600:
        message = inbox.next()
        assert message.slots.nbytes <= PIECE_BYTES
        here = torch.tensor(slots_per_token(message, None, row_bytes))
        of_token = torch.tensor(message.keys.tolist()).float().repeat_interleave(here)
        assert torch.equal(message.slots.view(torch.float32), of_token[:, None].expand(-1, 4))
        num_here += len(message.keys)
    sender.close()
    ring.close()


def test_a_lease_is_given_back_once_its_rows_are_read_and_not_before(inbox, sender, ring):
    seen = []
    leases = [_write(ring, 2) for _ in range(3)]
    inbox.during = lambda message: seen.append([lease.free for lease in leases])
    for lease in leases:
        _send(sender, lease)
        assert _freed(sender, lease)
    assert seen == [[False] * 3, [True, False, False], [True, True, False]]


def test_a_ring_that_reuses_a_closed_ones_descriptor_is_mapped_again(road, inbox):
    # Engines inside this process come and go; the front-end's inbox stays. The second
    # ring may get the first one's file descriptor.
    for number in (1, 2):
        ring = HostRing(4, cuda=False)
        sender = inbox.open(road, ring)
        lease = _write(ring, 3, float(number))
        _send(sender, lease)
        assert _value(inbox.next()) == number
        assert _freed(sender, lease)
        sender.close()
        ring.close()


def test_rings_that_are_gone_are_forgotten(inbox):
    """Engines come and go in one process; a ring that stays mapped keeps its memory."""
    gone = []
    inbox.receiver._on_gone = gone.append
    identities = []
    for _ in range(10):
        ring = HostRing(100, cuda=False)
        sender = inbox.open("shared", ring)
        _send(sender, _write(ring, 3, 1.0))
        assert _value(inbox.next()) == 1.0
        identities.append(ring.ref.identity)
        sender.close()
        ring.close()
    rings = inbox.receiver._rings
    assert len(rings.readers) <= 2
    assert len(rings.counters) <= 2
    assert gone == identities[: len(gone)]
    assert len(gone) >= 8


def test_messages_of_one_sender_stay_in_order_and_errors_travel(inbox, sender, ring):
    ring.reclaim = sender.reclaim
    for position in range(50):
        _send(sender, _write(ring, 1, float(position)))
        sender.send_finish(position, 3, f"reason {position}")
    for position in range(50):
        assert _value(inbox.next()) == position
        assert inbox.next() == FinishHeader(position, 3, f"reason {position}")


@pytest.mark.parametrize("road", ["shared", "tcp"])
def test_what_a_policy_decides_comes_before_the_end(road, inbox, ring):
    sender = inbox.open(road, ring)
    decided = [Decided(5, 7, {"e": 0.5}), Decided(9, flag="odd", stop=True), Decided(11, error="x")]
    for one in decided:
        sender.send_decided(3, one)
    sender.send_finish(3, 0, None)
    assert [inbox.next() for _ in decided] == [DecidedHeader(3, one) for one in decided]
    assert inbox.next() == FinishHeader(3, 0, None)
    sender.close()


def test_senders_of_both_transports_reach_one_receiver(inbox, ring):
    senders = [inbox.open(road, ring) for road in ("shared", "tcp", "tcp", "shared")]
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


def test_closing_removes_the_folder_and_gives_back_every_lease(road, ring):
    inbox = Inbox()
    folder = Path(inbox.receiver.address.path).parent
    sender = inbox.open(road, ring)
    assert folder.exists()
    inbox.receiver.close()
    assert not folder.exists()
    lease = _write(ring, 2)
    _send(sender, lease)
    assert _freed(sender, lease)
    assert sender.dead
    sender.close()


@pytest.mark.parametrize("case", ["another-front-end", "another-host"])
def test_a_front_end_that_is_not_on_this_host_shares_nothing(case, inbox, ring, tmp_path):
    wrong = {
        "another-front-end": {"frontend": "f" * 32},
        "another-host": {"path": str(tmp_path / "rows")},
    }[case]
    with pytest.raises(CompatError, match="on another host than this worker"):
        SharedSender(msgspec.structs.replace(inbox.receiver.address, **wrong), ring)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        pytest.param({"pid": 1 << 30}, "No such file", id="another-pid-namespace"),
        pytest.param({"fd": 1 << 20}, "No such file", id="no-such-file"),
        pytest.param({"identity": 1}, "is not the worker's ring", id="a-namesake"),
    ],
)
def test_a_ring_that_the_front_end_cannot_map_is_found_out_before_any_row(wrong, why, inbox, ring):
    true = ring.ref
    ring.ref = RingRef(**(msgspec.structs.asdict(true) | wrong))
    free = len(ring._free_readers)
    with pytest.raises(CompatError, match=f"cannot map this worker's memory: .*{why}"):
        SharedSender(inbox.receiver.address, ring)
    assert len(ring._free_readers) == free
    ring.ref = true
    SharedSender(inbox.receiver.address, ring).close()


def test_an_address_knows_whether_its_process_lives(inbox):
    address = inbox.receiver.address
    assert address.pid == os.getpid()
    assert address.alive
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    of_child = msgspec.structs.replace(address, pid=child.pid, started=start_of(child.pid))
    assert of_child.alive
    # Its number was given to a later process.
    assert not msgspec.structs.replace(of_child, started=of_child.started - 1).alive
    child.stdin.close()
    assert _soon(lambda: not of_child.alive), "a process that nobody waited for looks alive"
    child.wait()
    assert not of_child.alive


class _Touch:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _header(ring: HostRing, **changes: object) -> bytes:
    """A message of one row, with some fields wrong; those named ring_... are the ring's."""
    fields = {
        "ring": ring.ref, "start": 0, "stop": 1, "reader": 9, "message": 1,
        "boundary": None, "row_bytes": (ROW_BYTES,), "layouts": [((0,), ())],
        "keys": bytes(8), "positions": bytes(8), "layout_of": bytes(4),
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
    "a-layout-of-words": lambda ring, path: _header(ring, layouts=[(("a",), ())]),
    "a-score-without-a-number": lambda ring, path: _header(ring, layouts=[((0,), ((1,),))]),
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
def test_garbage_is_neither_run_nor_fatal(case, inbox, ring, tmp_path):
    sender = inbox.open("shared", ring)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{inbox.receiver.address.path}")
    socket.send_multipart([GARBAGE[case](ring, tmp_path / "touched")])
    # On the same socket, so the garbage is read before.
    socket.send(msgspec.msgpack.encode(FinishHeader(1, 0, None)))
    assert inbox.next() == FinishHeader(1, 0, None)
    socket.close(linger=0)
    _send(sender, _write(ring, 2, 1.0))
    assert _value(inbox.next()) == 1
    assert not (tmp_path / "touched").exists()
    sender.close()


def test_a_callback_that_fails_loses_its_own_message_only(inbox, sender, ring):
    def fail(message: RowsMessage) -> None:
        inbox.during = lambda message: None
        raise RuntimeError("a callback failed")

    inbox.during = fail
    leases = [_write(ring, 2, 1.0), _write(ring, 2, 2.0)]
    for lease in leases:
        _send(sender, lease)
    assert _value(inbox.next()) == 2
    assert all(_freed(sender, lease) for lease in leases)


def test_a_counter_is_used_again_only_after_its_reader_has_closed(ring):
    counters = len(ring._free_readers)
    for _ in range(3):
        inbox = Inbox()
        sender = inbox.open("shared", ring)
        assert len(ring._free_readers) == counters - 1
        inbox.receiver.close()
        assert (ring.counters == CLOSED).sum() == 1
        sender.close()
        assert len(ring._free_readers) == counters
    inbox = Inbox()
    sender = inbox.open("shared", ring)
    assert not (ring.counters == CLOSED).any()  # the new reader starts at zero
    sender.close()
    assert len(ring._free_readers) == counters - 1  # its reader is still there
