"""The client against made-up answers: its requests, and its parsing of the answers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
import subprocess
import sys
import time
from types import MappingProxyType

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from vllm_scope import Add, CapacityError, Moments, Policy, Probe, Read, ScopeError, SpecError
from vllm_scope.client import (
    AsyncScopeClient,
    ScopeClient,
    ServerError,
    UnreachableError,
    Verdict,
)
from vllm_scope.client.frames import Frames
from vllm_scope.client.parsing import parse_file, parse_scope
from vllm_scope.client.transport import Events
from vllm_scope.control import Decided
from vllm_scope.request.media import BINARY
from vllm_scope.server import encode
from vllm_scope.sweeps import LogitDifference, Sweep
from vllm_scope.vectors import SteeringModule, from_bytes, to_bytes

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

    def __init__(self, models=({"id": "the-model"},), **answers):
        self.models, self.answers = list(models), answers
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": self.models})
        answer = self.answers[request.url.path.rsplit("/", 1)[1]]
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, text=json.dumps(answer))  # httpx's `json` takes no HALF

    def client(self, **options):
        return ScopeClient(transport=httpx.MockTransport(self), **options)

    @property
    def body(self):
        return json.loads(self.requests[-1].content)


#: Half of a surrogate pair, which JSON can contain.
HALF = "\ud800"


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
    with pytest.raises(KeyError, match="'resid_post' has rows in each layer; name one"):
        data.positions("resid_post")
    with pytest.raises(KeyError, match="read 'resid_post' 5"):
        data["resid_post", 6]


def test_the_streams_are_iterated_counted_and_looked_for_as_in_an_offline_result():
    embed = entry(ROWS, site="embed", layer=0)
    data = parse_scope({"rows": [entry(ROWS), entry(ROWS, when="before"), embed]}, None)
    assert list(data) == data.keys() == [("resid_post", 5), ("embed", 0)]
    assert len(data) == 2
    for stream in data:
        assert stream in data
    assert ("post_block", 5) in data
    assert ("resid_post", 5, "before") in data
    assert "embed" in data
    for other in [("resid_post", 6), "resid_post", ("embed", 0, "before"), "x", 5, None, ([], 5)]:
        assert other not in data
    empty = parse_scope({}, None)
    assert (list(empty), len(empty), bool(empty)) == ([], 0, True)


@pytest.mark.parametrize("reason", ["probe 'risk': 0.93 at position 57", 13, None])
def test_a_choice_and_a_last_chunk_say_what_stopped_them(reason):
    body = {"choices": [choice(COUNTS, stop_reason=reason)]}
    out = Server(completions=body).client().complete("x")
    assert out.choices[0].stop_reason == reason
    event = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
    events = httpx.Response(200, text=event, headers={"content-type": "text/event-stream"})
    (chunk,) = Server(completions=events).client().stream("x")
    assert chunk.stop_reason == reason


def test_scores_that_were_not_finite_are_nan():
    data = parse_scope({"scores": {"p": {"spans": [[3, 5]], "values": [1.5, None]}}}, None)
    assert data.scores.positions("p").tolist() == [3, 4]
    assert data.scores["p"][0] == 1.5
    assert np.isnan(data.scores["p"][1])


def test_aggregates_are_beside_the_scores_of_their_probe():
    summed = {"spans": [[3, 5]], "values": [1.5, None], "aggregates": [1.5, None]}
    plain = {"spans": [[3, 5]], "values": [0.5, 1.0]}
    data = parse_scope({"scores": {"summed": summed, "plain": plain}}, None)
    assert list(data.aggregates) == ["summed"]
    assert data.aggregates.positions("summed").tolist() == [3, 4]
    assert data.aggregates["summed"].dtype == np.float32
    assert np.array_equal(data.aggregates["summed"], [1.5, np.nan], equal_nan=True)


def test_features_are_a_sparse_matrix():
    told = {"spans": [[3, 5], [9, 10]], "indices": [[7, 2], [], [2]]}
    told["values"] = [[5.0, 1], [], [None]]
    found = parse_scope({"features": {"f": told}}, None).features["f"]
    assert found.tokens.tolist() == [3, 4, 9]
    assert found.positions.tolist() == [3, 3, 9]
    assert found.indices.tolist() == [7, 2, 2]
    assert found.top(3) == [(7, 5.0), (2, 1.0)]
    assert found.top(4) == []
    with pytest.raises(KeyError, match="position 5 has no features"):
        found.top(5)
    assert found.dense(7).tolist() == [5, 0, 0]
    assert np.isnan(found.dense(2)[2])
    with pytest.raises(KeyError, match="feature -1 is not there"):
        found.dense(-1)
    parts = {"": "values", ".positions": "positions", ".indices": "indices", ".tokens": "tokens"}
    tensors = {
        f"features.f{end}": torch.from_numpy(getattr(found, name)) for end, name in parts.items()
    }
    file = safetensors.torch.save(tensors)
    late = parse_scope({"features": {"f": {"spans": [[4, 5], [9, 10]]}}}, file)
    assert late.features["f"].tokens.tolist() == [4, 9]
    assert late.features["f"].indices.tolist() == [2]
    with pytest.raises(ScopeError, match=r"values of shape \[3\] for 4 positions"):
        parse_scope({"features": {"f": told | {"spans": [[3, 7]]}}}, None)


def test_a_feature_that_was_not_read_or_that_no_sae_has_is_not_a_row_of_zeros():
    told = {"spans": [[3, 5]], "indices": [[7], []], "values": [[5.0], []]}
    for more, bad, words in (
        ({"asked": [7, 2]}, 5, r"feature 5 was not read; the read named \[7, 2\]"),
        ({"num_features": 99}, 99, "feature 99 is not there; the SAE has features 0 to 98"),
        ({"asked": [7, 2], "num_features": 99}, 99, "feature 99 was not read"),
        ({}, True, "feature True is not there; features are whole numbers"),
    ):
        found = parse_scope({"features": {"f": told | more}}, None).features["f"]
        assert (found.num_features, list(found.asked or [])) == (
            more.get("num_features"), more.get("asked", []),
        )  # fmt: skip
        assert found.dense(7).tolist() == found.at(found.tokens).dense(7).tolist() == [5, 0]
        for some in (found, found.at(found.tokens[:1])):
            with pytest.raises(KeyError, match=words):
                some.dense(bad)
    with pytest.raises(ScopeError, match="the server's scope has an unknown form"):
        parse_scope({"features": {"f": told | {"asked": "all"}}}, None)


@pytest.mark.parametrize(
    ("metadata", "asked"),
    [
        pytest.param(None, None, id="no-metadata"),
        pytest.param({"scope": json.dumps(COUNTS)}, None, id="old-server"),
        pytest.param({"scope": json.dumps({"features": {"f": {"asked": [4]}}})}, (4,), id="new"),
    ],
)
def test_a_file_says_which_features_were_read_if_its_server_did(metadata, asked):
    none, at = torch.zeros(0, dtype=torch.int64), torch.arange(2)
    tensors = {"": torch.zeros(0), ".positions": none, ".indices": none, ".tokens": at}
    named = {f"features.f{end}": one for end, one in tensors.items()}
    found = parse_file(safetensors.torch.save(named, metadata)).features["f"]
    assert found.asked == asked
    assert found.dense(4).tolist() == [0, 0]
    with pytest.raises(ScopeError, match="the server's result has metadata of an unknown form"):
        parse_file(safetensors.torch.save(named, {"scope": "{"}))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        pytest.param(
            ["features.f", "features.f.positions", "features.f.tokens"],
            "the tensor 'features.f' without its indices", id="features",
        ),
        pytest.param(["lens.l.2", "lens.l.2.positions"], "without its token_ids", id="lens"),
        pytest.param(
            ["lens.l", "lens.l.positions", "lens.l.token_ids"], "has the layer 'l'", id="no-layer"
        ),
        pytest.param(["rows", "rows.positions"], "'rows' has the layer ''", id="one-word"),
        pytest.param(["q.x", "q.x.positions"], "'q.x' has the layer 'x'", id="no-number"),
        pytest.param(
            ["q." + "1" * 5000, "q." + "1" * 5000 + ".positions"], "at most 9 digits", id="digits"
        ),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(names, words):
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ScopeError, match=words):
        parse_file(safetensors.torch.save(dict.fromkeys(names, none)))


@pytest.mark.parametrize(
    "name", ["resid_post.5", "scores.p", "features.f", "features.f.indices", "aggregates.p"]
)
def test_a_file_whose_tensors_do_not_fit_their_positions_is_refused(name):
    at, two = torch.arange(2), torch.zeros(2)
    tensors = {"resid_post.5": torch.zeros(2, 4), "scores.p": two, "features.f": two}
    tensors |= {f"{one}.positions": at for one in tensors}
    tensors |= {"aggregates.p": two, "features.f.indices": at, "features.f.tokens": at}
    tensors = {each: one.clone() for each, one in tensors.items()}
    parse_file(safetensors.torch.save(tensors))
    for wrong in (tensors[name][:1].clone(), tensors[name].reshape(1, -1)):
        with pytest.raises(ScopeError, match=r"server's tensor '.*' has the shape \["):
            parse_file(safetensors.torch.save(tensors | {name: wrong}))


@pytest.mark.parametrize(
    ("at", "tokens"),
    [
        pytest.param([0, 3], [0, 1], id="a-position-that-was-not-encoded"),
        pytest.param([0, 1], [], id="no-position"),
        pytest.param([1, 0], [0, 1], id="positions-not-ascending"),
        pytest.param([0, 1], [1, 0], id="tokens-not-ascending"),
        pytest.param([0, 1], [0, 1, 1], id="a-token-twice"),
    ],
)
def test_a_file_with_features_at_other_positions_than_its_tokens_is_refused(at, tokens):
    tensors = {
        "features.f": torch.ones(2), "features.f.indices": torch.arange(2),
        "features.f.positions": torch.tensor(at),
        "features.f.tokens": torch.tensor(tokens, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ScopeError, match="has values at positions that are not ascending"):
        parse_file(safetensors.torch.save(tensors))


def test_tokens_of_a_lens_are_by_layer():
    told = {"name": "n.m", "layer": 3, "spans": [[3, 5]], "token_ids": [[7, 2], [2, 0]]}
    told["log_probs"] = [[-0.5, -1], [-0.25, None]]
    found = parse_scope({"lens": [told, told | {"layer": 4}]}, None).lens["n.m"]
    assert sorted(found) == [3, 4]
    assert found[3].positions.tolist() == [3, 4]
    assert found[3].top(3) == [(7, -0.5), (2, -1.0)]
    assert np.isnan(found[3].log_probs[1, 1])
    assert found[3].token_ids.dtype == np.int64
    with pytest.raises(KeyError, match="position 5 has no tokens of this lens"):
        found[3].top(5)
    parts = {"": "log_probs", ".positions": "positions", ".token_ids": "token_ids"}
    tensors = {
        f"lens.n.m.3{end}": torch.from_numpy(getattr(found[3], name)) for end, name in parts.items()
    }
    file = safetensors.torch.save(tensors)
    late = parse_scope({"lens": [{"name": "n.m", "layer": 3, "spans": [[4, 5]]}]}, file)
    assert late.lens["n.m"][3].token_ids.tolist() == [[2, 0]]
    empty = told | {"spans": [], "token_ids": [], "log_probs": []}
    assert len(parse_scope({"lens": [empty]}, None).lens["n.m"][3].positions) == 0
    with pytest.raises(ScopeError, match=r"values of shape \[2, 2\] for 1 positions"):
        parse_scope({"lens": [told | {"spans": [[3, 4]]}]}, None)


def test_decisions_of_a_policy_are_in_their_order():
    decided = [Decided(5, 7, {"e": 0.5}), Decided(9, flag="odd", stop=True), Decided(11, error="x")]
    told = encode.decisions(decided)
    server = Server(completions={"choices": [choice(COUNTS | told)]})
    out = server.client().complete("x", Probe(np.ones(4), layer=5, name="p"), Policy("hold"))
    assert out.scope.decisions == tuple(decided)
    assert encode.decisions(()) == {}
    assert parse_scope(COUNTS, None).decisions == ()


def test_a_verdict_is_a_position_and_a_value():
    told = {"p": {"position": 7, "value": 0.75}, "overflow": {"position": 2, "value": None}}
    server = Server(completions={"choices": [choice(COUNTS | {"verdicts": told})]})
    out = server.client().complete("x", Probe(np.ones(4), layer=5, name="p", threshold=0.5))
    assert out.scope.verdicts == {"p": Verdict(7, 0.75), "overflow": Verdict(2, np.inf)}
    assert parse_scope(COUNTS, None).verdicts == parse_scope(COUNTS, None).begun == {}
    assert parse_scope(COUNTS | {"begun": {"dear": 9}}, None).begun == {"dear": 9}


def test_a_handle_is_fetched_and_its_file_deleted():
    file = safetensors.torch.save({
        "resid_post.5": ROWS.bfloat16(), "resid_post.5.positions": torch.tensor([0, 1, 7]),
        "scores.p.q": torch.ones(2), "scores.p.q.positions": torch.tensor([3, 4]),
        "aggregates.p.q": torch.tensor([1.0, 2.0]),
    })  # fmt: skip
    told = {name: value for name, value in entry(ROWS).items() if name != "data"}
    scope = COUNTS | {
        "result": {"id": "abc"}, "rows": [told], "scores": {"p.q": {"spans": [[3, 5]]}}
    }  # fmt: skip
    server = Server(completions={"choices": [choice(scope)]}, abc=httpx.Response(200, content=file))
    out = server.client(api_key="k").complete("x", Read("resid_post", layers=[5]))
    assert torch.equal(out.scope.tensor("resid_post", 5), ROWS.bfloat16())
    assert out.scope.positions("resid_post", 5).tolist() == [0, 1, 7]
    assert out.scope.scores["p.q"].tolist() == [1, 1]
    assert out.scope.aggregates["p.q"].tolist() == [1, 2]
    assert out.scope.aggregates.positions("p.q").tolist() == [3, 4]
    assert str(server.requests[-1].url.query, "ascii") == "delete=true"
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer k"}
    assert server.client().result("abc").aggregates["p.q"].tolist() == [1, 2]


def test_the_body_has_the_scope_the_options_and_the_model():
    server = Server(completions={"choices": []})
    server.client(base_url="http://x/v1/").complete(
        ["a", "b"], Read("embed"), max_tokens=3, scope_tensors="handle", scope_more=1,
        vllm_xargs={"other": 1},
    )  # fmt: skip
    assert str(server.requests[-1].url) == "http://x/v1/completions"
    xargs = server.body["vllm_xargs"]
    assert json.loads(xargs.pop("scope"))["reads"][0]["site"] == "embed"
    # The server refuses what it does not know of them.
    assert xargs == {"scope_tensors": "handle", "scope_more": 1, "other": 1}
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
def test_errors_of_any_shape_become_a_sentence(content, sentence):
    server = Server(completions=httpx.Response(401, content=content))
    with pytest.raises(ServerError, match=sentence):
        server.client().complete("x")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        pytest.param(
            lambda c: c.complete(5), "the prompt is 5; it must be a text or token", id="prompt"
        ),
        pytest.param(
            lambda c: c.sweep("a", "b"), "the sweep is 'b'; give the prompts and a S", id="no-sweep"
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(call, said):
    server = Server()
    with pytest.raises(SpecError, match=said):
        call(server.client())
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            401,
            {"error": "Unauthorized"},
            "HTTP 401: Unauthorized; give the server's key as api_key,",
        ),
        (403, {"error": {"message": "no."}}, "HTTP 403: no; .* and the operator's as admin_key"),
        (404, {"detail": "Not Found"}, "HTTP 404: Not Found; give the URL of a vLLM server that"),
    ],
)
def test_a_wrong_key_or_address_is_told_with_what_to_do(status, body, said):
    server = Server(completions=httpx.Response(status, json=body))
    with pytest.raises(ServerError, match=said):
        server.client().complete("x")


def test_what_a_choice_does_not_have_is_told_with_what_it_has():
    scores = {"p": {"spans": [[0, 1]], "values": [2.0]}}
    found = choice(COUNTS | {"rows": [entry(ROWS)], "scores": scores})
    out = Server(completions={"choices": [found]}).client().complete("x")
    with pytest.raises(KeyError, match="'resid_post' 1 is not here; this choice read 'resid_post'"):
        out.scope["resid_post", 1]
    for ask in (out.scope.scores.__getitem__, out.scope.scores.positions):
        with pytest.raises(KeyError, match="'q' has no scores here; this choice has those of 'p'"):
            ask("q")


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


def test_a_sweep_whose_stream_has_no_event_is_an_error():
    sweep = Sweep(np.zeros((1, 4)), metric=LogitDifference(1, 2))
    for run in both(lambda client: client.sweep("a", sweep)):
        with pytest.raises(ScopeError, match="the server ended the sweep without a table"):
            run(Server(sweeps=sse()))


def test_each_chunk_knows_which_features_were_read_though_the_first_one_alone_says_it():
    def event(index, position, **more):
        told = {"spans": [[position, position + 1]], "indices": [[]], "values": [[]]} | more
        part = choice({"rows": [], "features": {"f": told}}, finish_reason=None)
        return {"choices": [part | {"index": index}]}

    events = event(0, 3, asked=[7], num_features=9), event(1, 3), event(0, 4), event(1, 4)

    async def collect():
        transport = httpx.MockTransport(Server(completions=sse(*events)))
        async with AsyncScopeClient(transport=transport) as client:
            return [chunk async for chunk in client.stream("x")]

    for chunks in (
        list(Server(completions=sse(*events)).client().stream("x")),
        asyncio.run(collect()),
    ):
        found = [chunk.scope.features["f"] for chunk in chunks]
        assert [one.asked for one in found] == [(7,), None, (7,), None]
        assert [one.num_features for one in found] == [9, None, 9, None]


def test_only_the_positions_that_the_last_chunk_names_are_new_in_its_file():
    """The file has all scores, those of earlier chunks too."""
    file = safetensors.torch.save({
        "resid_post.5": ROWS, "resid_post.5.positions": torch.tensor([0, 1, 7]),
        "scores.p": torch.arange(4.0), "scores.p.positions": torch.arange(4),
        "scores.late": torch.arange(4.0), "scores.late.positions": torch.arange(4),
        "aggregates.p": torch.arange(4.0) / 2, "aggregates.late": torch.arange(4.0) / 2,
    })  # fmt: skip
    told = {name: value for name, value in entry(ROWS).items() if name != "data"}
    end = COUNTS | {
        "result": {"id": "abc"}, "rows": [told | {"spans": [[1, 2], [7, 8]]}],
        "scores": {"p": {"spans": [[3, 4]], "values": [3.0], "aggregates": [1.5]},
                   "late": {"spans": [[1, 4]]}},
    }  # fmt: skip
    found = parse_scope(end, file)
    assert found.scores.positions("p").tolist() == [3]
    assert found.scores["late"].tolist() == [1.0, 2.0, 3.0]
    assert found.aggregates["p"].tolist() == [1.5]
    assert found.aggregates["late"].tolist() == [0.5, 1.0, 1.5]
    assert found.aggregates.positions("late").tolist() == [1, 2, 3]
    assert found.positions("resid_post", 5).tolist() == [1, 7]
    assert np.array_equal(found["resid_post", 5], ROWS.numpy()[1:])


def both(act):
    """What each client does: `act(client)` gives an iterator, or what is awaited."""

    async def collect(server):
        async with AsyncScopeClient(transport=httpx.MockTransport(server)) as client:
            found = act(client)
            return [c async for c in found] if hasattr(found, "__aiter__") else await found

    def run(server):
        found = act(server.client())
        return list(found) if hasattr(found, "__iter__") else found

    return [run, lambda server: asyncio.run(collect(server))]


def _refuses(act, words) -> list[str]:
    """Check that each client raises a SpecError that matches `words`, and sends nothing. Returns
    the errors' texts."""
    texts = []
    for run in both(act):
        server = Server(edits={}, monitors={})
        with pytest.raises(SpecError, match=words) as error:
            run(server)
        assert server.requests == []
        texts.append(str(error.value))
    return texts


