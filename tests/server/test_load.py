"""Many clients at once, some of whom leave; nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import re

import numpy as np
import pytest

from tests.checkpoints import check_completion
from tests.server.conftest import API_KEY
from tests.server.test_answers import AsResult, check_scores, ids_of
from vllm_scope import Probe, Read
from vllm_scope.client import AsyncScopeClient

pytestmark = [pytest.mark.alone, pytest.mark.long]

TEXT = "My father told me about the book Goldette. Happily, it was"
PROBE = Probe(np.linspace(-1, 1, 256, dtype=np.float32), bias=0.5, layer=3, name="ramp")
READ = Read("resid_post", layers=[0, 5])


def options(i):
    return {"temperature": 0, "max_tokens": 4 + i % 9, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


async def plain(client, i):
    return await client.complete(f"{i} {TEXT}", **options(i))


async def reading(client, i):
    handle = {"scope_tensors": "handle"} if i % 3 == 0 else {}
    return await client.complete(f"{i} {TEXT}", READ, PROBE, **options(i), **handle)


async def streaming(client, i):
    more = {"vllm_xargs": {"scope_stream": "rows"}}
    return [
        chunk async for chunk in client.stream(f"{i} {TEXT}", READ, PROBE, **options(i), **more)
    ]


async def leaving(client, i):
    """Three chunks, or one sixth of a second of waiting for a whole answer."""
    long = options(i) | {"max_tokens": 400}
    if i % 16 == 7:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.complete(TEXT, READ, PROBE, **long), 0.3)
        return
    stream = client.stream(TEXT, READ, PROBE, **long)
    async with contextlib.aclosing(stream):
        chunks = 0
        async for _ in stream:
            chunks += 1
            if chunks == 3:
                break
    return


KINDS = [plain, reading, plain, streaming, plain, reading, plain, leaving]


def num_finished(server) -> int:
    """Requests that the engine has brought to their last token."""
    with server.http() as http:
        page = http.get("/metrics").text
    name = r'vllm:request_success_total\{[^}]*finished_reason="length"[^}]*\}'
    return int(sum(float(count) for count in re.findall(rf"{name} (\S+)", page)))


@pytest.fixture(scope="module")
def run(server):
    """What 64 clients got, each with a connection of its own; and how many of their requests
    came to their last token."""

    async def one(i):
        async with AsyncScopeClient(server.url, API_KEY, model="toyworld") as client:
            return await KINDS[i % len(KINDS)](client, i)

    async def everyone():
        return await asyncio.gather(*(one(i) for i in range(64)))

    server.at_rest()
    before = num_finished(server)
    found = asyncio.run(everyone())
    server.at_rest()
    return found, num_finished(server) - before


@pytest.fixture(scope="module")
def outcome(run):
    return run[0]


def of_kind(outcome, kind):
    return [(i, found) for i, found in enumerate(outcome) if KINDS[i % len(KINDS)] is kind]


def test_the_plain_half_is_as_alone(outcome, server):
    with server.client() as client:
        for i, out in of_kind(outcome, plain)[:6]:
            assert "scope" not in out.raw["choices"][0]
            assert out.text == client.complete(f"{i} {TEXT}", **options(i)).text


def test_the_reading_ones_have_every_row_and_score(outcome, ref):
    for _, out in of_kind(outcome, reading):
        prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
        check_completion(AsResult(out.choices[0].scope), prompt_ids, ids, ref)
        check_scores(out.scope.scores, [*prompt_ids, *ids][:-1], ref)


def test_the_streaming_ones_got_every_row_once(outcome):
    for i, chunks in of_kind(outcome, streaming):
        positions = [
            p for chunk in chunks if ("resid_post", 5) in chunk.scope.keys()
            for p in chunk.scope.positions("resid_post", 5)
        ]  # fmt: skip
        assert positions == list(range(len(positions))), i
        end = chunks[-1].scope
        assert (end.status, end.dropped, end.expected) == ("complete", 0, 3 * len(positions))


def test_nothing_is_left_behind(run, server):
    outcome, finished = run
    load = server.at_rest()
    assert (load["requests"], load["pending"]) == (0, 0)
    # A client on a busy machine may leave an answer that was sent to its end before: that one's
    # file is kept as any other's.
    stayed = sum(len(of_kind(outcome, kind)) for kind in (plain, reading, streaming))
    most = finished - stayed
    assert 0 <= most < len(of_kind(outcome, leaving))
    assert load["results"] <= most
    assert len(list(server.results.rglob("*.safetensors"))) == load["results"]


def test_who_comes_after_them_is_served(outcome, client, ref):
    out = client.complete(TEXT, READ, PROBE, **options(3))
    ids = ids_of(out.raw["choices"][0], out.raw)
    check_completion(AsResult(out.choices[0].scope), *ids, ref=ref)
