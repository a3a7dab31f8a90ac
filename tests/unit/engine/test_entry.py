"""EngineCore's side: what is stamped on requests that enter, and how their KV is keyed.
What is vLLM's own here is replaced by as little as the seams need."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_scope import Add, CapacityError, Probe, Read, Replace, Spec, SpecError, scope
from vllm_scope.core.registry import Registry
from vllm_scope.engine.core import entry as core
from vllm_scope.engine.core.entry import CoreScope
from vllm_scope.engine.model import foreign_connector
from vllm_scope.engine.params import HANDLE, handle_of
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.operations import Cost
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.vectors import SteeringModule, to_bytes
from vllm_scope.worker.plan import OVERSHOOT

SITES = Sites(2, 4, "float32", (0, 2, 4))
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]


def _module(vector: list[float]) -> bytes:
    return to_bytes(SteeringModule({("resid_post", 0): vector}))


def _core(most: Cost | None = None) -> CoreScope:
    """As its constructor leaves it."""
    made = CoreScope.__new__(CoreScope)
    made.sites, made.registry = SITES, Registry(SITES)
    made.most = most or Cost(100, 100, 100)
    made.everywhere, made.connector = Resolved(), None
    return made


def _request(*actions: Any, name: str = "r", num_prompt: int = 8, vectors: bool = True):
    """A request as it enters; without actions a plain one."""
    extra: dict[str, Any] = {"mine": 1}
    if actions:
        handle = {"key": 5, "frontend": "f", "first_position": None, "vectors": vectors}
        extra |= scope(*actions) | {HANDLE: handle}
    params = SimpleNamespace(extra_args=extra, max_tokens=10)
    return SimpleNamespace(
        request_id=name, sampling_params=params, prompt_token_ids=[1] * num_prompt
    )


# What a request is given when it enters


def test_a_handle_holds_what_names_and_the_servers_edits_mean():
    engine = _core()
    digest = engine.registry.register("m", _module(V))
    engine.registry.register("other", _module(W))
    server = engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    request = _request(Add("m"), Read("embed"))
    before = request.sampling_params
    entry = engine.stamp(request)
    handle = handle_of(request.sampling_params)
    assert handle["modules"] == {"m": digest}
    assert handle["server"] == server
    assert Cost.of(entry.programs) == Cost(2, 1, 3 + 1)  # each token is checked, too
    assert (handle["key"], handle["frontend"]) == (5, "f")
    # The caller's own parameters are as they were.
    assert "modules" not in before.extra_args[HANDLE]
    assert request.sampling_params is not before
    assert request.sampling_params.extra_args["mine"] == 1


def test_requests_that_touch_no_vector_enter_as_they_are():
    engine = _core()
    for request in (_request(), _request(Read("embed"), vectors=False)):
        before = request.sampling_params
        assert engine.stamp(request) is None
        assert request.sampling_params is before
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=[1])
    assert engine.stamp(pooling) is None


def test_the_servers_edits_are_stamped_on_plain_requests_too():
    engine = _core()
    server = engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    request = _request()
    entry = engine.stamp(request)
    handle = handle_of(request.sampling_params)
    assert handle == {"server": server, "modules": {}}
    assert Cost.of(entry.programs) == Cost(1, 1, 1 + 1)
    assert entry.keys.key(0, 4) is not None
    engine.registry.set_edits(None)
    assert engine.stamp(_request()) is None


def test_prompt_embeddings_enter_as_they_are_and_are_never_edited():
    engine = _core()
    engine.everywhere = Spec((Read("embed"),)).resolve(SITES)
    request = _request()
    request.prompt_token_ids = None
    before = request.sampling_params
    assert engine.stamp(request) is None
    assert request.sampling_params is before
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    with pytest.raises(SpecError, match="prompt embeddings cannot be edited; send text"):
        engine.stamp(request)
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=None)
    assert engine.stamp(pooling) is None


def test_the_cost_counts_the_positions_that_a_step_may_overshoot():
    engine = _core()
    last = 8 + 10 + OVERSHOOT - 1
    # Tokens that are not edited are checked.
    for position, cost in ((last, Cost(1, 2, 1 + 2)), (last + 1, Cost(0, 1, 1))):
        entry = engine.stamp(_request(Add(V, layer=0, tokens=[position])))
        assert Cost.of(entry.programs) == cost


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
        engine.stamp(_request(action))


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


# KV blocks


class _EngineCore(SimpleNamespace):
    """The part of vLLM's EngineCore that the seams touch."""


