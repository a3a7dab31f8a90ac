"""The steering fork's words, answers and routes at a real server, against the native API's."""

from __future__ import annotations

import asyncio
import base64
import json

import httpx
import numpy as np
import pytest

from tests.server.conftest import ADMIN_KEY, API_KEY
from tests.server.test_answers import MESSAGES, OPTIONS, TEXT, events_of, xargs
from vllm_scope import Add, Clamp, Gate, Read
from vllm_scope.compat.steering_http import read_request

BODY = OPTIONS | {"model": "toyworld", "prompt": TEXT}
READ = Read("resid_post", layers=[2, 5])
V, W = (np.linspace(-a, a, 256, dtype=np.float32)[::-1].copy() for a in (3.0, 1.0))


MODULE = {
    "vectors": {"post_block": {"1": W.tolist()}},
    "prefill_vectors": {"post_block": {"2": (-W).tolist()}},
    "decode_vectors": {"post_block": {"2": V.tolist()}},
}


def post(server, body, path="/v1/completions", operator=False):
    headers = {"X-Scope-Admin-Key": ADMIN_KEY} if operator else {}
    with server.http() as http:
        return http.post(path, json=body, headers=headers)


def answered(server, body, path="/v1/completions", operator=False):
    response = post(server, body, path, operator)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module", autouse=True)
def formal(server):
    url = "/v1/steering/modules"
    answered(server, MODULE | {"name": "formal"}, f"{url}/register", operator=True)
    yield
    answered(server, {"name": "formal"}, f"{url}/unregister", operator=True)


def rows_of(choice):
    return [
        np.frombuffer(base64.b64decode(row["data"]), np.float32).reshape(row["shape"])
        for row in choice["scope"]["rows"]
    ]


def check(server, client, words, *edits):
    """What the fork's words make of rows and text is what native edits make of them."""
    face = answered(server, BODY | words | xargs(READ))["choices"][0]
    native = client.complete(TEXT, *edits, READ, **OPTIONS)
    plain = client.complete(TEXT, READ, **OPTIONS)
    assert face["text"] == native.text
    for rows, stream in zip(rows_of(face), native.scope.keys(), strict=True):
        assert np.array_equal(rows, native.scope[stream])
        assert rows.shape != plain.scope[stream].shape or not np.array_equal(
            rows, plain.scope[stream]
        )


def packed(rows, layers, **more):
    data = base64.b64encode(rows.tobytes()).decode()
    return {"dtype": "float32", "shape": list(rows.shape), "layer_indices": layers, "data": data,
            **more}  # fmt: skip


TIERS = [Add(V, layer=2, tokens="prompt"), Add(np.stack([V, 2 * W]), layers=[0, 1],
                                               tokens="generated")]  # fmt: skip


@pytest.mark.parametrize("within", [False, True], ids=["beside", "within-xargs"])
def test_steering_in_a_body_equals_native_edits(within, server, client):
    words = {
        "prefill_steering_vectors": {"post_block": {"2": V.tolist()}},
        "decode_steering_vectors": {
            "post_block": packed(np.stack([V, W]), [0, 1], scales=[1.0, 2.0])
        },
        "steering_clamps": {"post_block": {"1": [{"vector": W.tolist(), "value": 2.0}]}},
    }
    if within:
        words = {key: json.dumps(value) for key, value in words.items()}
        body = {"vllm_xargs": words | xargs(READ)["vllm_xargs"]}
        face = answered(server, BODY | body)["choices"][0]
        beside = client.complete(TEXT, *TIERS, Clamp(W, lo=2.0, hi=2.0, layer=1), READ, **OPTIONS)
        assert face["text"] == beside.text
        assert np.array_equal(rows_of(face)[0], beside.scope["resid_post", 2])
        return
    check(server, client, words, *TIERS, Clamp(W, lo=2.0, hi=2.0, layer=1))


def test_a_gate_in_a_body_equals_a_native_gate(server, client):
    probe, steer = packed(W[None], [1]), packed(V[None], [2])
    gates = [
        {
            "when": {
                "kind": "probe", "probe": {"kind": "inline", "packed": {"post_block": probe}},
                "threshold": 0.5, "sharpness": 0.1,
            },
            "scope": "this_token",
            "apply": {"kind": "add", "steer": {"kind": "inline", "packed": {"post_block": steer}}},
        },
        {
            "when": {"kind": "always"}, "scope": "rest_of_request",
            "apply": {"kind": "add", "steer": {"kind": "name", "name": "formal"}, "strength": 0.5},
        },
    ]  # fmt: skip
    gate = Gate(W, 1, kind="sigmoid", threshold=0.5, sharpness=0.1)
    edits = [
        Add(V, layer=2, tokens="generated", gate=gate),
        Add("formal", scale=0.5, tokens="generated"),
    ]
    check(server, client, {"steering": gates}, *edits)


