"""A request of several completions enters once, whatever way vLLM makes the completions."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from copy import copy
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from tests.collector import collector_off
from vllm_scope import Add, Gate, Probe, Read, SpecError, scope
from vllm_scope.engine import functions, heap
from vllm_scope.engine.frontend import outputs
from vllm_scope.engine.frontend import requests as frontend
from vllm_scope.engine.frontend.connection import Connection, connections
from vllm_scope.engine.frontend.prepared import prepare
from vllm_scope.engine.frontend.running import Live, Running, lives, runs
from vllm_scope.engine.frontend.translators import Decorators
from vllm_scope.engine.params import asks
from vllm_scope.engine.refusals import busy, refusal, refused
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import UnheldError
from vllm_scope.request.actions import Module
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.results.budget import Budget, Share
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import inbox

SITES = Sites(2, 4, "float32", (0, 2, 4))
NUM_CHILDREN = 8
LARGE = " " * 5000


class Counted(Connection):
    """Remembers on which thread each request was checked."""

    def check(self, *args):
        self.__dict__.setdefault("threads", []).append(threading.current_thread())
        super().check(*args)


class State(SimpleNamespace):
    """vLLM's RequestState."""

    logprobs_processor = SimpleNamespace(prompt_logprobs=None)


class Completion(SimpleNamespace):
    """vLLM's CompletionOutput."""


class Hooks:
    """A request's functions, as far as the front-end goes."""


class Processor:
    offline = False

    def __init__(self) -> None:
        limits = Limits((16,), 0, 100, 100, 100, 100, False)
        connection = Counted(SITES, None, 1, 1.0, limits, {}, {})
        connection.generation, connection.offline = inbox().generation, self.offline
        connections.put(self, connection)
        self.request_states: dict[str, State] = {}

    def add_request(self, request, prompt, parent_req=None, request_index=0, queue=None):
        state = State(detokenizer=None)
        self.request_states[request.request_id] = state


