"""Sweeps over HTTP: values as Hugging Face's model with hooks has them, refusals, and clients that
leave."""

from __future__ import annotations

import asyncio
import json
import time
from http.client import HTTPConnection

import numpy as np
import pytest
import torch

from tests.conftest import TOYWORLD
from tests.server.conftest import API_KEY, OTHER_KEY
from vllm_scope import Add, LogitDifference, Replace, SpecError, Sweep
from vllm_scope.client import AsyncScopeClient, ServerError
from vllm_scope.vectors import SteeringModule

ASKED, OTHER = (f"Q: What is the capital of {name}? A:" for name in ("Ritova", "Kimar"))
METRIC = LogitDifference(" Sotburg", " Rindos")
BODY = {
    "prompts": ASKED, "source": {"prompts": OTHER},
    "metric": {"kind": "logit_difference", "a": " Sotburg", "b": " Rindos"},
}  # fmt: skip
ROUTE = "/v1/scope/sweeps"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOYWORLD)


@pytest.fixture(scope="module")
def http(server):
    with server.http() as found:
        yield found


class Hooks:
    """The metric of Hugging Face's model, edited at one place."""

    def __init__(self, ref, tokenizer):
        self.ref = ref
        self.asked, self.other = tokenizer.encode(ASKED), tokenizer.encode(OTHER)
        self.a, self.b = (
            tokenizer.encode(text, add_special_tokens=False)[0] for text in (METRIC.a, METRIC.b)
        )
        self.streams = ref.edited(self.other, [])[0]

    def value(self, layer, p, change, site="resid_pre"):
        def edit(x):
            x = x.clone()
            x[p] = change(x[p])
            return x

        logits = self.ref.edited(self.asked, [(site, layer, edit)])[1][-1]
        return float(logits[self.a] - logits[self.b])


@pytest.fixture(scope="module")
def hooks(ref, tokenizer):
    return Hooks(ref, tokenizer)


def test_cells_equal_hooks_and_single_requests(client, hooks):
    seen = []
    table = client.sweep(ASKED, Sweep(OTHER, metric=METRIC), on_cell=seen.append)
    assert table.values.shape == (1, 6, 12)
    assert table.tokens[0][-1] == ":"
    assert (table.site, table.mode, table.metric) == ("resid_pre", "patch", "logit difference")
    for layer in range(6):
        for p in range(12):
            row = hooks.streams["resid_pre", layer][p]
            wanted = hooks.value(layer, p, lambda _, row=row: row)
            assert table.values[0, layer, p] == pytest.approx(wanted, abs=1e-3)
    assert table.normalised().values[0, 5, -1] > 0.9
    assert {cell[:4] for cell in seen} == {
        (0, layer, p, None) for layer in range(6) for p in range(12)
    }
    assert all(table.values[table.index_of(cell)] == cell.value for cell in seen)
    row = hooks.streams["resid_pre", 3][5]
    patch = Replace(row, positions=[5], site="resid_pre", layer=3)
    out = client.complete(
        ASKED, patch, max_tokens=1, temperature=0, logprobs=1,
        logprob_token_ids=[hooks.a, hooks.b], return_tokens_as_token_ids=True,
    )  # fmt: skip
    (found,) = out.raw["choices"][0]["logprobs"]["top_logprobs"]
    alone = found[f"token_id:{hooks.a}"] - found[f"token_id:{hooks.b}"]
    assert table.values[0, 3, 5] == pytest.approx(alone, abs=1e-5)


def test_paths_equal_hooks_that_hold_all_other_branches(client, hooks):
    asked = Sweep(OTHER, metric=METRIC, positions=[-1], layers=[1, 5], receivers="logits")
    table = client.sweep(ASKED, asked)
    assert table.mode == "patch to logits"
    clean = hooks.ref.edited(hooks.asked, [])[0]
    held = [
        (site, k, lambda _, rows=clean[site, k]: rows)
        for site in ("attn_out", "mlp_out")
        for k in range(6)
    ]
    for i, layer in enumerate((1, 5)):

        def patch(x, row=hooks.streams["resid_pre", layer][-1]):
            return torch.cat([x[:-1], row[None]])

        logits = hooks.ref.edited(hooks.asked, [("resid_pre", layer, patch), *held])[1][-1]
        wanted = float(logits[hooks.a] - logits[hooks.b])
        assert table.values[0, i, 0] == pytest.approx(wanted, abs=1e-3)
    assert abs(table.values - table.plain).min() > 0.01


def test_the_whole_answer_equals_the_events(http, client, tokenizer):
    ids = [tokenizer.encode(text) for text in (ASKED, OTHER)]
    body = BODY | {"prompts": ids, "source": {"prompts": ids[::-1]}, "positions": [-1, 5]}
    found = http.post(ROUTE, json=body).json()
    assert found["shape"] == [2, 6, 2]
    assert found["counts"] == {"cells": 24, "failed": 0}
    assert found["errors"] == []
    several = [{"prompt_token_ids": one} for one in ids]
    table = client.sweep(several, Sweep(several[::-1], metric=METRIC, positions=[-1, 5]))
    values = np.reshape(found["values"], found["shape"])
    np.testing.assert_allclose(values, table.values, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["plain"], table.plain, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["source"], table.plain[::-1], rtol=0, atol=1e-5)