TOKENS = [
    {"id": 5, "text": " a", "position": 12, "scores": {"p": 2.0, "q": None}},
    {"id": 6, "text": "b", "position": 13, "scores": {}},
]


def test_an_answers_tokens_have_their_scores():
    server = Server(completions={"choices": [choice(COUNTS | {"tokens": TOKENS})]})
    (found,) = server.client().complete("x", Probe(np.ones(4), layer=5, name="p")).choices
    assert [(t.text, t.scores.get("p")) for t in found.tokens] == [(" a", 2.0), ("b", None)]
    (plain,) = Server(completions={"choices": [choice(None)]}).client().complete("x").choices
    assert plain.tokens == ()


@pytest.mark.parametrize("run", both(lambda client: client.stream("x")), ids=["sync", "async"])
class TestStreams:
    def test_chunks_have_their_tokens_with_the_scores_of_each(self, run):
        aligned = choice({"scores": {}, "tokens": TOKENS}, text=" ab", finish_reason=None)
        first, second, last = run(
            Server(completions=sse({"choices": [aligned]}, STREAM[1], {"choices": [choice(None)]}))
        )
        assert [(t.id, t.text, t.position) for t in first.tokens] == [(5, " a", 12), (6, "b", 13)]
        assert first.tokens[0].scores["p"] == 2.0
        assert np.isnan(first.tokens[0].scores["q"])
        assert first.tokens[1].scores == {}
        assert second.tokens == last.tokens == ()

    def test_chunks_have_their_aggregates_and_the_verdicts_so_far(self, run):
        def scores(position, value):
            some = {"spans": [[position, position + 1]], "values": [value], "aggregates": [value]}
            return {"scores": {"p": some}}

        told = {"verdicts": {"p": {"position": 1, "value": 3.0}}}
        parts = scores(0, 2.0), scores(1, 3.0) | told, COUNTS | scores(2, 1.0) | told
        chunks = run(Server(completions=sse(*({"choices": [choice(part)]} for part in parts))))
        found = [chunk.scope for chunk in chunks]
        assert [one.aggregates["p"].tolist() for one in found] == [[2.0], [3.0], [1.0]]
        assert [one.verdicts.get("p") for one in found] == [None, *[Verdict(1, 3.0)] * 2]

    @pytest.mark.parametrize(
        "tokens", [3, [3], [{"id": 5}], [{HALF: 5}], [TOKENS[0] | {"scores": {"p": "much"}}]]
    )
    def test_tokens_of_another_form_are_refused(self, tokens, run):
        event = {"choices": [choice({"tokens": tokens})]}
        with pytest.raises(ScopeError, match="the server's tokens must have id"):
            run(Server(completions=sse(event)))

    @pytest.mark.parametrize("end", ["\u2028", "\u2029", "\u0085", "\r", "\x0b", "\x1c"])
    def test_text_may_hold_any_end_of_line(self, end, run):
        event = {"choices": [choice(None, text=f"a{end}b")]}
        text = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\ndata:[DONE]\n\n"
        if end < " ":
            text = text.replace(end + "b", json.dumps(end)[1:-1] + "b")
        (chunk,) = run(Server(completions=httpx.Response(200, content=text.encode())))
        assert chunk.text == f"a{end}b"

    def test_events_may_come_in_any_pieces(self, run):
        data = sse(*STREAM).content
        parts = [bytes([byte]) for byte in data]

        class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
            def __iter__(self):
                return iter(parts)

            async def __aiter__(self):
                for part in parts:
                    yield part

        chunks = run(Server(completions=httpx.Response(200, stream=Pieces())))
        assert [chunk.text for chunk in chunks] == ["", "t", "t"]

    def test_one_that_ends_in_the_middle_is_no_answer(self, run):
        whole = sse(*STREAM).content
        for size in (whole.index(b"data: [DONE]"), whole.index(b"data: [DONE]") - 40, 0):
            with pytest.raises(ServerError, match="ended before the answer did"):
                run(Server(completions=httpx.Response(200, content=whole[:size])))

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            ({"message": "the engine died.", "code": 500}, "the engine died"),
            ({"message": "it died.", "code": None}, "it died"),
            ({"message": "it died.", "code": "oops"}, "it died"),
            ("boom", "boom"),
        ],
    )
    def test_an_error_within_is_raised(self, error, words, run):
        with pytest.raises(ServerError, match=words):
            run(Server(completions=sse(STREAM[0], {"error": error})))


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.complete("x"),
        lambda client: client.stream("x"),
        lambda client: client.delete_module("completions"),
        lambda client: client.clear_edits(),
    ],
    ids=["complete", "stream", "delete", "clear"],
)
def test_a_redirect_is_an_error(act):
    for run in both(act):
        elsewhere = httpx.Response(308, headers={"location": "https://other/"})
        with pytest.raises(ServerError, match="HTTP 308: a redirect to 'https://other/'; give"):
            run(Server(completions=elsewhere, edits=elsewhere))


