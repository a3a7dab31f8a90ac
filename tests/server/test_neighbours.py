"""Beside each request that does harm where nobody sees to it, a plain one of another key is what
it is alone: its tokens, its logprobs, its status, and the time it takes.

A server without the plugin is alive too. It gets the same bytes, and its worst answer to
`/health` meanwhile is the measure, as is what its own plain request takes then: to read a large
body takes time in any server.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.hostile import Hostile, hostile
from tests.conftest import long_except
from tests.server.conftest import API_KEY, OTHER_KEY, ROOT, Server, serving
from tests.server.trouble import FAULT, installed
from vllm_scope import Read, scope

pytestmark = pytest.mark.alone

LONGEST = 17_000
OPTIONS = [
    "--max-model-len", str(LONGEST), "--hf-overrides", '{"max_position_embeddings": 32768}',
]  # fmt: skip
PLAIN = {
    "model": "toyworld", "prompt": "My father told me about the book Goldette.",
    "max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 1,
}  # fmt: skip
#: Numbers of prompts; no two are alike.
PROMPTS = itertools.count()
#: Of the API's process while a body is read, less what two runs differ by.
HEALTH_S = 0.05


def unread_streams(url: str) -> None:
    """Six connections whose client asks for all rows, and reads none of them. Each has a prompt of
    its own: tokens that are read are computed anew, and the other server would take them from its
    prefix cache."""
    where = urlsplit(url)
    body = {"model": "toyworld", "max_tokens": 100, "stream": True,
            "ignore_eos": True, "vllm_xargs": scope(Read("resid_post"))}  # fmt: skip
    body["vllm_xargs"]["scope_stream"] = "rows"
    with ExitStack() as stack:
        for _ in range(6):
            body["prompt"] = [next(PROMPTS) % 1000 + 5] + [5] * 1999
            content = json.dumps(body).encode()
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            connection.connect((where.hostname, where.port))
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
        time.sleep(2)


def unread_files(url: str) -> None:
    """Results that nobody fetches, until there is no room."""
    body = {"prompt": [5] * 4000, "vllm_xargs": scope(Read("resid_post"))}
    body["vllm_xargs"]["scope_tensors"] = "handle"
    for _ in range(4):
        assert send(posted(body), url) in (200, 429)


def posted(body: dict[str, Any], *statuses: int) -> Hostile:
    content = json.dumps({"model": "toyworld", "prompt": "x", "max_tokens": 2} | body)
    return Hostile(content.encode(), frozenset(statuses), alike=False)


def send(one: Hostile, url: str) -> int:
    headers = {"Authorization": f"Bearer {API_KEY}"} | one.all_headers
    with httpx.Client(base_url=url, timeout=300, headers=headers) as client:
        return client.request(one.method, one.path, content=one.content).status_code


def refused(one: Hostile, url: str) -> None:
    assert (status := send(one, url)) in one.statuses, status


def distinct_specs(url: str) -> None:
    """More specs than are remembered, each of its own."""
    read = scope(Read("resid_post", layers=[1], tokens=[0]))["scope"]
    for i in range(60):
        body = {"vllm_xargs": {"scope": read + " " * (800_000 + i)}, "max_tokens": 1}
        refused(posted(body, 200), url)


def hung_up(url: str) -> None:
    """Clients that leave in the middle of what they have asked for."""
    body = {"model": "toyworld", "prompt": [5] * 2000, "max_tokens": 100, "stream": True,
            "ignore_eos": True, "vllm_xargs": scope(Read("resid_post"))}  # fmt: skip
    headers = {"Authorization": f"Bearer {API_KEY}"}
    for seconds in (0.0, 0.05, 0.2, 0.5):
        for stream in (True, False):
            with suppress(httpx.ReadTimeout), httpx.Client(timeout=seconds + 0.01) as client:
                client.post(f"{url}/v1/completions", json=body | {"stream": stream},
                            headers=headers)  # fmt: skip


def loud(url: str) -> None:
    """A sink raises 50 MB of text, of which callers hear nothing."""
    told = failed({"vllm_xargs": scope(Read("resid_post", to="loud"))}, {}, url)
    assert told["sinks"]["loud"]["status"] == "error"


def unplanned(url: str) -> None:
    """A step cannot be planned, for a fault of ours."""
    body = {"vllm_xargs": scope(Read("resid_post")), "max_tokens": 20}
    told = failed(body, {"X-Request-Id": FAULT}, url)
    assert "failed in a step (RuntimeError)" in told["error"]


def failed(body: dict[str, Any], headers: dict[str, str], url: str) -> dict[str, Any]:
    """The scope of an answer whose scope failed."""
    headers = headers | {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": "toyworld", "prompt": "x", "max_tokens": 2} | body
    response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
    assert response.status_code == 200
    assert len(response.text) < 10_000
    told: dict[str, Any] = response.json()["choices"][0]["scope"]
    assert told["status"] == "failed"
    return told


SHARED = {"site": "embed", "to": "filesystem", "name": "shared", "tag": "shared"}
REQUESTS = hostile("toyworld", 256, LONGEST) | {
    "a file of the same name": lambda: posted(
        {"vllm_xargs": {"scope": json.dumps({"reads": [SHARED]})}}, 200
    ),
}
STREAMS = "streams that are never read"
#: What is sent otherwise than as one request.
OTHERS = {
    STREAMS: unread_streams, "files that are never fetched": unread_files,
    "more specs than are remembered": distinct_specs, "clients that leave": hung_up,
    "a sink that raises a long text": loud, "a step that cannot be planned": unplanned,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    logprobs: list[float]
    seconds: float


def plain(url: str) -> Answer:
    """A plain request of another key."""
    started = time.perf_counter()
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    response = httpx.post(f"{url}/v1/completions", json=PLAIN, headers=headers, timeout=300)
    seconds = time.perf_counter() - started
    choice = response.json()["choices"][0] if response.status_code == 200 else {}
    logprobs = choice.get("logprobs", {}).get("token_logprobs", [])
    return Answer(response.status_code, choice.get("text", response.text), logprobs, seconds)


@contextmanager
def health(url: str) -> Iterator[list[float]]:
    """Seconds that `/health` took, asked all the time."""
    where, seconds, over = urlsplit(url), [0.0], threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
        while not over.is_set():
            started = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""
            seconds.append(time.perf_counter() - started)
            over.wait(0.005)
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def worst_health(url: str, one: Hostile) -> float:
    """While it is answered; the least of three times, as a machine has its own hiccups."""
    found = []
    for _ in range(3):
        with health(url) as seconds:
            send(one, url)
        found.append(max(seconds))
    return min(found)


def beside(url: str, do: Callable[[str], Any]) -> float:
    """Seconds of the plain request beside what another client does; the least of three times."""
    took = []
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            sending = pool.submit(do, url)
            time.sleep(0.02)
            took.append(plain(url).seconds)
            sending.result()
    return min(took)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("neighbours")
    sinks = ["--additional-config.scope.sinks.filesystem.root", str(folder / "captures"),
             "--additional-config.scope.sinks.filesystem.layout", "per_request"]  # fmt: skip
    loud = ["--additional-config.scope.sinks.loud.patience_s", "20"]
    path = os.pathsep.join([str(ROOT), installed(folder / "plugins")])
    with serving(folder, *OPTIONS, *sinks, *loud, PYTHONPATH=path) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without the plugin."""
    with serving(tmp_path_factory.mktemp("bare"), *OPTIONS, VLLM_SCOPE="0") as server:
        yield server


