"""Two API processes before two replicas, with an adapter and little room for vectors."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.conftest import TOYWORLD
from tests.engine.test_lora import adapted, make_adapter
from tests.server.conftest import ADMIN_KEY, API_KEY, serving
from tests.server.test_answers import OPTIONS, PROBE, READS, TEXT, check, check_scores, ids_of
from vllm_scope import (
    Add,
    CapacityError,
    LogitDifference,
    Probe,
    Read,
    SpecError,
    Sweep,
    scope,
)
from vllm_scope.analysis.attention import attention_pattern
from vllm_scope.client import ScopeClient
from vllm_scope.compat.vllm_lens import VLLMLensClient, attention_patterns
from vllm_scope.vectors import SteeringModule

pytestmark = pytest.mark.long

#: Vectors that the engine has room for: 0.05 MiB of 256 numbers.
ROOM = 51
RAMP = np.linspace(-1, 1, 256, dtype=np.float32)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, 256, num_layers=6)
    return folder


@pytest.fixture(scope="module")
def several(adapter, tmp_path_factory):
    config = {"scope": {"vectors_mib": 0.05, "sites": ["embed", "resid_post", "q", "k"]}}
    with serving(
        tmp_path_factory.mktemp("several"), "--api-server-count", "2",
        "--data-parallel-size", "2", "--enable-lora",
        "--max-lora-rank", "8", "--lora-modules", f"adapted={adapter}",
        "--additional-config", json.dumps(config), VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_SERVER_DEV_MODE="1",
    ) as found:  # fmt: skip
        yield found


@pytest.fixture
def client(several):
    with several.client() as found:
        yield found


def clients(server, count=12, **options):
    """Clients with a connection of their own: the system spreads them over the processes."""
    for _ in range(count):
        with ScopeClient(server.url, API_KEY, ADMIN_KEY, timeout=120, **options) as found:
            yield found


@pytest.mark.parametrize("model", ["adapted", "toyworld"])
def test_an_adapters_requests_read_and_score_its_model(model, client, adapter, ref):
    out = client.complete(TEXT, *READS, PROBE, model=model, **OPTIONS)
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    expected = adapted(TOYWORLD, adapter) if model == "adapted" else ref
    check(out.choices[0], prompt_ids, ids, expected)
    check_scores(out.scope.scores, [*prompt_ids, *ids][:-1], expected)


@pytest.mark.parametrize("tensors", ["auto", "handle"])
def test_queries_and_keys_come_by_head(tensors, client, ref):
    told = [entry["site"] for entry in client.info()["sites"]]
    assert told == ["embed", "resid_pre", "resid_post", "q", "k"]
    reads = [Read("q", layers=[0, 5]), Read("k", layer=5), Read("resid_post", layer=2)]
    out = client.complete(TEXT, *reads, scope_tensors=tensors, **OPTIONS)
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    expected = ref.attention([*prompt_ids, *ids][:-1])
    for site, layer in (("q", 0), ("q", 5), ("k", 5)):
        rows = out.scope.tensor(site, layer)
        torch.testing.assert_close(rows, expected[layer][site], rtol=1e-3, atol=1e-3)
    assert out.scope["resid_post", 2].shape == (len(rows), 256)
    pattern = attention_pattern(out.scope, 5, kernel=client.info()["attention"]["5"])
    torch.testing.assert_close(pattern, expected[5]["weights"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("transport", ["base64", "binary"])
def test_patterns_follow_from_what_the_vllm_lens_client_captures(transport, several, ref):
    with VLLMLensClient(several.url, None, API_KEY, 120) as lens:
        out = lens.generate(
            TEXT, max_tokens=6, capture_qk=[4, 1], capture_layers=[0], ignore_eos=True,
            activations_transport=transport, return_token_ids=True,
        )  # fmt: skip
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    expected = ref.attention([*prompt_ids, *ids][:-1])
    assert out.activations["qk_layers"] == [1, 4]
    assert out.activations["residual_stream"].shape == (1, len(prompt_ids) + 5, 256)
    for layer in (1, 4):
        weights = attention_patterns(out.activations, layer)
        torch.testing.assert_close(weights, expected[layer]["weights"], rtol=1e-3, atol=1e-4)


def test_a_file_is_served_and_deleted_by_any_process(several):
    body = {"model": "toyworld", "prompt": TEXT, "max_tokens": 4}
    spec = {"scope": '{"reads": [{"site": "embed"}]}', "scope_tensors": "handle"}
    with several.http() as http:
        answer = http.post("/v1/completions", json=body | {"vllm_xargs": spec}).json()
    kept = answer["choices"][0]["scope"]["result"]
    holders, files = set(), set()
    for one in clients(several, 24):
        holders.add(one.info()["load"]["results"])
        files.add(one._http.get(kept["url"]).content)
    assert holders == {0, 1}, "24 connections went to one process"
    assert len(files) == 1
    assert len(files.pop()) == kept["num_bytes"]
    for one in clients(several, 24):
        found = one.info()["load"]["results"]
        if found == 0:  # not the process that wrote it
            assert one._http.get(kept["url"] + "?delete=true").status_code == 200
            break
    assert {one._http.get(kept["url"]).status_code for one in clients(several)} == {404}


def test_every_process_sweeps_and_they_share_the_batch(several, ref):
    """The vectors' table has room for 51, so cells wait for each other too."""
    asked, other = [list(range(20, 28))] * 2, list(range(40, 48))
    ids = [{"prompt_token_ids": one} for one in asked]
    sweep = Sweep([{"prompt_token_ids": other}], metric=LogitDifference(5, 50), layers=[1, 4])

    def swept(_):
        with several.client() as client:
            return client.sweep(ids, sweep)

    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(swept, range(4)))
    for table in tables:
        assert not table.errors
        np.testing.assert_allclose(table.values, tables[0].values, rtol=0, atol=1e-5)
    row = ref.edited(other, [])[0]["resid_pre", 4][7]

    def patch(x):
        return torch.cat([x[:7], row[None]])

    logits = ref.edited(asked[0], [("resid_pre", 4, patch)])[1][-1]
    wanted = float(logits[5] - logits[50])
    assert tables[0].values[0, 1, 7] == pytest.approx(wanted, abs=1e-3)


