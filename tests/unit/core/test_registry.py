"""Steering modules by name and edits of a whole server: what a request keeps of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.strategies import sentence
from vllm_scope import Ablate, Add, Policy, Probe, Read, Replace, Spec, scope
from vllm_scope.core import registry
from vllm_scope.core.registry import Registry
from vllm_scope.errors import SpecError
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient, Ticket, travelling
from vllm_scope.vectors import SteeringModule, to_bytes

SITES = Sites(3, 4, "float32", (0, 2, 4))
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]


def _module(*vectors: list[float]) -> SteeringModule:
    return SteeringModule({("resid_post", i): v for i, v in enumerate(vectors)})


def _text(*edits) -> str:
    return scope(*edits)["scope"]


def _values(edits) -> list[list[float]]:
    return [edit.values.numpy.tolist() for edit in edits]


FAR = SteeringModule({("resid_post", 3): V})


@pytest.fixture
def held() -> Registry:
    return Registry(SITES)


def _resolve(held: Registry, spec: Spec | None) -> Resolved:
    """What a request with this spec means if it enters now."""
    if spec is None:
        return held.resolve(None)[1]
    arrays = travelling(spec.arrays.values())
    ticket = Ticket(Recipient(1, "f"), None, spec.modules, spec.packed, arrays)
    return held.resolve(Ticket.decode(ticket.encode()))[1]


def test_where_the_model_changes_its_stream_no_edit_acts_before_the_layer(held):
    edit = scope(Add(V, site="resid_pre", layer=1, tokens="all"))["scope"]
    held.set_edits(edit)
    held.know(replace(SITES, moved=(1,)))
    with pytest.raises(SpecError, match="changes the stream before that layer"):
        held.set_edits(edit)


# Modules


def test_a_name_means_what_was_registered_last(held):
    first = held.register("m", to_bytes(_module(V)))
    assert held.names == {"m": first}
    assert first == _module(V).digest
    second = held.register("m", to_bytes(_module(W)))
    assert held.names == {"m": second} != {"m": first}
    assert held.register("twin", to_bytes(_module(W))) == second
    assert held.modules() == {
        name: {"digest": second, "streams": [["resid_post", 0]]} for name in ("m", "twin")
    }


def test_vectors_of_a_tier_are_added_to_its_tokens_alone(held):
    module = SteeringModule(
        {("resid_post", 0): V},
        tiers={"prompt": {("resid_post", 0): W}, "generated": {("resid_post", 1): W}},
    )
    held.register("m", to_bytes(module))
    assert held.modules()["m"]["streams"] == [
        ["resid_post", 0], ["resid_post", 0, "prompt"], ["resid_post", 1, "generated"]
    ]  # fmt: skip

    def found(edit):
        edits = _resolve(held, Spec(edits=(edit,))).edits
        return [(e.stream[1], e.values.numpy.tolist(), e.tokens.to_json()) for e in edits]

    assert found(Add("m")) == [(0, V, "all"), (0, W, "prompt"), (1, W, "generated")]
    assert found(Add("m", layer=0)) == [(0, V, "all"), (0, W, "prompt")]
    assert found(Add("m", tokens="generated")) == [(0, V, "generated"), (1, W, "generated")]
    within = {"except": [[3], "prompt"]}
    assert found(Add("m", layer=1, tokens=[3])) == [(1, W, within)]
    probe = Spec(probes=(Probe("m", layer=0, name="p"),))
    (cell,) = _resolve(held, probe).probes[0].cells
    assert [weight.numpy.tolist() for weight, _ in cell.net.layers] == [[V]]
    with pytest.raises(ValueError, match="has no vector; it has resid_post 0, resid_post 0 prompt"):
        _resolve(held, Spec(probes=(Probe("m", layer=1, name="p"),)))


def test_a_request_keeps_what_a_name_meant_when_it_entered(held):
    spec = Spec(edits=(Add("m", layer=0),))
    held.register("m", to_bytes(_module(V)))
    first = _resolve(held, spec)
    held.register("m", to_bytes(_module(W)))
    assert _values(_resolve(held, spec).edits) == [W]
    held.unregister("m")
    assert _values(first.edits) == [V]


def test_requests_with_the_same_spec_share_its_programs(held):
    spec = Spec(edits=(Add("m", layer=0),))
    held.register("m", to_bytes(_module(V)))
    for server in (None, _text(Add(W, layer=1))):
        held.set_edits(server)
        # Each front-end has a Spec of its own.
        found = [_resolve(held, Spec.from_json(spec.to_json())) for _ in range(2)]
        assert found[0] is found[1]
    alone = [_resolve(held, None) for _ in range(2)]
    assert alone[0] is alone[1]
    held.register("m", to_bytes(_module(W)))
    assert _values(_resolve(held, spec).edits) == [W, W]


def test_an_unknown_module_is_refused_with_the_known_ones(held):
    held.register("known", to_bytes(_module(V)))
    spec = Spec(edits=(Add("m", layer=0),))
    text = sentence(lambda: _resolve(held, spec))
    assert "'m', which this engine does not hold. It holds: known." in text
    held.unregister("known")
    assert "It holds: none." in sentence(lambda: _resolve(held, spec))
    assert not held.unregister("known")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        pytest.param("", to_bytes(_module(V)), ["1 to 200", "''"], id="no-name"),
        pytest.param("n" * 201, to_bytes(_module(V)), ["1 to 200"], id="a-long-name"),
        pytest.param(7, to_bytes(_module(V)), ["1 to 200", "not 7"], id="a-number-as-name"),
        pytest.param("m", "text", ["'m' came as str, not bytes"], id="not-bytes"),
        pytest.param("m", b"noise", ["not safetensors"], id="noise"),
        pytest.param(
            "m", to_bytes(_module([1.0] * 5)), ["'m' have 5", "rows have 4"], id="another-size"
        ),
        pytest.param("m", to_bytes(_module(V, [0.0] * 4)), ["is zero", "1"], id="a-zero-vector"),
        pytest.param("m", to_bytes(FAR), ["has 3", "0 to 2"], id="a-layer-too-far"),
        pytest.param("m", to_bytes(_module(V, V, V)), ["does not tap"], id="an-untapped-layer"),
        pytest.param(
            "m", to_bytes(SteeringModule({("resid_mid", 0): V})), ["does not tap 'resid_mid'"],
            id="an-untapped-site",
        ),
    ],
)  # fmt: skip
def test_an_invalid_module_is_refused_and_its_name_keeps_its_meaning(name, data, words, held):
    before = held.register("m", to_bytes(_module(W)))
    text = sentence(lambda: held.register(name, data))
    assert all(word in text for word in words), text
    assert held.names == {"m": before}
    assert held.modules()["m"]["digest"] == before


def test_as_many_names_as_are_allowed(held, monkeypatch):
    monkeypatch.setattr(registry, "MAX_MODULES", 2)
    for name in "ab":
        held.register(name, to_bytes(_module(V)))
    assert "2 modules are registered" in sentence(lambda: held.register("c", to_bytes(_module(V))))
    held.register("a", to_bytes(_module(W)))
    held.unregister("b")
    held.register("c", to_bytes(_module(V)))


def test_content_without_a_name_is_kept_by_the_requests_that_use_it_alone(held):
    spec, found = Spec(edits=(Add("m", layer=0),)), []
    for i in range(5):
        held.register("m", to_bytes(_module([float(i), 1, 1, 1])))
        found.append(_resolve(held, spec))
    assert [_values(one.edits)[0][0] for one in found] == [0, 1, 2, 3, 4]
    vectors = [weakref.ref(one.edits[0].values) for one in found]
    del found
    gc.collect()
    assert [vector() is None for vector in vectors] == [True] * 4 + [False]


# Edits of the server


def test_the_servers_edits_come_before_the_requests_own(held):
    server = held.set_edits(_text(Ablate(W, layer=0), Add(V, layer=1, tokens="generated")))
    assert (held.server, held.server_text) == (
        server,
        _text(*Spec.from_json(held.server_text).edits),
    )
    asked = _resolve(held, Spec((Read("embed"),), (), (Add(W, layer=0),)))
    assert [(e.kind, e.stream[1]) for e in asked.edits] == [("ablate", 0), ("add", 1), ("add", 0)]
    assert len(asked.reads) == 1
    assert [e.kind for e in _resolve(held, None).edits] == ["ablate", "add"]
    held.set_edits(None)
    assert _resolve(held, None).edits == ()


def test_a_request_keeps_the_servers_edits_with_which_it_entered(held):
    found = []
    for vector in (V, W):
        held.set_edits(_text(Add(vector, layer=0)))
        found.append(_resolve(held, None))
    assert held.set_edits(None) is None
    assert (held.server, held.server_text) == (None, None)
    assert [_values(one.edits) for one in found] == [[V], [W]]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(Add(np.array(V), layers=[0]), True, id="another-spelling"),
        pytest.param(Add("m", layer=0), True, id="by-name"),
        pytest.param(Add(V, layer=0, tokens="prompt"), False, id="other-tokens"),
        pytest.param(Add(V, layer=0, scale=2), False, id="another-scale"),
        pytest.param(Add(W, layer=0), False, id="another-vector"),
    ],
)
def test_the_digest_of_the_servers_edits_is_of_their_content(other, same, held):
    held.register("m", to_bytes(_module(V)))
    one = held.set_edits(_text(Add(V, layer=0)))
    assert (held.set_edits(_text(other)) == one) is same


def test_the_servers_edits_keep_what_a_name_meant_when_they_were_set(held):
    held.register("m", to_bytes(_module(V)))
    held.set_edits(_text(Add("m", layer=0)))
    held.register("m", to_bytes(_module(W)))
    assert _values(_resolve(held, None).edits) == [V]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("noise", ["not JSON"], id="noise"),
        pytest.param(7, ["JSON string"], id="a-number"),
        pytest.param(
            _text(Add(V, layer=0), Read("embed")),
            ["moments and policies belong to requests"],
            id="a-read",
        ),
        pytest.param(
            _text(Add(V, layer=0), Probe(V, layer=0, name="p")),
            ["moments and policies belong to requests"],
            id="a-probe",
        ),
        pytest.param(
            _text(Add(V, layer=0), Policy("p")), ["policies belong to requests"], id="a-policy"
        ),
        pytest.param(_text(Add(V, layer=0, name="n")), ["edits[0].name is 'n'"], id="a-name"),
        pytest.param(
            _text(Add(V, layer=0), Add(V, layer=0, tokens=[3])),
            ["edits[1].tokens is [3]", "all, prompt, generated"],
            id="positions",
        ),
        pytest.param(
            _text(Add(V, layer=0, tokens="last")), ["edits[0].tokens is 'last'"], id="the-last"
        ),
        pytest.param(
            _text(Replace(V, positions=[0], layer=0)), ["edits[0].tokens is [0]"], id="replace"
        ),
        pytest.param(_text(Add("m", layer=0)), ["'m', which this engine"], id="an-unknown-module"),
        pytest.param(_text(Add(V, layer=2)), ["does not tap"], id="an-untapped-layer"),
        pytest.param(_text(Add([1.0], layer=0)), ["'resid_post' have 4"], id="another-size"),
    ],
)
def test_invalid_server_wide_edits_are_refused_and_the_earlier_ones_stay(text, words, held):
    before = held.set_edits(_text(Add(W, layer=0)))
    said = sentence(lambda: held.set_edits(text))
    assert all(word in said for word in words), said
    assert held.server == before
    assert _values(_resolve(held, None).edits) == [W]
