"""EngineCore's side: what requests that enter mean, and how their KV is keyed.
What is vLLM's own here is replaced by as little as the seams need."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

from vllm_scope import (
    Add,
    CapacityError,
    LensTopK,
    Moments,
    Policy,
    Probe,
    Read,
    Replace,
    Spec,
    SpecError,
    scope,
)  # fmt: skip
from vllm_scope.control.policy_options import PolicyConfig, PolicyOptions
from vllm_scope.core.registry import Registry
from vllm_scope.core.sums_room import SumsRoom
from vllm_scope.engine.core import entry as core
from vllm_scope.engine.core.entered import entered
from vllm_scope.engine.core.entry import CoreScope
from vllm_scope.engine.model import foreign_connector
from vllm_scope.engine.params import TICKET, ticket_of
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import OVERSHOOT
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import Cost
from vllm_scope.program.table_rows import OpList
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient, Ticket, travelling
from vllm_scope.vectors import SteeringModule, to_bytes

SITES = Sites(2, 4, "float32", (0, 2, 4))
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]


def _module(vector: list[float]) -> bytes:
    return to_bytes(SteeringModule({("resid_post", 0): vector}))


def _core(most: Cost | None = None) -> CoreScope:
    """As its constructor leaves it."""
    made = CoreScope.__new__(CoreScope)
    made.sites, made.registry = SITES, Registry(SITES)
    made.num_stages = 1
    made.most = most or Cost(100, 100, 100)
    made.everywhere, made.connector = Resolved(), None
    made.sums, made.widths = SumsRoom(SITES, 1), None
    made.sessions, made.refused = WeakValueDictionary(), {}
    return made


def _request(*actions: Any, name: str = "r", num_prompt: int = 8, first: int | None = None):
    """A request as it enters; without actions a plain one."""
    extra: dict[str, Any] = {"mine": 1}
    if actions:
        spec = Spec.from_json(scope(*actions)["scope"])
        arrays = travelling(spec.arrays.values())
        ticket = Ticket(Recipient(5, "f"), first, spec.modules, spec.packed, arrays)
        extra[TICKET] = ticket.encode()
    params = SimpleNamespace(extra_args=extra, max_tokens=10)
    return SimpleNamespace(
        request_id=name, sampling_params=params, prompt_token_ids=[1] * num_prompt, resumable=False
    )


def _enter(engine: CoreScope, request: Any) -> Any:
    return engine.enter(request, ticket_of(request.sampling_params))


# What a request is given when it enters


def test_names_and_the_servers_edits_mean_what_they_mean_when_a_request_enters():
    engine = _core()
    engine.registry.register("m", _module(V))
    engine.registry.register("other", _module(W))
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    request = _request(Add("m"), Read("embed"), first=3)
    found = _enter(engine, request)
    engine.registry.register("m", _module(W))
    engine.registry.set_edits(None)
    values = [(edit.stream[1], edit.values.numpy.tolist()) for edit in found.asked.edits]
    assert values == [(1, W), (0, V)]
    assert found.held.cost == Cost(2, 1, 3 + 1)  # each token is checked, too
    assert (found.recipient, found.first_read) == (Recipient(5, "f"), 3)
    assert found.unchecked
    later = _enter(engine, request)
    assert [edit.values.numpy.tolist() for edit in later.asked.edits] == [W]


def test_a_request_holds_the_rows_of_its_lenses():
    asked = LensTopK(top_k=2), LensTopK(layers=[1], tokens=[-1, 3], name="b")
    found = _enter(_core(), _request(*asked, num_prompt=8))
    # 8 tokens and 9 generated ones at two layers; the last one is known later.
    assert found.reserve == Cost(lens_rows=2 * 17 + 2)
    again = _enter(_core(), _request(LensTopK(), num_prompt=3))
    assert again.reserve == Cost(lens_rows=2 * 12)


def test_a_request_that_only_reads_holds_no_places_and_keys_no_block():
    found = _enter(_core(), _request(Read("embed"), first=0))
    assert (found.held, found.keys, found.first_edited) == (None, None, None)
    assert (found.first_read, found.unchecked) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "num_programs"),
    [
        pytest.param("generated", 1, id="uniform"),
        pytest.param([2, 9], 4, id="positions"),  # prompt and generated, edited and not
    ],
)
def test_a_request_whose_policy_sets_scales_has_room_for_them_and_blocks_of_its_own(
    tokens, num_programs
):
    engine = _core()
    engine.policies = {"p": PolicyConfig("p", PolicyOptions(most_changes=5), {})}
    probe, policy = Probe(V, layer=1, name="s", tokens="generated"), Policy("p")
    named, unnamed = (Add(V, layer=0, tokens=tokens, name=name) for name in ("e", None))
    one, other = (_enter(engine, _request(named, probe, policy)) for _ in range(2))
    plain, without = (
        _enter(engine, _request(*some)) for some in ((named, probe), (unnamed, probe))
    )
    assert (one.reserve.vectors, one.reserve.programs) == (0, 5 * num_programs)
    assert one.reserve.ops >= one.reserve.programs
    assert plain.reserve == without.reserve == Cost()
    assert len({x.keys.key(8, 12) for x in (one, other, plain, without)}) == 3
    assert len({x.keys.key(0, 4) for x in (one, other, plain, without)}) == 1
    engine.most = Cost(100, one.held.num_programs + one.reserve.programs - 1, 100)
    with pytest.raises(CapacityError, match="the request takes"):
        _enter(engine, _request(named, probe, policy))


def test_plain_requests_enter_as_they_are():
    engine = _core()
    assert _enter(engine, _request()) is None
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=[1])
    assert _enter(engine, pooling) is None


def test_requests_of_the_same_spec_share_what_it_means():
    engine = _core()
    engine.registry.register("m", _module(V))
    for server in (None, scope(Add(W, layer=1))["scope"]):
        engine.registry.set_edits(server)
        found = [_enter(engine, _request(Add("m"), Read("embed"))) for _ in range(2)]
        assert found[0].asked is found[1].asked
    alone = [_enter(engine, _request()) for _ in range(2)]
    assert alone[0].asked is alone[1].asked


@pytest.mark.parametrize("widths", [Widths((16,)), None], ids=["in-this-process", "elsewhere"])
def test_programs_for_a_worker_in_this_process_are_made_when_the_request_enters(
    widths, monkeypatch
):
    made, original = [], OpList.at
    monkeypatch.setattr(OpList, "at", lambda *args: made.append(args[2]) or original(*args))
    engine = _core()
    engine.widths = widths
    edits = [Add(V, layer=0, scale=i + 1.0, tokens=[i]) for i in range(8)]
    held = _enter(engine, _request(*edits)).held
    assert made == ([] if widths is None else [widths])
    if widths is not None:  # the worker's thread makes none
        assert held.rows(widths).num_ops == held.num_ops
        assert made == [widths]


def test_the_servers_edits_concern_plain_requests_too():
    engine = _core()
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    found = _enter(engine, _request())
    assert found.recipient is None
    assert found.held.cost == Cost(1, 1, 1 + 1)
    assert found.keys.key(0, 4) is not None
    engine.registry.set_edits(None)
    assert _enter(engine, _request()) is None


def test_reads_can_need_room_that_the_servers_edits_have_taken():
    engine = _core(most=Cost(1, 2, 4))
    edits = scope(Add(W, layer=1))["scope"]
    engine.check_edits(edits)
    engine.registry.set_edits(edits)
    assert _enter(engine, _request(Read("embed"))).held.num_programs == 1
    with pytest.raises(CapacityError, match="with the server's edits the request takes"):
        _enter(engine, _request(Read("embed", tokens=[0])))


def test_global_sinks_read_plain_requests_too():
    engine = _core()
    engine.everywhere = Spec((Read("embed", tokens="last_prompt"),)).resolve(SITES)
    found = _enter(engine, _request())
    assert (found.recipient, found.first_read, found.unchecked) == (None, 7, True)
    assert _enter(engine, _request(Read("embed"), first=2)).first_read == 2


def test_prompt_embeddings_enter_as_they_are_and_are_never_edited():
    engine = _core()
    engine.everywhere = Spec((Read("embed"),)).resolve(SITES)
    request = _request()
    request.prompt_token_ids = None
    assert _enter(engine, request) is None
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    with pytest.raises(SpecError, match="prompt embeddings cannot be edited; send text"):
        _enter(engine, request)
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=None)
    assert _enter(engine, pooling) is None


@pytest.mark.parametrize("tokens", ["prompt", "generated"])
def test_the_first_piece_of_streamed_input_is_not_edited_in_parts(tokens):
    """Tokens of the later pieces would count as generated."""
    engine, piece = _core(), _request()
    piece.resumable = True
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    found = _enter(engine, piece)
    assert (len(found.asked.edits), found.num_prompt) == (1, 8)
    engine.registry.set_edits(scope(Add(W, layer=1, tokens=tokens))["scope"])
    with pytest.raises(SpecError, match="a later piece of streamed input cannot be told from"):
        _enter(engine, piece)
    # A session that began before the edits were set goes on without these edits.
    session = SimpleNamespace(requests={"r": None})
    made, hashed = _preprocess(_EngineCore(engine, scheduler=session), piece)
    assert hashed == [None] * 4
    assert entered(made) is None


def test_a_piece_of_streamed_input_whose_session_is_not_in_the_scheduler_yet_is_not_refused():
    """The first piece waits for room. Without this piece, the session would never end."""
    scope_, piece = _core(), _request(name="session")
    engine = _EngineCore(scope_, scheduler=SimpleNamespace(requests={}))
    piece.resumable = True
    scope_.registry.set_edits(scope(Add(W, layer=1))["scope"])
    first, _ = _preprocess(engine, piece)
    assert len(entered(first).asked.edits) == 1
    scope_.registry.set_edits(scope(Add(W, layer=1, tokens="prompt"))["scope"])
    later, _ = _preprocess(engine, piece)
    assert entered(later) is None
    del first  # the session has ended
    with pytest.raises(SpecError, match="a later piece of streamed input cannot be told from"):
        _preprocess(engine, piece)


def test_a_session_of_another_engine_in_the_process_is_not_known():
    one, other = (_EngineCore(_core(), scheduler=SimpleNamespace(requests={})) for _ in range(2))
    piece = _request(Add(V, layer=0), name="session")
    piece.resumable = True
    first, _ = _preprocess(one, piece)
    piece = _request(Add(V, layer=0), name="session")
    piece.resumable = True
    second, _ = _preprocess(other, piece)
    assert [len(entered(made).asked.edits) for made in (first, second)] == [1, 1]


def test_the_end_of_a_refused_session_of_streamed_input_begins_no_request(monkeypatch):
    """vLLM sends the end as a request of one dummy token, with the id of the session."""
    monkeypatch.setattr(core, "MOST_REFUSED", 2)
    scope_ = _core()
    engine = _EngineCore(scope_, scheduler=SimpleNamespace(requests={}))

    def send(name: str, resumable: bool) -> Any:
        request = _request(name=name)
        request.resumable = resumable
        return _preprocess(engine, request)[0]

    scope_.registry.set_edits(scope(Add(W, layer=1, tokens="prompt"))["scope"])
    for name in ("before", "a", "b", "a"):
        with pytest.raises(SpecError, match="a later piece of streamed input cannot be told from"):
            send(name, True)
    with pytest.raises(SpecError, match="every piece of this streamed input was refused"):
        send("a", False)
    # A request that comes later has an id of its own. The oldest refusal is forgotten.
    assert all(entered(send(name, False)) is not None for name in ("a", "before", "other"))
    scope_.registry.set_edits(None)
    piece = send("b", True)  # the session goes on after the edits were removed
    assert entered(send("b", False)) is None
    assert scope_.refused == {}
    del piece


def test_the_cost_counts_the_positions_that_a_step_may_overshoot():
    engine = _core()
    last = 8 + 10 + OVERSHOOT - 1
    # Tokens that are not edited are checked.
    for position, cost in ((last, Cost(1, 2, 1 + 2)), (last + 1, Cost(0, 1, 1))):
        found = _enter(engine, _request(Add(V, layer=0, tokens=[position])))
        assert found.held.cost == cost


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        pytest.param(Add("m"), SpecError, "'m', which this engine does not hold", id="gone"),
        pytest.param(
            Replace(np.arange(1.0, 25.0).reshape(6, 4), positions=range(6), layer=0), CapacityError,
            "this engine has", id="too-large",
        ),
    ],
)  # fmt: skip
def test_a_request_that_is_no_longer_possible_is_refused_when_it_enters(action, error, words):
    engine = _core(Cost(5, 5, 5))
    with pytest.raises(error, match=words):
        _enter(engine, _request(action))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_server_wide_edits_that_no_request_could_hold_are_refused(count):
    engine = _core(Cost(3, 5, 10))
    vectors = [[float(i + 1)] * 4 for i in range(count)]
    text = scope(*(Add(vector, layer=0, tokens="generated") for vector in vectors))["scope"]
    if count <= 3:
        engine.check_edits(text)
    else:
        with pytest.raises(SpecError, match=r"take 4 vectors, .* has 3 vectors, "):
            engine.check_edits(text)
    assert engine.registry.server is None


@pytest.mark.parametrize("num_monitors", [1, 2])
def test_edits_and_monitors_for_which_no_request_has_room_together_are_refused(num_monitors):
    workers = _Workers(most=Cost(3, 5, 20))
    registry = core._scope_of(workers.engine).registry
    edits = scope(*(Add(v, layer=0) for v in (V, W)))["scope"]
    probes = [Probe([i + 7.0] * 4, layer=1, name=f"monitor/{i}") for i in range(num_monitors)]
    monitors = scope(*probes)["scope"]
    fits = num_monitors == 1
    refused = pytest.raises(SpecError, match=r"take 4 vectors, .* together.* has 3 vectors, ")
    with nullcontext() if fits else refused:
        workers.call("scope_set_edits", edits, monitors)
    assert (registry.server is not None) == fits
    workers.call("scope_set_edits", edits)
    with nullcontext() if fits else refused:
        workers.call("scope_check_monitors", monitors)
    with nullcontext() if fits else pytest.raises(CapacityError, match="with the server's edits"):
        _enter(core._scope_of(workers.engine), _request(*probes))
    workers.call("scope_set_edits", None, monitors)
    assert workers.call("scope_check_monitors", monitors) == [None]


# KV blocks


class _EngineCore(SimpleNamespace):
    """The part of vLLM's EngineCore that the seams touch."""

    def __init__(self, scope: CoreScope | None = None, **attributes: Any) -> None:
        super().__init__(**attributes)
        if scope is not None:
            core._scopes.put(self, scope)


