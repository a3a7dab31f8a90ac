"""Answers and chunks of one HTTP request, and its files if the client leaves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from contextlib import suppress
from functools import partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from vllm import SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from tests.unit.roads import SITES
from vllm_scope import Features, Moments, Probe, Read, Spec, SpecError, scope
from vllm_scope.batch.by_position import Part
from vllm_scope.client.parsing import parse_file, parse_scope
from vllm_scope.engine.frontend import requests
from vllm_scope.engine.frontend.connection import Connection, connections
from vllm_scope.engine.http import serving as http
from vllm_scope.engine.refusals import busy, refusal
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import CapacityError
from vllm_scope.request.sites import Place
from vllm_scope.results.budget import asking
from vllm_scope.results.column import Column
from vllm_scope.results.result import ScopeResult
from vllm_scope.results.streams import StreamTable
from vllm_scope.server import answer as module
from vllm_scope.server import choice, encode
from vllm_scope.server.answer import Answer, current
from vllm_scope.server.exchange import Exchange
from vllm_scope.server.options import ScopeOptions
from vllm_scope.server.store import Store
from vllm_scope.server.tokens import ScoredTokens
from vllm_scope.sinks import Manifest

SIZE = SITES.hidden_size
NUM_PROMPT, NUM_TOKENS = 3, 9
ROWS = torch.arange(NUM_TOKENS * SIZE, dtype=torch.float32).view(NUM_TOKENS, SIZE)
SPEC = scope(Read("resid_post", layers=[1]), Probe(np.ones(SIZE), layer=1, name="p"))


#: The mean of all scores up to each.
MEAN = scope(Probe(np.ones(SIZE), layer=1, name="p", aggregate="mean"))
MEANS = [ROWS[: n + 1, 0].mean().item() for n in range(NUM_TOKENS)]
#: Two features that the request names; their SAE's size is not known.
ENCODER = {"encoder": np.ones((2, SIZE)), "bias": [0, 0], "threshold": [0, 0]}
SOME = scope(Features(ENCODER, indices=[9, 4], name="f", site="resid_post", layer=1))


def result(num_tokens=NUM_TOKENS, num_arrived=None, status="complete", spec=SPEC):
    """Of a request that has processed all tokens but the last, and got some of its values."""
    n = num_tokens - 1 if num_arrived is None else num_arrived
    at, asked = np.arange(n), Spec.from_json(spec["scope"]).resolve(SITES)
    point = Place("resid_post", 1).point()
    parts = {None: {point: [Part(at, at, ROWS[:n])]}}
    for probe in asked.probes:
        (cell,) = probe.cells
        parts[cell.bank.nameless] = {cell.place.point(): [Part(at, at, ROWS[:n, :1])]}
    for one in asked.features:
        (cell,) = one.cells
        parts[cell.bank.nameless] = {cell.place.point(): [Part(at, at, ROWS[:n, :2])]}
    ids = list(range(num_tokens))
    return ScopeResult(asked, SITES, ids, NUM_PROMPT, parts, status, None)


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path, "run", 1 << 20, 600.0)
    yield found
    found.close()


def answer(store, streams=False, n=1, **options):
    """On a running loop, as it is made by a request."""
    found = Answer(ScopeOptions(**options), store, 1 << 20, "owner", n, streams)
    if not streams:
        found.add_prompt()
        found.open_one(lambda: None, True)
    return found


TEXTS = [f" {i}" for i in range(NUM_PROMPT, NUM_TOKENS)]


def completion(index=0, *args):
    scope = result(*args)
    end = None if scope.status == "streaming" else "length"
    return SimpleNamespace(index=index, finish_reason=end, scope=scope, scope_texts=TEXTS)


def take(found, index=0, *args):
    found.take(0, completion(index, *args))


def response(*indices):
    return SimpleNamespace(choices=[SimpleNamespace(index=index) for index in indices])


def text_of(index=0, end=None):
    choice = {"index": index, "text": 'ü " \\', "finish_reason": end}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def on_a_loop(test):
    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@on_a_loop
async def test_chunks_carry_each_value_once_whatever_arrives_when(store):
    found = answer(store, streams=True, stream="rows")
    found.add_prompt()
    found.open_one(lambda: None, True)
    sent = []
    for tokens, arrived in ((4, 2), (5, 2), (6, 6), (9, 7), (9, None)):
        end = None if arrived is not None else "length"
        take(found, 0, tokens, arrived, "complete" if end else "streaming")
        chunk = await found.chunk(text_of(end=end))
        assert chunk.endswith("\n\n")
        sent.append(json.loads(chunk.removeprefix("data: "))["choices"][0])
    assert {choice["text"] for choice in sent} == {'ü " \\'}
    spans = [[r["spans"] for r in choice["scope"]["rows"]] for choice in sent]
    assert spans == [[[[0, 2]]], [], [[[2, 5]]], [[[5, 7]]], [[[7, 8]]]]
    values = [v for c in sent for s in c["scope"]["scores"].values() for v in s["values"]]
    assert values == ROWS[:8, 0].tolist()
    assert sent[-1]["scope"]["status"] == "complete"
    assert (sent[-1]["scope"]["expected"], sent[-1]["scope"]["dropped"]) == (16, 0)


def entries(first, last, scored):
    """The generated tokens of these positions; those of `scored` with the score of their row."""
    return [
        {
            "id": p, "text": f" {p}", "position": p,
            "scores": {"p": ROWS[p, 0].item()} if p in scored else {},
        }
        for p in range(first, last)
    ]  # fmt: skip


@on_a_loop
async def test_each_token_is_sent_once_with_the_score_of_its_own_row(store):
    found, told = answer(store, streams=True), []
    found.add_prompt()
    found.open_one(lambda: None, True)
    for tokens, arrived in ((4, 2), (5, 3), (6, 5), (9, 7), (9, None)):
        end = None if arrived is not None else "length"
        take(found, 0, tokens, arrived, "complete" if end else "streaming")
        chunk = await found.chunk(text_of(end=end))
        told.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["scope"]["tokens"])
    # The token sampled last was not processed, and has no score.
    scored = range(3, 8)
    assert told == [[], [], entries(3, 5, scored), entries(5, 7, scored), entries(7, 9, scored)]


@on_a_loop
async def test_a_whole_answer_has_its_tokens_too(store):
    found, made = answer(store), response(0)
    take(found)
    await found.fill(made)
    assert made.choices[0].scope["tokens"] == entries(3, 9, range(3, 8))


@on_a_loop
async def test_drafts_that_may_be_rejected_are_sent_at_the_end(store):
    found, told = answer(store, streams=True), []
    found.holds = True
    found.add_prompt()
    found.open_one(lambda: None, True)
    for tokens, end in ((6, None), (9, "length")):
        take(found, 0, tokens, None, "complete" if end else "streaming")
        chunk = await found.chunk(text_of(end=end))
        told.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["scope"])
    assert told[0] == {"rows": [], "scores": {}}
    assert told[1]["tokens"] == entries(3, 9, range(3, 8))
    assert told[1]["scores"]["p"]["spans"] == [[0, 8]]


@on_a_loop
async def test_too_many_tokens_with_scores_are_left_out(store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 5)
    (first, last) = await sent_in_chunks(store, "scores", 3, 9)
    assert first["tokens"] == []
    assert "tokens" not in last


@on_a_loop
async def test_a_token_after_too_many_has_its_score(store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 3)
    sent = await sent_in_chunks(store, "scores", 4, 8, 9)
    assert ["tokens" in body for body in sent] == [True, False, True]
    assert sent[2]["tokens"] == entries(7, 9, range(3, 8))


def test_the_scores_of_too_many_tokens_take_no_memory():
    num_tokens = 2000
    at, values = np.arange(num_tokens), torch.zeros(num_tokens)
    columns = [Column(f"p{i}", values, at) for i in range(64)]
    found = SimpleNamespace(num_prompt=0, transcript=list(range(num_tokens)))
    tracemalloc.start()
    told = ScoredTokens().take(found, columns, [""] * num_tokens, None, 16_384)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told is None
    assert peak < 1 << 20


@on_a_loop
async def test_without_probes_there_are_no_tokens(store):
    found, made = answer(store), response(0)
    take(found, 0, NUM_TOKENS, None, "complete", scope(Read("resid_post", layers=[1])))
    await found.fill(made)
    assert "tokens" not in made.choices[0].scope


@on_a_loop
async def test_chunks_of_scores_do_not_assemble_rows(store, monkeypatch):
    """That takes milliseconds of the event loop, of every chunk."""
    rows, asked = StreamTable.rows, []
    monkeypatch.setattr(StreamTable, "rows", lambda *a: asked.append(a) or rows(*a))
    found, sent = answer(store, streams=True), []
    found.add_prompt()
    found.open_one(lambda: None, True)
    for tokens, end in ((5, None), (9, "length")):
        assert not asked
        take(found, 0, tokens, None, "complete" if end else "streaming")
        chunk = await found.chunk(text_of(end=end))
        sent.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["scope"])
    assert [body["scores"]["p"]["spans"] for body in sent] == [[[0, 4]], [[4, 8]]]
    assert [[row["spans"] for row in body["rows"]] for body in sent] == [[], [[[0, 8]]]]


async def sent_in_chunks(store, stream, *num_tokens, spec=SPEC):
    """The scope of each chunk, at so many tokens; the last one ends."""
    found, sent = answer(store, streams=True, stream=stream), []
    found.add_prompt()
    found.open_one(lambda: None, True)
    for tokens in num_tokens:
        end = "length" if tokens == num_tokens[-1] else None
        take(found, 0, tokens, None, "complete" if end else "streaming", spec)
        chunk = await found.chunk(text_of(end=end))
        sent.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["scope"])
    return sent


@on_a_loop
async def test_aggregates_are_beside_the_values_of_a_whole_answer(store):
    found, made = answer(store), response(0)
    take(found, 0, NUM_TOKENS, None, "complete", MEAN)
    await found.fill(made)
    told = made.choices[0].scope
    values = {"spans": [[0, 8]], "values": ROWS[:8, 0].tolist(), "aggregates": MEANS[:8]}
    assert told["scores"] == {"p": values}
    # A token has its score alone.
    assert told["tokens"] == entries(3, 9, range(3, 8))


@on_a_loop
async def test_aggregates_of_a_chunk_are_of_all_scores_up_to_there(store):
    sent = await sent_in_chunks(store, "scores", 3, 8, 9, spec=MEAN)
    told = [body["scores"]["p"] for body in sent]
    assert [one["spans"] for one in told] == [[[0, 2]], [[2, 7]], [[7, 8]]]
    assert [one["aggregates"] for one in told] == [MEANS[:2], MEANS[2:7], MEANS[7:8]]


@on_a_loop
async def test_aggregates_of_scores_that_are_in_the_file_are_there_too(store, monkeypatch):
    # Of 2 scores with their aggregates there are 4 numbers, of 5 there are 10.
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 9)
    first, _, last = await sent_in_chunks(store, "scores", 3, 8, 9, spec=MEAN)
    assert first["scores"]["p"]["aggregates"] == MEANS[:2]
    assert last["scores"] == {"p": {"spans": [[2, 8]]}}
    with store.open(last["result"]["id"], "owner") as file:
        data = file.read()
    found = safetensors.torch.load(data)
    assert set(found) == {"scores.p", "scores.p.positions", "aggregates.p"}
    assert found["aggregates.p"].tolist() == MEANS[:8]
    end = parse_scope(last, data)
    assert end.aggregates["p"].tolist() == MEANS[2:8]
    assert end.aggregates.positions("p").tolist() == list(range(2, 8))


@pytest.mark.parametrize("streams_rows", [True, False])
@on_a_loop
async def test_too_many_scores_for_a_chunk_are_in_the_file(streams_rows, store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 3)
    stream = "rows" if streams_rows else "scores"
    sent = await sent_in_chunks(store, stream, 3, 8, 9)
    first, then, last = [body["scores"] for body in sent]
    assert first["p"] == {"spans": [[0, 2]], "values": ROWS[:2, 0].tolist()}
    assert (then, last["p"]) == ({}, {"spans": [[2, 8]]})
    rows = [row["spans"] for body in sent for row in body["rows"]]
    assert rows == ([[[0, 2]], [[2, 7]], [[7, 8]]] if streams_rows else [[[0, 8]]])
    with store.open(sent[-1]["result"]["id"], "owner") as file:
        end = parse_scope(sent[-1], file.read())
    # Each value once, as in all chunks.
    assert end.scores["p"].tolist() == ROWS[2:8, 0].tolist()
    assert end.positions("resid_post", 1).tolist() == ([7] if streams_rows else list(range(8)))
    assert end["resid_post", 1].tolist() == ROWS[end.positions("resid_post", 1)].tolist()


@on_a_loop
async def test_an_answer_says_which_features_were_read(store):
    found, made = answer(store), response(0)
    take(found, 0, NUM_TOKENS, None, "complete", SOME)
    await found.fill(made)
    told = made.choices[0].scope["features"]["f"]
    assert list(told["asked"]) == [9, 4]
    assert "num_features" not in told
    features = parse_scope(made.choices[0].scope, None).features["f"]
    assert features.dense(4).tolist() == ROWS[:8, 1].tolist()
    with pytest.raises(KeyError, match=r"feature 5 was not read; the read named \[9, 4\]"):
        features.dense(5)


@on_a_loop
@pytest.mark.parametrize("most", [pytest.param(99, id="inline"), pytest.param(9, id="file")])
async def test_the_chunks_of_a_choice_say_once_which_features_were_read(store, monkeypatch, most):
    """The second chunk has 25 numbers: 5 tokens with two features each."""
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", most)
    sent = await sent_in_chunks(store, "scores", 2, 7, 8, 9, spec=SOME)
    told = [body["features"]["f"] for body in sent if "features" in body]
    assert [one["spans"] for one in told] == (
        [[[0, 1]], [[1, 6]], [[6, 7]], [[7, 8]]]
        if most == 99
        else [[[0, 1]], [[6, 7]], [[1, 6], [7, 8]]]
    )
    assert [one.get("asked") for one in told] == [[9, 4], *[None] * (len(told) - 1)]


@on_a_loop
async def test_features_that_are_in_the_file_say_there_which_were_read(store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 3)
    sent = await sent_in_chunks(store, "scores", 8, 9, spec=SOME)
    assert [list(body.get("features", {}).get("f", {})) for body in sent] == [
        [],
        ["spans", "asked"],
    ]
    with store.open(sent[-1]["result"]["id"], "owner") as file:
        data = file.read()
    for found in (parse_file(data), parse_scope(sent[-1], data)):
        assert found.features["f"].asked == (9, 4)
        with pytest.raises(KeyError, match="feature 5 was not read"):
            found.features["f"].dense(5)


@on_a_loop
async def test_too_many_rows_for_a_chunk_are_in_the_file(store, monkeypatch):
    monkeypatch.setattr(choice, "MAX_CHUNK_BYTES", 3 * ROWS[0].nbytes)
    sent = await sent_in_chunks(store, "rows", 6, 8, 9)
    told = [[(row["spans"], "data" in row) for row in body["rows"]] for body in sent]
    assert told == [[], [([[5, 7]], True)], [([[0, 5], [7, 8]], False)]]
    assert [body["scores"]["p"]["spans"] for body in sent] == [[[0, 5]], [[5, 7]], [[7, 8]]]
    with store.open(sent[-1]["result"]["id"], "owner") as file:
        end = parse_scope(sent[-1], file.read())
    assert end.positions("resid_post", 1).tolist() == [0, 1, 2, 3, 4, 7]
    assert end["resid_post", 1].tolist() == ROWS[[0, 1, 2, 3, 4, 7]].tolist()
    assert end.scores["p"].tolist() == ROWS[7:8, 0].tolist()


#: A probe and a read of every second token.
SECOND = scope(
    Read("resid_post", layers=[1], tokens=[0, 2, 4, 6]),
    Probe(np.ones(SIZE), layer=1, name="p", tokens=[0, 2, 4, 6]),
)


def scattered(num_arrived, status="complete"):
    """A completion of SECOND whose first values have arrived."""
    found = completion(0, NUM_TOKENS, None, status, SECOND)
    at = np.array([0, 2, 4, 6])[:num_arrived]
    asked = Spec.from_json(SECOND["scope"]).resolve(SITES)
    (cell,) = asked.probes[0].cells
    point = Place("resid_post", 1).point()
    parts = {
        None: {point: [Part(at, at, ROWS[at])]},
        cell.bank.nameless: {point: [Part(at, at, ROWS[at, :1])]},
    }
    found.scope = ScopeResult(
        asked, SITES, list(range(NUM_TOKENS)), NUM_PROMPT, parts, status, None
    )
    return found


@pytest.mark.parametrize(("most", "told"), [(2, [[0, 7]]), (4, [[p, p + 1] for p in (0, 2, 4, 6)])])
@on_a_loop
async def test_many_spans_of_values_in_a_file_become_few(most, told, store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 3)
    monkeypatch.setattr(encode, "MAX_LATE_SPANS", most)
    found, made = answer(store, tensors="handle"), response(0)
    found.take(0, scattered(4))
    await found.fill(made)
    body = made.choices[0].scope
    assert body["scores"] == {"p": {"spans": told}}
    assert [(row["spans"], row["shape"]) for row in body["rows"]] == [(told, [4, SIZE])]
    with store.open(body["result"]["id"], "owner") as file:
        end = parse_scope(body, file.read())
    assert end.scores.positions("p").tolist() == [0, 2, 4, 6]
    assert end["resid_post", 1].tolist() == ROWS[[0, 2, 4, 6]].tolist()


@on_a_loop
async def test_few_spans_of_late_values_contain_no_position_of_an_earlier_chunk(store, monkeypatch):
    monkeypatch.setattr(encode, "MAX_INLINE_SCORES", 1)
    monkeypatch.setattr(encode, "MAX_LATE_SPANS", 1)
    found, sent = answer(store, streams=True, stream="rows"), []
    found.add_prompt()
    found.open_one(lambda: None, True)
    for arrived, end in ((1, None), (3, None), (4, "length")):
        found.take(0, scattered(arrived, "complete" if end else "streaming"))
        chunk = await found.chunk(text_of(end=end))
        sent.append(json.loads(chunk.removeprefix("data: "))["choices"][0]["scope"])
    assert [body["scores"].get("p", {}).get("spans") for body in sent] == [[[0, 1]], None, [[2, 7]]]
    with store.open(sent[-1]["result"]["id"], "owner") as file:
        end = parse_scope(sent[-1], file.read())
    assert end.scores.positions("p").tolist() == [2, 4, 6]
    assert end.positions("resid_post", 1).tolist() == [6]


@on_a_loop
async def test_events_that_are_no_chunks_pass_unchanged(store):
    found = answer(store)
    for text in ("data: [DONE]\n\n", ": ping\n\n"):
        assert await found.chunk(text) == text


@on_a_loop
async def test_a_chunk_of_a_choice_without_output_has_an_empty_scope(store):
    """The first chunks of a chat name the role of each choice, though only some have output."""
    found = answer(store, n=2, streams=True)
    found.add_prompt()
    found.open_one(lambda: None, False)
    take(found, 0, 5, 4, "streaming")
    (chunk,) = json.loads((await found.chunk(text_of(1))).removeprefix("data: "))["choices"]
    assert chunk["scope"] == {"rows": [], "scores": {}}
    assert parse_scope(chunk["scope"], None).status == "streaming"


@on_a_loop
async def test_choices_get_their_own_results_in_whatever_order(store):
    found, made = answer(store, n=2), response(1, 0)
    take(found, 1, 5)
    take(found, 0, 9)
    await found.fill(made)
    assert [choice.scope["expected"] for choice in made.choices] == [8, 16]


@on_a_loop
async def test_choices_share_the_room_inside_an_answer(store, monkeypatch):
    """Of three choices with 8 rows and 8 scores each, two are small enough together."""
    monkeypatch.setattr(module, "MAX_INLINE_BYTES", 2 * (8 * SIZE * 4 + 8 * 20) + 100)
    found, made = answer(store, n=3), response(0, 1, 2)
    for index in range(3):
        take(found, index)
    await found.fill(made)
    scopes = [choice.scope for choice in made.choices]
    assert ["data" in scope["rows"][0] for scope in scopes] == [True, True, False]
    assert ["values" in scope["scores"]["p"] for scope in scopes] == [True, True, False]
    assert [scope["result"] is None for scope in scopes] == [True, True, False]
    found.close()


@on_a_loop
async def test_a_client_that_leaves_while_its_file_is_written_leaves_no_file(store, tmp_path):
    found = answer(store, tensors="handle")
    take(found)
    writing, go_on, put = threading.Event(), threading.Event(), store.put

    def slow(*args):
        writing.set()
        assert go_on.wait(10)
        kept = put(*args)
        assert len(store) == 1
        return kept

    store.put = slow
    task = asyncio.ensure_future(found.fill(response(0)))
    await asyncio.to_thread(writing.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(store) == 0
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert len(store) == 0
    assert not list(tmp_path.rglob("*.safetensors"))


@on_a_loop
async def test_an_answer_that_fails_in_the_middle_leaves_no_file(store, tmp_path):
    found = answer(store, n=2, tensors="handle")
    take(found)
    with pytest.raises(KeyError):
        await found.fill(response(0, 1))
    assert not list(tmp_path.rglob("*.safetensors"))


@on_a_loop
async def test_the_error_of_a_file_that_cannot_be_written_has_no_path(store):
    def put(*args):
        raise PermissionError(13, "Permission denied", "/secret/place")

    store.put = put
    found, made = answer(store, tensors="handle"), response(0)
    take(found)
    await found.fill(made)
    told = made.choices[0].scope
    assert told["status"] == "failed"
    assert told["error"] == "The rows could not be kept: Permission denied."


@on_a_loop
async def test_files_of_an_answer_that_was_sent_stay(store, tmp_path):
    found, made = answer(store, tensors="handle"), response(0)
    take(found)
    await found.fill(made)
    found.close()
    assert store.open(made.choices[0].scope["result"]["id"], "owner") is not None


@on_a_loop
async def test_a_named_read_takes_one_prompt_only(store):
    for name, allowed in (("q", False), (None, True)):
        xargs = scope(Read("embed", to="filesystem", name=name))
        found = Answer(ScopeOptions.parse(xargs), store, 1 << 20, "owner", 2, False)
        assert found.add_prompt() == 0
        if allowed:
            assert found.add_prompt() == 1
            continue
        with pytest.raises(SpecError, match="'name', and there is more than one prompt"):
            found.add_prompt()


def test_a_probes_name_does_not_end_like_positions():
    probe = Probe(np.ones(SIZE), layer=1, name="a.positions")
    with pytest.raises(SpecError, match=r"no name ends in '\.positions'"):
        ScopeOptions.parse(scope(probe))


def test_moments_over_http_need_the_operators_key():
    xargs = scope(Moments())
    with pytest.raises(SpecError, match=r"has moments, .* key in the header X-Scope-Admin-Key"):
        ScopeOptions.parse(xargs)
    assert ScopeOptions.parse(xargs, operator=True) is not None


async def chunks_of(found, ended):
    """As vLLM's: lets a generation in when it is first asked."""
    try:
        found.add_prompt()
        found.open_one(lambda: ended.append("rows"), True)
        for _ in range(3):
            await asyncio.sleep(0)
            yield "data: [DONE]\n\n"
    finally:
        ended.append("chunks")