def test_a_name_means_the_same_to_all_processes(several, client):
    plain = client.complete(TEXT, **OPTIONS).text
    module = SteeringModule({("resid_post", 2): RAMP})
    client.put_module("ramp", module)
    steer = Add("ramp", scale=10.0)
    texts = {one.complete(TEXT, steer, **OPTIONS).text for one in clients(several)}
    assert len(texts) == 1
    assert texts != {plain}
    client.delete_module("ramp")
    # Each of the processes but one believes that it knows the name.
    for one in clients(several):
        with pytest.raises(SpecError, match="Register it first"):
            one.complete(TEXT, steer, **OPTIONS)
    for one in clients(several):
        with pytest.raises(SpecError, match="Register it first"):
            list(one.stream(TEXT, steer, **OPTIONS))


def vectors(count, seed):
    numbers = np.random.default_rng(seed).normal(size=(count, 256)).astype(np.float32)
    return [Add(row, layer=1, scale=0.01) for row in numbers]


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_room_beside_the_servers_edits_is_429_with_a_sentence(several, client, stream):
    client.set_edits(*vectors(ROOM - 10, 1))
    try:
        body = {"model": "toyworld", "prompt": TEXT, "max_tokens": 4, "stream": stream}
        body |= {"vllm_xargs": scope(*vectors(20, 2))}
        for one in clients(several, 4):
            response = one._http.post("/v1/completions", json=body)
            assert response.status_code == 429, response.text
            assert "this engine has 51 vectors" in response.json()["error"]["message"]
            assert "repeat the request after" in response.json()["error"]["message"]
        with pytest.raises(CapacityError, match="with the server's edits the request takes 6"):
            client.complete(TEXT, *vectors(20, 2), max_tokens=4)
        # Others go on: those that fit, and plain ones.
        assert client.complete(TEXT, *vectors(5, 3), **OPTIONS).choices[0].scope is not None
        assert client.complete(TEXT, **OPTIONS).text
    finally:
        client.clear_edits()
    assert client.complete(TEXT, *vectors(20, 2), max_tokens=4).scope.status == "complete"
    assert several.at_rest()["pending"] == 0


def test_server_wide_edits_that_no_request_could_hold_are_refused(client):
    with pytest.raises(SpecError, match="for all requests"):
        client.set_edits(*vectors(ROOM + 1, 1))
    assert client.edits() == []


def test_a_request_that_could_never_fit_is_400(client):
    with pytest.raises(SpecError, match="Edit or probe fewer places, or raise"):
        client.complete(TEXT, *vectors(ROOM + 1, 1), max_tokens=4)


def test_changes_that_come_at_once_mean_the_same_in_every_replica(several, client):
    """No tier is lost, and a name means one thing, whichever came last."""
    tiers = [
        (tier, layer) for tier in ("vectors", "prefill_vectors", "decode_vectors")
        for layer in range(6)
    ]  # fmt: skip

    def steer(i):
        tier, layer = tiers[i]
        body = {tier: {"post_block": {str(layer): (RAMP * (i + 1) / 10).tolist()}}}
        headers = {"X-Scope-Admin-Key": ADMIN_KEY}
        with several.client() as one, several.http() as http:
            http.post("/v1/steering/set", json=body, headers=headers).raise_for_status()
            one.put_module("at-once", SteeringModule({("resid_post", 1): RAMP * (i + 1)}))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(steer, range(len(tiers))))
    try:
        held = client.edits()
        assert sum(len(edit["layers"]) for edit in held) == len(tiers), held
        options = OPTIONS | {"max_tokens": 3}
        for spec in ((Read("resid_post"),), (Read("resid_post"), Add("at-once", tokens="prompt"))):
            found = [one.complete(TEXT, *spec, **options) for one in clients(several, 8)]
            rows = [out.scope.tensor("resid_post", 5) for out in found]
            for other in rows[1:]:
                torch.testing.assert_close(other, rows[0], rtol=1e-4, atol=1e-4)
    finally:
        client.clear_edits()
        client.delete_module("at-once")


