"""Monitors of several API servers: a file tells each process what another has set, and files tell
what each has counted. What became of verdicts for a webhook."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from tests.unit.engine.test_connection import SITES
from tests.unit.waiting import until
from vllm_scope.core.registry import Registry
from vllm_scope.engine import judge, monitors, webhook
from vllm_scope.engine.frontend import requests as entering
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.alike import Alike, asking
from vllm_scope.engine.frontend.connection import Connection, connections
from vllm_scope.engine.frontend.prepared import prepare
from vllm_scope.engine.http.calls import EngineCalls
from vllm_scope.engine.judge import Judge
from vllm_scope.engine.monitors import parse_all
from vllm_scope.engine.refusals import refusal
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.engine.worker.worker import ScopeWorker
from vllm_scope.errors import ConfigError, SpecError
from vllm_scope.request.actions import Add, Read
from vllm_scope.request.spec import Spec, scope
from vllm_scope.results.inbox import inbox
from vllm_scope.server.changes import NoTurnError
from vllm_scope.server.shared import Shared

FLAG = {"weight": [0.5] * 4, "layers": [1], "threshold": 10**30}


class Thing(SimpleNamespace):
    """Has a weak reference, as vLLM's objects."""

    __hash__ = object.__hash__


class Cores(Thing):
    """vLLM's client of one EngineCore."""

    async def call_utility_all_async(self, *call):
        return [[Registry(SITES).hold(*call[3])]]


def engine_of(num_processes):
    parallel = Thing(_api_process_count=num_processes, pipeline_parallel_size=1)
    config = Thing(additional_config={"scope": {}}, parallel_config=parallel)

    async def call(name, args):  # an EngineCore that has room
        return [None]

    engine = Thing(
        vllm_config=config, output_processor=Thing(request_states={}), engine_core=Cores(),
        collective_rpc=call,
    )  # fmt: skip
    limits = Limits((16,), 0, 100, 100, 100, 100)
    known = Connection(SITES, None, 1, 1.0, limits, {}, {}, inbox().generation)
    connections.put(engine.output_processor, known)
    return engine


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Of this process. Another `Shared` stands for another process."""
    monkeypatch.setattr(monitors, "_file", None)
    monitors.share(Shared(lambda: tmp_path))
    return tmp_path / "monitors"


def names(engine):
    return [monitor.name for monitor in monitors.monitors_of(engine.vllm_config)]


def put(engine, bodies):
    asyncio.run(EngineCalls(engine).set_monitors(bodies))


def test_what_one_process_sets_another_has(file):
    engine, other = engine_of(2), Shared(lambda: file.parent)
    assert names(engine) == []
    put(engine, {"one": FLAG})
    assert names(engine) == ["one"]
    other.set(other.news().replace(b'"one"', b'"two"'))
    assert names(engine) == ["two"]
    (monitor,) = monitors.monitors_of(engine.vllm_config)
    assert monitor is monitors.monitors_of(engine.vllm_config)[0], "parsed once"
    assert monitor.probe.threshold == 1e30
    put(engine, {})
    assert names(engine) == []


def test_one_api_server_has_no_file(file):
    engine = engine_of(1)
    put(engine, {"one": FLAG})
    assert names(engine) == ["one"]
    assert not file.exists()


def test_what_cannot_be_written_is_not_set(file, monkeypatch):
    engine = engine_of(2)
    put(engine, {"one": FLAG})

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(NoTurnError, match=r"No space left on device.*VLLM_SCOPE_RESULTS_DIR"):
        put(engine, {"two": FLAG})
    assert names(engine) == ["one"]


def tally_of(engine, name):
    (found,) = (one.tally for one in monitors.monitors_of(engine.vllm_config) if one.name == name)
    return found


def requests(engine):
    found = monitors.activity_of(engine.vllm_config)
    return {name: one.requests for name, one in found.items()}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_counts_begin_again_when_a_monitor_changes_and_only_then(file, num_processes):
    engine = engine_of(num_processes)
    later = FLAG | {"after": "one"}
    put(engine, {"one": FLAG, "later": later, "other": FLAG})
    for name in ("one", "later", "other"):
        tally_of(engine, name).add(1.0)
    put(engine, {"one": FLAG, "later": later, "new": FLAG})
    assert requests(engine) == {"one": 1, "later": 1, "new": 0}
    old = tally_of(engine, "one")
    put(engine, {"one": FLAG | {"threshold": 2.0}, "later": later, "new": FLAG})
    assert requests(engine) == {"one": 0, "later": 0, "new": 0}
    old.add(1.0)  # of a request that entered before the change
    assert requests(engine)["one"] == 0
    put(engine, {})
    put(engine, {"one": FLAG})
    assert requests(engine) == {"one": 0}


def test_processes_tell_the_sum_of_what_each_counted(file, monkeypatch):
    """The other process is another engine, which has read the same file."""
    engine, other = engine_of(2), engine_of(2)
    put(engine, {"one": FLAG})
    monkeypatch.setattr(monitors, "_file", Shared(lambda: file.parent))
    assert names(other) == ["one"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 7)
        theirs = monitors._peers_of(other.vllm_config)
    monitors.share(Shared(lambda: file.parent))
    for i in range(3):
        tally_of(other, "one").add(float(i), f"r{i}", 0, (i, float(i)))
    theirs.changed()
    tally_of(engine, "one").add(1.0)
    end = time.monotonic() + 60
    while requests(engine) != {"one": 4}:
        assert time.monotonic() < end
        time.sleep(0.01)
    put(engine, {"one": FLAG | {"threshold": 3.0}})
    assert requests(engine) == {"one": 0}, "the other process has told of the monitor before"


@pytest.mark.parametrize(
    ("made", "look_up"),
    [
        pytest.param("configured", monitors.monitors_of, id="monitors"),
        pytest.param("Peers", monitors._peers_of, id="peers"),
    ],
)
def test_threads_that_look_at_once_get_the_same(made, look_up, file, monkeypatch):
    """The event loop, and the thread on which an operator's question is answered."""
    engine, make, both = engine_of(2), getattr(monitors, made), threading.Barrier(2)
    engine.vllm_config.additional_config = {"scope": {"monitors": {"one": FLAG}}}

    def slow(*given):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # for the other one, which does not come if one waits for the other
        return make(*given)

    monkeypatch.setattr(monitors, made, slow)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(look_up, [engine.vllm_config] * 2)
    assert one is other is look_up(engine.vllm_config)