@on_a_loop
async def test_a_client_that_leaves_before_the_first_chunk_leaves_nothing(store):
    """The web framework then drops the generator, which has never run."""
    found, ended = answer(store, streams=True), []
    await http._stream(found, chunks_of(found, ended))
    await found.exchange.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(ended) == ["chunks", "rows"]


@on_a_loop
async def test_a_client_that_leaves_later_leaves_nothing(store):
    found, ended = answer(store, streams=True), []
    made = await http._stream(found, chunks_of(found, ended))
    assert (await anext(made)).startswith("data: ")
    await made.aclose()
    assert sorted(ended) == ["chunks", "rows"]


class Processor:
    """vLLM's OutputProcessor."""


@on_a_loop
async def test_a_lost_row_makes_a_stream_wait_once(store):
    found, waited = answer(store, streams=True), []
    connection = SimpleNamespace(limits=SimpleNamespace(optimistic=False), deliver_timeout_s=0.2)
    engine = SimpleNamespace(output_processor=Processor())
    connections.put(engine.output_processor, connection)

    async def outputs():
        for num_tokens in (7, 8, 9):
            yield SimpleNamespace(outputs=[completion(0, num_tokens, 2, "streaming")])

    started = time.monotonic()
    async for _ in http._followed(found, found.add_prompt(), engine, outputs()):
        waited.append(time.monotonic() - started)
        started = time.monotonic()
    assert waited[0] >= 0.2
    assert max(waited[1:]) < 0.1


