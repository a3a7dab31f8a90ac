"""Over TCP: nobody else gets in, nothing is lost, and no worker waits for the dead."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import psutil
import pytest
import torch
import zmq

from tests.unit.delivered import ROW_BYTES, labels_of
from vllm_scope import CompatError, ConfigError
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.sinks import RowBatch
from vllm_scope.transport import messages as road
from vllm_scope.transport import receiver as receiver_module
from vllm_scope.transport.messages import (
    CountersHeader,
    FinishHeader,
    RowsHeader,
    RowsMessage,
    TcpAddress,
    TcpHello,
)
from vllm_scope.transport.receiver import Receiver
from vllm_scope.transport.ring import HostRing
from vllm_scope.transport.senders import TcpSender, tcp

PATIENCE_S = 10


class FrontEnd:
    """A receiver that listens, and what came.

    Attributes:
        gate: rows are read once it is set.
    """

    def __init__(self) -> None:
        self.rows: list[float] = []
        self.finished: queue.Queue[FinishHeader] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()
        self.receiver = Receiver(self._on_rows, self.finished.put)
        self.receiver.listen("127.0.0.1")

    @property
    def tcp(self) -> TcpAddress:
        assert self.receiver.address.tcp is not None
        return self.receiver.address.tcp

    def _on_rows(self, message: RowsMessage) -> None:
        assert self.gate.wait(PATIENCE_S)
        self.rows += message.slots.view(torch.float32)[:, 0].tolist()

    def hears(self, sender: TcpSender, key: int = 1) -> bool:
        sender.send_finish(key, 0, None)
        return self.finished.get(timeout=PATIENCE_S).key == key


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    front_end = FrontEnd()
    yield front_end
    front_end.gate.set()
    front_end.receiver.close()
    assert not front_end.receiver._thread.is_alive(), "it hangs"


@pytest.fixture
def ring() -> Iterator[HostRing]:
    ring = HostRing(8, cuda=False)
    yield ring
    ring.close()


@pytest.fixture
def sender(front_end: FrontEnd, ring: HostRing) -> Iterator[TcpSender]:
    sender = TcpSender(front_end.tcp, ring)
    yield sender
    sender.close(patience_s=0.5)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(road, "SILENCE_MS", 300)
    monkeypatch.setattr(tcp, "DIAL_S", 0.2)
    monkeypatch.setattr(tcp, "ANSWER_S", 1.0)


def _send(
    sender: TcpSender, ring: HostRing, value: float, num_rows: int = 1, row_slots: int = 1
) -> None:
    """What the drain does; waits while the ring is full."""
    labels = labels_of(range(num_rows), range(num_rows))
    lease = ring.acquire(num_rows * row_slots)
    lease.slots.view(torch.float32).fill_(value)
    sender.send_rows(RowBatch(labels, lease, Widths((row_slots * ROW_BYTES,))))
    lease.release()


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def _all_free(ring: HostRing) -> bool:
    """Whether the whole ring can be had, soon."""
    taker = threading.Thread(target=lambda: ring.acquire(ring.num_slots).release(), daemon=True)
    taker.start()
    taker.join(PATIENCE_S)
    return not taker.is_alive()


# Who gets in


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_nothing_listens_until_it_must_and_then_on_one_address_only():
    before = _listening()
    receiver = Receiver(print, print)
    assert receiver.address.tcp is None
    assert _listening() == before
    for _ in range(2):
        receiver.listen("127.0.0.1")
    ((host, port),) = _listening() - before
    assert receiver.address.tcp.endpoint == f"tcp://{host}:{port}"
    assert host == "127.0.0.1"
    receiver.close()
    assert _listening() == before


def test_a_receiver_wakes_its_thread_before_the_thread_closes_the_descriptor(monkeypatch):
    """The thread may be awake for another reason, and see at once that it is to end."""
    receiver = Receiver(print, print)
    write = os.eventfd_write

    def late(descriptor: int, value: int) -> None:
        write(descriptor, value)
        receiver._thread.join(0.2)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    receiver.close()
    receiver.listen("127.0.0.1")
    assert receiver.address.tcp is None, "a closed receiver listens"


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        pytest.param("lo", "tcp://127.0.0.1:", id="an-interface"),
        pytest.param("::1", "tcp://[::1]:", id="ipv6"),
    ],
)
def test_rows_come_by_an_interfaces_name_and_by_ipv6(host, endpoint, ring):
    finished: queue.Queue[FinishHeader] = queue.Queue()
    receiver = Receiver(print, finished.put)
    receiver.listen(host)
    assert receiver.address.tcp.endpoint.startswith(endpoint)
    sender = TcpSender(receiver.address.tcp, ring)
    sender.send_finish(3, 0, None)
    assert finished.get(timeout=PATIENCE_S).key == 3
    sender.close()
    receiver.close()


def test_every_front_end_has_keys_of_its_own_and_logs_none():
    receivers = [Receiver(print, print) for _ in range(2)]
    for receiver in receivers:
        receiver.listen("127.0.0.1")
    one, two = (receiver.address.tcp for receiver in receivers)
    assert len({one.server_key, two.server_key, one.client_key, two.client_key}) == 4
    assert one.client_secret not in repr(receivers[0].address)
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-interface"])
def test_an_address_that_is_not_of_this_host_is_refused(host):
    receiver = Receiver(print, print)
    with pytest.raises(ConfigError, match=f"rows on TCP at '{host}'.*road_host"):
        receiver.listen(host)
    assert receiver.address.tcp is None
    receiver.close()


def test_a_zmq_without_curve_is_refused(front_end, ring, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    receiver = Receiver(print, print)
    with pytest.raises(CompatError, match="without CURVE"):
        receiver.listen("127.0.0.1")
    with pytest.raises(CompatError, match="without CURVE"):
        TcpSender(front_end.tcp, ring)
    receiver.close()


def _no_keys(socket: zmq.Socket, tcp: TcpAddress) -> None:
    pass


def _wrong_client_key(socket: zmq.Socket, tcp: TcpAddress) -> None:
    socket.curve_serverkey = tcp.server_key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _wrong_server_key(socket: zmq.Socket, tcp: TcpAddress) -> None:
    socket.curve_serverkey = zmq.curve_keypair()[0]
    socket.curve_publickey = tcp.client_key.encode()
    socket.curve_secretkey = tcp.client_secret.encode()


def _plain_password(socket: zmq.Socket, tcp: TcpAddress) -> None:
    socket.plain_username, socket.plain_password = b"worker", b"let me in"


@pytest.mark.parametrize(
    "disguise", [_no_keys, _wrong_client_key, _wrong_server_key, _plain_password]
)
def test_a_client_without_the_keys_is_not_heard(disguise, front_end, sender):
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    disguise(stranger, front_end.tcp)
    stranger.connect(front_end.tcp.endpoint)
    # Where it was turned away already, there is nobody left to send to.
    with suppress(zmq.Again):
        for message in (TcpHello(7, 1), FinishHeader(666, 0, None)):
            stranger.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
    assert not stranger.poll(500), "a stranger was answered"
    assert front_end.hears(sender)
    assert front_end.finished.empty()
    stranger.close(linger=0)


#: ZMTP 3.1: a greeting that announces CURVE.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(os.urandom(4096), id="noise"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="a-browser"),
        pytest.param(GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), id="a-huge-command"),
        pytest.param(GREETING + b"\x02" + (1 << 40).to_bytes(8, "big"), id="a-huge-frame"),
        pytest.param(GREETING + b"\x04\xc8\x05HELLO" + bytes(194), id="a-false-hello"),
    ],
)
def test_a_connection_without_a_handshake_is_closed(said, front_end, sender):
    host, port = front_end.tcp.endpoint.removeprefix("tcp://").split(":")
    before = psutil.Process().memory_info().rss
    with sockets.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
        stranger.sendall(said)
        try:
            while stranger.recv(4096):  # its own greeting, then the end
                pass
        except ConnectionResetError:
            pass
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert front_end.hears(sender)
    assert front_end.finished.empty()


def _header(ring: HostRing, **changes: object) -> bytes:
    fields = {
        "ring": ring.ref, "start": 0, "stop": 1, "reader": -1, "message": 0,
        "boundary": None, "row_bytes": (ROW_BYTES,), "layouts": [((0,), ())],
        "keys": bytes(8), "positions": bytes(8), "layout_of": bytes(4),
    }  # fmt: skip
    of_ring = {k[5:]: v for k, v in changes.items() if k.startswith("ring_")}
    fields |= {k: v for k, v in changes.items() if not k.startswith("ring_")}
    fields["ring"] = msgspec.structs.replace(ring.ref, **of_ring)
    return msgspec.msgpack.encode(RowsHeader(**fields))


BAD_MESSAGES = {
    "no-rows": lambda ring: [_header(ring)],
    "fewer-bytes-than-the-header-says": lambda ring: [_header(ring), bytes(15)],
    "more-bytes-than-the-header-says": lambda ring: [_header(ring), bytes(17)],
    "more-rows-than-memory-holds": lambda ring: [_header(ring, stop=1 << 50), bytes(16)],
    "less-than-no-rows": lambda ring: [_header(ring, start=2), bytes(16)],
    "a-layout-of-words": lambda ring: [_header(ring, layouts=[(("a",), ())]), bytes(16)],
    "half-a-key": lambda ring: [_header(ring, keys=bytes(5)), bytes(16)],
    "noise": lambda ring: [b"\xc1\xff\x00"],
    # The memory of this process is not to be had by a message from elsewhere.
    "a-ring-to-map": lambda ring: [msgspec.msgpack.encode(["shared", ring.ref, 0])],
}


@pytest.mark.parametrize("case", list(BAD_MESSAGES))
def test_a_message_with_wrong_sizes_counts_as_read_and_the_next_ones_are_read(
    case, front_end, sender, ring
):
    sender._put(BAD_MESSAGES[case](ring), None)
    _send(sender, ring, 5.0)
    assert front_end.hears(sender)
    assert front_end.rows == [5.0]
    assert _all_free(ring)
    assert not front_end.receiver._rings.readers


def test_a_worker_that_cannot_reach_the_front_end_says_where_it_tried(ring, impatient):
    with sockets.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        keys = [key.decode() for key in (*zmq.curve_keypair(), *zmq.curve_keypair())]
        address = TcpAddress(endpoint, keys[0], keys[2], keys[3])
        with pytest.raises(CompatError, match=f"cannot reach the front-end at {endpoint}"):
            TcpSender(address, ring)


# What is sent arrives


def test_rows_wait_in_the_ring_for_a_slow_front_end_and_all_arrive(front_end, sender, ring):
    front_end.gate.clear()
    written = 0

    def work() -> None:
        nonlocal written
        for value in range(50):
            _send(sender, ring, float(value), num_rows=2)  # the ring holds four
            written += 1

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(0.3)
    assert worker.is_alive()
    assert written == 4
    front_end.gate.set()
    worker.join(PATIENCE_S)
    assert front_end.hears(sender)
    assert front_end.rows == [float(value) for value in range(50) for _ in range(2)]


class Cable:
    """A TCP proxy to a front-end, that can be cut."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to = (host, int(port))
        self._server = sockets.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._ends: list[sockets.socket] = []
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = sockets.create_connection(self._to)
            self._ends += [near, far]
            self.num_connections += 1
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: sockets.socket, target: sockets.socket) -> None:
        try:
            while data := source.recv(1 << 14):
                target.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            end.shutdown(sockets.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._server.close()
        self.cut()


def test_a_lost_connection_loses_no_message_and_repeats_none(front_end, impatient):
    cable = Cable(front_end.tcp.endpoint)
    row_slots = 1024  # several frames of the network
    ring = HostRing(64 * row_slots, cuda=False)
    sender = TcpSender(msgspec.structs.replace(front_end.tcp, endpoint=cable.endpoint), ring)
    for value in range(300):
        _send(sender, ring, float(value), row_slots=row_slots)
        if value % 50 == 20:
            cable.cut()
    assert front_end.hears(sender)
    assert front_end.rows[::row_slots] == [float(value) for value in range(300)]
    assert cable.num_connections >= 5
    cable.close()
    sender.close(patience_s=0)
    ring.close()


def _with_the_keys(tcp: TcpAddress) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.curve_serverkey = tcp.server_key.encode()
    socket.curve_publickey = tcp.client_key.encode()
    socket.curve_secretkey = tcp.client_secret.encode()
    socket.connect(tcp.endpoint)
    return socket


def test_an_old_connection_whose_hello_is_read_late_does_not_replace_the_new_one(front_end):
    """zmq takes turns between connections, and can give the later hello first."""
    old, new = (_with_the_keys(front_end.tcp) for _ in range(2))
    new.send(msgspec.msgpack.encode(TcpHello(7, dial=2)))
    assert road.decode_answer(new.recv()).read == 0
    old.send(msgspec.msgpack.encode(TcpHello(7, dial=1)))
    assert not old.poll(500), "the old connection was answered"
    new.send(msgspec.msgpack.encode(FinishHeader(1, 0, None)))
    assert front_end.finished.get(timeout=PATIENCE_S).key == 1
    for socket in (old, new):
        socket.close(linger=0)


def test_a_worker_that_connects_while_the_front_end_is_busy_is_heard(
    front_end, sender, ring, impatient, monkeypatch
):
    """It connects more than once meanwhile."""
    hellos: list[TcpHello] = []

    def hello(session: int, dial: int) -> TcpHello:
        hellos.append(TcpHello(session, dial))
        return hellos[-1]

    monkeypatch.setattr(tcp, "TcpHello", hello)
    front_end.gate.clear()
    _send(sender, ring, 1.0)
    threading.Timer(0.45, front_end.gate.set).start()
    second = TcpSender(front_end.tcp, ring)
    assert front_end.hears(second)
    assert front_end.hears(sender)
    assert len({hello.session for hello in hellos}) == 1
    assert [hello.dial for hello in hellos] == list(range(1, len(hellos) + 1))
    assert len(hellos) > 1
    second.close(patience_s=0)


# What dies


def test_workers_that_are_gone_are_forgotten_and_running_ones_are_not(
    front_end, sender, ring, impatient, monkeypatch
):
    monkeypatch.setattr(receiver_module, "FORGET_S", 0.0)
    receiver, gone = front_end.receiver, []
    receiver._on_gone = gone.append
    for i in range(12):
        other = TcpSender(front_end.tcp, ring)
        other.send_counters(CountersHeader(i, {}))
        assert front_end.hears(other)
        other.close()
        assert front_end.hears(sender), "it lives, though it says nothing for long"
    last = TcpSender(front_end.tcp, ring)
    assert front_end.hears(last)
    assert len(receiver._sessions) <= 4
    assert len(receiver._peers) <= 4
    assert gone == sorted(gone)
    assert len(gone) >= 10
    last.close()


def test_a_worker_that_dials_again_in_time_is_known(front_end, impatient, ring):
    """Else it would be told that none of its messages was read."""
    cable = Cable(front_end.tcp.endpoint)
    sender = TcpSender(msgspec.structs.replace(front_end.tcp, endpoint=cable.endpoint), ring)
    assert front_end.hears(sender)
    cable.cut()
    for _ in range(3):
        other = TcpSender(front_end.tcp, ring)
        other.close()
    assert front_end.hears(sender)
    assert _soon(lambda: sender.num_read == 2)
    assert not sender.dead
    cable.close()
    sender.close(patience_s=0)


FRONT_END = """
import sys, time, msgspec
from vllm_scope.transport.receiver import Receiver
receiver = Receiver(lambda message: time.sleep(60), print)
receiver.listen("127.0.0.1")
print(msgspec.json.encode(receiver.address.tcp).decode(), flush=True)
time.sleep(60)
"""


def _connected(ring, monkeypatch):
    """A front-end in a process of its own, and a sender that has its answer."""
    child = subprocess.Popen([sys.executable, "-c", FRONT_END], stdout=subprocess.PIPE)
    address = msgspec.json.decode(child.stdout.readline(), type=TcpAddress)
    with monkeypatch.context() as patient:  # the process may be slow to answer
        patient.setattr(tcp, "DIAL_S", 30.0)
        patient.setattr(tcp, "ANSWER_S", 30.0)
        return child, TcpSender(address, ring)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_front_end_that_died_does_not_hold_a_worker(how, ring, impatient, monkeypatch):
    child, sender = _connected(ring, monkeypatch)
    for value in range(8):
        _send(sender, ring, float(value))
    child.send_signal(how)
    assert _all_free(ring)
    assert _soon(lambda: sender.dead)
    _send(sender, ring, 9.0)
    assert _all_free(ring)
    child.kill()
    child.wait()
    sender.close()


def test_each_dial_waits_for_an_answer_and_no_pause_follows_the_last_dial(
    ring, impatient, monkeypatch
):
    waits: list[tuple[float, float]] = []
    serve = TcpSender._serve

    def timed(self, *ends):
        started = time.monotonic()
        try:
            serve(self, *ends)
        finally:
            waits.append((started, time.monotonic()))

    monkeypatch.setattr(TcpSender, "_serve", timed)
    child, sender = _connected(ring, monkeypatch)
    monkeypatch.setattr(tcp, "DIAL_S", 0.5)
    sleep, pauses = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    child.kill()
    child.wait()
    sender._thread.join(PATIENCE_S)
    assert sender.dead
    assert len(waits) == 1 + tcp.MOST_DIALS
    # The first dial can still reach the port of the ending process, and is then lost at once.
    assert all(stop - start >= 0.5 for start, stop in waits[2:])
    assert all(then[0] - stop >= 0.5 for (_, stop), then in itertools.pairwise(waits[1:]))
    assert pauses.count(0.5) == tcp.MOST_DIALS - 1
    sender.close()


WORKER = """
import json, sys
import msgspec, numpy as np, torch
from vllm_scope.transport.ring import HostRing
from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.transport.messages import Address
from vllm_scope.sinks import RowBatch
from vllm_scope.sinks.memory import MemorySink
address, road = msgspec.json.decode(sys.argv[1], type=Address), sys.argv[2]
row_slots = 33  # of 514 bytes
ring = HostRing(64 * row_slots, cuda=False)
sink = MemorySink(0, ring, road)
print(sink.connect(address), flush=True)
sink.add_request(1, address.frontend)
torch.manual_seed(0)
for step in range(20):
    lease = ring.acquire(20 * row_slots)
    lease.slots.copy_(torch.randint(0, 256, lease.slots.shape, dtype=torch.uint8))
    ids = np.arange(10, dtype=np.int64)
    layouts = (Layout((0, 6)),)
    labels = Labels(ids * 0 + 1, ids + 10 * step, np.zeros(10, np.int32), layouts, ids)
    sink.write(RowBatch(labels, lease, Widths((514,))))
    lease.release()
sink.finish(1, None)
sink.close()
ring.close()
"""


def test_a_worker_in_another_process_sends_the_same_rows_over_both_roads():
    came: dict[str, list[tuple]] = {}
    rows: dict[str, list[torch.Tensor]] = {}
    for name in ("shared", "tcp"):
        finished: queue.Queue[FinishHeader] = queue.Queue()
        messages = came.setdefault(name, [])
        parts = rows.setdefault(name, [])

        def keep(message: RowsMessage, messages=messages, parts=parts) -> None:
            messages.append((message.keys.tolist(), message.positions.tolist(), message.layouts))
            parts.append(message.slots.clone())

        receiver = Receiver(keep, finished.put)
        receiver.listen("127.0.0.1")
        address = json.dumps(msgspec.to_builtins(receiver.address))
        worker = subprocess.run(
            [sys.executable, "-c", WORKER, address, name], capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert worker.stdout == f"{name}\n"
        assert worker.stderr == ""
        assert finished.get(timeout=PATIENCE_S) == FinishHeader(1, 0, None)
        receiver.close()
    assert came["shared"] == came["tcp"]
    torch.manual_seed(0)
    shape = (20 * 33, SLOT_BYTES)
    expected = torch.cat([torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(20)])
    for parts in rows.values():
        assert torch.equal(torch.cat(parts), expected)