@pytest.mark.parametrize(
    "body",
    [
        {"method": "scope_set_edits", "args": [None]},
        {"method": "execute_method", "args": ["scope_set_edits", None]},
        {"method": "scope_register", "args": ["a", "b"]},
    ],
)
def test_the_route_to_all_methods_needs_the_operators_key_for_ours(body, several, client):
    """With VLLM_SERVER_DEV_MODE; vLLM asks for no key there at all."""
    client.set_edits(Add(RAMP, layer=2, scale=1e-6))
    try:
        with several.http(None) as http:
            for headers in ({}, {"X-Scope-Admin-Key": "wrong"}):
                response = http.post("/collective_rpc", json=body, headers=headers)
                assert response.status_code == 403, response.text
            other = http.post("/collective_rpc", json={"method": "check_health"})
            assert other.status_code == 200, other.text
        assert len(client.edits()) == 1
    finally:
        client.clear_edits()


def test_both_replicas_were_asked(several, client, ref):
    """And every answer is right, whichever gave it."""
    for i in range(8):
        out = client.complete(f"{i} {TEXT}", *READS, PROBE, **OPTIONS)
        prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
        check(out.choices[0], prompt_ids, ids, ref)
        check_scores(out.scope.scores, [*prompt_ids, *ids][:-1], ref)
    with several.http() as http:
        metrics = http.get("/metrics").text
    found = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".* (\S+)', metrics)
    assert {engine for engine, count in found if float(count) > 0} == {"0", "1"}, found


def test_many_streams_over_both_processes_are_right(several, ref):
    probe = Probe(RAMP, bias=0.5, layer=3, name="ramp")
    for one in clients(several, 8):
        scores = [
            float(score) for chunk in one.stream(TEXT, probe, **OPTIONS)
            for score in chunk.scope.scores.get("ramp", ())
        ]  # fmt: skip
        whole = one.complete(TEXT, probe, **OPTIONS)
        np.testing.assert_allclose(scores, whole.scope.scores["ramp"], rtol=1e-4, atol=1e-4)
        prompt_ids, ids = ids_of(whole.raw["choices"][0], whole.raw)
        check_scores(whole.scope.scores, [*prompt_ids, *ids][:-1], ref)


def test_monitors_that_one_process_has_set_hold_in_all(several):
    """At once: the next request of each process has them."""
    flag = {"weight": RAMP.tolist(), "layers": [2], "threshold": -1e30}
    url, headers = "/v1/scope/monitors", {"X-Scope-Admin-Key": ADMIN_KEY}

    def put(names):
        body = {"monitors": dict.fromkeys(names, flag)}
        with several.http() as http:
            response = http.put(url, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert set(response.json()) == set(names)

    def flagged(one):
        out = one.complete(TEXT, max_tokens=2)
        return set(out.raw["choices"][0].get("scope", {"verdicts": {}})["verdicts"])

    def check_activity(names):
        """Every process tells of the requests of both, once it has heard of them."""
        end = time.monotonic() + 60
        for one in clients(several, 8):
            while True:
                found = one.activity().monitors
                assert set(found) == set(names)
                if all((each.requests, each.verdicts) == (16, 16) for each in found.values()):
                    break
                assert time.monotonic() < end, found
            assert all(len(each.recent) == 16 for each in found.values())

    def counted():
        with several.http() as http:
            metrics = http.get("/metrics").text
        return re.findall(r'monitor_score_count{monitor="first"} (\S+)', metrics)

    try:
        for names in (["first"], ["second", "third"], []):
            put(names)
            assert [flagged(one) for one in clients(several, 16)] == [
                {f"monitor/{name}" for name in names}
            ] * 16
            check_activity(names)
        assert counted() == ["16.0"], "one page has the sum of both processes"
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(put, [[f"at-once-{i}"] for i in range(6)]))
        held = {tuple(one._http.get(url, headers=headers).json()) for one in clients(several, 16)}
        assert len(held) == 1
        with several.http() as http:
            wrong = {"monitors": {"a": flag | {"layers": [9]}}}
            assert http.put(url, json=wrong, headers=headers).status_code == 400
        assert {
            tuple(one._http.get(url, headers=headers).json()) for one in clients(several)
        } == held
    finally:
        put([])