@on_a_loop
async def test_a_stream_waits_for_the_first_token_where_the_engine_may_still_refuse(store):
    found = answer(store, streams=True)

    async def chunks():
        found.add_prompt()
        found.open_one(lambda: None, False)
        await asyncio.sleep(0.05)
        found.fail(ValueError("no room"))
        yield text_of(end="error")

    with pytest.raises(ValueError, match="no room"):
        await http._stream(found, chunks())


def streamed(found, *generations):
    """The chunks of a stream, as vLLM makes them. The engine can refuse each generation until the
    generation's first token."""
    processor = Processor()
    connections.put(processor, SimpleNamespace(limits=SimpleNamespace(optimistic=True)))
    engine = SimpleNamespace(output_processor=processor)
    followed = [http._followed(found, found.add_prompt(), engine, one) for one in generations]
    found.open_one(lambda: None, False)

    async def chunks():
        try:
            async for prompt, output in merge_async_iterators(*followed):
                yield text_of(prompt, output.outputs[0].finish_reason)
        except Exception as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield "data: [DONE]\n\n"

    return http._stream(found, chunks())


async def generated(*steps):
    """The outputs of a generation. An event among the steps is awaited, and an error is raised."""
    for step in steps:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield SimpleNamespace(outputs=[completion(0, step, None, "streaming")])


