"""Specs as they travel between the processes of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.unit.strategies import specs
from vllm_scope import Add, Clamp, Probe, Read, Replace, Spec, TokenIds
from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient, Ticket, travelling

SITES = Sites(4, 8, "float32", tuple(range(9)))
ONES = [1.0] * 8


def _through_a_ticket(spec: Spec) -> Spec:
    arrays = travelling(spec.arrays.values())
    came = Ticket.decode(Ticket(Recipient(1, "f"), None, (), spec.packed, arrays).encode())
    return Spec.unpack(came.spec, came.own_arrays())


@given(specs(num_layers=4, hidden_size=8))
def test_a_spec_arrives_as_it_was_sent(spec):
    came = _through_a_ticket(spec)
    assert came == spec
    assert came.to_json() == spec.to_json()
    assert came.packed == spec.packed


def test_the_specs_of_a_request_that_stands_for_several_arrive_each_with_its_vectors():
    each = [Spec(edits=(Replace([[1.0 + i] * 8], positions=[3], layer=i),)) for i in range(3)]
    vectors = {digest: array for one in each for digest, array in one.arrays.items()}
    packed = [one.packed for one in each]
    sent = Ticket(Recipient(1, "f"), None, (), packed[0], travelling(vectors.values()), packed)
    came = Ticket.decode(sent.encode())
    assert came == sent
    tickets = came.of_variants()
    assert [Spec.unpack(one.spec, one.own_arrays()) for one in tickets] == each
    assert [len(one.arrays) for one in tickets] == [1] * 3


@given(specs(num_layers=4, hidden_size=8))
def test_a_resolved_spec_arrives_as_it_was_sent(spec):
    asked = spec.resolve(SITES)
    packed, arrays = pack((asked.reads, asked.probes, asked.edits))
    contents = {digest: Array(a.shape, a.data) for digest, a in arrays.items()}
    assert Resolved(*unpack(packed, contents)) == asked


@pytest.mark.parametrize(
    "spec",
    [
        Spec((Read("q", layers=[1], codec={"name": "rp8", "k": 4}, to="filesystem", tag="t"),)),
        Spec((Read("embed", tokens=TokenIds(3) | slice(1, None, 2), when="before"),)),
        Spec((Read("embed", tokens=[-1, 5] - TokenIds(7)),)),
        Spec(probes=(Probe("m", layer=1, name="p", bias=0.1, to="s"),)),
        Spec(edits=(Clamp(ONES, layer=1, lo=0.5), Clamp(ONES, layer=1, hi=2, strength=0.5))),
        Spec(edits=(Replace([ONES, ONES], positions=[3, -1], layer=0), Add("m"))),
    ],
    ids=lambda spec: type((*spec.reads, *spec.probes, *spec.edits)[0]).__name__,
)
def test_all_that_a_spec_can_hold_arrives(spec):
    assert _through_a_ticket(spec) == spec
    assert _through_a_ticket(spec).modules == spec.modules


def test_a_spec_of_many_named_probes_is_short_on_its_way_and_the_same_object_for_all_requests():
    probes = [Probe(f"probe-{i}", layer=1, name=f"p{i}") for i in range(1024)]
    spec = Spec(probes=tuple(probes))
    tickets = [Ticket(Recipient(i, "f"), 0, spec.modules, spec.packed, []) for i in range(2)]
    sent = [ticket.encode() for ticket in tickets]
    assert max(map(len, sent)) < len(spec.packed.body) / 4
    first, second = map(Ticket.decode, sent)
    assert [first, second] == tickets
    assert first.spec is second.spec
    assert first.modules is second.modules


def test_equal_vectors_travel_once():
    spec = Spec(edits=tuple(Add(ONES, layer=i % 4, scale=i) for i in range(64)))
    assert len(spec.arrays) == len(spec.packed.arrays) == 1
    assert len(spec.packed.body) < 64 * 100


def test_specs_that_differ_in_a_vector_alone_have_different_digests():
    one, other = (Spec(edits=(Add([x] * 8, layer=0),)) for x in (1.0, 2.0))
    assert one.packed.digest != other.packed.digest
    assert len(one.packed.body) == len(other.packed.body)
