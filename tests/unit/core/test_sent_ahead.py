"""Vectors that front-ends have sent ahead: what EngineCore holds, and for how long."""

from __future__ import annotations

import gc
import weakref

import pytest

from vllm_scope import Probe, Spec
from vllm_scope.core.registry import Registry
from vllm_scope.core.sent_ahead import SentAhead
from vllm_scope.errors import UnheldError
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient, Ticket, encode_arrays, travelling

SITES = Sites(2, 64, "float32", (0, 2, 4))


def vector(value: float, size: int = 64) -> Array:
    return Array.parse([value] * size, "")


def by_digest(*arrays: Array) -> dict[bytes, Array]:
    return {array.digest: array for array in arrays}


def probe(value: float) -> Spec:
    return Spec(probes=(Probe(vector(value), layer=1, name="p"),))


def ticket(spec: Spec, whole: bool) -> Ticket:
    """As EngineCore gets it, with its vectors or without."""
    arrays = travelling(spec.arrays.values() if whole else ())
    made = Ticket(Recipient(1, "f"), None, spec.modules, spec.packed, arrays)
    return Ticket.decode(made.encode())


def test_each_front_end_keeps_what_it_sent_until_it_sends_something_else():
    held, (a, b, c) = SentAhead(), map(vector, (1.0, 2.0, 3.0))
    assert held.replace("one", by_digest(a, b)) == [a.digest, b.digest]
    assert held.replace("two", by_digest(b, c)) == [b.digest, c.digest]
    assert held.num_bytes == 3 * 256, "one of each"
    held.replace("one", by_digest(c))
    assert set(held.arrays) == {b.digest, c.digest}
    kept = held.arrays[c.digest]
    held.replace("two", {})
    assert held.arrays == {c.digest: kept}
    held.replace("one", {})
    assert held.arrays == {}
    assert held.num_bytes == 0


def test_what_exceeds_the_bound_by_itself_is_not_held_and_takes_the_place_of_nothing(caplog):
    held, (a, b, c, d) = SentAhead(3 * 256), map(vector, (1.0, 2.0, 3.0, 4.0))
    large = vector(5.0, 1000)
    held.replace("one", by_digest(a))
    assert held.replace("two", by_digest(b, large, c)) == [b.digest, c.digest]
    assert set(held.arrays) == {a.digest, b.digest, c.digest}
    assert held.num_bytes == 3 * 256
    assert held.replace("three", by_digest(a, b, c, d)) == [a.digest, b.digest, c.digest]
    assert caplog.text.count("travel with each request") == 1, "it is logged once"


def test_at_the_bound_the_front_end_that_sent_longest_ago_makes_room():
    held, (a, b, c, d) = SentAhead(3 * 256), map(vector, (1.0, 2.0, 3.0, 4.0))
    held.replace("dead", by_digest(a))
    held.replace("old", by_digest(b))
    held.replace("dead", by_digest(a))  # before it died
    assert held.replace("new", by_digest(a, c)) == [a.digest, c.digest]
    assert set(held.arrays) == {a.digest, b.digest, c.digest}, "there was room"
    assert held.replace("next", by_digest(d)) == [d.digest]
    assert set(held.arrays) == {a.digest, c.digest, d.digest}
    # What another front-end has sent too stays.
    assert held.replace("last", by_digest(b, a)) == [b.digest, a.digest]
    assert set(held.arrays) == {a.digest, b.digest, d.digest}


def test_front_ends_that_have_died_never_fill_the_bound():
    held = SentAhead(4 * 256)
    for i in range(20):
        some = by_digest(*(vector(3.0 * i + j + 1) for j in range(3)))
        assert held.replace(f"restarted {i}", some) == list(some)
        assert held.num_bytes <= 4 * 256


def test_a_ticket_names_vectors_that_were_sent_ahead():
    registry, spec = Registry(SITES), probe(1.0)
    (digest,) = spec.packed.arrays
    assert registry.hold("f", encode_arrays(spec.arrays.values())) == [digest]
    small = ticket(spec, whole=False)
    assert len(small.encode()) < 300
    assert registry.resolve(small)[1] == spec.resolve(SITES)
    # Whether the vectors travel or not, it is the same spec.
    assert registry.resolve(ticket(spec, whole=True))[1] is registry.resolve(small)[1]


def test_a_ticket_may_have_some_vectors_with_it_and_others_ahead():
    registry, first, second = Registry(SITES), probe(1.0), Probe(vector(2.0), layer=0, name="q")
    registry.hold("f", encode_arrays(first.arrays.values()))
    both = Spec(probes=(*first.probes, second))
    own = travelling(a for d, a in both.arrays.items() if d not in first.arrays)
    made = Ticket(Recipient(1, "f"), None, (), both.packed, own)
    assert registry.resolve(Ticket.decode(made.encode()))[1] == both.resolve(SITES)


def test_vectors_that_nobody_sent_are_refused_with_a_sentence():
    with pytest.raises(UnheldError, match=r"does not hold vectors.*send the request again"):
        Registry(SITES).resolve(ticket(probe(1.0), whole=False))


def test_what_is_unset_is_freed_with_the_specs_that_were_resolved_with_it():
    registry, spec = Registry(SITES), probe(1.0)
    registry.hold("f", encode_arrays(spec.arrays.values()))
    found = weakref.ref(registry.resolve(ticket(spec, whole=False))[1])
    registry.hold("f", encode_arrays(probe(2.0).arrays.values()))
    gc.collect()
    assert found() is None
    registry.hold("f", encode_arrays([]))
    assert registry.ahead.num_bytes == 0
    # It comes again, as from a front-end that has not sent it ahead.
    assert registry.resolve(ticket(spec, whole=True))[1] == spec.resolve(SITES)


def test_what_is_unset_leaves_other_specs_their_meaning():
    registry, spec, other = Registry(SITES), probe(1.0), probe(3.0)
    registry.hold("f", encode_arrays(spec.arrays.values()))
    kept, dropped = (registry.resolve(ticket(one, whole=True))[1] for one in (other, spec))
    registry.hold("f", encode_arrays([]))
    assert registry.resolve(ticket(other, whole=True))[1] is kept
    assert registry.resolve(ticket(spec, whole=True))[1] is not dropped