@on_a_loop
async def test_a_stream_that_fails_after_its_first_chunk_sends_the_error(store):
    found = answer(store, streams=True)
    made = await streamed(found, generated(5, refusal()("the edit makes a row that is NaN.")))
    first, error, done = [text async for text in made]
    assert '"scope"' in first
    assert json.loads(error.removeprefix("data: ")) == {
        "error": {"message": "the edit makes a row that is NaN."}
    }
    assert done == "data: [DONE]\n\n"


@on_a_loop
async def test_a_prompt_that_is_refused_after_the_first_chunk_of_another_ends_the_stream(store):
    found, late, never = answer(store, streams=True), asyncio.Event(), asyncio.Event()
    made = await streamed(found, generated(5, never), generated(late, busy("no room.")))
    assert '"scope"' in await anext(made)
    late.set()
    error, _ = [text async for text in made]
    assert json.loads(error.removeprefix("data: ")) == {"error": {"message": "prompt[1]: no room."}}


@on_a_loop
async def test_a_prompt_that_is_refused_with_the_first_chunk_of_another_refuses_the_stream(store):
    found, closed, never = answer(store, streams=True), [], asyncio.Event()

    async def begun():
        try:
            async for output in generated(5, never):
                yield output
        finally:
            closed.append(True)

    with pytest.raises(CapacityError, match=r"^prompt\[1\]: no room\.$") as raised:
        await streamed(found, begun(), generated(busy("no room.")))
    for _ in range(9):
        await asyncio.sleep(0)
    assert closed, "the other prompt would generate until its end"
    assert raised.value is found.error


