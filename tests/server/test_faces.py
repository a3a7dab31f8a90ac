"""Faces over HTTP: their words reach the engine, and their fields come back, or a refusal."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.server.test_answers import MESSAGES, OPTIONS, TEXT, events_of, xargs
from vllm_scope import Add, Read
from vllm_scope.client import ScopeClient
from vllm_scope.compat.vllm_lens import SteeringVector, decode_activations

BODY = OPTIONS | {"model": "toyworld", "prompt": TEXT}
LENS = {"output_residual_stream": "[2]"}
VECTOR = np.full(256, 7.0, np.float32)


def post(server, body, path="/v1/completions"):
    with server.http() as http:
        return http.post(path, json=body)


def answered(server, body, path="/v1/completions"):
    response = post(server, body, path)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_faces_fields_come_back_without_a_scope(server, client):
    body = answered(server, BODY | {"vllm_xargs": LENS})
    assert "scope" not in body["choices"][0]
    native = client.complete(TEXT, Read("resid_post", layers=[2]), **OPTIONS)
    (rows,) = decode_activations(body)["residual_stream"]
    assert np.array_equal(rows.numpy(), native.scope["resid_post", 2])
    assert body["choices"][0]["text"] == native.text


def test_a_faces_words_may_stand_beside_vllm_xargs(server):
    """As JSON that `vllm_xargs` has no room for: objects and booleans."""
    vector = SteeringVector(VECTOR[None], [2]).model_dump()
    beside = {"output_residual_stream": True, "apply_steering_vectors": [vector]}
    within = {name: json.dumps(value) for name, value in beside.items()}
    one, two, plain = (
        answered(server, BODY | more) for more in (beside, {"vllm_xargs": within}, {})
    )
    assert one["choices"][0]["text"] == two["choices"][0]["text"] != plain["choices"][0]["text"]
    found = [decode_activations(body)["residual_stream"] for body in (one, two)]
    assert found[0].shape[0] == 6
    assert np.array_equal(*found)
    assert "activations" not in plain


def test_a_native_scope_works_beside_a_faces_words(server, client):
    words = {"apply_steering_vectors": json.dumps([SteeringVector(VECTOR[None], [2]).model_dump()])}
    body = answered(
        server, BODY | xargs(Read("embed", tokens=[0])) | {"output_residual_stream": [5]}
    )
    assert [row["site"] for row in body["choices"][0]["scope"]["rows"]] == ["embed", "resid_post"]
    assert decode_activations(body)["residual_stream"].shape[0] == 1
    both = client.complete(TEXT, Read("resid_post", layers=[5]), vllm_xargs=words, **OPTIONS)
    native = client.complete(TEXT, Add(VECTOR, layer=2), Read("resid_post", layers=[5]), **OPTIONS)
    assert both.text == native.text
    assert np.array_equal(both.scope["resid_post", 5], native.scope["resid_post", 5])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["false", "null", 0])
def test_words_that_ask_for_nothing_leave_the_answer_as_it_is(value, stream, server):
    body = BODY | {"vllm_xargs": {"output_residual_stream": value}, "stream": stream}
    path = "/v1/completions"
    answers = events_of(server, path, body) if stream else [answered(server, body)]
    for answer in answers:
        assert "activations" not in answer
        assert all("scope" not in choice for choice in answer["choices"])


@pytest.mark.parametrize("more", [LENS, {"vllm_xargs": LENS}], ids=["beside", "within"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/responses", {"input": "hi"}, id="responses"),
        pytest.param(
            "/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, id="anthropic-messages"
        ),
        pytest.param("/v1/chat/completions/batch", {"messages": [MESSAGES]}, id="batch-of-chats"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_without_a_place_for_a_faces_fields_say_so(path, body, more, stream, server):
    if path == "/v1/messages" and more is LENS:
        pytest.skip("vLLM's model of these requests drops fields that it does not know")
    response = post(server, body | more | {"model": "toyworld", "stream": stream}, path)
    assert response.status_code == 400, response.text
    assert "have no field for a scope; use /v1/completions" in response.text


BAD = {
    "said-twice": (LENS | {"vllm_xargs": LENS}, "both in vllm_xargs and in the body"),
    "offline-only": ({"vllm_xargs": {"probe_hook": "{}"}}, "understood offline only"),
    "a-layer-that-is-not-there": ({"output_residual_stream": [99]}, "layers 0 to 5"),
    "not-json": ({"vllm_xargs": {"output_residual_stream": "[1"}}, "is not JSON"),
    "beams": (LENS | {"use_beam_search": True}, "beam search cannot be tapped"),
    "options-of-a-scope": (
        {"vllm_xargs": LENS | {"scope_tensors": "handle"}}, "options of a scope and no 'scope'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_a_wrong_word_is_refused_for_that_request(case, stream, server):
    more, sentence = BAD[case]
    if stream and case == "beams":
        pytest.skip("vLLM refuses streams of beams itself")
    response = post(server, BODY | more | {"stream": stream})
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]


def test_nothing_is_held_once_a_face_was_answered(server):
    with ScopeClient(server.url, "key-of-one") as client:
        client.complete(TEXT, vllm_xargs=LENS, **OPTIONS)
    load = server.at_rest()
    assert (load["requests"], load["pending"], load["results"]) == (0, 0, 0)


def test_concurrent_requests_through_different_faces_are_as_if_alone(server):
    vector = json.dumps([SteeringVector(VECTOR[None], [2]).model_dump()])
    native = xargs(Add(VECTOR, layer=2), Read("resid_post", layers=[5]))
    bodies = [
        BODY,
        BODY | {"vllm_xargs": {"output_residual_stream": "[5]"}},
        BODY | {"vllm_xargs": {"output_residual_stream": "[5]", "apply_steering_vectors": vector}},
        BODY | native,
        BODY | native | {"output_residual_stream": [5]},
    ] * 4
    with ThreadPoolExecutor(len(bodies)) as threads:
        plain, lens, steered, scoped, both = list(
            threads.map(lambda body: answered(server, body), bodies)
        )[5:10]
    assert plain["choices"][0]["text"] == lens["choices"][0]["text"]
    texts = {body["choices"][0]["text"] for body in (steered, scoped, both)}
    assert texts == {answered(server, BODY | native)["choices"][0]["text"]}
    assert texts != {plain["choices"][0]["text"]}
    found = [decode_activations(body)["residual_stream"][0] for body in (steered, both)]
    (row,) = scoped["choices"][0]["scope"]["rows"]
    rows = np.frombuffer(base64.b64decode(row["data"]), row["dtype"]).reshape(row["shape"])
    for each in found:
        np.testing.assert_allclose(each.numpy(), rows, rtol=1e-3, atol=1e-2)
