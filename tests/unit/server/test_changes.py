"""Operators' changes with a full disk: only edits can be cleared without the lock."""

from __future__ import annotations

import os

import pytest

from tests.unit.server.test_routes import ADMIN, MODULE
from vllm_scope.server import changes

#: Each with the status that it has when its turn comes.
CHANGES = [
    pytest.param("PUT", "/v1/scope/modules/a", MODULE, 200, id="module"),
    pytest.param("DELETE", "/v1/scope/modules/a", None, 204, id="no-module"),
    pytest.param("PUT", "/v1/scope/edits", b'{"edits": [{"kind": "add"}]}', 200, id="edits"),
]


@pytest.fixture
def full_disk(monkeypatch):
    """Nothing new can be made."""
    opened = os.open

    def full(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and not os.path.exists(path):
            raise OSError(28, "No space left on device", path)
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(changes.os, "open", full)


@pytest.mark.parametrize(("method", "path", "body", "status"), CHANGES)
def test_without_the_lock_nothing_is_changed(
    method, path, body, status, app, http, engine, full_disk
):
    engine.held["a"], engine.text = b"kept", "kept"
    (app.state.scope.store.folder() / "changes").unlink(missing_ok=True)
    headers = ADMIN | {"Content-Type": "application/json"}
    response = http.request(method, path, content=body, headers=headers)
    assert response.status_code == 503
    told = response.json()["error"]["message"]
    assert "No space left on device" in told
    assert "VLLM_SCOPE_RESULTS_DIR" in told
    assert str(app.state.scope.store.folder()) not in told
    assert (engine.held, engine.text) == ({"a": b"kept"}, "kept")
    assert http.delete("/v1/scope/edits", headers=ADMIN).status_code == 204
    assert engine.text is None


@pytest.mark.parametrize(("method", "path", "body", "status"), CHANGES)
def test_a_disk_that_fills_after_the_start_stops_no_change(
    method, path, body, status, http, engine, full_disk
):
    """The file of the lock was made when the server started."""
    engine.held["a"] = b"kept"
    headers = ADMIN | {"Content-Type": "application/json"}
    assert http.request(method, path, content=body, headers=headers).status_code == status
