"""Monitors over HTTP: set by the operator alone; flags in answers of requests without a scope."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.browser.browser import MISSING, browsing
from tests.server.conftest import ADMIN_KEY, API_KEY
from vllm_scope import Probe, Read, scope
from vllm_scope.cli import app
from vllm_scope.client import ScopeClient
from vllm_scope.control.tally import MOST_RANGES, MOST_VERDICTS

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


@pytest.mark.parametrize("binary", [False, True])
def test_a_read_is_answered_alike_with_monitors_and_without(binary, http, server):
    with ScopeClient(server.url, API_KEY, binary=binary, timeout=120) as client:
        ask = {"max_tokens": 5, "temperature": 0}
        reads = "The capital of Ritova is", Read("resid_post", layers=[2])
        plain = client.complete(*reads, **ask)
        put(http, {"low": FLAG, "high": FLAG | {"threshold": 1e30}})
        watched = client.complete(*reads, **ask)
        assert set(watched.scope.verdicts) == {"monitor/low"}
        counts = [(o.scope.status, o.scope.expected, o.scope.delivered) for o in (plain, watched)]
        assert counts[0] == counts[1]
        assert "tokens" not in watched.raw["choices"][0]["scope"]
        *chunks, last = client.stream(*reads, **ask)
        assert (last.scope.expected, last.scope.delivered) == counts[0][1:]
        assert not any(chunk.tokens for chunk in (*chunks, last))


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
    activity(http)  # all that has ended is counted
    text = http.get("/metrics").text
    counts = {
        name: float(re.findall(rf'monitor_score_count{{monitor="{name}"}} (\S+)', text)[0])
        for name in ("low", "dear")
    }
    assert counts["dear"] >= 4
    assert f'vllm_scope_monitor_verdicts_total{{monitor="dear"}} {counts["dear"]}' in text


def test_a_put_replaces_all_and_the_unchanged_go_on(http, client):
    client.set_monitors({"low": FLAG, "other": FLAG})
    assert http.post("/v1/completions", json=BODY).status_code == 200
    changed = client.set_monitors({"low": FLAG, "other": FLAG | {"threshold": 0.9}})
    assert changed == client.monitors()
    assert changed["other"]["threshold"] == 0.9
    counts = {name: found.requests for name, found in client.activity().monitors.items()}
    assert counts == {"low": 1, "other": 0}
    assert set(client.set_monitors({"low": FLAG})) == {"low"}, "`other` was not sent"


@pytest.mark.parametrize("more", [{"action": "escalate"}, {"url": "http://127.0.0.1"}])
def test_what_cannot_be_set_over_http_is_told_with_what_can(more, http):
    said = put(http, {"a": FLAG | more}).json()["error"]["message"]
    assert "has action 'flag' or 'stop'" in said


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
    activity(http)  # all that has ended is counted
    text = http.get("/metrics").text
    assert 'vllm_scope_monitor_verdicts_total{monitor="low"}' in text
    assert 'vllm_scope_monitor_score_count{monitor="low"}' in text
    keys = {"VLLM_API_KEY": API_KEY, "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["monitor", server.url, "--once"], env=keys)
    assert done.exit_code == 0, done.output
    heading, low, place, escalations, *told = done.output.splitlines()
    assert heading.split() == ["monitor", "action", "requests", "verdicts", "flagged", "scores"]
    assert low.split()[:5] == ["low", "flag", "1", "1", "100.0%"], "since it was set"
    assert "█" in low.split("│")[1]
    assert place.split()[:4] == ["resid_post", "2", "above", "-1e+30"]
    assert escalations == "escalations: 0 sent, 0 failed, 0 dropped, 0 waiting"
    assert re.match(r"verdict at \S+ UTC: low, \S+ at position 0, flag, cmpl-", told[0])
    assert any(line.startswith("plugin: ") for line in told)
    refused = CliRunner().invoke(app, ["monitor", server.url], env=keys | {"VLLM_API_KEY": "x"})
    assert (refused.exit_code, "HTTP 401" in refused.output) == (1, True)


# What they found


@pytest.fixture
def half(http, client):
    """A monitor above whose threshold is half of some prompts; the prompts, and their values."""
    prompts = [f"{i} The capital of Ritova is" for i in range(12)]
    probe = Probe(WEIGHT, layer=2, name="mine", aggregate="max")
    outs = [client.complete(prompt, probe, max_tokens=1, temperature=0) for prompt in prompts]
    values = np.array([out.scope.aggregates["mine"][-1] for out in outs], np.float64)
    low, high = np.sort(values)[5:7]
    assert high - low > 1e-3
    threshold = round(float(low + high) / 2, 5)
    return FLAG | {"threshold": threshold}, prompts, values


def activity(http):
    response = http.get("/v1/scope/monitors/activity", headers=ADMIN)
    assert response.status_code == 200, response.text
    return response.json()


def metric(http, name, **labels):
    text = http.get("/metrics").text
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.findall(rf"^vllm_scope_{name}{{{re.escape(told)}}} (\S+)", text, re.M)
    return float(found[0]) if found else 0.0


def test_what_monitors_found_is_what_metrics_count(http, client, server, half):
    monitor, prompts, values = half
    put(http, {"half": monitor, "later": FLAG | {"after": "half"}})
    ids = []
    for prompt in prompts:
        body = BODY | {"prompt": prompt, "temperature": 0, "max_tokens": 1}
        ids.append(http.post("/v1/completions", json=body).json()["id"])
    above = values > monitor["threshold"]
    found = activity(http)["monitors"]["half"]
    assert (found["requests"], found["verdicts"]) == (12, 6)
    assert found["requests"] == metric(http, "monitor_score_count", monitor="half")
    assert found["verdicts"] == metric(http, "monitor_verdicts_total", monitor="half")
    histogram = found["histogram"]
    for i, count in enumerate(histogram["counts"]):
        k = histogram["first"] + i
        low, high = (monitor["threshold"] + (k + j) * histogram["width"] for j in (0, 1))
        assert count == ((values > low) & (values <= high)).sum()
    assert sum(histogram["counts"]) == 12
    flagged = [id for id, is_above in zip(ids, above, strict=True) if is_above]
    told = [one["request_id"] for one in found["recent"]]
    assert [one[: len(id)] for one, id in zip(told, flagged[::-1], strict=True)] == flagged[::-1]
    assert sum(one["requests"] for one in found["slices"]) == 12
    # A monitor that stays goes on; one that changes begins again, and so do its later stages.
    put(http, {"half": monitor, "new": FLAG, "later": FLAG | {"after": "half"}})
    again = activity(http)["monitors"]
    assert (again["half"]["requests"], again["new"]["requests"]) == (12, 0)
    assert [again[name]["since_s"] == found["since_s"] for name in ("half", "later")] == [True] * 2
    put(http, {"half": monitor | {"bias": 1.0}, "later": FLAG | {"after": "half"}})
    changed = activity(http)["monitors"]
    assert [changed[name]["since_s"] > found["since_s"] for name in ("half", "later")] == [True] * 2
    assert (changed["half"]["requests"], changed["half"]["recent"]) == (0, [])
    assert metric(http, "monitor_score_count", monitor="half") == 12, "those of Prometheus go on"


def test_a_flood_of_verdicts_stays_bounded(http):
    put(http, {"flood": FLAG})
    for _ in range(3):
        body = BODY | {"n": 32, "max_tokens": 1, "temperature": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
    found = activity(http)["monitors"]["flood"]
    assert (found["requests"], found["verdicts"]) == (96, 96)
    assert metric(http, "monitor_verdicts_total", monitor="flood") == 96
    assert len(found["recent"]) == MOST_VERDICTS
    assert len(found["histogram"]["counts"]) <= MOST_RANGES
    assert "Ritova" not in json.dumps(found)


def test_the_plugins_state_is_what_the_other_routes_tell(http, client, server):
    put(http, {"low": FLAG})
    client.complete("The capital", Read("embed", to="filesystem"), max_tokens=2)
    kept = client.complete("The capital", Read("embed"), max_tokens=2)
    assert kept.scope.status == "complete"
    load, state = server.at_rest(), activity(http)["state"]
    assert {name: state[name] for name in load} == load
    assert state["rows_most_bytes"] == 64 << 20
    (ring,) = state["rings"]
    assert 0 <= ring["used_bytes"] < ring["num_bytes"]
    assert state["sinks"]["filesystem"]["rows"] > 0
    assert state["sinks"]["filesystem"]["drops"] == metric(
        http, "sink_drops_total", sink="filesystem"
    )


@pytest.mark.parametrize("path", ["activity", "view"])
def test_nobody_but_the_operator_is_told(path, http, server):
    put(http, {"low": FLAG})
    url = f"/v1/scope/monitors/{path}"
    assert http.get(url).status_code == 401
    assert http.get(url, headers={"X-Scope-Admin-Key": "wrong"}).status_code == 403
    with server.http(None) as nobody:
        assert nobody.get(url, headers=ADMIN).status_code == 401
        page = nobody.get("/scope/monitors")
    assert page.status_code == 200
    assert "low" not in re.findall(r'vllm-scope-data">(.*?)</script>', page.text)[0]


@pytest.mark.skipif(bool(MISSING), reason="no page can be looked at without chromium")
def test_the_page_of_the_server_shows_it(http, server, tmp_path):
    put(http, {"low": FLAG, "high": FLAG | {"threshold": 1e30}})
    cells = """return [...document.querySelectorAll("main > figure:first-of-type tbody tr")].map(
      row => [...row.cells].slice(0, 6).map(cell => cell.textContent))"""
    with browsing(tmp_path) as browser:
        browser.forget()
        browser.load(f"{server.url}/scope/monitors")
        browser.press("Tab", *API_KEY, "Tab", *ADMIN_KEY, "Enter")
        browser.until("return document.querySelectorAll('main details').length == 2")
        assert browser.run(cells)[0] == ["low", "flag", "-1e+30", "0", "0", "-"]
        (answer,) = [http.post("/v1/completions", json=BODY).json()]
        browser.until("return document.querySelector('main').textContent.includes('cmpl-')")
        assert browser.run(cells) == [
            ["low", "flag", "-1e+30", "1", "1", "100.0%"],
            ["high", "flag", "1e+30", "1", "0", "0.0%"],
        ]
        assert browser.run("return document.body.textContent").count(answer["id"]) == 1
        asked = set(browser.requests())
        assert asked == {f"{server.url}{path}" for path in ("/scope/monitors",
                         "/v1/scope/monitors/view")}  # fmt: skip
    done = CliRunner().invoke(
        app, ["monitor", server.url, "--page", str(tmp_path / "page.html")],
        env={"VLLM_API_KEY": API_KEY, "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY},
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert answer["id"] in page
    assert ADMIN_KEY not in page