@pytest.mark.parametrize("address", ["javascript:1", "http://xn--a/", "http://a b/", "//["])
def test_a_redirect_to_what_is_no_url_is_an_error_of_ours(address):
    runs = [*both(lambda client: client.complete("x")), *both(lambda client: client.stream("x"))]
    for run in runs:
        nowhere = httpx.Response(301, headers={"location": address})
        with pytest.raises(ScopeError, match=r"no answer from http|a redirect to"):
            run(Server(completions=nowhere))


def test_a_page_instead_of_an_answer_is_an_error():
    server = Server(completions=httpx.Response(200, content=b"<html>login"))
    with pytest.raises(ServerError, match="the answer is no JSON but"):
        server.client().complete("x")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param([], "server's answer", id="a-list"),
        pytest.param({"choices": [{"index": "first"}]}, "server's answer", id="an-index"),
        pytest.param({"choices": [choice({"rows": 3})]}, "server's scope", id="rows"),
        pytest.param({"choices": [choice({"expected": None})]}, "server's scope", id="a-count"),
        pytest.param(
            {"choices": [choice({"verdicts": {"p": 7}})]}, "server's scope", id="a-verdict"
        ),
        pytest.param({"choices": [choice({"begun": {"p": "x"}})]}, "server's scope", id="a-stage"),
        pytest.param(
            {"choices": [choice({"rows": [entry(ROWS, data="%")]})]}, "server's scope", id="base64"
        ),
        pytest.param({"choices": [choice(None) | {HALF: 1}]}, "server's answer", id="a-half"),
        pytest.param(
            {"choices": [choice({"rows": [entry(ROWS, data=HALF)]})]}, "server's scope", id="half"
        ),
    ],
)
def test_json_of_another_form_is_one_sentence(body, words):
    with pytest.raises(ScopeError, match=f"the {words} has an unknown form: .*[.]$"):
        Server(completions=body).client().complete("x")