def _preprocess(engine: _EngineCore, request: Any, num_blocks: int = 4) -> tuple[Any, list]:
    """vLLM makes its own request of what came, and hashes its blocks while it does."""
    made = SimpleNamespace(request_id=request.request_id)
    hashed = []

    def original(self, came):
        assert self is engine
        hashed.extend(_extra_keys(made, 4 * b, 4 * b + 4) for b in range(num_blocks))
        return made, 0

    found, _ = core._preprocess(original, engine, request)
    assert found is made
    assert core._entering == {}
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
    assert made.scope_first == 5
    # A program for the edited tokens, which are checked too, and one that checks the others.
    assert Cost.of(made.scope_programs) == Cost(1, 2, 3)


def test_a_request_that_only_probes_holds_places_and_keys_no_block():
    engine = _EngineCore(scope=_core())
    made, hashed = _preprocess(engine, _request(Probe(V, layer=0, name="p")))
    assert hashed == [None] * 4
    assert Cost.of(made.scope_programs) == Cost(1, 1, 1)


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
    for request in (_request(), _request(Read("embed"), vectors=False)):
        made, hashed = _preprocess(engine, request)
        assert hashed == [None] * 4
        assert not hasattr(made, "scope_keys")
        assert _extra_keys(made, 0, 4, ("salt",)) == ("salt",)


def test_the_registry_is_made_at_its_first_use(monkeypatch):
    monkeypatch.setattr(core, "CoreScope", lambda config: pytest.fail("set up"))
    engine = _EngineCore(vllm_config=SimpleNamespace(additional_config={}))
    _preprocess(engine, _request())
    assert not hasattr(engine, "scope")


def test_a_request_that_fails_while_it_enters_leaves_nothing_behind():
    engine = _EngineCore(scope=_core())

    def original(self, request):
        raise RuntimeError("vLLM refused it")

    with pytest.raises(RuntimeError):
        core._preprocess(original, engine, _request(Add(V, layer=0)))
    assert core._entering == {}


def test_enginecore_registers_a_name_before_any_worker():
    engine = _EngineCore(scope=_core())
    heard = []

    def original(self, method, timeout, args, kwargs):
        heard.append((method, args, len(self.scope.registry.names)))
        return ["answer"]

    def call(method, *args, **kwargs):
        return core._collective_rpc(original, engine, method, None, args, kwargs)

    assert call("scope_register", "m", _module(V)) == ["answer"]
    with pytest.raises(SpecError):
        call("scope_register", "m", b"noise")
    call("scope_set_edits", text=scope(Add(V, layer=0))["scope"])
    call("anything", 1)
    call("scope_unregister", "m")
    methods = ["scope_register", "scope_set_edits", "anything", "scope_unregister"]
    assert [(m, n) for m, _, n in heard] == list(zip(methods, [1, 1, 1, 0], strict=True))
    assert engine.scope.registry.server is not None


def test_enginecore_takes_back_a_change_that_a_worker_refuses():
    engine = _EngineCore(scope=_core())
    held = engine.scope.registry
    before = held.register("m", _module(V)), held.set_edits(scope(Add(V, layer=0))["scope"])

    def original(self, method, timeout, args, kwargs):
        raise RuntimeError("a worker refused")

    for method, args in (
        ("scope_register", ("m", _module(W))),
        ("scope_register", ("new", _module(W))),
        ("scope_unregister", ("m",)),
        ("scope_set_edits", (None,)),
        ("scope_set_edits", (scope(Add(W, layer=0))["scope"],)),
    ):
        with pytest.raises(RuntimeError, match="a worker refused"):
            core._collective_rpc(original, engine, method, None, args, None)
        assert held.names == {"m": before[0]}
        assert held.server == before[1]
        assert held.server_text == scope(Add(V, layer=0))["scope"]


def test_two_threads_share_one_registry(monkeypatch):
    def slow(config):
        time.sleep(0.2)
        return _core()

    monkeypatch.setattr(core, "CoreScope", slow)
    engine = _EngineCore(vllm_config=None)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(core._scope_of, [engine, engine])
    assert first is second is engine.scope


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
        lambda: engine.stamp(_request(Add(V, layer=0))),
        lambda: engine.check_edits(text),
    ):
        with pytest.raises(SpecError, match=r"through 'LMCacheConnectorV1'.* edits need"):
            refused()
    engine.check_edits(None)
    assert engine.stamp(_request(Probe(V, layer=0, name="p"))).keys is None
    assert engine.stamp(_request(Read("embed"), vectors=False)) is None
