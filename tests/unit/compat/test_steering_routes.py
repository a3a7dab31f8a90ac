"""/v1/steering with an engine that only remembers: bodies, answers, and the one list of edits."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.unit.server.test_routes import ADMIN, Remembering, app_with
from vllm_scope import Ablate, Add, Clamp, Gate, scope
from vllm_scope.compat.steering_http.http import HTTP
from vllm_scope.request.actions import MAX_FLOAT32
from vllm_scope.server import changes, faces
from vllm_scope.server import edits as edits_module
from vllm_scope.server.changes import Changes
from vllm_scope.server.settings import MAX_OPERATOR_BYTES
from vllm_scope.transport.folders import RUN
from vllm_scope.vectors import from_bytes

V, W, D = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0], [0.0, 1.0, 0.0, 0.0]


@pytest.fixture(autouse=True)
def face():
    faces.register(HTTP)
    yield
    faces.unregister(HTTP.name)


@pytest.fixture
def engine():
    return Remembering()


@pytest.fixture
def http(tmp_path, monkeypatch, engine):
    app = app_with(tmp_path, monkeypatch, engine=engine)
    with TestClient(app, raise_server_exceptions=False, headers=ADMIN) as client:
        yield client
    app.state.scope.store.close()


def put(http, path, **body):
    response = http.post(f"/v1/steering/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def edits(engine):
    return json.loads(engine.text)["edits"] if engine.text else []


def as_json(*actions):
    return json.loads(scope(*actions)["scope"])["edits"]


def hook(vector, layer=1):
    return {"post_block": {str(layer): vector}}


def test_tiers_become_server_wide_edits_that_both_routes_show(http, engine):
    answer = put(
        http, "set", vectors=hook({"vector": V, "scale": 2.0}), decode_vectors=hook(W, 0),
        prefill_clamps=hook([{"vector": D, "max": 4.0}]),
    )  # fmt: skip
    assert answer == {"status": "ok", "hook_points": ["post_block"], "layers_updated": [0, 1]}
    assert edits(engine) == as_json(
        Add([[2 * x for x in V]], layers=[1]), Add([W], layers=[0], tokens="generated"),
        Clamp(D, lo=-MAX_FLOAT32, hi=4.0, layers=[1], tokens="prompt"),
    )  # fmt: skip
    assert http.get("/v1/scope/edits").json()["edits"] == json.loads(engine.text)["edits"]
    assert http.get("/v1/steering").json() == {
        "active_layers": {
            "0": {"post_block": {"decode_norm": 5.0}},
            "1": {"post_block": {"norm": pytest.approx(24**0.5), "prefill_clamps": 1}},
        },
        "other_edits": 0,
    }
    assert put(http, "clear") == {"status": "ok"}
    assert engine.text is None
    assert http.get("/v1/steering").json() == {"active_layers": {}, "other_edits": 0}


def test_a_set_changes_the_places_that_it_names_and_no_others(http, engine):
    below = hook([{"vector": D, "max": 1}])
    put(http, "set", vectors={"post_block": {"0": V, "1": V}}, clamps=below)
    put(http, "set", vectors=hook(W), prefill_vectors=hook(V))
    added = [Add([V], layer=0), Add([W], layer=1), Add([V], layer=1, tokens="prompt")]
    assert edits(engine) == as_json(*added, Clamp(D, lo=-MAX_FLOAT32, hi=1, layer=1))
    put(http, "set", clamps=hook([{"vector": D, "value": 2}, {"vector": V, "min": 0}]))
    clamps = [Clamp(D, lo=2, hi=2, layer=1), Clamp(V, lo=0, hi=MAX_FLOAT32, layer=1)]
    assert edits(engine) == as_json(*added, *clamps)
    put(http, "set", vectors=hook([0, 0, 0, 0]))
    assert edits(engine) == as_json(added[0], added[2], *clamps)
    put(http, "set", clamps=hook([]))
    assert edits(engine) == as_json(added[0], added[2])
    put(http, "set", decode_vectors=hook(W), replace=True)
    assert edits(engine) == as_json(Add([W], layer=1, tokens="generated"))


def test_edits_of_no_tier_stay_and_are_counted(http, engine):
    others = [
        Add("formal", tokens="generated"), Ablate(D, layer=1), Add(V, layer="all"),
        Add(V, layer=1, norm_match=True), Add(V, layer=0, max_relative_norm=0.5),
        Add(V, layer=0, gate=Gate(D, 0)), Add(V, layer=0, dose="d"),
    ]  # fmt: skip
    clamps = Clamp(D, lo=0, hi=1, layer=0), Clamp(D, lo=0, layer=0, gate=Gate(D, 0))
    body = {"edits": as_json(*others, Add(V, layers=[0, 1], scale=0.5), *clamps)}
    assert http.put("/v1/scope/edits", json=body).status_code == 200
    put(http, "set", vectors=hook(W, 0))
    kept = Add([V], layers=[1], scale=0.5)
    assert edits(engine) == as_json(*others, kept, Add([W], layers=[0]), *clamps)
    assert http.get("/v1/steering").json() == {
        "active_layers": {
            "0": {"post_block": {"norm": 5.0, "clamps": 1}},
            "1": {"post_block": {"norm": pytest.approx(0.5 * 6**0.5)}},
        },
        "other_edits": 8,
    }


def test_layers_are_those_with_taps(http):
    assert http.get("/v1/steering/layers?target=main").json() == {
        "layers": {
            "0": {"hook_points": ["post_block", "pre_attn"]},
            "1": {"hook_points": ["post_block", "pre_attn"]},
        }
    }


def test_modules_of_both_routes_are_the_engines(http, engine):
    rows = np.array([V, W], np.float32)
    packed = {"dtype": "float32", "shape": [2, 4], "layer_indices": [0, 1],
              "data": base64.b64encode(rows.tobytes()).decode()}  # fmt: skip
    assert put(
        http, "modules/register", name="mood", vectors=hook(V), decode_vectors={"pre_attn": packed}
    ) == {"status": "ok", "name": "mood", "modules": ["mood"]}
    assert {place: v.tolist() for place, v in from_bytes(engine.held["mood"]).placed()} == {
        ("resid_post", 1): V, ("resid_pre", 0, "generated"): V, ("resid_pre", 1, "generated"): W
    }  # fmt: skip
    assert http.get("/v1/steering/modules").json() == {"modules": ["mood"], "count": 1}
    answer = put(http, "modules/unregister", name="mood")
    assert answer == {"status": "ok", "name": "mood", "modules": []}
    again = http.post("/v1/steering/modules/unregister", json={"name": "mood"})
    assert again.status_code == 404
    assert "no steering module is called 'mood'; there are none" in again.text


BAD = {
    "nothing": ("set", {}, "the body sets nothing; give vectors or clamps"),
    "unknown-hook": ("set", {"vectors": {"mlp": {}}}, "vectors has 'mlp'; hooks are pre_attn"),
    "untapped-hook": ("set", {"vectors": {"post_attn": {"0": V}}}, "not tap 'resid_mid' there"),
    "no-such-layer": ("set", {"vectors": hook(V, 9)}, "vectors['post_block'] has layer 9"),
    "wrong-size": (
        "set", {"decode_vectors": hook([1.0])}, "decode_vectors['post_block']['1'] has 1 numbers;",
    ),
    "wrong-size-packed": (
        "set", {"vectors": {"post_block": {"dtype": "float32", "shape": [1, 1], "data": "AAAAAA==",
                                           "layer_indices": [1]}}}, "this model's rows have 4",
    ),
    "module-of-another-model": (
        "modules/register", {"name": "a", "vectors": hook(V, 9)}, "this model has layers 0 to 1",
    ),
    "draft": ("set", {"vectors": hook(V), "target": "draft"}, "target is 'draft'"),
    "clear-draft": ("clear", {"target": "draft"}, "target is 'draft'"),
    "features": (
        "modules/register", {"name": "a", "kind": "sae_delta"}, "kind is 'sae_delta'; it must be",
    ),
    "empty-module": ("modules/register", {"name": "a"}, "no vector, or only zeros"),
    "clamps-in-a-module": (
        "modules/register", {"name": "a", "clamps": hook([{"vector": V, "max": 1}])},
        "the body has clamps; a steering module can have only vectors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_body_changes_nothing(case, http, engine):
    put(http, "set", vectors=hook(V))
    before = engine.text
    path, body, sentence = BAD[case]
    response = http.post(f"/v1/steering/{path}", json=body)
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]
    assert (engine.text, engine.held) == (before, {})


def test_an_unknown_field_is_refused(http, engine):
    response = http.post("/v1/steering/set", json={"vectors": hook(V), "vector": {}})
    assert response.status_code == 422  # vLLM's own handler makes it 400
    assert engine.text is None


CHANGING = ["set", "clear", "modules/register", "modules/unregister"]


@pytest.mark.parametrize("path", CHANGING)
def test_changes_need_the_operators_key(path, http):
    url = f"/v1/steering/{path}"
    del http.headers["X-Scope-Admin-Key"]
    assert http.post(url, json={}).status_code == 401
    bearer = {"Authorization": "Bearer someone"}
    assert http.post(url, json={}, headers=bearer).status_code == 401
    wrong = {"X-Scope-Admin-Key": "wrong", "Authorization": "Bearer operator"}
    assert http.post(url, json={}, headers=wrong).status_code == 403
    # The fork's clients send the operator's key so.
    bearer = {"Authorization": "Bearer operator"}
    assert http.post(url, json={}, headers=bearer).status_code not in (401, 403)


@pytest.mark.parametrize("path", CHANGING)
def test_without_an_operators_key_there_are_no_changes(path, tmp_path, monkeypatch, engine):
    app = app_with(tmp_path, monkeypatch, None, engine)
    with TestClient(app) as client:
        assert client.post(f"/v1/steering/{path}", json={}).status_code in (404, 405)
        assert client.get("/v1/steering/modules").status_code == 200
    app.state.scope.store.close()


def test_bodies_are_bounded(http):
    headers = {"Content-Length": str(MAX_OPERATOR_BYTES + 1)}
    response = http.post("/v1/steering/set", content=b"{}", headers=headers)
    assert response.status_code == 413


LONG = {
    "numbers": (
        '{"vectors": {"post_block": {"0": [' + "1," * (1 << 21) + "1]}}}",
        "items; at most",
    ),
    "objects": ('{"vectors": {"post_block": [' + "{}," * (1 << 15) + "{}]}}", "lists, objects and"),
    "nested": ('{"vectors": ' * 50_000 + "1" + "}" * 50_000, "lists, objects and"),
    "no-json": ("{", "the body is not JSON"),
}


@pytest.mark.parametrize("case", LONG)
def test_a_body_is_counted_before_it_is_parsed_and_off_the_loop(case, http, engine, monkeypatch):
    threads, parse = [], edits_module.decode

    def told(*args):
        threads.append(threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr(edits_module, "decode", told)
    body, sentence = LONG[case]
    for path in ("set", "modules/register"):
        headers = {"Content-Type": "application/json"}
        response = http.post(f"/v1/steering/{path}", content=body, headers=headers)
        assert response.status_code == 400
        assert sentence in response.json()["error"]["message"]
    assert engine.text is None
    assert len(threads) == 2
    assert all(name.startswith("asyncio_") for name in threads), "the pool's, not the loop's"


class Slow(Remembering):
    """An engine that lets other tasks run between a read and a write of edits."""

    async def edits(self):
        text = self.text
        await asyncio.sleep(0.01)
        return text

    async def set_edits(self, text):
        await asyncio.sleep(0.01)
        return await super().set_edits(text)


def test_no_tier_is_lost_if_two_processes_set_them_at_once(tmp_path, monkeypatch):
    """Two apps of one server, as in its API server processes, before one engine."""
    monkeypatch.setenv(RUN, "of-both")
    engine = Slow()
    apps = [app_with(tmp_path, monkeypatch, engine=engine) for _ in range(2)]
    tiers = [(tier, layer) for tier in ("vectors", "prefill_vectors", "decode_vectors")
             for layer in range(2)]  # fmt: skip

    async def everything():
        transports = [httpx.ASGITransport(app) for app in apps]
        clients = [
            httpx.AsyncClient(transport=one, base_url="http://here", headers=ADMIN)
            for one in transports
        ]
        return await asyncio.gather(*(
            clients[i % 2].post("/v1/steering/set", json={tier: hook(V, layer)})
            for i, (tier, layer) in enumerate(tiers)
        ))  # fmt: skip

    answers = asyncio.run(everything())
    assert [answer.status_code for answer in answers] == [200] * len(tiers)
    found = {(one.get("tokens", "all"), i) for one in edits(engine) for i in one["layers"]}
    assert found == {(word, i) for word in ("all", "prompt", "generated") for i in range(2)}
    for app in apps:
        app.state.scope.store.close()
    assert not list(tmp_path.iterdir())


def test_a_cancelled_change_releases_the_lock(tmp_path):
    async def changed(some):
        async with some.one():
            pass

    async def run():
        mine, others = Changes(lambda: tmp_path), Changes(lambda: tmp_path)
        async with mine.one():
            waiting = [asyncio.ensure_future(changed(one)) for one in (mine, others)]
            await asyncio.sleep(0.05)
            assert not any(one.done() for one in waiting)
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)
        await asyncio.wait_for(changed(others), 5)
        await asyncio.wait_for(changed(mine), 5)

    asyncio.run(run())


def test_a_change_that_does_not_get_the_lock_is_refused(http, tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "MOST_WAIT_S", 0.1)
    other = Changes(http.app.state.scope.store.folder)

    async def hold():
        async with other.one():
            return await asyncio.to_thread(http.delete, "/v1/scope/edits")

    answer = asyncio.run(hold())
    assert answer.status_code == 503
    assert "has not ended within" in answer.json()["error"]["message"]
    assert http.delete("/v1/scope/edits").status_code == 204


def test_edits_can_be_cleared_where_the_disk_is_full(http, engine, monkeypatch):
    put(http, "set", vectors=hook(V))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(changes.os, "open", full)
    assert http.delete("/v1/scope/edits").status_code == 204
    assert engine.text is None