class _Request(SimpleNamespace):
    """The Request that vLLM makes of what enters."""


def _preprocess(engine: _EngineCore, request: Any, num_blocks: int = 4) -> tuple[Any, list]:
    """vLLM makes its own request of what came, and hashes its blocks while it does."""
    made = _Request(request_id=request.request_id)
    hashed = []

    def original(self, came):
        assert self is engine
        hashed.extend(_extra_keys(made, 4 * b, 4 * b + 4) for b in range(num_blocks))
        return made, 0

    found, _ = core._preprocess(original, engine, request)
    assert found is made
    assert core.entering == {}
    return made, hashed


def _extra_keys(request: Any, start: int, stop: int, own: tuple | None = None) -> Any:
    """What vLLM hashes into a block, beside its tokens."""
    found, following = core._extra_keys(lambda *_: (own, 7), request, start, stop, 0)
    assert following == 7
    return found


def test_edited_blocks_are_keyed_from_their_first_hash_on():
    engine = _EngineCore(scope=_core())
    action = Add(V, layer=0, tokens=[5, 9])
    made, hashed = _preprocess(engine, _request(action))
    (edit,) = _resolved(action)
    keys = BlockKeys((edit,), 8, np.ones(8, np.int64))
    expected = [keys.key(4 * b, 4 * b + 4) for b in range(4)]
    assert [key is None for key in expected] == [True, False, False, True]
    assert hashed == [None if key is None else (("scope", key),) for key in expected]
    # And so are the blocks that are hashed while it runs.
    assert _extra_keys(made, 8, 12) == (("scope", expected[2]),)
    known = entered(made)
    assert known.first_edited == 5
    # A program for the edited tokens, which are checked too, and one that checks the others.
    assert known.held.cost == Cost(1, 2, 3)