@pytest.fixture(scope="module")
def alone(ours: Server) -> tuple[Answer, float]:
    """The plain request alone, and its usual seconds."""
    plain(ours.url)
    answers = [plain(ours.url) for _ in range(7)]
    assert {answer.status for answer in answers} == {200}
    return answers[-1], statistics.median(answer.seconds for answer in answers)


#: The first of each kind; the others are as these.
FIRST, FIRST_OTHERS = list(REQUESTS)[:4], list(OTHERS)[:2]


@pytest.mark.parametrize("name", long_except([*REQUESTS, *OTHERS], *FIRST, *FIRST_OTHERS))
def test_a_plain_request_is_what_it_is_alone(name, ours, bare, alone):
    expected, usual = alone
    do = OTHERS[name] if name in OTHERS else partial(refused, REQUESTS[name]())
    took = []
    with ThreadPoolExecutor() as pool:
        # Beside it and after it: what it left behind would be seen then.
        for _ in range(3):
            doing = pool.submit(do, ours.url)
            time.sleep(0.02)
            answers = [plain(ours.url)]
            doing.result()
            took.append(answers[0].seconds)
            answers.append(plain(ours.url))
            for answer in answers:
                assert answer.status == 200, answer.text
                assert answer.text == expected.text
                assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    if min(took) > 2 * usual:
        # What the same does to a neighbour where the plugin is not.
        alike = name == STREAMS or (name in REQUESTS and REQUESTS[name]().alike)
        assert alike, (name, min(took), usual)
        same = unread_streams if name == STREAMS else partial(send, REQUESTS[name]())
        assert min(took) <= 2 * beside(bare.url, same)
    assert ours.at_rest()["requests"] == 0


@pytest.mark.parametrize("name", long_except(REQUESTS, *FIRST))
def test_the_server_answers_as_one_that_only_reads_the_body(name, ours, bare):
    one = REQUESTS[name]()
    if not one.alike:
        pytest.skip("a server without the plugin does something else with it")
    with_, without = worst_health(ours.url, one), worst_health(bare.url, one)
    assert with_ <= 2 * without + HEALTH_S, (with_, without)