@pytest.mark.parametrize("name", [".", "..", ""])
def test_no_name_of_a_module_is_another_path(name):
    with pytest.raises(SpecError, match="module"):
        Server().client().delete_module(name)


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


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        pytest.param([], r"no edit; give at least one, or call clear_edits\(\)", id="nothing"),
        pytest.param([Read("resid_post")], "has Read.* must be an edit .Add, Ablate", id="a-read"),
        pytest.param([Add("m"), Probe(np.ones(4), layer=1, name="p")], "has Probe", id="a-probe"),
        pytest.param([Policy("p")], "has Policy", id="a-policy"),
        pytest.param([Add("m"), "m"], "has 'm'; each argument must be", id="a-name"),
    ],
)
def test_set_edits_refuses_what_is_no_edit_and_leaves_the_servers_edits(actions, words):
    _refuses(lambda client: client.set_edits(*actions), f"set_edits.*{words}")


@pytest.mark.parametrize(
    ("monitor", "came"),
    [
        pytest.param({"weight": np.ones(4), "layers": [1]}, "type ndarray", id="an-array"),
        pytest.param(Probe(np.ones(4), layer=1, name="p"), "type Probe", id="a-probe"),
        pytest.param({"weight": [1.0], "threshold": float("nan")}, "float values", id="not-finite"),
    ],
)
def test_a_monitor_that_is_no_json_is_named_and_nothing_is_sent(monitor, came):
    for said in _refuses(
        lambda client: client.set_monitors({"fine": {}, "risky": monitor}),
        r"^monitors\['risky'\] cannot be sent as JSON: ",
    ):
        assert came in said
        assert "weight.tolist()" in said