class Engine:
    """AsyncLLM, as far as adding a request with n > 1 goes: vllm 0.31 to 0.33."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(worker_cls="auto")
        self.vllm_config = SimpleNamespace(
            additional_config={"scope": {}}, parallel_config=parallel
        )
        self.output_processor = Processor()

    async def add_request(self, request_id, prompt, params):
        request = SimpleNamespace(
            request_id=request_id, external_req_id=request_id, resumable=False, cache_salt=None,
            prompt_token_ids=prompt["prompt_token_ids"], params=copy(params),
            sampling_params=params,
        )  # fmt: skip
        parent = ParentRequest(request)
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            frontend._add_to_processor(
                Processor.add_request, self.output_processor, child, None, parent, index, None
            )


def _add(text: str, ids: list[int]) -> tuple[Engine, threading.Thread]:
    engine = Engine()
    params = SamplingParams(n=NUM_CHILDREN, max_tokens=3, extra_args={"scope": text})
    prompt = {"type": "token", "prompt_token_ids": ids}

    async def run() -> threading.Thread:
        await frontend._add_async(Engine.add_request, engine, "one", prompt, params)
        return threading.current_thread()

    return engine, asyncio.run(run())


@pytest.mark.parametrize("padding", ["", LARGE], ids=["small", "large"])
def test_completions_of_one_request_are_prepared_once_and_a_large_one_off_the_loop(padding):
    engine, loop_thread = _add(scope(Read("resid_post"))["scope"] + padding, [1, 2, 3])
    processor = engine.output_processor
    (thread,) = connections.of(processor).threads
    assert (thread is loop_thread) == (not padding)
    pending = [runs.of(state).pending for state in processor.request_states.values()]
    assert len({one.key for one in pending}) == NUM_CHILDREN
    for one in pending:
        assert len(one.snapshot([7], None).transcript) == 4
        inbox().forget(one)


@pytest.mark.parametrize("offline", [True, False])
def test_collections_are_rarer_until_an_llm_engine_frees_the_states_of_requests_with_a_spec(
    offline, monkeypatch
):
    monkeypatch.setattr(frontend, "seldom", seldom := heap._Seldom())
    monkeypatch.setattr(Processor, "offline", offline)
    engine, _ = _add(scope(Read("resid_post"))["scope"], [1, 2, 3])
    states = engine.output_processor.request_states
    assert seldom._num == (NUM_CHILDREN if offline else 0)
    for state in states.values():
        inbox().forget(runs.of(state).pending)
    del state
    states.popitem()
    assert seldom._num == (NUM_CHILDREN - 1 if offline else 0)
    states.clear()
    assert seldom._num == 0


@pytest.mark.parametrize(
    ("tokens", "again_on_the_loop"),
    [pytest.param("all", True, id="whole-phases"), pytest.param([0, 1], False, id="positions")],
)
def test_a_long_spec_that_is_known_is_prepared_on_the_loop_if_that_takes_no_time(
    tokens, again_on_the_loop
):
    text = scope(Read("resid_post", tokens=tokens))["scope"] + 2 * LARGE
    for on_the_loop in (False, again_on_the_loop):
        engine, loop_thread = _add(text, [1, 2, 3])
        (thread,) = connections.of(engine.output_processor).threads
        assert (thread is loop_thread) == on_the_loop
        for state in engine.output_processor.request_states.values():
            inbox().forget(runs.of(state).pending)


def test_a_long_prompt_is_prepared_off_the_loop():
    engine, loop_thread = _add(scope(Read("resid_post"))["scope"], [1] * 5000)
    (thread,) = connections.of(engine.output_processor).threads
    assert thread is not loop_thread
    for state in engine.output_processor.request_states.values():
        inbox().forget(runs.of(state).pending)


def test_a_large_request_that_is_not_possible_is_refused_before_it_enters():
    with pytest.raises(SpecError, match=r"reads\[0\].layers has 9"):
        _add(scope(Read("resid_post", layers=[9]))["scope"] + LARGE, [1, 2, 3])


def test_a_prepared_request_is_not_used_for_another_prompt():
    """vLLM may cut a prompt when it makes the request."""

    class Cuts(Engine):
        async def add_request(self, request_id, prompt, params):
            await super().add_request(request_id, {"prompt_token_ids": [1, 2]}, params)

    engine = Cuts()
    params = SamplingParams(n=2, max_tokens=3, extra_args=scope(Read("resid_post")))
    prompt = {"type": "token", "prompt_token_ids": [1] * 5000}
    asyncio.run(frontend._add_async(Cuts.add_request, engine, "one", prompt, params))
    for state in engine.output_processor.request_states.values():
        assert len(runs.of(state).pending.snapshot([], None).transcript) == 2
        inbox().forget(runs.of(state).pending)


def test_a_request_that_is_cancelled_while_it_is_added_is_aborted():
    """vLLM's generate aborts what it has added, not what it is adding. Other requests with the same
    caller's id run on."""
    aborted = []

    class Leaves(Engine):
        async def abort(self, names, internal=False):
            aborted.append((names, internal))

    async def cancelled():
        begun = asyncio.Event()

        async def add(engine, request, prompt, parent):
            begun.set()
            await asyncio.Event().wait()

        request = SimpleNamespace(
            request_id="one-made", external_req_id="one", prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(max_tokens=3),
        )  # fmt: skip
        added = frontend._add_one_async(add, Leaves(), request, None, None)
        task = asyncio.create_task(added)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert aborted == [(["one-made"], True)]


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_refused_request_leaves_nothing_and_ends_no_other_with_the_same_callers_id(num):
    """A request is refused before it is added, or by an EngineCore in the same process."""
    ended = []

    class Refuses(Sync):
        abort_request = LLMEngine.abort_request

        def __init__(self):
            super().__init__()
            self.output_processor = OutputProcessor(None, log_stats=False)
            self.engine_core = SimpleNamespace(abort_requests=ended.extend)

        def add_request(self, request_id, prompt, params):
            request = _request(request_id, "one", params)
            parent = ParentRequest(request) if params.n > 1 else None
            for index in range(num):
                child = copy(request)
                if parent is not None:
                    child.request_id, child.sampling_params = parent.get_child_info(index)
                self.output_processor.add_request(child, None, parent, index)
            raise SpecError("no.")

    engine = Refuses()
    processor = engine.output_processor
    processor.add_request(_request("one-a", "one", SamplingParams()), None)
    with pytest.raises(SpecError, match="no"):
        frontend._add_sync(
            Refuses.add_request, engine, "one-b", "a prompt", SamplingParams(n=max(num, 1))
        )
    assert sorted(ended) == [[], ["one-b"], [], ["0_one-b", "1_one-b", "2_one-b"]][num]
    assert list(processor.request_states) == ["one-a"]
    assert processor.external_req_ids == {"one": ["one-a"]}
    assert not processor.parent_requests