def test_a_request_that_only_probes_holds_places_and_keys_no_block():
    engine = _EngineCore(scope=_core())
    made, hashed = _preprocess(engine, _request(Probe(V, layer=0, name="p")))
    assert hashed == [None] * 4
    assert entered(made).held.cost == Cost(1, 1, 1)


def test_a_request_that_vllm_refuses_takes_no_room_for_sums():
    engine, refuses = _EngineCore(scope=_core()), True
    room = core._scopes.of(engine).sums

    def original(self, came):
        if refuses:
            raise ValueError("no grammar")
        return _Request(request_id=came.request_id), 0

    with pytest.raises(ValueError, match="no grammar"):
        core._preprocess(original, engine, _request(Moments()))
    assert room.num_bytes == 0
    refuses = False
    made, _ = core._preprocess(original, engine, _request(Moments()))
    assert room.num_bytes > 0
    assert entered(made).sums is room
    made, _ = core._preprocess(original, engine, _request(Probe(V, layer=0, name="p")))
    assert entered(made).sums is None


def _resolved(action):
    return Spec(edits=(action,)).resolve(SITES).edits


def test_vllms_own_keys_stay_beside_the_edits():
    engine = _EngineCore(scope=_core())
    made, _ = _preprocess(engine, _request(Add(V, layer=0)))
    own = ("lora-a", "salt")
    assert _extra_keys(made, 0, 4, own)[:2] == own
    assert _extra_keys(made, 0, 4, own)[2][0] == "scope"