class Owner(SimpleNamespace):
    """An object of vLLM, for which this package stores data."""


@pytest.mark.parametrize(
    ("actions", "opens"),
    [
        pytest.param((), True, id="plain"),
        pytest.param((Read("resid_post", layers=[1]),), False, id="read"),
        pytest.param((Moments(layers=[1], name="m"),), False, id="moments"),
        pytest.param((Probe(np.ones(SIZE), layer=1, name="p"),), False, id="probe"),
    ],
)
@on_a_loop
async def test_a_stream_opens_before_the_first_token_only_if_the_request_has_no_spec(
    store, actions, opens
):
    found, limits = answer(store, streams=True), Limits((4 * SIZE,), 0, 99, 99, 99, 99, False)
    found.add_prompt()
    processor, state = Owner(request_states={}), Owner(detokenizer=None)
    connections.put(processor, Connection(SITES, None, 1, 1.0, limits, {}, {}))
    params = SamplingParams(max_tokens=2, extra_args=scope(*actions) if actions else None)
    request = SimpleNamespace(
        request_id="r", external_req_id="r", prompt_token_ids=[1, 2], resumable=False,
        sampling_params=params,
    )  # fmt: skip

    def add(processor, request, *_args):
        processor.request_states[request.request_id] = state

    token = current.set(found)
    try:
        http._admitted(partial(requests._add_to_processor, add), processor, request, "text")
    finally:
        current.reset(token)
        found.close()
    assert found.opened.is_set() is opens