def _request(request_id: str, external: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2], None, params, None, 0.0, None, None, None, external_req_id=external
    )


def _named(name: str) -> SamplingParams:
    edit = Add(Module(name), layer=0)
    return SamplingParams(max_tokens=3, extra_args=scope(edit))


class Asked(Engine):
    """Its modules are asked for by a remote call, which is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    async def collective_rpc(self, name):
        assert name == "scope_modules"
        self.num_asked += 1
        await asyncio.sleep(0)
        return [{"happy": {"streams": [("resid_post", 0)]}}]

    async def add_request(self, request_id, prompt, params):
        await asyncio.sleep(0)
        ids, connection = prompt["prompt_token_ids"], connections.of(self.output_processor)
        request = SimpleNamespace(sampling_params=params, prompt_token_ids=ids, resumable=False)
        prepare(connection, request)


async def _enter(engine, params):
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    await frontend._add_async(Asked.add_request, engine, "one", prompt, params)


async def _refused(engine, text):
    """A request's output that says that EngineCore refused it."""
    source = SimpleNamespace(text=text)
    completion = Completion()
    before = len(lives)
    lives.put(completion, Live(source, refusal=SpecError("no")))

    async def stream():
        yield SimpleNamespace(outputs=[completion])

    with pytest.raises(SpecError, match="no"):
        await anext(outputs._settled(engine, stream()))
    assert len(lives) == before, "the error's traceback would keep the completion, and its rows"


@pytest.mark.parametrize(
    ("params", "num_asked"),
    [
        pytest.param(SamplingParams(extra_args=scope(Read("resid_post"))), 1, id="no-module"),
        pytest.param(_named("happy"), 2, id="a-module"),
    ],
)
def test_a_refusal_harms_no_request_that_is_being_prepared(params, num_asked):
    async def run():
        engine = Asked()
        await _enter(engine, _named("happy"))
        neighbour = asyncio.ensure_future(_enter(engine, _named("happy")))
        await asyncio.sleep(0)  # it knows its module, and waits for its turn
        await _refused(engine, params.extra_args["scope"])
        await neighbour
        await _enter(engine, _named("happy"))
        await _enter(engine, _named("happy"))
        return engine.num_asked

    assert asyncio.run(run()) == num_asked


def test_a_name_that_may_have_changed_while_modules_were_asked_for_is_asked_for_again():
    async def run():
        engine = Asked()
        entering = asyncio.ensure_future(_enter(engine, _named("happy")))
        await asyncio.sleep(0)
        connections.of(engine.output_processor).doubt_modules()
        await entering
        await _enter(engine, _named("happy"))
        return engine.num_asked

    assert asyncio.run(run()) == 2


def test_a_request_with_functions_or_several_stages_waits_for_their_errors():
    engine, token_ids = Engine(), {"prompt_token_ids": [1, 2]}
    connection = connections.of(engine.output_processor)
    edit, hooks = scope(Add([1.0] * 4, layer=0)), Hooks()
    given = edit | {functions.FUNCTIONS: functions.keep(hooks)}
    for name, extra_args, num_stages in (("hooks", given, 1), ("stages", edit, 2)):
        connection.num_stages = num_stages
        params = SamplingParams(max_tokens=3, n=2, extra_args=extra_args)
        asyncio.run(engine.add_request(name, token_ids, params))
    states = engine.output_processor.request_states.values()
    assert len(states) == 4
    for state in states:
        pending = runs.of(state).pending
        pending.finish(0, "a hook failed")
        pending.finish(1, None)
        assert pending.snapshot([1, 2, 3], "length").status == "failed"


