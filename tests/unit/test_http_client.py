"""The client against answers that are made up here: what it sends, what it makes of them."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from vllm_scope import Add, CapacityError, Probe, Read, ScopeError, SpecError
from vllm_scope.client import AsyncScopeClient, ScopeClient, ServerError
from vllm_scope.client.answers import parse_scope
from vllm_scope.vectors import SteeringModule, from_bytes

ROWS = torch.randn(3, 4)
COUNTS = {"status": "complete", "error": None, "expected": 6, "delivered": 6, "dropped": 0}


def b64(tensor):
    return base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode()


def entry(tensor, **more):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "site": "resid_post", "layer": 5, "spans": [[0, 2], [7, 8]], "dtype": dtype,
        "shape": list(tensor.shape), "data": b64(tensor),
    } | more  # fmt: skip


class Server:
    """Answers from a table, and remembers what was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        answer = self.answers[request.url.path.rsplit("/", 1)[1]]
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def client(self, **options):
        return ScopeClient(transport=httpx.MockTransport(self), **options)

    @property
    def body(self):
        return json.loads(self.requests[-1].content)


def choice(scope, **more):
    return {"index": 0, "text": "t", "finish_reason": "stop", "scope": scope} | more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_in_numpy_and_torch(dtype):
    rows = ROWS.to(dtype)
    server = Server(completions={"choices": [choice(COUNTS | {"rows": [entry(rows)]})]})
    out = server.client().complete("x", Read("resid_post", layers=[5]))
    assert np.array_equal(out.scope["resid_post", 5], rows.float().numpy())
    assert np.array_equal(out.scope["post_block", 5], rows.float().numpy())
    assert torch.equal(out.scope.tensor("resid_post", 5), rows)
    assert out.scope.tensor("resid_post", 5).dtype == dtype
    assert out.scope.positions("resid_post", 5).tolist() == [0, 1, 7]
    assert (out.scope.status, out.scope.expected) == ("complete", 6)


def test_rows_before_and_after_edits_are_told_apart():
    scope = {"rows": [entry(ROWS), entry(ROWS * 2, when="before")]}
    data = parse_scope(scope, None)
    assert np.array_equal(data["resid_post", 5], ROWS.numpy())
    assert np.array_equal(data["resid_post", 5, "before"], 2 * ROWS.numpy())
    with pytest.raises(KeyError, match="read 'resid_post' 5"):
        data["resid_post", 6]


def test_scores_that_were_not_finite_are_nan():
    data = parse_scope({"scores": {"p": {"spans": [[3, 5]], "values": [1.5, None]}}}, None)
    assert data.scores.positions("p").tolist() == [3, 4]
    assert data.scores["p"][0] == 1.5
    assert np.isnan(data.scores["p"][1])


def test_a_handle_is_fetched_and_its_file_deleted():
    file = safetensors.torch.save({
        "resid_post.5": ROWS.bfloat16(), "resid_post.5.positions": torch.tensor([0, 1, 7]),
        "scores.p.q": torch.ones(2), "scores.p.q.positions": torch.tensor([3, 4]),
    })  # fmt: skip
    scope = COUNTS | {"result": {"id": "abc"}, "rows": [], "scores": {}}
    server = Server(completions={"choices": [choice(scope)]}, abc=httpx.Response(200, content=file))
    out = server.client(api_key="k").complete("x", Read("resid_post", layers=[5]))
    assert torch.equal(out.scope.tensor("resid_post", 5), ROWS.bfloat16())
    assert out.scope.positions("resid_post", 5).tolist() == [0, 1, 7]
    assert out.scope.scores["p.q"].tolist() == [1, 1]
    assert str(server.requests[-1].url.query, "ascii") == "delete=true"
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer k"}


def test_what_is_sent():
    server = Server(completions={"choices": []})
    server.client(base_url="http://x/v1/").complete(
        ["a", "b"], Read("embed"), max_tokens=3, scope_tensors="handle", vllm_xargs={"other": 1}
    )
    assert str(server.requests[-1].url) == "http://x/v1/completions"
    xargs = server.body["vllm_xargs"]
    assert json.loads(xargs.pop("scope"))["reads"][0]["site"] == "embed"
    assert xargs == {"scope_tensors": "handle", "other": 1}
    assert server.body["model"] == "the-model"
    assert (server.body["prompt"], server.body["max_tokens"]) == (["a", "b"], 3)