def test_plain_requests_share_blocks_as_ever():
    engine = _EngineCore(scope=_core())
    for request in (_request(), _request(Read("embed"))):
        made, hashed = _preprocess(engine, request)
        assert hashed == [None] * 4
        assert _extra_keys(made, 0, 4, ("salt",)) == ("salt",)


def test_the_registry_is_made_at_its_first_use(monkeypatch):
    monkeypatch.setattr(core, "CoreScope", lambda config: pytest.fail("set up"))
    engine = _EngineCore(vllm_config=SimpleNamespace(additional_config={}))
    _preprocess(engine, _request())
    assert core._scopes.of(engine) is None


def test_a_request_that_fails_while_it_enters_leaves_nothing_behind():
    engine = _EngineCore(scope=_core())

    def original(self, request):
        raise RuntimeError("vLLM refused it")

    with pytest.raises(RuntimeError):
        core._preprocess(original, engine, _request(Add(V, layer=0)))
    assert core.entering == {}


class _Workers:
    """EngineCore.collective_rpc, and what the workers hear of it."""

    def __init__(self, reason: str | None = None, most: Cost | None = None) -> None:
        self.reason, self.heard, self.moved = reason, [], ()
        self.engine = _EngineCore(scope=_core(most))

    def original(self, engine, method, timeout, args, kwargs):
        self.heard.append(method)
        sites = {"moved": self.moved}
        return [{"reason": self.reason, "stage": stage, "sites": sites} for stage in range(2)]

    def call(self, method, *args, **kwargs):
        return core._collective_rpc(self.original, self.engine, method, None, args, kwargs)


