"""One key takes all it can get, and another finds room; beside it, nothing is lost."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.server.conftest import API_KEY, OTHER_KEY, WRITE_TIMEOUT_S
from vllm_scope import Read, scope

#: All layers of 480 tokens: 3.3 MiB, and more where it is written as text.
LARGE = {"model": "toyworld", "prompt": [5] * 480, "max_tokens": 8, "temperature": 0}
SMALL = {"model": "toyworld", "prompt": [5] * 8, "max_tokens": 2, "temperature": 0}
ALL = scope(Read("resid_post"), Read("embed"))
ONE = scope(Read("resid_post", layers=[1], tokens="last_prompt"))


def unread_stream(server, body):
    """A connection whose client asks, and reads nothing."""
    where = urlsplit(server.url)
    content = json.dumps(body | {"stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.connect((where.hostname, where.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def status_of(http, body):
    response = http.post("/v1/completions", json=body)
    if response.status_code == 200:
        found = response.json()["choices"][0]["scope"]
        assert found["status"] == "complete", found
        if found["result"] is not None:
            http.get(found["result"]["url"], params={"delete": "true"})
    return response.status_code


def test_streams_that_are_never_read_leave_other_keys_their_room_and_end(server):
    body = LARGE | {"vllm_xargs": ALL | {"scope_stream": "rows"}}
    with ExitStack() as stack, server.http() as mine, server.http(OTHER_KEY) as other:
        for _ in range(18):
            stack.enter_context(unread_stream(server, body))
        limit = time.monotonic() + 60
        while status_of(mine, LARGE | {"vllm_xargs": ALL}) != 429:
            assert time.monotonic() < limit, "the streams hold too little"
        assert status_of(other, LARGE | {"vllm_xargs": ALL}) == 200
        # Its streams have ended, though its connections are still there.
        limit = time.monotonic() + 4 * WRITE_TIMEOUT_S + 30
        while status_of(mine, LARGE | {"vllm_xargs": ALL}) != 200:
            assert time.monotonic() < limit
            time.sleep(0.5)
        assert {"requests": 0, "pending": 0}.items() <= server.at_rest().items()


def test_results_that_are_never_fetched_leave_other_keys_their_room(server):
    body = LARGE | {"vllm_xargs": ALL | {"scope_tensors": "handle"}}
    kept = []
    with server.http() as mine, server.http(OTHER_KEY) as other:
        try:
            while (response := mine.post("/v1/completions", json=body)).status_code == 200:
                kept.append(response.json()["choices"][0]["scope"]["result"]["url"])
                assert len(kept) < 40
            assert response.status_code == 429, response.text
            assert "VLLM" not in response.text
            assert "of this key wait to be fetched" in response.json()["error"]["message"]
            held = server.at_rest()["results_bytes"]
            assert 90 << 20 < held < 96 << 20, "three quarters of 128 MiB"
            # What needs no file is answered, of this key too.
            assert status_of(mine, SMALL | {"vllm_xargs": ONE}) == 200
            assert status_of(mine, SMALL | {"vllm_xargs": ONE, "n": 2, "temperature": 1.0}) == 200
            assert status_of(other, body) == 200
        finally:
            for url in kept:
                assert mine.get(url, params={"delete": "true"}).status_code == 200
        assert status_of(mine, body) == 200