@pytest.mark.parametrize(
    ("actions", "sinks", "waits"),
    [
        ((Add([1.0] * 4, layer=0),), {}, False),
        ((Add([1.0] * 4, layer=0),), {"file": ["read"]}, True),
        ((Add([1.0] * 4, layer=0), Read("resid_post", layers=[0])), {}, True),
        ((Add([1.0] * 4, layer=1, gate=Gate([1.0] * 4, 0)),), {}, False),
        ((Add([1.0] * 4, layer=1, gate=Gate([1.0] * 4, 0, name="g")),), {}, True),
    ],
    ids=["edit", "sink for all", "read", "gate", "told gate"],
)
def test_a_request_of_edits_alone_is_over_with_its_last_token(actions, sinks, waits):
    engine = Engine()
    connections.of(engine.output_processor).sinks = sinks
    params = SamplingParams(max_tokens=3, n=2, extra_args=scope(*actions))
    asyncio.run(engine.add_request("a", {"prompt_token_ids": [1, 2]}, params))
    for state in engine.output_processor.request_states.values():
        pending = runs.of(state).pending
        assert pending.done.done() is not waits
        result = pending.snapshot([1, 2, 3], "length")
        assert result.status == ("incomplete" if waits else "complete")


class Sync(Engine):
    """Stands for LLMEngine; it can only be given requests."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_core = SimpleNamespace()
        self.given: list[SamplingParams] = []

    def add_request(self, request_id, prompt, params):
        self.given.append(params)


def _given(params: SamplingParams, asynchronous: bool) -> SamplingParams:
    """What vLLM is given for a request with these parameters."""
    engine, prompt = Sync(), {"type": "token", "prompt_token_ids": [1, 2]}

    async def add(engine, request_id, prompt, params):
        engine.given.append(params)

    if asynchronous:
        asyncio.run(frontend._add_async(add, engine, "one", prompt, params))
    else:
        frontend._add_sync(Sync.add_request, engine, "one", prompt, params)
    return engine.given[0]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_vllm_need_not_copy_the_parameters_of_a_request_with_a_spec(asynchronous):
    params = SamplingParams(max_tokens=3, extra_args=scope(Read("embed")))
    given = _given(params, asynchronous)
    assert given.skip_clone
    assert given.extra_args == params.extra_args
    assert not params.skip_clone


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_plain_parameters_are_passed_on_as_they_are(asynchronous):
    params = SamplingParams(max_tokens=3)
    assert _given(params, asynchronous) is params


@pytest.mark.parametrize("given", [Read("embed"), [Read("embed")], "embed"])
def test_arguments_that_are_no_mapping_are_refused_with_a_sentence(given):
    with pytest.raises(SpecError, match=r"extra_args is .*; it must be a dict, as scope\(Read"):
        asks(SimpleNamespace(extra_args=given))


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([None, None, refusal()("no such layer.")], "prompts[2]: no such layer."),
        ([None, busy("no room.")], "prompts[1]: no room."),
        ([None, busy("sent anew.", UnheldError)], "prompts[1]: sent anew."),
        ([refusal()("no such layer.")], "no such layer."),
        ([None, ValueError("vLLM's own")], "vLLM's own"),
    ],
    ids=["a-wrong-spec", "no-room", "not-held", "a-prompt-alone", "not-ours"],
)
def test_an_llm_names_the_prompt_of_several_that_is_refused(errors, said):
    from vllm import LLM

    added, aborted = [], []

    class One(LLM):
        def __init__(self):
            self.llm_engine = SimpleNamespace(
                abort_request=lambda ids, internal: aborted.extend(ids)
            )

        def _resolve_mm_lora(self, prompt, lora):
            return lora

        def _add_request(self, prompt, params, **_):
            if params is not None:
                raise params
            added.append(prompt)
            return prompt

    frontend.wrap_llm()
    with pytest.raises(type(errors[-1])) as caught:
        One()._render_and_add_requests(prompts=[f"{i}" for i in range(len(errors))], params=errors)
    assert str(caught.value) == said
    assert type(caught.value) is type(errors[-1])  # by which vLLM knows the status
    assert added == aborted == [f"{i}" for i in range(len(errors) - 1)]


def test_an_llm_names_the_prompt_of_several_whose_arguments_are_no_mapping():
    from vllm import LLM

    class One(LLM):
        def __init__(self):
            self.llm_engine = SimpleNamespace(abort_request=lambda ids, internal: None)

        def _resolve_mm_lora(self, prompt, lora):
            return lora

        def _add_request(self, prompt, params, **_):
            asks(params)
            return prompt

    frontend.wrap_llm()
    params = [SamplingParams(), SamplingParams(extra_args=Read("embed"))]
    with pytest.raises(SpecError, match=r"^prompts\[1\]: extra_args is "):
        One()._render_and_add_requests(prompts=["a", "b"], params=params)


def _made(running, state, token_ids, finish_reason, stop_reason):
    """An output of a stream, as vLLM makes it for the newest tokens of a request."""

    def original(self):
        return CompletionOutput(0, "", token_ids, None, None, None, finish_reason, stop_reason)

    runs.put(state, running)
    completion = outputs._new_completion(original, state)
    return RequestOutput("r", None, [1], None, [completion], finish_reason is not None)


@pytest.mark.parametrize(
    ("reason", "before", "after"),
    [
        pytest.param("stop", [None], [None] * 4, id="in-the-first-chunk"),
        pytest.param("stop", [None, {1: 0.5}], [None, {1: 0.5}, None, None], id="in-a-later-chunk"),
        pytest.param(None, [None], [None], id="goes-on"),
        pytest.param("stop", [], [], id="streamed-before"),
        pytest.param("stop", None, None, id="not-asked-for"),
    ],
)
def test_each_prompt_token_of_a_stopped_request_has_a_place_for_its_logprob(reason, before, after):
    pending = SimpleNamespace(asked=SimpleNamespace(probes=()), error=None)
    processor = SimpleNamespace(prompt_logprobs=before)
    state = State(logprobs_processor=processor, prompt_token_ids=[1, 2, 3, 4])
    _made(Running(pending, Decorators(), None, ""), state, [], reason, "probe 'p'")
    assert processor.prompt_logprobs == after


def test_a_stream_whose_caller_is_slow_is_refused_with_the_reason():
    """vLLM adds the newest tokens of a stream to an output that the caller has not read yet."""
    pending = SimpleNamespace(asked=SimpleNamespace(probes=()), error=None)
    running, state = Running(pending, Decorators(), None, ""), State()
    last = refused("r", SpecError("an edit makes a row that is not finite."))
    first = _made(running, state, [7], None, None)
    first.add(_made(running, state, [], "error", last.stop_reason), aggregate=True)
    before = len(lives)

    async def stream():
        yield first

    async def read():
        with pytest.raises(SpecError, match=r"^an edit makes a row that is not finite\.$"):
            await anext(outputs._settled(State(output_processor=State()), stream()))

    asyncio.run(read())
    assert len(lives) == before - 1, "the completion, and its rows, would stay in memory"


def test_an_error_in_a_stream_does_not_keep_the_streams_earlier_outputs():
    """The frames of the caller, which the error's traceback holds, can hold these outputs."""
    pending = State(asked=SimpleNamespace(probes=()), error=None, done=Future(), num_came=0)
    running, state = Running(pending, Decorators(), None, ""), State()
    running.give = lambda output, completion: None
    last = refused("r", SpecError("an edit makes a row that is not finite."))
    before, came = len(lives), []

    async def stream():
        yield _made(running, state, [7], None, None)
        yield _made(running, state, [], "error", last.stop_reason)

    async def read():
        earlier = []
        async for output in outputs._settled(State(output_processor=State()), stream()):
            earlier.append(output)
            came.append(weakref.ref(output.outputs[0]))

    with pytest.raises(SpecError, match="not finite"):
        asyncio.run(read())
    gc.collect()
    assert [one() for one in came] == [None]
    assert len(lives) == before


@pytest.mark.parametrize(
    "action", [Read("embed"), Probe([1.0] * 4, name="p", layers=[0])], ids=["read", "probe"]
)
def test_the_rows_of_an_ended_request_are_freed_without_a_garbage_collection(action):
    """The texts of tokens are taken from the detokenizer if there are probes."""

    class Detokenizer:
        def decode_next(self, token):
            return f"<{token}>"

    asked = Spec.from_json(scope(action)["scope"]).resolve(SITES)
    budget = Budget(1 << 20)
    pending = Pending(7, asked, SITES, [1, 2], 3, 1, Share(budget, 1000))
    state = State(detokenizer=Detokenizer())
    running = runs.put(state, Running(pending, Decorators(), state.detokenizer, ""))
    assert state.detokenizer.decode_next(5) == "<5>"
    assert running.texts == ["<5>"] * len(asked.probes)
    assert budget.num_bytes == 1000
    with collector_off():
        del pending, running, state
        assert budget.num_bytes == 0