def test_without_actions_the_request_is_plain():
    server = Server(completions={"choices": [choice(None)]})
    out = server.client(model="m").complete("x")
    assert server.body == {"model": "m", "prompt": "x"}
    assert (out.scope, out.text) == (None, "t")


def test_several_choices_are_not_one():
    choices = [choice(None), choice(None, index=1)]
    out = Server(completions={"choices": choices}).client().complete("x", n=2)
    with pytest.raises(ScopeError, match="there are 2 choices; use"):
        _ = out.text


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, SpecError), (429, CapacityError), (401, ServerError), (500, ServerError)],
)
def test_errors_keep_the_servers_sentence(status, error):
    body = {"error": {"message": "what came, and what to do."}}
    server = Server(completions=httpx.Response(status, json=body))
    with pytest.raises(error, match="what came, and what to do"):
        server.client().complete("x")
    with pytest.raises(error, match="what came, and what to do"):
        list(server.client().stream("x"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(b'{"error": "Unauthorized"}', "Unauthorized", id="vllm-keys"),
        pytest.param(b"<html>gateway", "<html>gateway", id="a-proxy"),
        pytest.param(b"", "no reason was given", id="nothing"),
        pytest.param(b"[1]", r"\[1\]", id="a-list"),
    ],
)
def test_errors_of_any_shape_are_told(content, sentence):
    server = Server(completions=httpx.Response(401, content=content))
    with pytest.raises(ServerError, match=sentence):
        server.client().complete("x")


def sse(*events):
    text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + ": alive\n\ndata: [DONE]\n\n"
    return httpx.Response(200, content=text.encode())


STREAM = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [choice({"scores": {"p": {"spans": [[0, 1]], "values": [2.0]}}},
                        finish_reason=None)]},
    {"choices": [choice(COUNTS | {"rows": [entry(ROWS)], "scores": {}, "result": None})]},
    {"choices": [], "usage": {}},
]  # fmt: skip


def test_streams_of_both_clients_are_the_same():
    server = Server(completions=sse(*STREAM))
    chunks = list(server.client().stream("x", Probe(np.ones(4), layer=5, name="p")))
    assert server.body["stream"] is True
    assert [chunk.text for chunk in chunks] == ["", "t", "t"]
    assert chunks[0].scope is None
    assert chunks[1].scope.scores["p"].tolist() == [2.0]
    assert chunks[2].scope.status == "complete"

    async def collect():
        server = Server(completions=sse(*STREAM))
        async with AsyncScopeClient(transport=httpx.MockTransport(server)) as client:
            return [chunk async for chunk in client.stream("x")]

    for one, other in zip(chunks, asyncio.run(collect()), strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert (one.scope is None) == (other.scope is None)


def test_an_error_within_a_stream_is_raised():
    event = {"error": {"message": "the engine died.", "code": 500}}
    with pytest.raises(ServerError, match="the engine died"):
        list(Server(completions=sse(STREAM[0], event)).client().stream("x"))


def test_modules_and_edits_carry_the_operators_key():
    server = Server(**{"a%20b": {}}, edits={"edits": []}, **{"a b": {}})
    client = server.client(admin_key="op")
    module = SteeringModule({("resid_post", 1): np.ones(4)})
    client.put_module("a b", module)
    assert server.requests[-1].url.raw_path == b"/v1/scope/modules/a%20b"
    assert from_bytes(server.requests[-1].content).digest == module.digest
    client.set_edits(Add("a b", scale=2.0))
    assert server.body["edits"][0]["vector"] == {"module": "a b"}
    assert all(r.headers["x-scope-admin-key"] == "op" for r in server.requests)
    client.edits()
    assert "x-scope-admin-key" not in server.requests[-1].headers


def test_rows_that_do_not_fit_their_shape_are_refused():
    with pytest.raises(ScopeError, match="12 numbers for rows of shape"):
        parse_scope({"rows": [entry(ROWS, shape=[3, 5])]}, None)
    with pytest.raises(ScopeError, match="does not know"):
        parse_scope({"rows": [entry(ROWS, dtype="int4")]}, None)


def test_the_client_loads_neither_torch_nor_vllm():
    code = (
        "import sys; import vllm_scope.client; "
        "print([m for m in ('torch', 'vllm', 'fastapi', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