def of_formal(scale):
    found = []
    for field, tokens in (("vectors", "all"), ("prefill_vectors", "prompt"),
                          ("decode_vectors", "generated")):  # fmt: skip
        for layer, vector in MODULE[field]["post_block"].items():
            found.append(Add(vector, layer=int(layer), scale=scale, tokens=tokens))
    return found


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        pytest.param({"steering_name": "formal"}, 1.0, id="name"),
        pytest.param({"steering_module_ref": ["formal", 2.5]}, 2.5, id="name-and-scale"),
    ],
)
def test_a_module_of_three_tiers_is_referred_to(words, scale, server, client):
    check(server, client, words, *of_formal(scale))


def test_a_module_that_came_over_http_is_referred_to_until_it_is_forgotten(server, client):
    url, body = (
        "/v1/steering/modules",
        {"name": "brief", "vectors": {"post_block": {"2": V.tolist()}}},
    )
    assert post(server, body, f"{url}/register").status_code == 401
    names = answered(server, body, f"{url}/register", operator=True)["modules"]
    assert names == ["brief", "formal"]
    check(server, client, {"steering_name": "brief"}, Add(V, layer=2))
    answered(server, {"name": "brief"}, f"{url}/unregister", operator=True)
    refused = post(server, BODY | {"steering_name": "brief"})
    assert refused.status_code == 400
    assert "does not hold" in refused.json()["error"]["message"]


HOOKS = {"post_block": {"layers": [0], "ranges": [[2, 3]]}}


def check_files(results, server, name, native, operator=False):
    """The operator is told the path, a key the name."""
    result = results["filesystem"]
    assert (result["status"], result["error"]) == ("ok", None)
    (told,) = result["payload"]["items"]
    (path,) = (server.results.parent / "captures").rglob(f"http/{name}.safetensors")
    assert told == (str(path) if operator else path.name)
    found = read_request(path.parent / name)
    assert sorted(found) == [(k, "post_block") for k in (0, 2, 3)]
    for (layer, _), entry in found.items():
        assert np.array_equal(entry.array, native["resid_post", layer])
        assert entry.positions == native.positions("resid_post", layer).tolist()


def capture(name, positions="all"):
    wanted = {"request_id": name, "tag": "http", "hooks": HOOKS, "positions": positions}
    return {"capture": {"filesystem": wanted}, "capture_wait": True}


def test_a_capture_over_http_leaves_files_and_says_where(server, client):
    answer = answered(server, BODY | capture("q-1"))
    native = client.complete(TEXT, Read("resid_post", layers=[0, 2, 3]), **OPTIONS)
    check_files(answer["capture_results"], server, "q-1", native.scope)
    known = answered(server, BODY | capture("q-1"), operator=True)
    check_files(known["capture_results"], server, "q-1", native.scope, operator=True)
    assert "scope" not in answer["choices"][0]
    assert "capture_results" not in answer["choices"][0]
    assert answer["choices"][0]["text"] == native.text


def test_the_last_chunk_of_a_stream_says_where_the_files_are(server, client):
    body = OPTIONS | {"model": "toyworld", "messages": MESSAGES, "stream": True}
    path = "/v1/chat/completions"
    chunks = events_of(server, path, body | capture("q-2", "all_generated"))
    told = [chunk["capture_results"] for chunk in chunks if "capture_results" in chunk]
    read = Read("resid_post", layers=[0, 2, 3], tokens="generated")
    native = client.chat(MESSAGES, read, **OPTIONS)
    assert len(told) == 1
    check_files(told[0], server, "q-2", native.scope)


def test_every_choice_says_where_its_files_are(server):
    body = BODY | {"prompt": [TEXT, "The capital of "], "n": 2, "temperature": 1.0}
    answer = answered(server, body | capture("q-3"))
    each = [choice["capture_results"]["filesystem"] for choice in answer["choices"]]
    assert {one["status"] for one in each} == {"ok"}
    assert answer["capture_results"]["filesystem"] == each[0]


