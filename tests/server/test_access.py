"""Who may do what, on a real server; and bodies that are too large for it."""

from __future__ import annotations

import re
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from tests.server.conftest import ADMIN_KEY, API_KEY, OTHER_KEY
from vllm_scope import Read, scope

MODULE = save({"direction.2": np.ones(256, np.float32)})
ADMIN = {"X-Scope-Admin-Key": ADMIN_KEY}


def test_reading_needs_the_api_key(server):
    for path in ("", "/modules", "/edits", "/results/" + "a" * 32):
        for key in (None, "wrong"):
            with server.http(key) as http:
                assert http.get(f"/v1/scope{path}").status_code == 401


def test_changing_needs_both_keys(server):
    for key, headers, status in (
        (None, ADMIN, 401),
        ("wrong", ADMIN, 401),
        (ADMIN_KEY, {}, 401),
        (API_KEY, {}, 401),
        (API_KEY, {"X-Scope-Admin-Key": API_KEY}, 403),
    ):
        with server.http(key) as http:
            for method, path in (("PUT", "/modules/a"), ("DELETE", "/modules/a"),
                                 ("PUT", "/edits"), ("DELETE", "/edits")):  # fmt: skip
                response = http.request(method, f"/v1/scope{path}", content=MODULE, headers=headers)
                assert response.status_code == status, (key, headers, method, path)
    with server.http() as http:
        assert http.get("/v1/scope/modules").json() == {"modules": []}


def kept_by(http):
    """The URL of a result that waits to be fetched."""
    xargs = {"scope": '{"reads": [{"site": "embed"}]}', "scope_tensors": "handle"}
    body = {"model": "toyworld", "prompt": "x", "max_tokens": 2, "vllm_xargs": xargs}
    answer = http.post("/v1/completions", json=body).json()
    return answer["choices"][0]["scope"]["result"]["url"]


def test_a_result_is_its_askers_alone(server):
    with server.http() as mine, server.http(OTHER_KEY) as other:
        url = kept_by(mine)
        assert other.get(f"{url}?delete=true").status_code == 404
        assert mine.get(url).status_code == 200
        assert mine.get(f"{url}?delete=true").status_code == 200
        assert mine.get(url).status_code == 404


@pytest.mark.parametrize(
    "name", ["..%2F..%2Fx", "%2Fetc%2Fpasswd", "~", "%00", "a" * 32, "x" * 5000]
)
def test_paths_are_no_results(name, server):
    with server.http() as http:
        assert http.get(f"/v1/scope/results/{name}").status_code == 404


@pytest.mark.parametrize(
    ("path", "size"),
    [
        pytest.param("/v1/completions", 300 << 20, id="a-completion"),
        pytest.param("/v1/chat/completions", 1 << 40, id="a-chat"),
        pytest.param("/v1/scope/modules/a", 66 << 20, id="a-module"),
        pytest.param("/v1/scope/edits", 1 << 62, id="edits"),
    ],
)
def test_a_body_that_announces_too_much_is_refused_unread(path, size, server):
    """Only the head is ever sent, so an answer means that nobody waited for the body."""
    where = urlsplit(server.url)
    method = "POST" if "completions" in path else "PUT"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        f"X-Scope-Admin-Key: {ADMIN_KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_without_end_is_cut_off_and_memory_stays(server):
    def pieces():
        for _ in range(80):
            yield b"\0" * (1 << 20)

    before = server.memory()
    with server.http() as http:
        for _ in range(3):
            response = http.put("/v1/scope/modules/a", content=pieces(), headers=ADMIN)
            assert response.status_code == 413
    time.sleep(0.5)
    # One body may still be in the allocator's hands.
    assert server.memory() - before < 150 << 20


def test_results_are_files_of_their_folder_alone(server):
    with server.http() as http:
        url = kept_by(http)
        found = [path for path in server.results.rglob("*") if path.is_file()]
        assert http.get(f"{url}?delete=true").status_code == 200
    # Beside them lies what operators' changes take turns by, once there was one.
    names = re.compile(r"[A-Za-z0-9_-]{32}\.[0-9a-f]{32}\.safetensors|changes")
    assert all(names.fullmatch(path.name) for path in found)
    (folder,) = {path.parent for path in found}
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stream", [False, True])
def test_more_rows_than_the_server_holds_are_refused_and_what_was_let_in_is_let_go(stream, server):
    body = {
        "model": "toyworld", "prompt": [[5] * 480] * 64, "max_tokens": 8, "stream": stream,
        "vllm_xargs": scope(Read("resid_post"), Read("embed")),
    }  # fmt: skip
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 429, answer.text
        assert "VLLM_SCOPE_ROWS_MIB" in answer.text
        assert {"requests": 0, "pending": 0}.items() <= server.at_rest().items()
        one = http.post("/v1/completions", json=body | {"prompt": [5] * 480, "stream": False})
        found = one.json()["choices"][0]["scope"]
        assert found["status"] == "complete"
        file = http.get(found["result"]["url"], params={"delete": "true"})
        assert len(file.content) == found["result"]["num_bytes"]