def test_events_are_names_then_cells_then_counts(http):
    with http.stream("POST", ROUTE, json=BODY | {"stream": True, "layers": [1]}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    first, *groups, last = map(json.loads, events[:-1])
    assert first["num_cells"] == 12
    assert first["table"]["shape"] == [1, 1, 12]
    assert first["table"]["layers"] == [1]
    cells = [cell for group in groups for cell in group["cells"]]
    assert sorted(cell["position"] for cell in cells) == list(range(12))
    assert last["counts"] == {"cells": 12, "failed": 0}


def test_rows_and_modules_are_sources(client, hooks):
    row = torch.randn(256, generator=torch.Generator().manual_seed(0))
    table = client.sweep(ASKED, Sweep(row, metric=METRIC, mode="add", scale=0.5, positions=[3]))
    client.put_module("swept", SteeringModule({("resid_pre", 2): row.numpy()}))
    asked = Sweep({"module": "swept"}, metric=METRIC, mode="add", scale=0.5, positions=[3],
                  layers=[2, 4])  # fmt: skip
    named = client.sweep(ASKED, asked)
    client.delete_module("swept")
    wanted = hooks.value(2, 3, lambda x: x + row / 2)
    assert table.values[0, 2, 0] == pytest.approx(wanted, abs=1e-3)
    assert named.values[0, 0, 0] == pytest.approx(wanted, abs=1e-3)
    assert list(named.errors) == [(0, 1, 0)]  # the module has no vector there
    assert "swept" in named.errors[0, 1, 0]
    assert np.isnan(table.source).all()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        pytest.param({"prompts": []}, "prompts is []", id="no-prompt"),
        pytest.param({"prompts": [[1, -1]]}, "prompts[0] is [1, -1]", id="negative-token"),
        pytest.param({"prompts": [[10**9] * 12]}, "the vocabulary has 0 to", id="no-such-token"),
        pytest.param({"prompts": [[2**40] * 12]}, "the vocabulary has 0 to", id="huge-token"),
        pytest.param({"prompts": "a " * 10**6}, "2,000,000 characters", id="too-long-a-text"),
        pytest.param({"prompts": [[5] * 600], "source": {"prompts": [[6] * 600]}, "positions": [0]},
                     "at most 511, because it samples one more", id="too-long"),
        pytest.param({"prompts": [ASKED] * 1000}, "at most 65,536", id="too-many-cells"),
        pytest.param({"source": {"prompts": "short"}}, "same number of tokens", id="lengths"),
        pytest.param({"source": ASKED}, "one of prompts, rows, module", id="bare-source"),
        pytest.param({"source": {"rows": [1.0, 2.0]}}, "has the shape [2]", id="width"),
        pytest.param({"source": {"module": "x"}}, "rows to add or ablate", id="patch-of-a-module"),
        pytest.param({"metric": {"kind": "loss"}}, "logit_difference, logprob, kl", id="metric"),
        pytest.param({"metric": {"kind": "logprob"}}, "metric has no 'token'", id="no-token"),
        pytest.param({"metric": {"kind": "kl"}}, "max_logprobs=-1", id="kl"),
        pytest.param({"layers": [9]}, "this model has layers 0 to 5", id="layer"),
        pytest.param({"site": "mlp_out"}, "mlp_out", id="untapped"),
        pytest.param({"heads": [0]}, "have no heads", id="heads"),
        pytest.param({"positions": [12]}, "has 12 tokens", id="position"),
        pytest.param({"model": "toyworld"}, "the body has 'model'", id="unknown-field"),
        pytest.param({"stream": 1}, "it must be true or false", id="stream"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_swept_is_refused_with_a_sentence(stream, changed, sentence, http):
    response = http.post(ROUTE, json=BODY | {"stream": stream} | changed)
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]


def test_a_sweep_needs_an_api_key(server):
    with server.http(None) as http:
        assert http.post(ROUTE, json=BODY).status_code == 401
    with server.client("wrong") as client, pytest.raises(ServerError, match="401"):
        client.sweep(ASKED, Sweep(OTHER, metric=METRIC))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_sweep(stream, server, client):
    # 65,520 cells, one EngineCore's: they do not end within the 30 s below.
    many = json.dumps(BODY | {"prompts": [ASKED] * 910, "stream": stream})
    connection = HTTPConnection(server.url.removeprefix("http://"))
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    connection.request("POST", ROUTE, many, headers)
    limit = time.monotonic() + 60
    while not client.info()["load"]["requests"]:
        assert time.monotonic() < limit
    connection.close()
    limit = time.monotonic() + 30
    while (load := client.info()["load"])["requests"] or load["pending"]:
        assert time.monotonic() < limit, load
    table = client.sweep(ASKED, Sweep(OTHER, metric=METRIC, layers=[0]))  # others are served
    assert not table.errors


def test_other_requests_go_on_beside_a_sweep(server, client):
    plain = client.complete(ASKED, max_tokens=8, temperature=0).text
    many = BODY | {"prompts": [ASKED] * 20, "stream": True}
    with server.http() as http, http.stream("POST", ROUTE, json=many) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert client.complete(ASKED, max_tokens=8, temperature=0).text == plain
        row = Add(torch.ones(256), layer=2)
        assert client.complete(ASKED, row, max_tokens=2).scope.status == "complete"
        assert any("counts" in line for line in lines)


async def _swept(server, **options):
    async with AsyncScopeClient(server.url, OTHER_KEY, timeout=120) as client:
        return await client.sweep(ASKED, Sweep(OTHER, metric=METRIC, layers=[2]), **options)


def test_the_async_client_sweeps_and_an_error_ends_it(server):
    table = asyncio.run(_swept(server))
    assert not np.isnan(table.values).any()

    def fail(cell):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        asyncio.run(_swept(server, on_cell=fail))
    with pytest.raises(SpecError, match="layers 0 to 5"), server.client() as client:
        client.sweep(ASKED, Sweep(OTHER, metric=METRIC, layers=[9]))