def test_enginecore_answers_calls_about_modules_and_edits():
    workers, text = _Workers(), scope(Add(V, layer=0))["scope"]
    (digest,) = workers.call("scope_register", "m", _module(V))
    (modules,) = workers.call("scope_modules")
    assert modules == {"m": {"digest": digest, "streams": [["resid_post", 0]]}}
    with pytest.raises(SpecError):
        workers.call("scope_register", "m", b"noise")
    (server,) = workers.call("scope_set_edits", text=text)
    assert server is not None
    assert workers.call("scope_get_edits") == [text]
    workers.heard.clear()
    assert [each["modules"] for each in workers.call("scope_describe")] == [modules] * 2
    assert workers.call("anything", 1)[1]["stage"] == 1
    assert workers.call("scope_unregister", "m") == [True]
    assert workers.heard == ["scope_describe", "anything"]


def test_enginecore_knows_where_the_workers_saw_the_stream_change():
    workers, text = _Workers(), scope(Add(V, site="resid_pre", layer=1))["scope"]
    workers.moved = (1,)
    with pytest.raises(SpecError, match="changes the stream before that layer"):
        workers.call("scope_set_edits", text)


def test_an_engine_without_taps_takes_no_modules_and_no_edits_of_the_server():
    workers, text = _Workers("it is of another shape"), scope(Add(V, layer=0))["scope"]
    for refused in (
        lambda: workers.call("scope_set_edits", text),
        lambda: workers.call("scope_register", "m", _module(V)),
    ):
        with pytest.raises(SpecError, match="cannot be tapped: it is of another shape"):
            refused()
    assert workers.call("scope_set_edits", None) == [None]