def test_global_tiers_add_up_with_a_requests_own(server, client):
    own = {"decode_steering_vectors": {"post_block": {"0": W.tolist()}}}
    tiers = {
        "vectors": {"post_block": {"2": V.tolist()}},
        "decode_vectors": {"post_block": packed(np.stack([W, V]), [2, 3])},
    }
    global_edits = [Add(V, layer=2), Add(np.stack([W, V]), layers=[2, 3], tokens="generated")]
    native = [
        client.complete(TEXT, *global_edits, *edits, READ, **OPTIONS)
        for edits in ((), (Add(W, layer=0, tokens="generated"),))
    ]
    assert post(server, tiers, "/v1/steering/set").status_code == 401
    answer = answered(server, tiers, "/v1/steering/set", operator=True)
    try:
        assert answer == {"status": "ok", "hook_points": ["post_block"], "layers_updated": [2, 3]}
        found = [answered(server, BODY | words | xargs(READ))["choices"][0] for words in ({}, own)]
        with server.http() as http:
            status = http.get("/v1/steering").json()
            listed = http.get("/v1/scope/edits").json()["edits"]
    finally:
        answered(server, {}, "/v1/steering/clear", operator=True)
    for face, wanted in zip(found, native, strict=True):
        assert face["text"] == wanted.text
        for rows, stream in zip(rows_of(face), wanted.scope.keys(), strict=True):
            assert np.array_equal(rows, wanted.scope[stream])
    assert list(status["active_layers"]) == ["2", "3"]
    assert status["active_layers"]["2"]["post_block"]["norm"] == pytest.approx(
        float(np.linalg.norm(V)), rel=1e-5
    )
    assert [edit["tokens"] for edit in listed if "tokens" in edit] == ["generated"]
    with server.http() as http:
        assert http.get("/v1/steering").json() == {"active_layers": {}, "other_edits": 0}
        layers = http.get("/v1/steering/layers").json()["layers"]
    assert layers["3"] == {"hook_points": ["post_block", "pre_attn"]}
    assert answered(server, BODY)["choices"][0]["text"] == client.complete(TEXT, **OPTIONS).text


def test_requests_through_faces_share_a_batch(server):
    lens = {"vllm_xargs": {"output_residual_stream": "[5]"}}
    ways = [
        {"steering_vectors": {"post_block": {"2": V.tolist()}}} | capture("together"), lens,
        {"steering_name": "formal"} | lens, xargs(Add(V, layer=2), READ), {}, xargs(READ),
    ]  # fmt: skip

    async def all_at_once():
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as http:
            return await asyncio.gather(
                *(http.post("/v1/completions", json=BODY | way) for way in ways)
            )

    alone = [answered(server, BODY | way) for way in ways]
    together = [response.json() for response in asyncio.run(all_at_once())]
    for one, other in zip(alone, together, strict=True):
        assert one["choices"][0]["text"] == other["choices"][0]["text"]
    assert together[0]["capture_results"] == alone[0]["capture_results"]
    for one, other in ((alone[3], together[3]), (alone[5], together[5])):
        for a, b in zip(rows_of(one["choices"][0]), rows_of(other["choices"][0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


BAD = {
    "hook-of-the-mlp": ({"steering_vectors": {"mlp_out": {}}}, "hooks are pre_attn, post_attn"),
    "wrong-size": ({"steering_vectors": {"post_block": {"1": [1.0]}}}, "rows have 256"),
    "no-such-sink": (
        {"capture": {"logging": {"hooks": {"post_block": [1]}}}},
        "is 'logging'; this engine has memory, filesystem",
    ),
    "features": ({"sae_clamp_specs": [{}]}, "its fields are module_name, clamps, phase, gated"),
    "a-gates-scope": (
        {"steering": [{
            "when": {"kind": "always"}, "scope": "rest_of_conversation",
            "apply": {"kind": "add", "steer": {"kind": "name", "name": "formal"}},
        }]},
        "steering[0].scope is 'rest_of_conversation': requests share no state",
    ),
    "unknown-module": ({"steering_name": "nobody"}, "It holds: formal"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_is_an_error_of_that_request(case, server):
    words, sentence = BAD[case]
    response = post(server, BODY | words)
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]


def test_a_field_of_a_set_that_is_not_known_is_refused(server):
    response = post(server, {"vector": {}}, "/v1/steering/set", operator=True)
    assert response.status_code == 400


def test_the_example_turns_reviews_however_it_asks(server):
    from examples.faces.steering_client import run

    with server.http() as http:
        turned = run(http, "toyworld", {"X-Scope-Admin-Key": ADMIN_KEY})
    assert turned.pop("not at all") < 0.2
    assert len(set(turned.values())) == 1
    assert turned["by name"] > 0.8
