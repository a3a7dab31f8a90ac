"""Which banks taps make the numbers of: those of few linear probes at one place on the stream."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.request.test_packed import _through_a_ticket
from vllm_scope import AttentionPool, Features, Mlp, Probe, Read, Spec
from vllm_scope.request.actions import Action
from vllm_scope.request.heads import Bank, Scored, Told, known_head
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolve import MOST_SCORED
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import MODEL_SITES, SITES, STREAM_SITES, Heads, Place, Sites

NUM_LAYERS, SIZE = 2, 4
#: Every site of every layer.
_PLACES = {
    Place(site, 0 if site in MODEL_SITES else k) for site in SITES for k in range(NUM_LAYERS)
}
ENGINE = Sites(
    NUM_LAYERS, SIZE, "float32", tuple(sorted({place.boundary for place in _PLACES})),
    Heads(num_heads=4, num_kv_heads=2, head_size=3, head_size_v=5), 8, num_experts=5,
)  # fmt: skip
V = [1.0, -2.0, 0.5, 3.0]
MLP = Mlp([(np.ones((3, 4)), np.ones(3)), (np.ones((1, 3)), np.ones(1))])
ENCODER = {"encoder": [V, V[::-1]], "bias": [0.5, -1.0], "threshold": [0.0, 0.0]}


def pool(num_heads: int) -> AttentionPool:
    """It has two numbers for each head."""
    return AttentionPool([V] * num_heads, [V[::-1]] * num_heads)


def probes(*weights: object, name: str = "p", **where: object) -> list[Probe]:
    where = {"site": "resid_post", "layer": 1} | where
    return [Probe(weight, name=f"{name}{i}", **where) for i, weight in enumerate(weights)]


def resolved(*actions: Action) -> Resolved:
    kinds = (Read, Probe, Features)
    reads, some, features = (tuple(a for a in actions if isinstance(a, kind)) for kind in kinds)
    return Spec(reads, some, features=features).resolve(ENGINE)


def kind_of_only_bank(*actions: Action) -> type[Bank]:
    (bank,) = resolved(*actions).banks
    return type(bank)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        pytest.param([V], Scored, id="one-vector"),
        pytest.param([V] * 4, Scored, id="four-vectors"),
        pytest.param([V] * 5, Bank, id="five-vectors"),
        pytest.param([pool(1)], Scored, id="a-pool-of-one-head"),
        pytest.param([pool(2)], Scored, id="a-pool-of-two-heads"),
        pytest.param([pool(3)], Bank, id="a-pool-of-three-heads"),
        pytest.param([pool(1), V, V], Scored, id="a-pool-and-two-vectors"),
        pytest.param([pool(2), V], Bank, id="a-pool-of-two-heads-and-a-vector"),
        pytest.param([MLP], Bank, id="an-mlp"),
        pytest.param([V, MLP], Bank, id="a-vector-beside-an-mlp"),
    ],
)
def test_taps_score_at_most_four_numbers_of_linear_probes(weights, kind):
    assert MOST_SCORED == 4
    asked = resolved(*probes(*weights))
    (bank,) = asked.banks
    assert type(bank) is kind
    assert bank.row_bytes == 4 * sum(net.num_values for net in asked.banks[bank])


@pytest.mark.parametrize("site", SITES)
def test_taps_score_on_the_stream_alone(site):
    one = Probe([1.0] * ENGINE.row_size(site), site=site, layer=0, name="p")
    assert kind_of_only_bank(one) is (Scored if site in STREAM_SITES else Bank)


def test_features_that_travel_with_a_request_count_as_linear_probes():
    some = Features(ENCODER, indices=[7, 2], name="f", site="resid_post", layer=1)
    assert kind_of_only_bank(some) is Scored
    assert kind_of_only_bank(some, *probes(V, V)) is Scored
    assert kind_of_only_bank(some, *probes(V, V, V)) is Bank


def test_each_place_is_counted_by_itself():
    """Two sites may share a boundary, and one probe may be at several places."""
    few = [*probes(*[V] * 4), *probes(*[V] * 4, name="q", layer=0)]
    entry = probes(*[V] * 4, name="r", site="resid_pre", layer=1)
    both = Probe([V, V], site="resid_post", layers=[0, 1], name="both")
    assert {type(bank) for bank in resolved(*few, *entry).banks} == {Scored}
    kinds = {
        cell.place: type(cell.bank)
        for probe in resolved(*few[:5], *entry, both).probes for cell in probe.cells
    }  # fmt: skip
    assert kinds == {
        Place("resid_post", 1): Bank, Place("resid_post", 0): Scored, Place("resid_pre", 1): Scored
    }  # fmt: skip


@pytest.mark.parametrize("count", [4, 5])
def test_each_stage_of_a_cascade_is_counted_by_itself(count):
    first, *others = probes(*[V] * 4, threshold=1.0)
    later = probes(*[V] * count, name="later", after=first.name)
    asked = resolved(first, *others, *later)
    kinds = [type(probe.cells[0].bank) for probe in asked.probes]
    assert kinds == [Scored] * 4 + [Scored if count == 4 else Bank] * count


def test_the_banks_that_work_on_rows_are_all_but_those_of_taps():
    many, few = probes(*[V] * 5), probes(V, name="q", layer=0)
    asked = resolved(*many, *few)
    (on_rows,) = {probe.cells[0].bank for probe in asked.probes[:5]}
    scored = asked.probes[5].cells[0].bank
    assert set(asked.banks) == {on_rows, scored}
    nets = tuple(probe.cells[0].net for probe in asked.probes[:5])
    assert asked.banks_on_rows() == {on_rows: nets}
    at_last = frozenset([Place("resid_post", 1).boundary])
    assert asked.banks_on_rows(at_last) == {on_rows: nets}
    assert asked.banks_on_rows(frozenset([Place("resid_post", 0).boundary])) == {}
    for here in (None, at_last):
        assert asked.banks_on_rows(here) is asked.banks_on_rows(here)


def test_a_bank_of_taps_is_the_same_in_every_process():
    spec = Spec(probes=tuple(probes(V, pool(1))))
    asked = spec.resolve(ENGINE)
    assert _through_a_ticket(spec).resolve(ENGINE) == asked
    packed, arrays = pack((asked.reads, asked.probes, asked.edits))
    assert Resolved(*unpack(packed, arrays)) == asked
    (bank,) = asked.banks
    again = known_head(bank.text, bank.row_bytes)
    assert (again, type(again), type(bank.nameless)) == (bank, Scored, Scored)
    others = {kind.of([b"one"], 3) for kind in (Bank, Told, Scored)}
    assert len(others) == len({other.nameless for other in others}) == 3