@pytest.mark.parametrize("given", [[{"layers": [1]}], "risky", None], ids=["list", "text", "none"])
def test_monitors_that_are_no_map_are_refused_and_nothing_is_sent(given):
    words = "it must be a dict from the name of each monitor"
    _refuses(lambda client: client.set_monitors(given), words)


def test_any_map_of_monitors_is_sent_and_a_name_that_is_no_text_is_refused():
    monitors = {"risky": {"layers": [1]}}
    for run in both(lambda client: client.set_monitors(MappingProxyType(monitors))):
        server = Server(monitors={})
        run(server)
        assert server.body == {"monitors": monitors}
    for name in (7, ("risky", 1)):
        _refuses(
            lambda client, name=name: client.set_monitors({name: {"layers": [1]}}),
            r"^monitors has the name .*; it must be a text",
        )


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "complete"), ("length", "complete"), ("abort", "aborted"), (None, "streaming")],
)
def test_a_plain_answer_with_a_monitors_verdict_has_ended(reason, status):
    told = {"verdicts": {"monitor/m": {"position": 3, "value": 1.0}}}
    part = choice(told, finish_reason=reason)
    out = Server(completions={"choices": [part]}).client().complete("x")
    (chunk,) = Server(completions=sse({"choices": [part]})).client().stream("x")
    for found in (out.scope, chunk.scope):
        assert found.status == status
        assert found.verdicts == {"monitor/m": Verdict(3, 1.0)}


