"""Requests that differ in layers, vectors and numbers alone.

A process treats such a request as it would treat the request without having seen others."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.programs import programs_of
from tests.unit.strategies import as_json
from vllm_scope import Add, Gate, ScopeError, scope
from vllm_scope.core.registry import Registry
from vllm_scope.engine.frontend import connection as of_engine
from vllm_scope.engine.frontend.connection import Connection
from vllm_scope.engine.frontend.prepared import prepare
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient, Ticket, travelling

SITES = Sites(4, 4, "float32", (0, 2, 4, 8))
HERE = frozenset(SITES.boundaries)
IDS, MAX_TOKENS = [5, 6, 7, 8, 9, 5, 6, 7], 4


def _packed(*numbers: float) -> dict[str, Any]:
    return as_json(data=base64.b64encode(np.array(numbers, "<f4").tobytes()).decode())


#: Two of them have one direction, and two have equal numbers. The last ones are refused.
VECTORS = [
    [1.0, 2.0, 0.0, -1.0], [2.0, 4.0, 0.0, -2.0], [0.5, 0.0, 3.0, 1.0],
    _packed(0.5, 0.0, 3.0, 1.0), [7.0, 1.0, 1.0, 0.0],
    [0.0] * 4, [1.0] * 5, [], _packed(1.0, np.nan, 0.0, 1.0), "m", None,
]  # fmt: skip
NUMBERS = [0.25, 0.5, 1.0, 2, 0.0, -0.0, -3.0, 3e38, 1e39, True, "1", None]
#: Layer 2 is not tapped, and there is no layer 9.
LAYERS = [[0], [1], [3], [2], [9], [0, 1], "all", []]


def _mostly(some: list[Any], num_sane: int) -> st.SearchStrategy[Any]:
    """One of the first, and sometimes one of the others."""
    sane = st.sampled_from(some[:num_sane])
    return st.integers(0, 23).flatmap(lambda n: sane if n else st.sampled_from(some))


vectors, numbers, layers = _mostly(VECTORS, 5), _mostly(NUMBERS, 7), _mostly(LAYERS, 3)
#: Field of a gate, and of each kind of edit -> what it may be.
GATE = {"vector": vectors, "threshold": numbers, "sharpness": numbers, "bias": numbers}
EDITS = {
    "add": {"vector": vectors, "scale": numbers, "max_relative_norm": numbers},
    "ablate": {"direction": vectors},
    "clamp": {"direction": vectors, "lo": numbers, "strength": numbers},
    "replace": {"values": vectors},
}
#: What requests that are alike have in common.
FIXED: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "tokens": st.sampled_from([{}, {"tokens": "generated"}, {"tokens": [1, -1]}]),
    "gate": st.sampled_from([
        None, {"layer": 0}, {"layer": 1, "kind": "sigmoid"}, {"layer": 0, "kind": "cosine"},
        {"site": "embed", "state": {"kind": "latch"}}, {"layer": 3}, {"layer": 0, "above": False},
    ]),
}  # fmt: skip


@st.composite
def alike(draw: Any) -> list[str]:
    """Texts of several requests. Their edits have the same fields, and values that mostly pass."""
    forms = []
    for kind in draw(st.lists(st.sampled_from(list(EDITS)), min_size=1, max_size=3)):
        tokens, gate = draw(FIXED["tokens"]), draw(FIXED["gate"])
        fixed = {"kind": kind, **({"positions": [1]} if kind == "replace" else tokens)}
        given = draw(st.sets(st.sampled_from(list(EDITS[kind]))))
        names = [name for i, name in enumerate(EDITS[kind]) if i == 0 or name in given]
        slope = gate is not None and gate.get("kind") == "sigmoid"
        known = [name for name in GATE if slope or name != "sharpness"]
        told = draw(st.permutations(known)) if gate is not None else []
        forms.append((fixed, names, gate, ["vector", *told[: draw(st.integers(0, 4))]]))
    texts = []
    for _ in range(draw(st.integers(2, 4))):
        edits = []
        for fixed, names, gate, told in forms:
            edit = {"layers": draw(layers), **fixed}
            edit |= {name: draw(EDITS[fixed["kind"]][name]) for name in names}
            if gate is not None:
                edit["gate"] = gate | {name: draw(GATE[name]) for name in told}
            edits.append(edit)
        texts.append(json.dumps({"edits": edits}))
    return texts


def _connection(vectors: int = 4) -> Connection:
    limits = Limits((16,), 0, 100, vectors, 6, 24, states=1000)
    return Connection(SITES, None, 1, 1.0, limits, {}, {})


def _request(text: str, num_prompt: int = len(IDS)) -> Any:
    params = SimpleNamespace(extra_args={"scope": text}, max_tokens=MAX_TOKENS)
    return SimpleNamespace(
        sampling_params=params, prompt_token_ids=IDS[:num_prompt], resumable=False
    )


def _treated(connection: Connection, registry: Registry, text: str) -> Any:
    """What the front-end says to a request; or what it sends, and what becomes of it."""
    try:
        found = prepare(connection, _request(text))
    except ScopeError as error:
        return type(error), str(error)
    arrays = travelling(found.spec.arrays.values())
    sent = Ticket(Recipient(1, "f"), None, found.spec.modules, found.spec.packed, arrays)
    asked, _ = registry.resolve(Ticket.decode(sent.encode()))
    assert asked == found.asked
    program = RequestProgram.compile(asked, SITES, HERE, len(IDS), IDS)
    columns = program.columns(len(IDS) + MAX_TOKENS)
    held = program.held(columns, "key")
    keys = BlockKeys(asked.edits, len(IDS), IDS, b"", asked.shared)
    return (
        found.asked, found.spec.packed, found.own, found.first_position, found.num_bytes,
        repr([(edit.numbers, edit.limit, edit.gate) for edit in asked.edits]), columns,
        programs_of(program, columns), held.cost, held.vectors, asked.num_states,
        [keys.key(start, start + 4) for start in (0, 4, 8)],
    )  # fmt: skip


@settings(max_examples=300)
@given(alike())
def test_a_request_after_others_like_it_is_treated_as_one_that_comes_first(texts):
    connection, registry = _connection(), Registry(SITES)
    for text in texts:
        alone = _treated(_connection(), Registry(SITES), text)
        assert _treated(connection, registry, text) == alone


def _gated(seed: int) -> str:
    rng = np.random.default_rng(seed)
    gate = Gate(rng.normal(size=4), 0, threshold=seed + 0.1, kind="sigmoid")
    return scope(Add(rng.normal(size=4), layer=1, gate=gate))["scope"]


def test_of_requests_that_are_alike_the_first_is_compiled_to_see_whether_there_is_room(monkeypatch):
    asked, original = [], of_engine.check_room
    monkeypatch.setattr(
        of_engine, "check_room", lambda *args: asked.append(args[0]) or original(*args)
    )
    connection = _connection()
    for seed in range(4):
        prepare(connection, _request(_gated(seed), num_prompt=2 + seed))
    assert len(asked) == 1
    connection.limits = _connection(vectors=1).limits
    for seed in (4, 5):
        with pytest.raises(ScopeError, match="takes 2 vectors"):
            prepare(connection, _request(_gated(seed)))


def test_a_request_with_more_directions_than_the_first_is_refused_for_its_own_number():
    """The first one's vectors differ in their lengths only, so that they are one direction."""

    def text(*vectors: list[float]) -> str:
        edits = [{"kind": "ablate", "direction": each, "layers": [0]} for each in vectors]
        return json.dumps({"edits": edits})

    one, double, other = [1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    connection = _connection(vectors=1)
    prepare(connection, _request(text(one, double)))
    with pytest.raises(ScopeError, match="takes 2 vectors"):
        prepare(connection, _request(text(one, other)))