@pytest.fixture
def exchange():
    found = Exchange("owner")
    token = asking.set(found)
    yield found
    asking.reset(token)


@on_a_loop
async def test_a_file_that_no_sent_chunk_names_is_deleted(store, exchange):
    found, made = answer(store, tensors="handle"), response(0)
    take(found)
    await found.fill(made)
    assert (len(store), len(exchange.untold)) == (1, 1)
    await exchange.close()  # and no part of the answer was sent
    assert len(store) == 0


@on_a_loop
async def test_a_requests_rows_are_let_go_when_it_is_over_however_it_ends(store, exchange):
    found, ended = answer(store, streams=True), []
    assert exchange.timed
    made = await http._stream(found, chunks_of(found, ended))
    assert (await anext(made)).startswith("data: ")
    # Its client leaves while the chunk goes out: nobody closes the generator.
    await exchange.close()
    assert sorted(ended) == ["chunks", "rows"]


@pytest.mark.parametrize(
    ("streams", "options", "promised", "needs"),
    [
        pytest.param(False, {}, (1 << 20,), 0, id="inline"),
        pytest.param(False, {}, (1 << 21, 100, 1 << 21), 1 << 22, id="two-of-three-are-large"),
        pytest.param(False, {"tensors": "handle", "reads": True}, (100, 0), 100, id="handles"),
        pytest.param(True, {"stream": "rows"}, (1 << 21,), 0, id="in-chunks"),
        pytest.param(True, {"stream": "rows"}, (1 << 24,), 1 << 24, id="more-than-a-chunk"),
        pytest.param(True, {}, (1 << 21,), 1 << 21, id="at-the-end-of-a-stream"),
    ],
)
@on_a_loop
async def test_room_is_checked_if_a_file_will_be_needed(
    streams, options, promised, needs, store, exchange, monkeypatch
):
    asked = []
    monkeypatch.setattr(store, "check_room", lambda size, owner: asked.append((size, owner)))
    answer(store, streams, **options)
    for size in promised:
        exchange.expect(size)
    assert asked[-1:] == ([(needs, "owner")] if needs else [])