def test_requests_with_moments_carry_the_operators_key_and_others_do_not():
    server = Server(completions={"choices": []})
    client = server.client(admin_key="op")
    for action, sent in ((Moments(), True), (Read("resid_post"), False)):
        client.complete("x", action)
        assert ("x-scope-admin-key" in server.requests[-1].headers) == sent


def test_a_module_may_be_the_content_of_its_file():
    server = Server(happy={})
    module = SteeringModule({("resid_post", 1): np.ones(4)})
    data = to_bytes(module)
    for content in (data, bytearray(data), memoryview(data)):
        server.client().put_module("happy", content)
        assert server.requests[-1].content == data
    with pytest.raises(SpecError, match="is not safetensors"):
        server.client().put_module("happy", b"nonsense")
    assert len(server.requests) == 3


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """An answer that stops in the middle, with the connection."""

    def __iter__(self):
        yield sse(*STREAM).content[:60]
        raise httpx.ReadError("")

    async def __aiter__(self):
        yield sse(*STREAM).content[:60]
        raise httpx.ReadError("")


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.complete("x"),
        lambda client: client.stream("x"),
        lambda client: client.info(),
        lambda client: client.put_module("a", SteeringModule({("embed", 0): [1.0]})),
    ],
    ids=["complete", "stream", "info", "put"],
)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "no answer from http://here:8000: refused"),
        (httpx.ReadTimeout(""), "no answer from http://here:8000: ReadTimeout"),
        (httpx.RemoteProtocolError("gone"), "no answer from http://here:8000: gone"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error_of_ours(act, error, words):
    def fail(request):
        raise error

    async def collect():
        async with AsyncScopeClient(
            "http://here:8000/v1", model="m", transport=httpx.MockTransport(fail)
        ) as client:
            found = act(client)
            return [c async for c in found] if hasattr(found, "__aiter__") else await found

    def listed():
        found = act(ScopeClient(
            "http://here:8000/v1", model="m", transport=httpx.MockTransport(fail)
        ))  # fmt: skip
        return list(found) if hasattr(found, "__iter__") else found

    for run in (listed, lambda: asyncio.run(collect())):
        with pytest.raises(UnreachableError, match=f"^{words}[.]$") as raised:
            run()
        assert isinstance(raised.value, ScopeError)
        assert raised.value.__cause__ is error


@pytest.mark.parametrize("run", both(lambda client: client.stream("x")), ids=["sync", "async"])
def test_a_server_that_goes_away_while_it_answers_is_the_same_error(run):
    broken = httpx.Response(200, stream=Broken())
    with pytest.raises(UnreachableError, match="no answer from http://localhost:8000: ReadError"):
        run(Server(completions=broken))
    refused = httpx.Response(503, stream=Broken())
    with pytest.raises(UnreachableError, match="no answer from http://localhost:8000: ReadError"):
        run(Server(completions=refused))


@pytest.mark.parametrize("kind", [ScopeClient, AsyncScopeClient])
def test_an_address_that_is_no_url_is_refused(kind):
    with pytest.raises(SpecError, match=r"base_url is 'http://a b:1x'; .*such as http:"):
        kind("http://a b:1x")


@pytest.mark.parametrize("kind", [ScopeClient, AsyncScopeClient])
@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["secret\r", "secret ", "sécret", b"secret"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key, name, kind):
    with pytest.raises(SpecError, match=f"{name} must be a string of printable ASCII") as caught:
        kind(**{name: key})
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        pytest.param("a\udcff", {}, "surrogates not allowed", id="half-of-a-pair"),
        pytest.param("a", {"temperature": math.inf}, "Out of range float", id="infinite"),
    ],
)
def test_a_request_that_is_no_json_is_refused_with_a_sentence(prompt, options, said):
    server = Server()
    with pytest.raises(SpecError, match=f"the request cannot be sent as JSON: .*{said}"):
        server.client(model="m").complete(prompt, **options)
    assert server.requests == []


