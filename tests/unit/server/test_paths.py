"""Root paths of a server: its authentication and its router must see the same path."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI

from vllm_scope.engine.http.serving import _attach
from vllm_scope.errors import ConfigError
from vllm_scope.server.answer import current
from vllm_scope.server.limits import Door
from vllm_scope.server.settings import ServerSettings


@pytest.mark.parametrize("root", ["/", "/v", "/v1/", "/api/", "/v1/sco", "/v1/scope"])
def test_a_root_path_that_opens_what_needs_a_key_stops_the_start(root):
    app = FastAPI()
    app.root_path = root
    with pytest.raises(ConfigError, match=f"--root-path is '{root}'.*such as '/api'"):
        _attach(lambda app: pytest.fail("it was attached"), app)


@pytest.mark.parametrize("root", [None, "", "/api", "/v2", "/v1"])
def test_other_root_paths_go_on(root):
    class AttachedError(Exception):
        pass

    def original(app):
        raise AttachedError

    app = FastAPI()
    app.root_path = root
    with pytest.raises(AttachedError):
        _attach(original, app)


@pytest.mark.parametrize(
    ("root", "path", "seen"),
    [
        pytest.param("", "/v1/completions", "/v1/completions", id="none"),
        pytest.param("/api", "/api/v1/completions", "/v1/completions", id="with-it"),
        pytest.param("/api", "/v1/completions", "/v1/completions", id="taken-off-before"),
        pytest.param("/ap", "/api/v1/completions", "/api/v1/completions", id="part-of-a-segment"),
    ],
)
def test_the_door_sees_the_path_that_the_router_sees(root, path, seen):
    found = []

    async def app(scope, receive, send):
        found.append(current.get())

    scope = {"type": "http", "path": path, "root_path": root, "headers": []}
    asyncio.run(Door(app, {}, ServerSettings.from_environment({}))(scope, None, None))
    assert found == [seen]
