"""The routes with an engine that only remembers: keys, bodies, errors, OpenAPI."""

from __future__ import annotations

import asyncio
import json
import re
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel
from safetensors.numpy import save

from vllm_scope.batch.sums import Sums
from vllm_scope.control.activity import Activity, Ring, State
from vllm_scope.control.tally import Tally
from vllm_scope.errors import SpecError
from vllm_scope.server import pages, routes, schemas
from vllm_scope.server.routes import attach
from vllm_scope.server.settings import MAX_OPERATOR_BYTES
from vllm_scope.server.store import owner_of

ADMIN = {"X-Scope-Admin-Key": "operator"}
MODULE = save({"direction.2": np.ones(4, np.float32)})


class Remembering:
    """An engine's answers, without one."""

    def __init__(self):
        self.held: dict[str, bytes] = {}
        self.text: str | None = None
        self.tallies: dict[str, Tally] = {}
        self.summed = {"one/more": Sums(3, np.arange(4.0), np.eye(4), y=2.5)}

    async def describe(self):
        sites = {"num_layers": 2, "hidden_size": 4, "dtype": "float32", "boundaries": [0, 2, 4]}
        sites |= {"heads": None, "kernels": {1: {"scale": 0.5, "sinks": None}}, "moved": []}
        return {"runner": "V1", "reason": None, "sites": sites, "limits": {}}

    async def load(self):
        return 0, 0

    async def modules(self):
        return {name: {"digest": "d", "streams": [["resid_post", 2]]} for name in self.held}

    async def register(self, name, data):
        self.held[name] = data
        return "d"

    async def unregister(self, name):
        return self.held.pop(name, None) is not None

    async def set_edits(self, text):
        if text is not None and "bad" in text:
            raise SpecError("edits[0] is bad; make it good.")
        self.text = text
        return "digest" if text else None

    async def edits(self):
        return self.text

    async def activity(self, settings):
        found = {
            name: tally.found("resid_post", "flag", [2], None, {})
            for name, tally in self.tallies.items()
        }
        state = State(3, 2, 1 << 20, settings.rows_of(1), rings=[Ring(1000, 250, 7.5)],
                      sinks={"filesystem": {"rows": 12, "drops": 5, "errors": 1}})  # fmt: skip
        return Activity(time.time(), found, state)

    async def moments(self, name):
        return [("resid_post", 1, "a")] if name in self.summed else []

    async def moments_at(self, name, site, layer, label):
        if (site, layer, label) != ("resid_post", 1, "a"):
            raise SpecError("there are no such sums.")
        return self.summed[name].to_bytes()

    async def drop_moments(self, name):
        return self.summed.pop(name, None) is not None


def app_with(tmp_path, monkeypatch, admin_key="operator", engine=None):
    monkeypatch.setenv("VLLM_SCOPE_RESULTS_DIR", str(tmp_path))
    if admin_key is None:
        monkeypatch.delenv("VLLM_SCOPE_ADMIN_KEY", raising=False)
    else:
        monkeypatch.setenv("VLLM_SCOPE_ADMIN_KEY", admin_key)
    app = FastAPI()
    attach(app, lambda: engine)
    return app


