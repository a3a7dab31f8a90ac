"""Answers of a real server to clients that read, that do not read, and that leave."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse

from tests.unit.waiting import until
from vllm_scope.results.budget import asking
from vllm_scope.server.exchange import Exchange
from vllm_scope.server.limits import Door
from vllm_scope.server.settings import ServerSettings
from vllm_scope.server.store import Store, owner_of

TIMEOUT_S = 1.0
PATIENCE_S = 20.0
CHUNK = b"x" * (1 << 18)


class Host:
    """A server whose answers are told of what became of them.

    Attributes:
        undone: what nobody was told.
        ended: the streams that have ended.
        wait: a whole answer waits for it.
    """

    def __init__(self):
        self.undone, self.ended, self.exchanges = [], [], []
        self.wait = threading.Event()
        self.wait.set()
        self.app = FastAPI()
        settings = ServerSettings.from_environment(
            {"VLLM_SCOPE_ADMIN_KEY": "operator", "VLLM_SCOPE_WRITE_TIMEOUT_S": str(TIMEOUT_S)}
        )
        self.app.add_middleware(Door, limits={}, settings=settings, timed=["/v1/scope"])
        self.app.get("/stream")(self.stream)
        self.app.get("/v1/scope/whole")(self.whole)
        self.app.get("/v1/scope/file")(self.file)

    async def stream(self, ours: bool, count: int = 10_000):
        asking.get().timed = ours

        async def chunks():
            try:
                for i in range(count):
                    asking.get().untold.append(lambda i=i: self.undone.append(i))
                    yield CHUNK
            finally:
                self.ended.append(ours)

        made = chunks()
        asking.get().closing.append(made.aclose)
        return StreamingResponse(made)

    async def whole(self, size: int = 10):
        exchange = asking.get()
        self.exchanges.append(exchange)
        exchange.untold.append(lambda: self.undone.append("whole"))
        while not self.wait.is_set():
            await asyncio.sleep(0.01)
        return Response(b"x" * size)

    async def file(self, name: str):
        """The file of that name in `store`, which is deleted once it was sent."""
        exchange = asking.get()
        self.exchanges.append(exchange)
        return self.store.sent(self.store.open(name, exchange.owner), name, exchange.owner, True)


@contextmanager
def running(**options):
    """A Host behind uvicorn, at a port or at a unix socket (`uds`)."""
    found = Host()
    # As vLLM does; see vllm 0.32, entrypoints/launchers/launcher.py, serve_http.
    config = uvicorn.Config(found.app, log_level="error", **options)
    server = found.app.state.server = found.server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, PATIENCE_S)
    found.address = server.servers[0].sockets[0].getsockname()
    yield found
    server.should_exit = True
    thread.join(PATIENCE_S)


@pytest.fixture
def host():
    with running(port=0) as found:
        found.port = found.address[1]
        yield found


@contextmanager
def asked(host, path, buffer=1 << 12, headers=""):
    """A connection whose client has asked, and does not read."""
    family = socket.AF_UNIX if isinstance(host.address, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(host.address)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        yield connection


def connections(host):
    return len(host.server.server_state.connections)


def test_a_stream_that_nobody_reads_ends_and_holds_nothing(host):
    with asked(host, "/stream?ours=true"):
        started = time.monotonic()
        until(lambda: host.ended, PATIENCE_S)
        assert time.monotonic() - started > TIMEOUT_S
        until(lambda: not connections(host), PATIENCE_S)
    assert 0 < len(host.undone) < 5, "what went out before was told"


def test_a_second_request_on_the_connection_does_not_save_an_unread_stream(host):
    with asked(host, "/stream?ours=true") as connection:
        connection.sendall(b"GET /stream?ours=false HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: host.ended and not connections(host), PATIENCE_S)


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_on_a_unix_socket_only_the_client_that_does_not_read_is_disconnected(http, tmp_path):
    with running(uds=str(tmp_path / "socket"), http=http) as host, ExitStack() as others:
        for _ in range(10):
            others.enter_context(asked(host, "/stream?ours=false"))
        until(lambda: connections(host) == 10, PATIENCE_S)
        with asked(host, "/stream?ours=true"):
            until(lambda: host.ended, PATIENCE_S)
            until(lambda: connections(host) < 11, PATIENCE_S)
            time.sleep(0.2)
            assert host.ended == [True]
            assert connections(host) == 10
        others.close()
        until(lambda: len(host.ended) == 11, PATIENCE_S)


def test_a_client_that_names_the_address_of_another_does_not_end_its_connection(host):
    with asked(host, "/stream?ours=false") as other:
        said = f"X-Forwarded-For: 127.0.0.1:{other.getsockname()[1]}\r\n"
        with asked(host, "/stream?ours=true", headers=said) as connection:
            # The connection's scope is that of the request behind, so that it is not found by it.
            second = f"GET /stream?ours=false HTTP/1.1\r\nHost: x\r\n{said}\r\n"
            connection.sendall(second.encode())
            until(lambda: host.ended, PATIENCE_S)
            time.sleep(0.2)
            assert host.ended == [True]


def test_a_whole_answer_that_nobody_reads_ends_too(host):
    with asked(host, f"/v1/scope/whole?size={32 << 20}"):
        until(lambda: connections(host), PATIENCE_S)
        until(lambda: not connections(host), PATIENCE_S)


def test_a_file_stays_until_its_client_has_received_it(host, tmp_path):
    host.store = Store(tmp_path, "run", 1 << 24, 600.0)
    # The store reads the file in three pieces, and the client stalls in the last piece.
    kept = host.store.put({"x": torch.zeros(760_000)}, {}, owner_of(None))
    path = f"/v1/scope/file?name={kept.id}"
    with asked(host, path):
        until(lambda: host.exchanges, PATIENCE_S)
        until(lambda: not connections(host), PATIENCE_S)
        time.sleep(0.2)
        assert len(host.store) == 1
    answer = httpx.get(f"http://127.0.0.1:{host.port}{path}")
    assert len(answer.content) == kept.num_bytes
    until(lambda: not len(host.store), PATIENCE_S)
    host.store.close()


def test_a_plain_stream_is_left_as_it_is(host):
    with asked(host, "/stream?ours=false"):
        time.sleep(3 * TIMEOUT_S)
        assert not host.ended
        assert connections(host) == 1
    until(lambda: host.ended, PATIENCE_S)


def test_a_client_that_reads_slowly_gets_everything(host):
    with asked(host, "/stream?ours=true&count=60", 1 << 16) as connection:
        num_bytes, started = 0, time.monotonic()
        while num_bytes < 60 * len(CHUNK):
            time.sleep(0.01)
            came = len(connection.recv(1 << 16))
            assert came, "it was hung up on"
            num_bytes += came
        until(lambda: host.ended, PATIENCE_S)
        assert time.monotonic() - started > 2 * TIMEOUT_S
    assert not host.undone


def test_a_file_that_a_sent_part_names_stays(host):
    for path in ("/v1/scope/whole", "/stream?ours=true&count=3"):
        assert httpx.get(f"http://127.0.0.1:{host.port}{path}").status_code == 200
    assert not host.undone


def test_a_file_for_a_client_that_has_left_is_deleted(host):
    host.wait.clear()
    with asked(host, "/v1/scope/whole"):
        until(lambda: host.exchanges, PATIENCE_S)
    until(lambda: not connections(host), PATIENCE_S)
    host.wait.set()
    until(lambda: host.undone, PATIENCE_S)
    assert host.undone == ["whole"]


@pytest.mark.parametrize(
    ("headers", "operator"),
    [
        pytest.param({}, False, id="no-key"),
        pytest.param({"X-Scope-Admin-Key": "wrong"}, False, id="wrong"),
        pytest.param({"X-Scope-Admin-Key": "operator"}, True, id="right"),
    ],
)
def test_the_exchange_knows_the_key_of_its_request(headers, operator, host):
    headers = {"Authorization": "Bearer mine"} | headers
    httpx.get(f"http://127.0.0.1:{host.port}/v1/scope/whole", headers=headers)
    (exchange,) = host.exchanges
    assert (exchange.owner, exchange.operator) == (owner_of("Bearer mine"), operator)
    assert exchange.timed


def test_everything_is_closed_even_if_something_fails():
    done = []

    async def closed():
        done.append("closed")

    async def fails():
        raise OSError("gone")

    async def run():
        exchange = Exchange("mine")
        exchange.closing += [closed, fails]
        exchange.untold += [lambda: done.append("undone"), lambda: 1 / 0]
        await exchange.close()

    asyncio.run(run())
    assert done == ["closed", "undone"]
