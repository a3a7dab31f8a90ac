"""Binary answers have bit for bit the values of JSON, and keep its bounds."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import numpy as np
import pytest
import safetensors.torch

from tests.server.conftest import API_KEY
from tests.server.test_answers import MESSAGES, OPTIONS, PROBE, TEXT, check, ids_of, xargs
from vllm_scope import Features, LensTopK, Read
from vllm_scope.client import AsyncScopeClient, ScopeClient
from vllm_scope.client.parsing import parse_file
from vllm_scope.request.media import BINARY

EVERYTHING = (
    Read("resid_post", layers=[0, 5]),
    Read("resid_pre", layers=[3], codec="int8"),
    Read("embed"),
    Read("resid_post", layers=[1], tokens="last_prompt"),
    PROBE,
    Features("toy", top_k=4),
    LensTopK(layers=[2, 5], top_k=3),
)
BODY = OPTIONS | {"model": "toyworld", "prompt": TEXT}


@pytest.fixture(scope="module")
def in_json(server):
    with ScopeClient(server.url, API_KEY, timeout=120, binary=False) as found:
        yield found


def post(server, body, accept=BINARY):
    with server.http() as http:
        return http.post("/v1/completions", json=body, headers={"Accept": accept})


def same(one, other):
    """Whether two ScopeData have the same values, bit for bit."""
    assert list(one.rows) == list(other.rows)
    for stream, rows in one.rows.items():
        assert rows.dtype == other.rows[stream].dtype
        assert np.array_equal(rows.bits, other.rows[stream].bits), stream
        assert rows.positions.tolist() == other.rows[stream].positions.tolist()
    assert {n: s.tolist() for n, s in one.scores.items()} == {
        n: s.tolist() for n, s in other.scores.items()
    }
    for name, found in one.features.items():
        for field in ("positions", "indices", "values", "tokens"):
            assert np.array_equal(getattr(found, field), getattr(other.features[name], field))
    for name, layers in one.lens.items():
        for layer, top in layers.items():
            assert np.array_equal(top.token_ids, other.lens[name][layer].token_ids)
            assert np.array_equal(top.log_probs, other.lens[name][layer].log_probs)
    assert (one.status, one.expected, one.delivered) == (
        other.status, other.expected, other.delivered,
    )  # fmt: skip


def test_a_binary_answer_has_the_values_of_json(client, in_json):
    found, expected = (c.complete(TEXT, *EVERYTHING, **OPTIONS) for c in (client, in_json))
    assert "data" in expected.raw["choices"][0]["scope"]["rows"][0]
    assert "tensor" in found.raw["choices"][0]["scope"]["rows"][0]
    same(found.scope, expected.scope)
    assert found.choices[0].tokens == expected.choices[0].tokens
    assert len(found.scope.rows) == 5
    assert found.scope.lens
    assert found.scope.features


def test_several_choices_each_have_their_own_tensors(client, in_json, ref):
    prompts = [[5, 6, 7] * 3, [11, 12, 13], [7] * 40]
    found, expected = (c.complete(prompts, *EVERYTHING, **OPTIONS) for c in (client, in_json))
    for one, other in zip(found.choices, expected.choices, strict=True):
        assert len(one.scope.rows) == len(other.scope.rows) == 5
        assert one.scope.positions("embed").tolist() == other.scope.positions("embed").tolist()
        for stream in one.scope.keys():  # batches of prompts differ in the last bits
            np.testing.assert_allclose(one.scope[stream], other.scope[stream], rtol=1e-3, atol=1e-2)
    options = OPTIONS | {"n": 3, "temperature": 2.0}
    sampled = client.chat(MESSAGES, Read("resid_post", layers=[5]), Read("embed"), **options)
    for one, raw in zip(sampled.choices, sampled.raw["choices"], strict=True):
        check(one, *ids_of(raw, sampled.raw), ref=ref)


@pytest.mark.parametrize("stream", ["rows", "scores"])
def test_a_binary_stream_has_the_values_of_the_whole_answer(stream, client, in_json):
    chunks = list(client.stream(TEXT, *EVERYTHING, **OPTIONS, scope_stream=stream))
    told = [chunk.scope for chunk in chunks if chunk.scope is not None]
    whole = in_json.complete(TEXT, *EVERYTHING, **OPTIONS)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert told[-1].status == "complete"
    assert told[-1].expected == whole.scope.expected
    for where in whole.scope.rows:
        parts = [scope.rows[where] for scope in told if where in scope.rows]
        bits = np.concatenate([part.bits for part in parts])
        np.testing.assert_allclose(bits, whole.scope.rows[where].bits, rtol=1e-3, atol=1e-2)
        assert len(parts) == 1 or stream == "rows"
    tops = [scope.lens["lens"][5].token_ids for scope in told if 5 in scope.lens.get("lens", {})]
    assert np.array_equal(np.concatenate(tops), whole.scope.lens["lens"][5].token_ids)


def test_the_formats_own_library_reads_an_answer(server):
    response = post(server, BODY | xargs(*EVERYTHING))
    assert response.headers["content-type"] == BINARY
    tensors = safetensors.torch.load(response.content)
    answer = json.loads(bytes(tensors["answer"].numpy()))
    (rows,) = [r for r in answer["choices"][0]["scope"]["rows"] if r["site"] == "embed"]
    assert rows["tensor"] == "choices.0.embed.0"
    assert list(tensors["choices.0.embed.0"].shape) == rows["shape"]
    plain = post(server, BODY | xargs(*EVERYTHING), "*/*").json()
    assert answer.keys() == plain.keys()
    assert answer["choices"][0].keys() == plain["choices"][0].keys()


def test_rows_that_json_leaves_to_a_file_are_in_a_binary_answer(client, in_json, ref):
    asked = ([7] * 300, Read("resid_post"))
    found, filed = (c.complete(*asked, **OPTIONS) for c in (client, in_json))
    assert found.raw["choices"][0]["scope"]["result"] is None
    assert filed.raw["choices"][0]["scope"]["result"]["num_bytes"] > 256 * 1024
    same(found.scope, filed.scope)
    check(found.choices[0], *ids_of(found.raw["choices"][0], found.raw), ref=ref)


def test_a_file_that_is_asked_for_stays_a_file(server):
    body = BODY | xargs(*EVERYTHING, scope_tensors="handle")
    response = post(server, body)
    tensors = safetensors.torch.load(response.content)
    told = json.loads(bytes(tensors["answer"].numpy()))["choices"][0]["scope"]
    assert not any("tensor" in row for row in told["rows"])
    with server.http() as http:
        file = http.get(told["result"]["url"], params={"delete": "true"})
    assert file.headers["content-type"] == "application/octet-stream"
    assert parse_file(file.content).rows.keys() >= {("embed", 0, "after")}


@pytest.mark.parametrize("stream", [False, True])
def test_errors_and_plain_answers_stay_as_they_are(stream, server):
    wrong = post(server, BODY | {"stream": stream} | xargs(Read("resid_post", layers=[99])))
    assert wrong.status_code == 400
    assert wrong.headers["content-type"] == "application/json"
    assert "layers 0 to 5" in wrong.json()["error"]["message"]
    plain = post(server, BODY | {"stream": stream})
    kind = "text/event-stream" if stream else "application/json"
    assert plain.headers["content-type"].startswith(kind)


def test_many_clients_at_once_get_their_own_rows(server, ref):
    prompts = [[5 + i] * (20 + 7 * i) for i in range(16)]

    async def everyone():
        async with AsyncScopeClient(server.url, API_KEY, model="toyworld") as one:
            reads = Read("resid_post", layers=[0, 5]), Read("embed")
            asked = (one.complete(prompt, *reads, **OPTIONS) for prompt in prompts)
            return await asyncio.gather(*asked)

    for prompt, out in zip(prompts, asyncio.run(everyone()), strict=True):
        prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
        assert prompt_ids == prompt
        check(out.choices[0], prompt_ids, ids, ref)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_or_does_not_read_holds_nothing(leaves, server, client):
    """Its rows count until they are sent, or until the server gives up."""
    body = json.dumps(BODY | {"prompt": [7] * 400} | xargs(Read("resid_post"), Read("resid_pre")))
    url = httpx.URL(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect((url.host, url.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
            f"Accept: {BINARY}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        connection.settimeout(120)
        assert connection.recv(12) == b"HTTP/1.1 200"
        if leaves:
            connection.close()
        rest = server.at_rest()
        assert (rest["requests"], rest["pending"], rest["results"]) == (0, 0, 0)
    out = client.complete(TEXT, Read("embed"), **OPTIONS)
    assert out.scope.status == "complete"


def test_the_description_has_the_media_type(server):
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        limits = http.get("/v1/scope").json()["http"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content[BINARY] == {"schema": {"type": "string", "format": "binary"}}
        assert "text/event-stream" in content
    assert (limits["inline_bytes"], limits["binary_bytes"]) == (256 << 10, 8 << 20)