@on_a_loop
async def test_a_full_store_refuses_what_needs_a_file_and_nothing_else(store, exchange):
    with suppress(CapacityError):
        while True:
            store.put({"x": torch.zeros(100_000)}, {}, "owner")
    Answer(ScopeOptions(), store, 1000, "owner", 1, False)
    exchange.expect(1000)
    with pytest.raises(CapacityError, match="of this key wait to be fetched"):
        exchange.expect(700_000)
    taken, made = answer(store), response(0)
    take(taken)
    await taken.fill(made)
    assert made.choices[0].scope["status"] == "complete"


@on_a_loop
async def test_a_file_of_generated_rows_is_refused_before_they_are_computed(store, exchange):
    generated = scope(Read("resid_post", tokens="generated"))
    with suppress(CapacityError):
        while True:
            store.put({"x": torch.zeros(10)}, {}, "owner")
    Answer(ScopeOptions.parse(generated), store, 1000, "owner", 1, False)
    exchange.expect(0)
    probe = scope(Probe(np.ones(SITES.hidden_size), layer=0, name="p"))
    Answer(ScopeOptions.parse(probe | {"scope_tensors": "handle"}), store, 1000, "owner", 1, False)
    exchange.expect(100)  # scores are part of the answer
    Answer(
        ScopeOptions.parse(generated | {"scope_tensors": "handle"}), store, 1000, "owner", 1, False
    )
    with pytest.raises(CapacityError, match="of this key wait to be fetched"):
        exchange.expect(0)


@on_a_loop
async def test_words_of_faces_without_a_scope_check_no_room(store, exchange):
    """Their own fields report tensors that could not be kept."""
    Answer(None, store, 1 << 20, "owner", 1, False)
    exchange.expect(1 << 30)
    assert exchange.timed