CHANGES = [
    ("PUT", "/v1/scope/modules/a", MODULE),
    ("DELETE", "/v1/scope/modules/a", None),
    ("PUT", "/v1/scope/edits", b'{"edits": []}'),
    ("DELETE", "/v1/scope/edits", None),
    ("GET", "/v1/scope/moments/one%2Fmore", None),
    ("GET", "/v1/scope/sums/one%2Fmore?site=resid_post&layer=1&label=a", None),
    ("DELETE", "/v1/scope/moments/one%2Fmore", None),
    ("GET", "/v1/scope/monitors/activity", None),
    ("GET", "/v1/scope/monitors/view", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 401, id="no-key"),
        pytest.param({"X-Scope-Admin-Key": ""}, 403, id="empty-key"),
        pytest.param({"X-Scope-Admin-Key": "operatoR"}, 403, id="wrong-key"),
        pytest.param({"X-Scope-Admin-Key": "operator-and-more"}, 403, id="longer-key"),
        pytest.param({"X-Scope-Admin-Key": b"\xff\xfe"}, 403, id="bytes-as-key"),
        pytest.param({"Authorization": "Bearer operator"}, 401, id="in-another-header"),
    ],
)
def test_a_change_without_the_operators_key_is_refused(method, path, body, headers, status, http,
                                                       engine):  # fmt: skip
    engine.held["a"] = b"kept"
    response = http.request(method, path, content=body, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert engine.held == {"a": b"kept"}


def test_the_operators_key_is_compared_in_constant_time(http, monkeypatch):
    """By digests of one length, whatever came."""
    seen, compare = [], routes.secrets.compare_digest

    def watched(a, b):
        seen.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(routes.secrets, "compare_digest", watched)
    for key, status in (("operator", 204), ("o", 403), ("operatoR", 403), ("x" * 5000, 403)):
        headers = {"X-Scope-Admin-Key": key}
        assert http.delete("/v1/scope/edits", headers=headers).status_code == status
    assert set(seen) == {(32, 32)}


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"X-Scope-Admin-Key": "x"}, 403)])
def test_a_body_is_not_read_before_the_operators_key(method, path, body, headers, status, app):
    """Only the operator may make this process parse 65 MiB."""

    async def never():
        raise AssertionError("the body was read")

    sent = []

    async def send(message):
        sent.append(message)

    asked = {
        "type": "http", "method": method, "path": path, "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        + [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1),
    }  # fmt: skip
    asyncio.run(app(asked, never, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_without_an_operators_key_there_are_no_routes_that_change(
    method, path, body, tmp_path, monkeypatch
):
    app = app_with(tmp_path, monkeypatch, None, Remembering())
    response = TestClient(app).request(method, path, content=body, headers=ADMIN)
    assert response.status_code in (404, 405)
    paths = TestClient(app).get("/openapi.json").json()["paths"]
    others = {path for path, found in paths.items() if found.keys() != {"get"}}
    assert others == {"/v1/scope/sweeps"}  # it changes nothing
    assert TestClient(app).get("/scope/monitors").status_code == 404
    app.state.scope.store.close()


def test_modules_are_put_listed_and_deleted(http, engine):
    name = "/v1/scope/modules/a%2Fb%20%C3%BC%3F%0A"
    assert http.put(name, content=MODULE, headers=ADMIN).json()["streams"] == [["resid_post", 2]]
    assert engine.held == {"a/b ü?\n": MODULE}
    assert [m["name"] for m in http.get("/v1/scope/modules").json()["modules"]] == ["a/b ü?\n"]
    assert http.delete(name, headers=ADMIN).status_code == 204
    assert http.delete(name, headers=ADMIN).status_code == 404


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(b"", "not safetensors", id="nothing"),
        pytest.param(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.", "not safetensors", id="a-pickle"),
        pytest.param(b"\xff" * 8 + b"{}", "not safetensors", id="a-header-of-2-to-64"),
        pytest.param(MODULE[:-1], "not safetensors", id="cut-short"),
        pytest.param(b"PK\x03\x04" + b"\0" * 100, "not safetensors", id="a-zip"),
        pytest.param(save({"direction.2": np.ones((2, 4), np.float32)}), "shape", id="a-matrix"),
        pytest.param(save({"../../x.2": np.ones(4, np.float32)}), "no name of a vector", id="path"),
        pytest.param(save({"direction.2": np.full(4, np.nan, np.float32)}), "has nan", id="nan"),
        pytest.param(save({"direction.2": np.ones(4, np.int64)}), "dtype", id="integers"),
    ],
)
def test_a_wrong_module_never_reaches_the_engine(content, sentence, http, engine):
    response = http.put("/v1/scope/modules/a", content=content, headers=ADMIN)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]
    assert engine.held == {}


def test_edits_are_set_shown_and_cleared(http):
    assert http.get("/v1/scope/edits").json() == {"edits": [], "digest": None}
    body = {"edits": [{"kind": "add"}]}
    assert http.put("/v1/scope/edits", json=body, headers=ADMIN).json()["digest"] == "digest"
    assert http.get("/v1/scope/edits").json()["edits"] == body["edits"]
    assert http.delete("/v1/scope/edits", headers=ADMIN).status_code == 204
    assert http.get("/v1/scope/edits").json()["edits"] == []


