"""Server-wide edits over HTTP, and the cost to accept, to refuse and to show them."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc

import numpy as np
import pytest

from tests.unit.server.test_routes import ADMIN
from vllm_scope.server import edits as module

VECTOR = np.arange(8, dtype="<f4")
PACKED = {
    "dtype": "float32", "shape": [8], "data": base64.b64encode(VECTOR.tobytes()).decode()
}  # fmt: skip
EDIT = {"kind": "add", "site": "resid_post", "layers": [1], "scale": 0.5}


def put(http, content, **headers):
    return http.put("/v1/scope/edits", content=content, headers=ADMIN | headers)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "application/json"}, {"Content-Type": "text/plain"},
     {"Content-Type": "application/x-www-form-urlencoded"}],
    ids=["none", "json", "text", "as-curl-sends-it"],
)  # fmt: skip
def test_a_body_is_json_whatever_type_it_says(headers, http, engine):
    body = {"edits": [EDIT | {"vector": VECTOR.tolist()}]}
    answer = put(http, json.dumps(body).encode(), **headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == body | {"digest": "digest"}
    assert json.loads(engine.text) == body
    assert http.get("/v1/scope/edits").json() == body | {"digest": None}


def nested(depth):
    return b'{"edits": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(b"", "the body is not JSON", id="nothing"),
        pytest.param(b"{", "the body is not JSON", id="half"),
        pytest.param(b'{"edits": [\xc3]}', "the body is not UTF-8", id="not-utf-8"),
        pytest.param(b'{"edits": ["\\ud800"]}', "the body", id="half-a-surrogate"),
        pytest.param(b"[]", "it must be an object", id="a-list"),
        pytest.param(b"null", "it must be an object", id="null"),
        pytest.param(b'{"edits": {}}', "it must be an object", id="edits-that-are-none"),
        pytest.param(b'{"edits": [3]}', "it must be an object", id="an-edit-that-is-none"),
        pytest.param(b'{"edit": []}', "it must be an object", id="misspelt"),
        pytest.param(b'{"edits": [], "reads": []}', "has 'reads'", id="more"),
        pytest.param(nested(100_000), "lists, objects and fields", id="deep"),
        pytest.param(b'{"edits": [' + b"{}," * 500_000 + b"{}]}", "lists, objects", id="many"),
    ],
)
def test_a_body_without_a_list_of_edits_is_refused_with_a_sentence(content, sentence, http, engine):
    answer = put(http, content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "SpecError"
    assert sentence in answer.json()["error"]["message"]
    assert len(answer.content) < 1000
    assert engine.text is None


def test_thirty_million_numbers_are_refused_before_they_are_parsed(http, engine):
    """They took 13 GB."""
    content = b'{"edits": [{"kind": "add", "vector": [' + b"1," * 30_000_000 + b"1]}]}"
    tracemalloc.start()
    started = time.monotonic()
    try:
        answer = put(http, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert "30,000,001 items; at most" in answer.json()["error"]["message"]
    assert peak < 6 * len(content)
    assert time.monotonic() - started < 5


def large(count=64):
    numbers = base64.b64encode(bytes(4 * 40_000)).decode()
    body = {"dtype": "float32", "shape": [40_000], "data": numbers}
    return {"edits": [EDIT | {"vector": body, "layers": [i]} for i in range(count)]}


def test_base64_up_to_the_bodys_limit_is_accepted_and_shown_without_its_numbers(http, engine):
    content = json.dumps(large()).encode()
    assert len(content) > module.MOST_SHOWN_BYTES
    put_answer = put(http, content)
    assert put_answer.status_code == 200
    assert json.loads(engine.text) == json.loads(content)
    told = {"dtype": "float32", "shape": [40_000]}
    shown = [EDIT | {"vector": told, "layers": [i]} for i in range(64)]
    assert put_answer.json() == {"edits": shown, "digest": "digest"}
    assert http.get("/v1/scope/edits").json() == {"edits": shown, "digest": None}


def test_long_lists_are_shown_by_their_length(http, engine, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHOWN_BYTES", 1000)
    edit = EDIT | {"vector": [0.25] * 1000, "values": [[1.0, 2.0]] * 300, "layers": [0, 1]}
    engine.text = json.dumps({"edits": [edit, EDIT | {"vector": {"module": "happy"}}]})
    first, second = http.get("/v1/scope/edits").json()["edits"]
    assert first == EDIT | {"vector": {"shape": [1000]}, "values": {"shape": [300]},
                            "layers": [0, 1]}  # fmt: skip
    assert second == EDIT | {"vector": {"module": "happy"}}


def test_without_edits_an_empty_list_is_shown(http):
    assert http.get("/v1/scope/edits").json() == {"edits": [], "digest": None}


def test_openapi_describes_the_body(http):
    described = http.get("/openapi.json").json()["paths"]["/v1/scope/edits"]["put"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["edits"]
    assert described["responses"]["200"]["content"]["application/json"]["schema"]
