"""Monitors over HTTP: set by the operator alone; flags in answers of requests without a scope."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.server.conftest import ADMIN_KEY, API_KEY
from vllm_scope import Probe, scope
from vllm_scope.cli import app

ADMIN = {"X-Scope-Admin-Key": ADMIN_KEY}
WEIGHT = np.random.default_rng(0).normal(size=256).tolist()
FLAG = {"weight": WEIGHT, "layers": [2], "threshold": -1e30, "aggregate": "max"}
BODY = {"model": "toyworld", "prompt": "The capital of Ritova is", "max_tokens": 5}


@pytest.fixture
def http(server):
    with server.http() as http:
        yield http
        assert http.put("/v1/scope/monitors", json={"monitors": {}}, headers=ADMIN).json() == {}


def put(http, monitors):
    return http.put("/v1/scope/monitors", json={"monitors": monitors}, headers=ADMIN)


def test_a_plain_answer_has_the_flag_and_no_scores(http):
    assert "scope" not in http.post("/v1/completions", json=BODY).json()["choices"][0]
    response = put(http, {"low": FLAG, "high": FLAG | {"threshold": 1e30}})
    assert response.status_code == 200, response.text
    told = response.json()
    assert told == http.get("/v1/scope/monitors", headers=ADMIN).json()
    assert told["low"]["action"] == "flag"
    assert "weight" not in told["low"]
    scope_field = http.post("/v1/completions", json=BODY).json()["choices"][0]["scope"]
    assert set(scope_field) == {"verdicts"}
    assert set(scope_field["verdicts"]) == {"monitor/low"}
    assert scope_field["verdicts"]["monitor/low"]["position"] == 0


def test_a_stream_has_it_in_its_last_chunk_and_a_chat_too(http):
    put(http, {"low": FLAG})
    body = BODY | {"stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert chunks[-1]["scope"]["verdicts"]["monitor/low"]["position"] == 0
    assert all("scope" not in chunk for chunk in chunks[:-1])
    chat = {"model": "toyworld", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    choice = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert "monitor/low" in choice["scope"]["verdicts"]


def test_a_request_with_probes_of_its_own_gets_these_and_the_flag(http):
    put(http, {"low": FLAG})
    spec = scope(Probe(WEIGHT, layer=2, name="mine"))["scope"]
    body = BODY | {"vllm_xargs": {"scope": spec}}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["scope"]
    assert set(found["scores"]) == {"mine"}
    assert set(found["verdicts"]) == {"monitor/low"}
    assert all(set(token["scores"]) <= {"mine"} for token in found["tokens"])
    handle = BODY | {"vllm_xargs": {"scope": spec, "scope_tensors": "handle"}}
    assert "monitor" not in http.post("/v1/completions", json=handle).text.replace(
        "monitor/low", ""
    )


def test_a_monitor_stops_an_answer(http):
    put(http, {"all": FLAG | {"action": "stop", "tokens": "generated"}})
    choice = http.post("/v1/completions", json=BODY | {"max_tokens": 50}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"].startswith("probe 'monitor/all': ")
    assert choice["scope"]["verdicts"]["monitor/all"]["position"] >= 5


def test_a_cascade_is_told_whole_and_streamed(http, server):
    dear = FLAG | {"layers": [4], "after": "low"}
    told = put(http, {"dear": dear, "low": FLAG, "never": FLAG | {"threshold": 1e30}}).json()
    assert (told["dear"]["after"], "after" in told["low"]) == ("low", False)
    body = BODY | {"max_tokens": 12, "temperature": 0}
    num_prompt = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    found = http.post("/v1/completions", json=body).json()["choices"][0]["scope"]
    # The verdict is in the prompt; the second generated token is the first one.
    assert found["begun"] == {"monitor/dear": num_prompt + 1}
    assert found["verdicts"]["monitor/dear"]["position"] == num_prompt + 1
    assert "monitor/never" not in found["verdicts"]
    spec = scope(Probe(WEIGHT, layer=2, name="mine", threshold=-1e30),
                 Probe(WEIGHT, layer=3, name="later", after="mine"))["scope"]  # fmt: skip
    asked = body | {"vllm_xargs": {"scope": spec}}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]["scope"]
    assert whole["begun"] == dict.fromkeys(["monitor/dear", "later"], num_prompt + 1)
    assert whole["scores"]["later"]["spans"] == [[num_prompt + 1, num_prompt + 11]]
    with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    values = [x for c in chunks for x in c["scope"]["scores"].get("later", {}).get("values", [])]
    assert values == pytest.approx(whole["scores"]["later"]["values"], abs=1e-3)
    assert "begun" in chunks[-2]["scope"], "while it is streamed"
    assert chunks[-1]["scope"]["begun"] == whole["begun"]
    text = http.get("/metrics").text
    counts = {
        name: float(re.findall(rf'monitor_score_count{{monitor="{name}"}} (\S+)', text)[0])
        for name in ("low", "dear")
    }
    assert counts["dear"] >= 4
    assert f'vllm_scope_monitor_verdicts_total{{monitor="dear"}} {counts["dear"]}' in text


@pytest.mark.parametrize(
    "monitors",
    [
        {"a": FLAG | {"after": "b"}}, {"a": FLAG | {"after": "a"}}, {"a": FLAG | {"after": ""}},
        {"a": FLAG | {"weight": [1.0]}}, {"a": FLAG | {"file": "/etc/passwd"}},
        {"a": FLAG | {"url": "http://127.0.0.1"}}, {"a": 1}, 3,
    ],
)  # fmt: skip
def test_a_wrong_monitor_is_answered_with_a_sentence(monitors, http):
    put(http, {"low": FLAG})
    response = put(http, monitors)
    assert response.status_code == 400
    assert "monitor" in response.json()["error"]["message"]
    assert set(http.get("/v1/scope/monitors", headers=ADMIN).json()) == {"low"}


def test_only_the_operator_sees_and_sets_them(http):
    for method in ("GET", "PUT"):
        assert http.request(method, "/v1/scope/monitors").status_code in (401, 403)
    spec = scope(Probe(WEIGHT, layer=2, name="monitor/low"))["scope"]
    response = http.post("/v1/completions", json=BODY | {"vllm_xargs": {"scope": spec}})
    assert response.status_code == 400
    assert "are the operator's" in response.json()["error"]["message"]


def test_metrics_count_them_and_the_command_shows_them(http, server):
    put(http, {"low": FLAG})
    http.post("/v1/completions", json=BODY)
    text = http.get("/metrics").text
    assert 'vllm_scope_monitor_verdicts_total{monitor="low"}' in text
    assert 'vllm_scope_monitor_score_count{monitor="low"}' in text
    keys = {"VLLM_API_KEY": API_KEY, "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["monitor", server.url, "--once"], env=keys)
    assert done.exit_code == 0, done.output
    _, heading, low, place, escalations = done.output.splitlines()
    (count,) = re.findall(r'monitor_score_count{monitor="low"} (\d+)', text)
    assert low.split()[:5] == ["low", "flag", count, count, "100.0%"]
    assert place.split() == ["resid_post", "2", "above", "-1e+30"]
    assert "-1 to 2" in heading
    assert "█" in low
    assert escalations == "escalations: 0 sent, 0 failed, 0 dropped"
    refused = CliRunner().invoke(app, ["monitor", server.url], env=keys | {"VLLM_API_KEY": "x"})
    assert (refused.exit_code, "HTTP 401" in refused.output) == (1, True)
