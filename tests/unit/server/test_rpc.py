"""vLLM's development route that calls any method of a worker: ours need the operator's key."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from vllm_scope.server import rpc
from vllm_scope.server.routes import attach

ADMIN = {"X-Scope-Admin-Key": "operator"}
EDITS = {"method": "scope_set_edits", "args": ['{"edits": []}']}


@pytest.fixture(params=["operator", None])
def server(request, tmp_path, monkeypatch):
    """With vLLM's route, and what it was called with; with an operator's key and without."""
    monkeypatch.setenv("VLLM_SCOPE_RESULTS_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_SCOPE_ADMIN_KEY", raising=False)
    if request.param:
        monkeypatch.setenv("VLLM_SCOPE_ADMIN_KEY", request.param)
    app = FastAPI()
    called = []

    @app.post("/collective_rpc")
    async def collective_rpc(raw_request: Request):  # as vLLM 0.32's
        called.append(await raw_request.json())
        return {"results": []}

    @app.get("/server_info")
    async def server_info():
        called.append("info")
        return {"vllm_config": "token=secret"}

    attach(app, lambda: None)
    yield TestClient(app, raise_server_exceptions=False), called, request.param
    app.state.scope.store.close()


BODIES = [
    pytest.param(json.dumps(EDITS).encode(), id="edits"),
    pytest.param(json.dumps(EDITS).encode("utf-16"), id="another-encoding"),
    pytest.param(b'{"method": "sleep", "method": "scope\\u005fset_edits"}', id="said-twice"),
    pytest.param(
        b'{"method": "execute_method", "args": ["scope_set_edits", null]}', id="by-another"
    ),
    pytest.param(b'{"method": "run", "kwargs": {"method": ["scope_register"]}}', id="a-keyword"),
    pytest.param(b'{"method": "scope_counters"}', id="what-only-reads"),
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("headers", [{}, {"X-Scope-Admin-Key": "wrong"}], ids=["no-key", "wrong"])
def test_our_methods_are_refused_without_the_operators_key(headers, body, server):
    http, called, _ = server
    response = http.post("/collective_rpc", content=body, headers=headers)
    assert response.status_code == 403
    assert "X-Scope-Admin-Key" in response.json()["error"]["message"]
    assert called == []


@pytest.mark.parametrize("body", BODIES)
def test_the_operator_may_call_them(body, server):
    http, called, key = server
    response = http.post("/collective_rpc", content=body, headers=ADMIN)
    assert response.status_code == (200 if key else 403)
    assert len(called) == (key is not None)


@pytest.mark.parametrize(
    "body", [b'{"method": "get_model_inspection"}', b"{", b"", b"[" * 100_000, b"[]", b"\xff\xfe"]
)
def test_other_methods_pass_to_vllms_route(body, server):
    """Whatever it makes of it, it gets the body as it came."""
    http, called, _ = server
    response = http.post("/collective_rpc", content=body)
    assert response.status_code == (200 if called else 500)
    if body.startswith(b'{"'):
        assert called == [json.loads(body)]


def test_pieces_of_a_body_come_as_one(server):
    http, called, _ = server
    http.post("/collective_rpc", content=iter([b'{"method"', b': "sl', b'eep"}']))
    assert called == [{"method": "sleep"}]
    refused = http.post("/collective_rpc", content=iter([b'{"method"', b': "sco', b'pe_x"}']))
    assert refused.status_code == 403


def test_a_body_of_any_size_is_not_kept(server):
    http, called, _ = server
    pieces = (b" " * (1 << 20) for _ in range(80))
    assert http.post("/collective_rpc", content=pieces).status_code == 413
    assert called == []


@pytest.mark.parametrize(
    "path", ["/server_info", "/server_info/", "/server_info?config_format=json"]
)
@pytest.mark.parametrize("headers", [{}, {"X-Scope-Admin-Key": "wrong"}], ids=["no-key", "wrong"])
def test_the_options_of_sinks_are_not_shown_without_the_operators_key(path, headers, server):
    http, called, _ = server
    response = http.get(path, headers=headers)
    assert response.status_code == 403
    assert "X-Scope-Admin-Key" in response.json()["error"]["message"]
    assert called == []


def test_the_operator_sees_the_options_of_sinks(server):
    http, called, key = server
    assert http.get("/server_info", headers=ADMIN).status_code == (200 if key else 403)
    assert called == (["info"] if key else [])


@pytest.mark.parametrize(
    ("start", "status"),
    [
        pytest.param(b'{"method": "scope_set_edits", "args": [', 403, id="ours"),
        pytest.param(b'{"method": "scope\\u005fset_edits", "args": [', 403, id="escaped"),
        pytest.param(b'{"method": "sleep", "args": [', 200, id="another"),
    ],
)
def test_a_long_body_is_not_parsed_to_find_our_methods(start, status, server, monkeypatch):
    http, _, _ = server
    body = start + b"[1]," * 100_000 + b"1]}"
    parsed = []
    with monkeypatch.context() as patch:
        patch.setattr(rpc, "json", SimpleNamespace(loads=parsed.append))
        assert http.post("/collective_rpc", content=body).status_code == status
    assert parsed == []