def test_rows_that_do_not_fit_their_shape_are_refused():
    with pytest.raises(ScopeError, match=r"48 bytes for rows of float32 of shape \[3, 5\]"):
        parse_scope({"rows": [entry(ROWS, shape=[3, 5])]}, None)
    with pytest.raises(ScopeError, match="does not know"):
        parse_scope({"rows": [entry(ROWS, dtype="int4")]}, None)


SPANS = "server's scope has an unknown form"
TABLE = {"spans": [[0, 2]], "token_ids": [[1, 2], [3, 4]], "log_probs": [[0, -1], [-1, -2]]}
LENS = {"name": "l", "layer": 1} | TABLE


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"rows": [entry(ROWS, spans=[[0, 4]])]}, r"of shape \[3, 4\] for 4 positions"),
        ({"rows": [entry(ROWS, spans=[[0, 2**40]])]}, "for 1099511627776 positions"),
        ({"rows": [entry(ROWS, spans=[[0, 2**70]])]}, SPANS),
        ({"rows": [entry(ROWS, spans=[[-3, 0]])]}, SPANS),
        ({"rows": [entry(ROWS, spans=[[0, 4], [4, 3]])]}, "spans must be ascending"),
        ({"rows": [entry(ROWS, spans=[[0, 2], [1, 2]])]}, "spans must be ascending"),
        ({"rows": [entry(ROWS, shape=[])]}, "48 bytes for rows of float32"),
        (
            {"rows": [entry(ROWS, data="", shape=[2**36, 0], spans=[[0, 2**36]])]},
            r" 0 bytes for rows of float32 of shape \[68719476736, 0\]",
        ),
        ({"rows": [entry(ROWS[:1, :1], shape=[], spans=[])]}, "for 0 positions"),
        ({"rows": [entry(ROWS, shape=[-3, -4])]}, SPANS),
        ({"rows": [entry(ROWS, data="AAAA")]}, "3 bytes for rows"),
        ({"scores": {"p": {"spans": [[0, 2**40]], "values": [1.0]}}}, "for 1099511627776"),
        ({"scores": {"p": {"spans": [[0, 1]], "values": [1.0], "aggregates": []}}}, r"\[0\] for 1"),
        ({"features": {"f": {"spans": [[0, 2**40]], "indices": [[1]], "values": [[1]]}}}, "for 10"),
        ({"features": {"f": {"spans": [[0, 1]], "indices": [[2**70]], "values": [[1]]}}}, SPANS),
        ({"lens": [LENS | {"spans": [[0, 2**40]]}]}, "for 1099511627776 positions"),
        ({"lens": [LENS | {"token_ids": [[1], [2, 3]]}]}, r"a lens with \[1, 2\] items"),
        ({"lens": [LENS | {"token_ids": [[1, 2], [2**70, 3]]}]}, SPANS),
        ({"result": {}}, SPANS),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_their_positions_are_refused(body, words):
    answer = {"choices": [choice(COUNTS | body)]}
    with pytest.raises(ScopeError, match=words):
        Server(completions=answer).client().complete("x")


def test_spans_of_values_in_a_file_select_from_the_positions_of_the_file():
    """The client allocates nothing for the other positions of a span."""
    at = torch.tensor([1, 5, 9])
    file = safetensors.torch.save({"resid_post.5": ROWS, "resid_post.5.positions": at})
    told = {name: value for name, value in entry(ROWS).items() if name != "data"}
    for spans, found in (
        ([[0, 2**62]], [1, 5, 9]), ([[1, 5], [5, 6]], [1, 5]), ([[2, 5], [9, 10]], [9]), ([], []),
    ):  # fmt: skip
        data = parse_scope({"rows": [told | {"spans": spans}]}, file)
        assert data.positions("resid_post", 5).tolist() == found