@on_a_loop
async def test_a_choice_has_the_counts_of_its_sinks(store):
    """The answer does not count rows that went to sinks."""
    kept = Manifest("partial", "1 of 9 rows did not come", 9, 8, 1, ["a.json"], {"embed.0": {}})
    told = Manifest("ok", None, 2, 2, 0, ["b"], {}, [{"paths": ["/srv/b"]}])
    found, made, done = answer(store), response(0), completion()
    done.scope.manifests = {"files": kept, "mine": told}
    found.take(0, done)
    await found.fill(made)
    assert made.choices[0].scope["sinks"] == {
        "files": {
            "status": "partial", "reason": "1 of 9 rows did not come", "expected": 9,
            "delivered": 8, "dropped": 1, "names": ["a.json"],
        },
        "mine": {
            "status": "ok", "reason": None, "expected": 2, "delivered": 2, "dropped": 0,
            "names": ["b"], "details": [{"paths": ["/srv/b"]}],
        },
    }  # fmt: skip
    streamed = answer(store, streams=True)
    streamed.add_prompt()
    streamed.open_one(lambda: None, True)
    streamed.take(0, done)
    chunk = await streamed.chunk(text_of(end="length"))
    (choice,) = json.loads(chunk.removeprefix("data: "))["choices"]
    assert choice["scope"]["sinks"] == made.choices[0].scope["sinks"]


@on_a_loop
async def test_a_choice_without_sinks_has_no_counts_of_sinks(store):
    found, made = answer(store), response(0)
    take(found)
    await found.fill(made)
    assert "sinks" not in made.choices[0].scope


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("num_prompts", "error", "said"),
    [
        (1, refusal()("reads[0] is wrong."), "reads[0] is wrong."),
        (4, refusal()("reads[0] is wrong."), "prompt[3]: reads[0] is wrong."),
        (4, busy("no room."), "prompt[3]: no room."),
        (4, RuntimeError("broken"), "broken"),
    ],
    ids=["alone", "one-of-several", "without-room", "not-ours"],
)
def test_a_refusal_says_which_prompt_is_refused(store, num_prompts, error, said, streams):
    async def refusing():
        raise error
        yield

    async def run():
        found = Answer(ScopeOptions(), store, 1 << 20, "owner", 1, streams)
        prompts = [found.add_prompt() for _ in range(num_prompts)]
        with suppress(type(error)):
            async for _ in http._followed(found, prompts[-1], None, refusing()):
                pass
        return found.error

    found = asyncio.run(run())
    assert str(found) == said
    assert type(found) is type(error)  # by which vLLM knows the status


#: What a request sends and gets with an operator's monitors: their probes come after its own.
MONITORS = [Probe(np.ones(SIZE), layer=1, name=f"monitor/{name}", threshold=-1e30) for name in "ab"]
WATCHED = scope(Read("resid_post", layers=[1]), *MONITORS)


@on_a_loop
async def test_a_caller_sees_counts_of_the_own_rows_and_no_tokens_of_an_operators_monitors(store):
    found, filled = answer(store), response(0)
    take(found, 0, NUM_TOKENS, None, "complete", WATCHED)
    await found.fill(filled)
    told = filled.choices[0].scope
    assert (told["expected"], told["delivered"], told["dropped"]) == (8, 8, 0)
    assert set(told["verdicts"]) == {"monitor/a", "monitor/b"}
    assert "tokens" not in told
    # As a file.
    found, filled = answer(store, tensors="handle"), response(0)
    take(found, 0, NUM_TOKENS, None, "complete", WATCHED)
    await found.fill(filled)
    with store.open(filled.choices[0].scope["result"]["id"], "owner") as file:
        content = file.read()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["scope"])["expected"] == 8


@on_a_loop
async def test_a_plain_prompt_that_enters_after_the_monitors_ended_is_answered(store):
    found, made = Answer(None, store, 1 << 20, "owner", 1, False), response(0, 1)
    for forget in (lambda: None, None):
        found.add_prompt()
        found.open_one(forget, True)
    take(found)  # only the first prompt has results of monitors
    await found.fill(made)
    assert [vars(choice) for choice in made.choices] == [{"index": 0}, {"index": 1}]


@on_a_loop
async def test_a_callers_stream_has_the_same(store):
    found = answer(store, streams=True)
    found.add_prompt()
    found.open_one(lambda: None, True)
    take(found, 0, NUM_TOKENS - 2, None, "streaming", WATCHED)
    first = await found.chunk(text_of())
    take(found, 0, NUM_TOKENS, None, "complete", WATCHED)
    last = await found.chunk(text_of(end="length"))
    chunks = [json.loads(text[6:])["choices"][0]["scope"] for text in (first, last)]
    assert all("tokens" not in chunk for chunk in chunks)
    assert (chunks[1]["expected"], chunks[1]["delivered"]) == (8, 8)


@on_a_loop
async def test_a_callers_own_probe_has_tokens_beside_monitors(store):
    found, filled = answer(store), response(0)
    spec = scope(Probe(np.ones(SIZE), layer=1, name="p"), *MONITORS)
    take(found, 0, NUM_TOKENS, None, "complete", spec)
    await found.fill(filled)
    told = filled.choices[0].scope
    assert told["expected"] == 8
    assert all(set(token["scores"]) == {"p"} for token in told["tokens"][:-1])