def test_two_threads_share_one_registry(monkeypatch):
    def slow(config):
        time.sleep(0.2)
        return _core()

    monkeypatch.setattr(core, "CoreScope", slow)
    engine = _EngineCore(vllm_config=None)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(core._scope_of, [engine, engine])
    assert first is second is core._scopes.of(engine)


def _transfer(name: str | None, path: str | None = None) -> SimpleNamespace:
    found = SimpleNamespace(kv_connector=name, kv_connector_module_path=path)
    return SimpleNamespace(kv_transfer_config=found)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(SimpleNamespace(kv_transfer_config=None), None, id="none"),
        pytest.param(_transfer(None), None, id="unnamed"),
        pytest.param(_transfer("OffloadingConnector"), None, id="by-hash"),
        pytest.param(_transfer("OffloadingConnector", "mine"), "OffloadingConnector", id="other"),
        pytest.param(_transfer("LMCacheConnectorV1"), "LMCacheConnectorV1", id="by-tokens"),
        pytest.param(_transfer("MultiConnector"), "MultiConnector", id="several"),
    ],
)
def test_connectors_that_do_not_key_by_block_hashes_are_known(config, name):
    assert foreign_connector(config) == name


def test_edited_kv_is_never_shared_under_plain_tokens():
    engine = _core()
    engine.connector = "LMCacheConnectorV1"
    text = scope(Add(V, layer=0))["scope"]
    for refused in (
        lambda: _enter(engine, _request(Add(V, layer=0))),
        lambda: engine.check_edits(text),
    ):
        sentence = r"through 'LMCacheConnectorV1'.* Start the engine without this connector"
        with pytest.raises(SpecError, match=sentence):
            refused()
    engine.check_edits(None)
    assert _enter(engine, _request(Probe(V, layer=0, name="p"))).keys is None
    assert _enter(engine, _request(Read("embed"))).keys is None