def test_the_client_loads_neither_torch_nor_vllm():
    code = (
        "import sys; import vllm_scope.client; "
        "print([m for m in ('torch', 'vllm', 'fastapi', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_the_time_of_a_long_event_does_not_depend_on_its_pieces():
    event = b"data: " + b"x" * (8 << 20) + b"\n"
    took = []
    for size in (1 << 20, 1 << 12):
        events, started = Events(), time.thread_time()
        found = [
            one for at in range(0, len(event), size) for one in events.feed(event[at : at + size])
        ]
        took.append(time.thread_time() - started)
        assert [len(one.answer) for one in found] == [8 << 20]
    assert took[1] < 10 * took[0] + 0.1


def test_the_time_of_many_small_files_is_in_proportion_to_their_number():
    """If a response is compressed, httpx can pass many files in one piece of bytes."""
    one = struct.pack("<Q", 2) + b"{}"
    took = []
    for count in (10_000, 100_000):
        frames, started = Frames(), time.thread_time()
        assert frames.feed(one * count + one[:4]) == []
        took.append(time.thread_time() - started)
        assert frames.feed(one[4:]) == []
    assert took[1] < 30 * took[0]


# Binary answers, written by the format's own library


def binary(answer, **tensors):
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    tensors["answer"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    return safetensors.torch.save({name.replace("__", "."): one for name, one in tensors.items()})


def binary_scope(rows, **more):
    told = entry(rows) | {"tensor": "choices.0.resid_post.5"}
    del told["data"]
    return COUNTS | {"rows": [told]} | more


def binary_rows(rows):
    return {"choices__0__resid_post__5": rows, "choices__0__resid_post__5__positions": AT}


AT = torch.tensor([0, 1, 7])


def binary_response(*files):
    return httpx.Response(200, content=b"".join(files), headers={"Content-Type": f"{BINARY}; v=1"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_binary_answer_gives_the_same_objects(dtype):
    rows = ROWS.to(dtype)
    scores = {"p": {"spans": [[3, 5]], "values": [1.5, None]}}
    file = binary({"choices": [choice(binary_scope(rows, scores=scores))]}, **binary_rows(rows))
    server = Server(completions=binary_response(file))
    out = server.client().complete("x", Read("resid_post", layers=[5]))
    assert BINARY in server.requests[-1].headers["accept"]
    assert torch.equal(out.scope.tensor("resid_post", 5), rows)
    assert out.scope.tensor("resid_post", 5).dtype == dtype
    assert out.scope.positions("resid_post", 5).tolist() == [0, 1, 7]
    assert out.scope.scores["p"][0] == 1.5
    assert (out.scope.status, out.text) == ("complete", "t")


def test_a_binary_stream_gives_the_same_chunks():
    files = [
        binary({"choices": [choice({"rows": []}, finish_reason=None)]}),
        safetensors.torch.save({}),  # keeps the connection alive
        binary({"choices": [choice(binary_scope(ROWS))]}, **binary_rows(ROWS)),
        binary(b"[DONE]"),
    ]
    server = Server(completions=binary_response(*files))
    first, last = server.client().stream("x", Read("resid_post", layers=[5]))
    assert (first.scope.status, last.scope.status) == ("streaming", "complete")
    assert np.array_equal(last.scope["resid_post", 5], ROWS.numpy())
    cut = Server(completions=binary_response(*files[:-1]))
    with pytest.raises(ServerError, match="ended before the answer did"):
        list(cut.client().stream("x", Read("resid_post", layers=[5])))


def test_an_error_in_a_binary_stream_is_raised():
    error = {"error": {"message": "no room", "code": 429}}
    server = Server(completions=binary_response(binary(error), binary(b"[DONE]")))
    with pytest.raises(CapacityError, match="no room"):
        list(server.client().stream("x", Read("resid_post", layers=[5])))


def test_only_requests_with_actions_ask_for_binary_and_only_if_the_client_may():
    server = Server(completions={"choices": [choice(None)]})
    server.client().complete("x")
    assert BINARY not in server.requests[-1].headers["accept"]
    server.client(binary=False).complete("x", Read("embed"))
    assert BINARY not in server.requests[-1].headers["accept"]
    server.client().complete("x", Read("embed"))
    assert BINARY in server.requests[-1].headers["accept"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"\xff" * 30, "is not safetensors", id="no-file"),
        pytest.param(safetensors.torch.save({"a": ROWS}), "no JSON", id="no-answer"),
        pytest.param(
            binary({"choices": [choice(binary_scope(ROWS))]}), "names the tensor", id="no-tensor"
        ),
    ],
)
def test_a_damaged_binary_answer_is_an_error(content, words):
    server = Server(completions=binary_response(content))
    with pytest.raises(ScopeError, match=words):
        server.client().complete("x", Read("resid_post", layers=[5]))


DEEP = b"[" * 200_000 + b"]" * 200_000


def test_json_that_is_too_deep_is_an_error_of_ours():
    deep = b'{"choices": ' + DEEP + b"}"
    with pytest.raises(ServerError, match="the answer is no JSON but"):
        Server(completions=httpx.Response(200, content=deep)).client().complete("x")
    with pytest.raises(SpecError, match=r"^\{\"choices\": \[\["):
        Server(completions=httpx.Response(400, content=deep)).client().complete("x")
    events = httpx.Response(
        200, content=b"data: " + deep + b"\n\n", headers={"content-type": "text/event-stream"}
    )
    with pytest.raises(ServerError, match="the answer is no JSON but"):
        list(Server(completions=events).client().stream("x"))
    header = struct.pack("<Q", len(deep)) + deep
    with pytest.raises(ScopeError, match="the server's stream is damaged"):
        list(Server(completions=binary_response(header)).client().stream("x", Read("embed")))
    rows = {"resid_post.5": ROWS, "resid_post.5.positions": torch.arange(len(ROWS))}
    with pytest.raises(ScopeError, match="the server's result has metadata of an unknown form"):
        parse_file(safetensors.torch.save(rows, {"scope": DEEP.decode()}))


@pytest.mark.parametrize("models", [[], [{}], [{"id": 7}]])
def test_a_server_that_names_no_model_is_an_error_of_ours(models):
    with pytest.raises(ScopeError, match="the server's list of models has an unknown form"):
        Server(models).client().complete("x")


def test_a_stream_whose_header_is_no_text_is_an_error():
    damaged = binary({"choices": []}).replace(b'"answer"', b'"answe\xb2"')
    server = Server(completions=binary_response(damaged))
    with pytest.raises(ScopeError, match="the server's stream is damaged"):
        list(server.client().stream("x", Read("resid_post", layers=[5])))
