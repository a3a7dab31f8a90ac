"""An app with vllm-scope's routes, and an engine that only remembers."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.test_routes import Remembering, app_with


@pytest.fixture
def engine():
    return Remembering()


@pytest.fixture
def app(tmp_path, monkeypatch, engine):
    found = app_with(tmp_path, monkeypatch, engine=engine)
    yield found
    found.state.scope.store.close()


@pytest.fixture
def http(app):
    return TestClient(app, raise_server_exceptions=False)