class _Address(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.statuses.get()
        self.send_response(status)
        self.send_header("Location", "/other")
        self.end_headers()

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    """A server that answers with the next of its `statuses`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Address)
    server.statuses = queue.Queue()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_what_became_of_a_verdict_is_told_to_the_other_processes(file, address):
    """The other process is another engine, in whose folder this one tells."""
    url = f"http://127.0.0.1:{address.server_port}/x"
    body = {"one": FLAG | {"action": "escalate", "url": url}}
    engine, other = engine_of(2), engine_of(2)
    for each in (engine, other):
        each.vllm_config.additional_config = {"scope": {"monitors": body}}
    (monitor,) = monitors.monitors_of(other.vllm_config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 7)
        theirs = monitors._peers_of(other.vllm_config)
    result = SimpleNamespace(
        verdicts={monitor.probe.name: SimpleNamespace(position=2, value=0.5)}, begun=(),
        scores={monitor.probe.name: torch.tensor([0.5])}, aggregates={}, num_lost=lambda name: 0,
    )  # fmt: skip
    result.monitored = lambda: result
    ended = SimpleNamespace(finish_reason="stop", index=0, scope=result)
    Judge((monitor,), None, theirs).told(SimpleNamespace(request_id="r"), ended)

    def until(**counts):
        end = time.monotonic() + 60
        while True:
            found = monitors.activity_of(engine.vllm_config)["one"]
            if found.escalations == {"sent": 0, "failed": 0, "dropped": 0, "waiting": 0} | counts:
                assert found.verdicts == 1
                return
            assert time.monotonic() < end, found
            time.sleep(0.01)

    until(waiting=1)
    address.statuses.put(200)  # nothing else ends from here on
    until(sent=1)


def test_a_webhook_tells_what_became_of_each_verdict(monkeypatch, address):
    monkeypatch.setattr(webhook, "MOST_WAITING", 2)
    hook = webhook.Webhook.parse(f"http://127.0.0.1:{address.server_port}/x", "url")
    assert hook.outcomes == {"sent": 0, "failed": 0, "dropped": 0, "waiting": 0}

    def until(**counts):
        end = time.monotonic() + 60
        while {name: hook.outcomes[name] for name in counts} != counts:
            assert time.monotonic() < end, hook.outcomes
            time.sleep(0.01)

    hook.tell({"position": 0})
    end = time.monotonic() + 60
    while hook._waiting.qsize():  # until the thread has taken it
        assert time.monotonic() < end
        time.sleep(0.01)
    for i in range(4):
        hook.tell({"position": i})
    assert hook.outcomes == {"sent": 0, "failed": 0, "dropped": 2, "waiting": 3}
    for status in (200, 500, 200):
        address.statuses.put(status)
    until(sent=2, failed=1, dropped=2, waiting=0)


@pytest.mark.parametrize("status", [301, 303, 307])
def test_a_verdict_for_a_webhook_that_redirects_has_failed(status, address):
    hook = webhook.Webhook.parse(f"http://127.0.0.1:{address.server_port}/x", "url")
    address.statuses.put(status)
    hook.tell({"position": 0})
    until(lambda: not hook.outcomes["waiting"], 60)
    assert hook.outcomes == {"sent": 0, "failed": 1, "dropped": 0, "waiting": 0}


@pytest.mark.parametrize("statuses", [(500, 200, 500), (None, None)])
def test_the_log_has_the_first_failure_of_a_webhook_alone(statuses, address, caplog):
    """A status of None is an address where nobody listens."""
    port = address.server_port
    if None in statuses:
        address.shutdown()
        address.server_close()
    hook = webhook.Webhook.parse(f"http://127.0.0.1:{port}/secret", "url")
    for i, status in enumerate(statuses):
        address.statuses.put(status)
        hook.tell({"position": i})
    end = time.monotonic() + 60
    while hook.outcomes["waiting"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert hook.outcomes["failed"] == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a verdict did not reach the webhook at 127.0.0.1 (" in line
    assert ("HTTP 500" if statuses[0] else "URLError") in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"action": "escalate"}, "has action 'escalate', which needs a 'url'. Only monitors"),
        ({"action": "escalate", "url": "http://x"}, "has 'url'. Only monitors that the engine"),
        ({"url": "http://x"}, "A monitor that is set while the engine serves has action 'flag'"),
    ],
)
def test_an_escalation_while_serving_is_told_what_is_possible(more, sentence):
    with pytest.raises(SpecError) as refused:
        put(engine_of(1), {"one": FLAG | more})
    assert sentence in str(refused.value)
    assert "additional_config={'scope': {'monitors': ...}}" in str(refused.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"action": "escalate"}, "action is 'escalate', and there is no 'url' to tell; give the"),
        ({"url": "http://x"}, "has 'url' and action 'flag', which tells no url; take 'escalate'"),
    ],
)
def test_half_an_escalation_at_the_start_is_told_its_other_half(more, sentence):
    with pytest.raises(SpecError) as refused:
        parse_all({"one": FLAG | more})
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("url", "came"),
    [
        ("http://", "a text"),
        ("http://[", "a text"),
        ("https:///T0KEN", "a text"),
        ("https://hooks.example:T0KEN/x", "a text"),
        ("ftp://hooks.example/T0KEN", "a text"),
        ("hooks.example/T0KEN", "a text"),
        ("https://user:T0KEN@hooks.example/x", "a text"),
        ("https://hooks.example/T0KEN x", "a text"),
        ("https://hooks.example/T0KEN/é", "a text"),
        (3, "3"),
    ],
)
def test_a_url_to_which_nothing_can_be_sent_is_refused_and_not_shown(url, came):
    with pytest.raises(SpecError, match=rf"^monitors\['one'\].url is {came}.* with a host") as no:
        parse_all({"one": FLAG | {"action": "escalate", "url": url}})
    assert "T0KEN" not in str(no.value)


@pytest.fixture
def monitored(monkeypatch):
    """An engine with one monitor; no other translator is registered."""
    monkeypatch.setattr(monitors, "needs_connection", lambda engine: False)
    for name in ("send", "send_soon"):
        monkeypatch.setattr(monitors.ahead, name, lambda engine, some: None)
    for name, empty in {"_entries": {}, "_everywhere": (), "_keys": frozenset()}.items():
        monkeypatch.setattr(translators, name, empty)
    monitors.register()
    engine = engine_of(1)
    limits = Limits((16,), 0, 100, 100, 100, 100)
    connections.put(engine.output_processor, Connection(SITES, None, 1, 1.0, limits, {}, {}))
    engine.collective_rpc = lambda name, args: [None]
    monitors.set_on(engine, {"one": FLAG})
    yield engine
    monitors.set_on(engine, {})


def test_monitors_that_together_have_no_room_are_refused_and_the_earlier_ones_stay(monitored):
    connection = connections.of(monitored.output_processor)
    most = connection.limits.vectors
    several = {
        f"m{i}": FLAG | {"weight": [[0.5, 1.0, j, i] for j in (0, 1)], "layers": [0, 1]}
        for i in range(64)
    }
    sentence = (
        rf"these 64 monitors, .* 128 vectors, .* this engine has {most} vectors.*fewer monitors"
    )
    with pytest.raises(SpecError, match=sentence):
        monitors.set_on(monitored, several)
    assert names(monitored) == ["one"]
    with pytest.raises(SpecError, match=sentence):  # at the start, in a worker
        monitors.check(parse_all(several), SITES, 1, connection.limits)
    monitors.set_on(monitored, dict(list(several.items())[: most // 2]))
    assert len(names(monitored)) == most // 2


def test_monitors_on_a_model_without_taps_are_refused_and_can_be_ended(monitored):
    """Otherwise every request would be refused."""
    connection = connections.of(monitored.output_processor)
    connection.reason = "its layers are not understood"
    words = "be refused: this model cannot be tapped: its layers are not understood. Set no monit"
    with pytest.raises(SpecError, match=words):
        monitors.set_on(monitored, {"two": FLAG})
    assert names(monitored) == ["one"]
    monitors.set_on(monitored, {})
    assert names(monitored) == []


@pytest.mark.parametrize("named", [{}, {"one": FLAG}], ids=["none", "one"])
def test_an_engine_with_monitors_does_not_start_on_a_model_without_taps(named):
    config = Thing(additional_config={"scope": {"monitors": named}})
    worker = ScopeWorker.__new__(ScopeWorker)
    worker._vllm_config = config
    words = r"^additional_config\['scope'\].monitors: every request .* tapped: no layers. Set no"
    with pytest.raises(ConfigError, match=words) if named else nullcontext():
        worker._go_without_taps("no layers")
    assert worker.reason == "no layers"


def test_monitors_whose_weights_no_spec_can_have_are_refused(monitored, monkeypatch):
    """Otherwise every request would be refused."""
    text = monitors.spec_of(monitored.vllm_config)
    monkeypatch.setattr(monitors, "MAX_SPEC_BYTES", len(text))
    monitors.set_on(monitored, {"two": FLAG})
    with pytest.raises(SpecError, match=rf"^these 2 monitors .* at most {len(text)}\. Set fewer"):
        monitors.set_on(monitored, {"two": FLAG, "three": FLAG})
    assert names(monitored) == ["two"]


def test_enginecore_is_asked_for_room_for_monitors_and_server_wide_edits_together(monitored):
    asked = []

    async def call(name, args):
        asked.append((name, args))
        if name == "scope_check_monitors":
            raise RuntimeError("Call to collective_rpc method failed: there is no room")
        return ["a digest"]

    monitored.collective_rpc = call
    calls, text = EngineCalls(monitored), monitors.spec_of(monitored.vllm_config)
    assert asyncio.run(calls.set_edits("edits")) == "a digest"
    with pytest.raises(SpecError, match=r"^there is no room$"):
        asyncio.run(calls.set_monitors({"two": FLAG}))
    assert names(monitored) == ["one"]
    asyncio.run(calls.set_monitors({}))
    asyncio.run(calls.set_edits("edits"))
    assert asked == [
        ("scope_set_edits", ("edits", text)),
        ("scope_check_monitors", (text.replace("monitor/one", "monitor/two"),)),
        ("scope_set_edits", ("edits", None)),
    ]
    monitored.collective_rpc = lambda name, args: [None]


@pytest.mark.parametrize(
    ("tokens", "fits"),
    [([9], False), ([1], False), ([-2], False), ([0], True), ([-1], True), ("last", True),
     ({"token_ids": [7]}, True), ({"slice": [0, 9, None]}, True)],
    ids=str,
)  # fmt: skip
def test_a_monitor_scores_only_tokens_that_each_request_can_have(tokens, fits, monitored):
    """Otherwise the monitor would refuse the requests of others."""
    body = FLAG | {"tokens": tokens}
    if fits:
        monitors.set_on(monitored, {"two": body})
        assert names(monitored) == ["two"]
        return
    with pytest.raises(
        SpecError, match=r"monitors\['two'\].tokens has positions that a short .*'all'"
    ):
        monitors.set_on(monitored, {"two": body})
    assert names(monitored) == ["one"]


def test_the_spec_that_requests_get_is_ready_when_monitors_are_set(monitored, monkeypatch):
    connection = connections.of(monitored.output_processor)
    with monkeypatch.context() as patch:
        for name in ("_parse", "resolve"):  # done already
            patch.setattr(Spec, name, None)
        given = SimpleNamespace(extra_args=None)
        applied = translators.applying(given, monitored.vllm_config)
        params = translators.translated(given, applied, SITES, {})
        asked = connection.resolve(Spec.from_json(params.extra_args["scope"]))
    assert [probe.name for probe in asked.probes] == ["monitor/one"]


@pytest.mark.parametrize("extra", [None, {"word": 1}], ids=["plain", "key-of-another-translator"])
def test_monitors_apply_to_each_request_that_generates(extra, monitored):
    translators.register("word", ["word"], lambda values, sites: translators.Translation())
    given = SimpleNamespace(extra_args=extra)
    applied = translators.applying(given, monitored.vllm_config)
    params = translators.translated(given, applied, SITES, {})
    asked = Spec.from_json(params.extra_args["scope"])
    assert [probe.name for probe in asked.probes] == ["monitor/one"]
    pooling = SimpleNamespace()  # vLLM's PoolingParams have no extra_args
    assert not translators.applying(pooling, monitored.vllm_config)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_request_without_a_spec_of_its_own_gets_that_of_the_monitors(asynchronous, monitored):
    given: list[SamplingParams] = []
    params = SamplingParams(max_tokens=3)
    args = monitored, "r", {"type": "token", "prompt_token_ids": [1, 2]}, params
    connections.of(monitored.output_processor).generation = inbox().generation

    async def add(engine, request_id, prompt, params):
        given.append(params)

    if asynchronous:
        asyncio.run(entering._add_async(add, *args))
    else:
        entering._add_sync(lambda engine, name, prompt, params: given.append(params), *args)
    asked = Spec.from_json(given[0].extra_args["scope"])
    assert [probe.name for probe in asked.probes] == ["monitor/one"]
    assert (given[0].skip_clone, params.extra_args) == (True, None)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_cell_that_was_checked_before_monitors_were_set_enters_without_them(
    asynchronous, monitored
):
    given: list[SamplingParams] = []
    connections.of(monitored.output_processor).generation = inbox().generation
    monitors.set_on(monitored, {})
    alike, plain, edit = Alike.of_engine(monitored), SamplingParams(), Add([1.0] * 4, layer=1)
    cell = alike.with_edits(alike.checked(0, (edit,), plain, [1, 2]), (edit,))
    monitors.set_on(monitored, {"one": FLAG})
    args = monitored, "r", {"type": "token", "prompt_token_ids": [1, 2]}, asking(plain)

    async def add(engine, request_id, prompt, params):
        given.append(params)

    with entering.prepared_as(cell):
        if asynchronous:
            asyncio.run(entering._add_async(add, *args))
        else:
            entering._add_sync(lambda engine, name, prompt, params: given.append(params), *args)
    assert [params.extra_args for params in given] == [{"scope": ""}]
    assert Alike.of_engine(monitored) is None


@pytest.mark.parametrize("names", [["one"], ["one", "two"], []])
@pytest.mark.parametrize(
    ("ids", "resumable", "what", "instead"),
    [
        (None, False, "prompt embeddings", "send text or token ids."),
        ([1], True, "streamed input", "send the prompt in one piece."),
    ],
    ids=["embeddings", "streamed"],
)
def test_a_request_that_cannot_be_tapped_is_refused_with_the_names_of_the_monitors(
    names, ids, resumable, what, instead, monitored
):
    monitors.set_on(monitored, dict.fromkeys(names, FLAG))
    given = SamplingParams(extra_args=None if names else scope(Read("embed")))
    applied = translators.applying(given, monitored.vllm_config)
    params = translators.translated(given, applied, SITES, {})
    request = Thing(sampling_params=params, prompt_token_ids=ids, resumable=resumable)
    with pytest.raises(SpecError) as refused:
        prepare(connections.of(monitored.output_processor), request)
    called = f"monitor{'s' * (len(names) - 1)} {', '.join(map(repr, names))}"
    why = f", and this engine taps every request for its {called}" if names else ""
    assert str(refused.value) == f"{what} cannot be tapped{why}; {instead}"


@pytest.mark.parametrize("monitored_by", [["one"], []], ids=["a-monitor", "a-spec"])
def test_streamed_input_is_refused_even_if_each_piece_has_parameters_of_its_own(
    monitored_by, monitored
):
    """vLLM then gives the parameters of the call only to the message that ends the input."""
    monitors.set_on(monitored, dict.fromkeys(monitored_by, FLAG))
    given = SamplingParams(extra_args=None if monitored_by else scope(Read("embed")))
    connections.of(monitored.output_processor).generation = inbox().generation

    async def add(engine, request_id, prompt, params):
        pytest.fail("the pieces would enter without the spec")

    async def pieces():
        yield SimpleNamespace(prompt={"prompt_token_ids": [1]}, sampling_params=SamplingParams())

    why = ", and this engine taps every request for its monitor 'one'" if monitored_by else ""
    with pytest.raises(SpecError) as refused:
        asyncio.run(entering._add_async(add, monitored, "r", pieces(), given))
    assert type(refused.value) is refusal()  # by which vLLM knows the status
    assert str(refused.value) == (
        f"streamed input cannot be tapped{why}; send the prompt in one piece."
    )


@pytest.mark.parametrize("given", [{"reads": []}, ["reads"], 5], ids=["dict", "list", "number"])
def test_a_spec_that_is_no_text_is_refused_with_a_sentence_beside_monitors(given, monitored):
    params = SamplingParams(extra_args={"scope": given})
    applied = translators.applying(params, monitored.vllm_config)
    with pytest.raises(
        SpecError, match=r"extra_args\['scope'\] is a \w+; it must be a JSON string"
    ):
        translators.translated(params, applied, SITES, {})


def test_a_monitor_that_lacks_its_weight_is_told_that_alone():
    with pytest.raises(SpecError) as refused:
        parse_all({"one": {"layers": [1], "threshold": 1.0}})
    assert str(refused.value) == "monitors['one'] has no weight."


def test_a_monitors_file_that_cannot_be_used_is_named_with_its_monitor(tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"x" * 100)
    for path, reason in (
        (tmp_path / "none.safetensors", "cannot be read: No such file or directory. Give the path"),
        (damaged, "the content is not safetensors"),
        (tmp_path, "a probe's file ends in .safetensors"),
    ):
        body = {"file": str(path), "layers": [1], "threshold": 1.0}
        config = engine_of(1).vllm_config
        config.additional_config = {"scope": {"monitors": {"one": body}}}
        with pytest.raises(ConfigError) as refused:
            monitors.configured(config)
        sentence = str(refused.value)
        assert sentence.startswith("additional_config['scope'].monitors['one'].file is ")
        assert path.name in sentence
        assert reason in sentence


def test_the_kind_of_a_file_is_refused_without_a_file():
    with pytest.raises(SpecError, match=r"monitors\['one'\] has 'kind', .* and no 'file'"):
        parse_all({"one": FLAG | {"kind": "attention"}})


@pytest.mark.parametrize("more", [{"treshold": 1.0}, {"layer": 1}], ids=["treshold", "layer"])
def test_a_misspelt_field_of_a_monitor_is_named_with_the_fields_of_a_monitor(more):
    with pytest.raises(SpecError) as refused:
        parse_all({"one": {"weight": [1.0], "layers": [1]} | more})
    assert str(refused.value) == (
        f"monitors['one'] has '{next(iter(more))}'; the fields are action, activation, after, "
        "aggregate, bias, layers, site, threshold, tokens, weight, and file, kind, url in "
        "additional_config={'scope': {'monitors': ...}}, at the engine's start."
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"name": "one"}, "the name of a monitor is its key in the object of all monitors. Leave"),
        ({"to": "memory"}, "the scores of monitors cannot be sent to a sink. Leave 'to' out."),
    ],
)
def test_a_field_of_probes_that_monitors_lack_is_refused_with_its_reason(more, sentence):
    with pytest.raises(SpecError) as refused:
        parse_all({"one": FLAG | more})
    assert f"monitors['one'] has '{next(iter(more))}'; {sentence}" in str(refused.value)


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", 2), ("length", 2), ("abort", 0), ("error", 0)]
)
def test_lost_scores_are_the_operators_to_know(reason, told, monkeypatch):
    """Of an aborted request, the scores of its last tokens may not have been made."""
    engine = engine_of(2)
    engine.vllm_config.additional_config = {"scope": {"monitors": {"one": FLAG}}}
    (monitor,) = monitors.monitors_of(engine.vllm_config)
    result = SimpleNamespace(
        verdicts={}, begun=(), scores={monitor.probe.name: torch.tensor([0.5])}, aggregates={},
        num_lost={monitor.probe.name: 2}.get,
    )  # fmt: skip
    result.monitored = lambda: result
    counted = []
    monkeypatch.setattr(judge, "count_verdict", lambda *came: counted.append(came))
    ended = SimpleNamespace(finish_reason=reason, index=0, scope=result)
    Judge((monitor,), None, None).told(SimpleNamespace(request_id="r"), ended)
    judge.backlog.work_off()
    assert counted == [("one", 0.5, False, told)]


def test_a_verdict_that_ends_is_counted_once():
    sums: list[int] = []
    one = webhook.Webhook("http://127.0.0.1:1/nobody-listens")
    reader = threading.Thread(target=lambda: sums.append(sum(one.outcomes.values())))
    count = one._count

    def counting(outcome: str) -> None:
        count(outcome)
        reader.start()
        reader.join(0.2)  # the verdict is counted, and still among those that wait

    one._count = counting
    one.tell({})
    until(lambda: bool(sums), 10)
    assert sums == [1]