def test_a_refusal_of_the_engine_is_400_with_its_sentence(http):
    response = http.put("/v1/scope/edits", json={"edits": [{"kind": "bad"}]}, headers=ADMIN)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "edits[0] is bad; make it good."


@pytest.mark.parametrize("text", ["half \ud800 of a pair", "x" * 1_000_000])
def test_a_refusal_is_answered_whatever_its_text_is(text, http, engine, monkeypatch):
    async def refuse(edits):
        raise SpecError(text)

    monkeypatch.setattr(engine, "set_edits", refuse)
    response = http.put("/v1/scope/edits", json={"edits": []}, headers=ADMIN)
    assert response.status_code == 400
    assert response.json()["error"]["message"][:5] == text[:5]
    assert len(response.content) < 3000


def test_a_body_that_announces_too_much_is_refused_before_it_is_read(app):
    async def never():
        raise AssertionError("the body was read")

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "PUT", "path": "/v1/scope/modules/a", "query_string": b"",
        "headers": [(b"content-length", str(MAX_OPERATOR_BYTES + 1).encode())],
        "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1),
        "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, never, send))
    assert sent[0]["status"] == 413


def test_a_body_that_goes_on_past_the_limit_is_cut_off(http, engine):
    def pieces():
        for _ in range(MAX_OPERATOR_BYTES // (1 << 20) + 2):
            yield b"\0" * (1 << 20)

    response = http.put("/v1/scope/modules/a", content=pieces(), headers=ADMIN)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "PayloadTooLarge"
    assert engine.held == {}


@pytest.mark.parametrize("content", [b"\xff", b"{", b'{"edits": [\xc3]}'])
def test_a_body_that_is_no_json_is_refused_in_the_shape_of_other_errors(content, http):
    headers = ADMIN | {"Content-Type": "application/json"}
    response = http.put("/v1/scope/edits", content=content, headers=headers)
    assert response.status_code in (400, 422)
    if response.status_code == 400:
        assert response.json()["error"]["code"] == 400


def test_a_result_is_streamed_with_its_length_and_deleted_if_asked(app, http):
    tensors = {"resid_post.1": torch.randn(600, 1024)}
    mine = {"Authorization": "Bearer mine"}
    kept = app.state.scope.store.put(tensors, {}, owner_of("Bearer mine"))
    url = f"/v1/scope/results/{kept.id}"
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert http.get(url + "?delete=true", headers=headers).status_code == 404
    for _ in range(2):
        response = http.get(url, headers=mine)
        assert response.headers["content-length"] == str(kept.num_bytes)
        assert len(response.content) == kept.num_bytes
    assert http.get(url + "?delete=true", headers=mine).status_code == 200
    assert http.get(url, headers=mine).status_code == 404


def test_the_models_sites_are_shown(http):
    body = http.get("/v1/scope").json()
    assert {site["site"]: site["layers"] for site in body["sites"]} == {
        "embed": [0], "resid_pre": [0, 1], "resid_post": [0, 1],
    }  # fmt: skip
    assert body["attention"] == {"1": {"scale": 0.5, "sinks": None}}
    assert body["operator"] is True


def test_a_server_without_an_engine_refuses_with_a_sentence(tmp_path, monkeypatch):
    app = app_with(tmp_path, monkeypatch)
    assert TestClient(app).get("/v1/scope").status_code == 404
    app.state.scope.store.close()


def test_every_route_has_a_summary_a_description_and_its_errors(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert len(paths) == 12
    for path, methods in paths.items():
        for method, found in methods.items():
            assert found["summary"], path
            assert found["description"], path
            if method in ("put", "delete"):
                assert {"400", "401", "403", "413"} <= set(found["responses"]), path
            if path.endswith("{name}") and method == "put":
                assert "application/octet-stream" in found["requestBody"]["content"]


def test_sums_come_as_a_file_and_are_dropped(http, engine):
    (at,) = http.get("/v1/scope/moments/one/more", headers=ADMIN).json()["sums"]
    assert at == {"site": "resid_post", "layer": 1, "label": "a"}
    found = http.get("/v1/scope/sums/one/more", params=at, headers=ADMIN)
    again, kept = Sums.from_bytes(found.content), engine.summed["one/more"]
    assert (again.count, again.y, again.missing, again.xy) == (3, 2.5, 0, None)
    assert (again.x == kept.x).all()
    assert (again.xx == kept.xx).all()
    other = http.get("/v1/scope/sums/one/more", params=at | {"layer": 7}, headers=ADMIN)
    assert (other.status_code, other.json()["error"]["message"]) == (400, "there are no such sums.")
    assert http.delete("/v1/scope/moments/one/more", headers=ADMIN).status_code == 204
    gone = http.delete("/v1/scope/moments/one/more", headers=ADMIN)
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "there are no sums called 'one/more'."


def test_the_activity_of_monitors_is_told_with_what_the_plugin_holds(http, engine, app):
    tally = engine.tallies["risky"] = Tally(0.5)
    tally.add(0.75, "cmpl-1", 0, (3, 0.625))
    tally.add(0.25)
    kept = app.state.scope.store.put({"resid_post.1": torch.ones(2, 4)}, {}, "")
    told = http.get("/v1/scope/monitors/activity", headers=ADMIN).json()
    found = told["monitors"]["risky"]
    assert (found["requests"], found["verdicts"], found["threshold"]) == (2, 1, 0.5)
    assert (found["recent"][0]["request_id"], found["recent"][0]["position"]) == ("cmpl-1", 3)
    state = told["state"]
    assert (state["results"], state["rings"]) == (
        1, [{"num_bytes": 1000, "used_bytes": 250, "wait_ms": 7.5}],
    )  # fmt: skip
    assert state["results_bytes"] >= kept.num_bytes
    parts = http.get("/v1/scope/monitors/view", headers=ADMIN).json()["parts"]
    assert [part["title"] for part in parts if part["kind"] == "section"] == ["risky"]


def test_the_page_about_http_has_every_field_of_the_server():
    text = (Path(__file__).parents[3] / "docs/http.md").read_text(encoding="utf-8")
    table = text.split("| field of `GET /v1/scope` | |\n")[1].split("\n\n")[0]
    named = [re.findall(r"`(\w+)", row.split("|")[1]) for row in table.splitlines()]
    assert sorted(schemas.ServerInfo.model_fields) == sorted(chain(*named))


def test_the_page_is_built_beside_the_event_loop(http, engine, monkeypatch):
    engine.tallies["risky"] = Tally(0.5)
    beside = []

    def spied(call):
        def spy(*args, **options):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                beside.append(call.__name__)
            return call(*args, **options)

        return spy

    monkeypatch.setattr(pages, "monitor_page", spied(pages.monitor_page))
    monkeypatch.setattr(json, "dumps", spied(json.dumps))
    response = http.get("/v1/scope/monitors/view", headers=ADMIN)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["parts"]
    assert {"monitor_page", "dumps"} <= set(beside)


def test_everybody_may_have_the_page_and_it_says_nothing_of_the_server(http, engine):
    engine.tallies["risky-and-secret"] = Tally(0.5)
    response = http.get("/scope/monitors")
    assert response.status_code == 200
    for secret in ("risky-and-secret", 'operator"', "filesystem"):
        assert secret not in response.text
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["cache-control"] == "no-store"
    again = http.get("/scope/monitors", headers=ADMIN).text
    assert again == response.text


class _Asked(BaseModel):
    """As vLLM declares it."""

    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    n: int = 1


@pytest.mark.parametrize("has_handler", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_scope_that_is_no_text_is_answered_with_one_sentence(path, has_handler, app):
    @app.post(path)
    def complete(body: _Asked) -> str:
        return "done"

    async def theirs(request, error):
        return PlainTextResponse("theirs", 400)

    if has_handler:  # vLLM adds its own after ours
        app.add_exception_handler(RequestValidationError, theirs)
    http = TestClient(app, raise_server_exceptions=False)
    for scope in ({"reads": []}, [{}], None):
        response = http.post(path, json={"vllm_xargs": {"scope": scope}})
        assert response.status_code == 400
        said = response.json()["error"]["message"]
        assert said.startswith("vllm_xargs['scope'] is "), said
        assert "it must be a string, the spec as JSON text: json.dumps(spec)" in said
    assert http.post(path, json={"vllm_xargs": {"scope": "{}"}}).json() == "done"
    other = http.post(path, json={"n": "x"})
    assert "vllm_xargs" not in other.text
    assert (other.text == "theirs") == has_handler
