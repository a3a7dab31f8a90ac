"""An operator's monitors: on every request, at start or while serving, and no request is harmed."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.numpy import save_file
from vllm.sampling_params import BeamSearchParams

from tests.asking import prompts, run
from tests.conftest import local_engine
from tests.engine.probing import numbers
from tests.engine.test_edits import params
from tests.engine.test_verdicts import PROMPT, record
from vllm_scope import ConfigError, Probe, Read, SpecError, set_monitors
from vllm_scope.engine.core import entry
from vllm_scope.engine.judge import backlog
from vllm_scope.engine.monitors import activity_of
from vllm_scope.engine.params import TICKET

WEIGHT = numbers(1, 128)
FLAG = {"weight": WEIGHT.tolist(), "layers": [1], "threshold": -1e30}
NEVER = FLAG | {"threshold": 1e30}


def sample(name, **labels):
    backlog.work_off()  # all that has ended is counted
    return REGISTRY.get_sample_value(f"vllm_scope_monitor_{name}", labels) or 0.0


@pytest.fixture(scope="module")
def llm(llama):
    with local_engine(
        llama, dtype="float32", block_size=32,
        additional_config={"scope": {"monitors": {"low": FLAG, "high": NEVER}}},
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(autouse=True)
def _as_started(llm):
    yield
    set_monitors(llm, {"low": FLAG, "high": NEVER})


def test_every_request_is_monitored_plain_ones_too(llm):
    before = sample("verdicts_total", monitor="low"), sample("score_count", monitor="high")
    plain, own = run(
        llm, [PROMPT, PROMPT[:30]],
        [params(), params(Probe(WEIGHT, layer=1, name="mine"), Read("resid_post", layers=[1]))],
    )  # fmt: skip
    for output in (plain, own):
        assert output.scope.status == "complete"
        assert output.scope.verdicts["monitor/low"].position == 0
        assert "monitor/high" not in output.scope.verdicts
    torch.testing.assert_close(own.scope.scores["mine"], own.scope.scores["monitor/low"])
    after = sample("verdicts_total", monitor="low"), sample("score_count", monitor="high")
    assert after == (before[0] + 2, before[1] + 2)
    assert sample("verdicts_total", monitor="high") == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_vllm_has_made_before_is_monitored_too(n, llm):
    """Its own parameters apply, and not those of the call."""
    from vllm.sampling_params import RequestOutputKind

    engine, own = llm.llm_engine, params(n=n, temperature=1.0)
    own.output_kind = RequestOutputKind.FINAL_ONLY
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    tasks = engine.get_supported_tasks()
    made = engine.input_processor.process_inputs("made", prompt, own, supported_tasks=tasks)
    engine.add_request("made", made, params(max_tokens=1))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (output,) = outputs
    assert len(output.outputs) == n
    for completion in output.outputs:
        assert len(completion.token_ids) == 6
        assert completion.scope.status == "complete"
        assert completion.scope.verdicts["monitor/low"].position == 0
    assert own.extra_args is None


def test_beam_search_is_refused_until_the_monitors_have_ended(llm):
    """vLLM makes requests of one token each, which a monitor could not stop."""
    prompts, beams = [{"prompt_token_ids": PROMPT}], BeamSearchParams(beam_width=2, max_tokens=3)
    said = "every request for its monitors 'low', 'high'; sample instead"
    with pytest.raises(SpecError, match=said):
        llm.beam_search(prompts, beams)
    set_monitors(llm, {})
    with pytest.raises(ValueError, match="Tokenizer not available"):  # vLLM's search has begun
        llm.beam_search(prompts, beams)


def test_a_monitored_prompt_hits_the_prefix_cache_as_a_plain_one_does(llm):
    prompt = list(range(300, 390))
    first, second = (run(llm, [prompt], params())[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert len(second.scope.scores["monitor/low"]) == 95
    # A changed monitor never gets the scores of the old one.
    set_monitors(llm, {"low": FLAG | {"weight": numbers(2, 128).tolist()}})
    (third,) = run(llm, [prompt], params())
    assert third.num_cached_tokens == 0
    assert not torch.allclose(third.scope.scores["monitor/low"], second.scope.scores["monitor/low"])


def test_a_monitor_stops_a_request_that_asked_for_nothing(llm):
    (whole,) = run(llm, [PROMPT], params(max_tokens=24))
    values = whole.scope.scores["monitor/low"][len(PROMPT) :]
    at, threshold = record(values)[0]
    stop = FLAG | {"threshold": threshold, "action": "stop", "tokens": "generated"}
    set_monitors(llm, {"stops": stop})
    (output,) = run(llm, [PROMPT], params(max_tokens=24))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason.startswith("probe 'monitor/stops': ")
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[: at + 2]


def test_without_monitors_a_plain_request_has_no_scope(llm):
    set_monitors(llm, {})
    (output,) = run(llm, [PROMPT], params())
    assert output.scope is None


def test_weights_travel_once_and_are_freed_when_the_monitor_is_unset(llm, monkeypatch):
    sizes, original = [], entry.ticket_of

    def recorded(params):
        sizes.append(len(params.extra_args[TICKET]))
        return original(params)

    monkeypatch.setattr(entry, "ticket_of", recorded)
    weights = [numbers(seed, 128).tolist() for seed in (5, 6)]
    wide = {"weight": weights, "layers": [0, 1], "threshold": 1e30}
    set_monitors(llm, {"wide": wide, "low": FLAG})
    ahead = entry._scopes.of(llm.llm_engine.engine_core.engine_core).registry.ahead
    assert ahead.num_bytes == 3 * 128 * 4
    first, second = run(llm, [PROMPT, PROMPT[:40]], params())
    (own,) = run(llm, [PROMPT], params(Probe(numbers(7, 128), layer=1, name="mine")))
    assert max(sizes[:2]) < 800
    assert 512 < sizes[2] < 1300, "its own weight travels with it"
    for output in (first, second, own):
        assert set(output.scope.scores) >= {"monitor/wide", "monitor/low"}
    # Changed while a request runs.
    engine = llm.llm_engine
    engine.add_request("runs", prompts(PROMPT)[0], params())
    engine.step()
    set_monitors(llm, {"wide": wide | {"weight": [numbers(8, 128).tolist()] * 2}})
    assert ahead.num_bytes == 2 * 128 * 4
    engine.add_request("after", prompts(PROMPT)[0], params())
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    found = [ended[name].scope.scores["monitor/wide"] for name in ("runs", "after")]
    before = first.scope.scores["monitor/wide"]
    torch.testing.assert_close(found[0][: len(before)], before)
    assert not torch.allclose(found[1], found[0])
    set_monitors(llm, {})
    assert ahead.num_bytes == 0


@pytest.mark.parametrize(
    ("monitors", "sentence"),
    [
        ({"a": FLAG | {"weight": [1.0, 2.0]}}, "monitors['a'].weight has 2 numbers"),
        ({"a": FLAG | {"layers": [9]}}, "monitors['a'].layers has 9"),
        ({"a": FLAG | {"site": "q"}}, "does not tap 'q'"),
        ({"a": FLAG | {"weight": [float("nan")] * 128}}, "is NaN or infinite"),
        ({"a": FLAG | {"threshold": None}}, "monitors['a'] has no threshold"),
        ({"a": FLAG | {"action": "explode"}}, "it must be one of flag, stop, escalate"),
        ({"a": FLAG | {"name": "b"}}, "the name of a monitor is its key"),
        ({"a": FLAG | {"weight": "module"}}, "names a module"),
        ({"a": FLAG | {"file": "/etc/passwd"}}, "monitors that the engine starts with"),
        ({"a": FLAG | {"url": "http://x"}}, "'url'. Only monitors that the engine starts"),
        ({"a": 3}, "monitors['a'] is 3; it must be an object"),
        ([], "it must be an object: name to monitor"),
        ({str(i): FLAG for i in range(65)}, "there are 65 monitors; at most 64"),
    ],
)
def test_a_wrong_monitor_is_refused_and_the_others_stay(monitors, sentence, llm):
    with pytest.raises(SpecError) as error:
        set_monitors(llm, monitors)
    assert sentence in str(error.value)
    (output,) = run(llm, [PROMPT[:9]], params())
    assert set(output.scope.scores) == {"monitor/low", "monitor/high"}


def test_a_wrong_monitor_ends_the_start(llama):
    wrong = {"a": FLAG | {"weight": [1.0]}}
    with (
        pytest.raises(Exception, match=r"monitors\['a'\].weight has 1 numbers"),
        local_engine(llama, dtype="float32", additional_config={"scope": {"monitors": wrong}}),
    ):
        pass
    malformed = {"a": FLAG | {"threshold": "x"}}
    with (
        pytest.raises(ConfigError, match=r"monitors\['a'\].threshold"),
        local_engine(llama, dtype="float32", additional_config={"scope": {"monitors": malformed}}),
    ):
        pass


class _Hook(BaseHTTPRequestHandler):
    hangs = 0.0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(type(self).hangs)
        self.server.came.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.long
def test_an_address_is_told_of_verdicts_and_one_that_hangs_delays_nothing(llama, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hook)
    server.came = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    save_file({"weight": WEIGHT[None], "bias": numbers(3, 1)}, tmp_path / "probe.safetensors")
    monitor = {
        "file": str(tmp_path / "probe.safetensors"), "layers": [1], "threshold": -1e30,
        "action": "escalate", "url": f"http://127.0.0.1:{server.server_port}/x",
    }  # fmt: skip
    with local_engine(
        llama, dtype="float32", additional_config={"scope": {"monitors": {"outside": monitor}}}
    ) as llm:
        (output,) = run(llm, [PROMPT], params())
        end = time.monotonic() + 10
        while not server.came and time.monotonic() < end:
            time.sleep(0.05)
        (told,) = server.came
        verdict = output.scope.verdicts["monitor/outside"]
        assert told == {
            "monitor": "outside", "request_id": output.request_id, "completion": 0,
            "position": verdict.position, "value": verdict.value,
        }  # fmt: skip
        found = activity_of(llm.llm_engine.vllm_config)["outside"]
        assert (found.action, found.requests, found.verdicts) == ("escalate", 1, 1)
        (flagged,) = found.recent
        assert (flagged.request_id, flagged.position) == (output.request_id, verdict.position)
        assert flagged.value == pytest.approx(verdict.value)
        _Hook.hangs = 3.0
        try:
            started = time.monotonic()
            run(llm, [PROMPT[:5]] * 20, params(max_tokens=1))
            assert time.monotonic() - started < 2.5
        finally:
            _Hook.hangs = 0.0
        escalations = activity_of(llm.llm_engine.vllm_config)["outside"].escalations
        assert sum(escalations.values()) == 21
        assert escalations["waiting"] > 0
    server.shutdown()
