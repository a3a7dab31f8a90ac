"""Specs that differ in the layers, vectors and numbers of their edits alone."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest

from tests.unit.programs import forget_ranges, programs_of
from vllm_scope import Ablate, Add, Clamp, Gate, Latch, Read, Replace, Spec, SpecError
from vllm_scope.core.registry import Registry
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request import spec
from vllm_scope.request.arrays import Array
from vllm_scope.request.outline import Outline
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Meanings
from vllm_scope.request.ticket import Recipient, Ticket, travelling

SITES = Sites(4, 8, "float32", (0, 2, 4, 6, 8))
HERE = frozenset(SITES.boundaries)
IDS = list(range(5, 29))


def _row(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*shape, 8)).astype(np.float32)


def _cells(seed: int, layer: int) -> dict[str, tuple]:
    """By kind. The numbers of one seed are distinct, like those of every other seed."""
    half, third = seed + 0.5, seed + 0.3
    gate = Gate(_row(seed + 7), 0, threshold=third, bias=half)
    latched = Gate(_row(seed + 7), site="embed", threshold=half, state=Latch())
    vector = Array.parse(_row(seed), "")
    return {
        "replaced": (Replace(_row(seed, 1), positions=[3], layer=layer),),
        "replaced-from-the-end": (Replace(_row(seed, 2), positions=[-1, 2], layer=layer),),
        "added": (Add(_row(seed), layer=layer, scale=2.0, tokens=[3]),),
        "added-to-all": (Add(_row(seed), layer=layer, norm_match=True),),
        "at-two-sites": (
            Add(_row(seed), site="resid_pre", layer=layer, tokens=[1]),
            Ablate(_row(seed + 9), layer=layer, tokens=[2]),
        ),
        "clamped": (Clamp(_row(seed), layer=layer, lo=0.5, tokens="last_prompt"),),
        "embedding": (Add(_row(seed), site="embed", tokens=[0]),),
        "scaled": (Add(_row(seed), layer=layer, scale=half, max_relative_norm=third),),
        "between": (Clamp(_row(seed), layer=layer, lo=third, hi=half, strength=0.7),),
        "from-below": (Clamp(_row(seed), layer=layer, hi=-half),),
        "gated": (Add(_row(seed), layer=layer, scale=third, gate=gate),),
        "gated-by-a-sigmoid": (
            Ablate(
                _row(seed),
                layer=layer,
                tokens="generated",
                gate=Gate(_row(seed + 7), site="embed", kind="sigmoid", sharpness=half),
            ),
        ),
        "gated-by-a-cosine": (
            Replace(
                _row(seed, 1),
                positions=[3],
                layer=layer,
                gate=Gate(_row(seed + 7), 0, kind="cosine", threshold=third, above=False),
            ),
        ),
        "gated-with-a-state": (
            Add(
                _row(seed),
                layer=layer,
                gate=Gate(_row(seed + 7), site="embed", threshold=half, state=Latch()),
            ),
        ),
        # Their layers are equal in some specs alone.
        "two-of-one-gate-with-a-state": tuple(
            Add(_row(seed + i), layer=at, gate=latched) for i, at in enumerate((layer, 3))
        ),
        "two-of-one-gate": (
            Add(_row(seed), layer=layer, gate=gate),
            Ablate(_row(seed + 9), layer=3, gate=gate),
        ),
        "two-gates-of-one-vector": (
            Add(vector, layer=layer, gate=Gate(gate.vector, 0, threshold=half)),
            Add(vector, layer=3, gate=Gate(gate.vector, 0, threshold=third)),
        ),
    }


def _meanings(*specs: Spec) -> list[Resolved]:
    meanings = Meanings(SITES)
    return [meanings.of(spec.packed, spec.arrays, {}) for spec in specs]


def _is_fitted(first: Resolved, other: Resolved) -> bool:
    return other is not first and other.shared is first.shared


@pytest.mark.parametrize("kind", _cells(0, 1))
def test_a_spec_is_made_of_another_one_that_differs_in_layer_vector_and_number(kind):
    one, other = Spec(edits=_cells(0, 1)[kind]), Spec(edits=_cells(100, 3)[kind])
    first, found = _meanings(one, other)
    expected = other.resolve(SITES)
    assert _is_fitted(first, found)
    assert found == expected
    assert [edit.number for edit in found.edits] == [edit.number for edit in expected.edits]
    for name in ("num_bytes", "uniform", "destinations", "watched", "scaled", "num_states"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("kind", _cells(0, 1))
@pytest.mark.parametrize("layer", range(4))
def test_its_programs_costs_and_keys_are_those_of_a_spec_without_an_outline(kind, layer):
    one, other = Spec(edits=_cells(0, 1)[kind]), Spec(edits=_cells(100, layer)[kind])
    first, found = _meanings(one, other)
    alone = other.resolve(SITES)
    forget_ranges()
    program = RequestProgram.compile(first, SITES, HERE, len(IDS), IDS)
    assert program.held(program.columns(90), "first").cost.programs
    made = []
    for asked in (found, alone):
        if asked is alone:
            forget_ranges()
        program = RequestProgram.compile(asked, SITES, HERE, len(IDS), IDS)
        columns = program.columns(90)
        held = program.held(columns, "key")
        made.append((
            columns, programs_of(program, columns), held.programs, held.cost, held.vectors,
            [program.distinct_at(first, 8)[1].tolist() for first in range(0, 24, 8)],
        ))  # fmt: skip
    assert made[0] == made[1]


def _check_refused(sites: Sites, one: Spec, other: Spec) -> None:
    """With an outline of `one` there, `other` is refused with the sentence of Spec.resolve."""
    meanings = Meanings(sites)
    meanings.of(one.packed, one.arrays, {})
    with pytest.raises(SpecError) as expected:
        other.resolve(sites)
    with pytest.raises(SpecError) as error:
        meanings.of(other.packed, other.arrays, {})
    assert str(error.value) == str(expected.value)


def test_a_layer_before_the_gate_is_refused_as_without_an_outline():
    gate = Gate([1.0] * 8, 2)
    _check_refused(SITES, *(Spec(edits=(Add([1.0] * 8, layer=at, gate=gate),)) for at in (3, 1)))


@pytest.mark.parametrize("kind", [*_cells(0, 1), "from-the-end"])
def test_its_block_keys_are_those_of_a_spec_without_an_outline_for_each_length_of_a_prompt(kind):
    def edits(seed: int, layer: int) -> tuple:
        added = Add(_row(seed), layer=layer, tokens=[-2, 5])
        return (added,) if kind == "from-the-end" else _cells(seed, layer)[kind]

    specs = [Spec(edits=edits(seed, layer)) for seed, layer in ((0, 1), (100, 3))]
    lengths = (24, 21, 13, 24)
    for asked in _meanings(*specs):
        for length in lengths:
            keys, alone = (
                BlockKeys(asked.edits, length, IDS[:length], shared=shared)
                for shared in (asked.shared, None)
            )
            for start in range(0, 32, 8):
                expected = alone.key(start, start + 8)
                # Made now, and taken from what is kept.
                assert [keys.key(start, start + 8) for _ in range(2)] == [expected] * 2


def test_a_layer_that_is_not_tapped_is_refused_as_without_an_outline():
    sites = Sites(4, 8, "float32", (0, 2, 4))
    _check_refused(sites, *(Spec(edits=(Add([1.0] * 8, layer=at),)) for at in (0, 3)))


_OF_ONE_LAYER = Spec(edits=(Add(_row(0), layer=1, tokens="generated", scale=4.0),))
_OF_SEVERAL = Spec(edits=(Add(_row(9), layers=[0, 1, 2], tokens="generated", scale=4.0),))


@pytest.mark.parametrize(
    "specs",
    [(_OF_ONE_LAYER, _OF_SEVERAL), (_OF_SEVERAL, _OF_ONE_LAYER)],
    ids=["one-layer-first", "several-first"],
)
def test_a_spec_of_several_layers_is_resolved_alone_though_its_body_is_that_of_one_layer(specs):
    assert _OF_ONE_LAYER.packed.body == _OF_SEVERAL.packed.body
    registry, expected = Registry(SITES), [one.resolve(SITES) for one in specs]
    assert _meanings(*specs, *specs) == expected * 2
    for one, alone in zip(specs * 2, expected * 2, strict=True):
        arrays = travelling(one.arrays.values())
        ticket = Ticket(Recipient(1, "f"), None, (), one.packed, arrays)
        assert registry.resolve(ticket)[0] == alone


def test_vectors_of_another_size_are_refused():
    one, other = (Spec(edits=(Add([1.0] * size, layer=0),)) for size in (8, 9))
    with pytest.raises(SpecError, match="has 9 numbers; rows of 'resid_post' have 8"):
        _meanings(one, other)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(edits=(Add([1.0] * 8, layers=[0, 1]),)),
        Spec(edits=(Add(_row(0, 2), layers=[0, 1]),)),
        Spec(edits=(Add([1.0] * 8, layer=0, gate=Gate([1.0] * 8, layer=0, name="g")),)),
        Spec(edits=(Add([1.0] * 8, layer=0, dose="d"),)),
        Spec((Read("resid_post", layer=0),), edits=(Add([1.0] * 8, layer=0),)),
    ],
    ids=["two-layers", "a-row-for-each", "a-gate-that-is-told", "a-dose", "a-read"],
)
def test_other_specs_have_no_outline(spec):
    assert Outline.of(spec.packed, spec.resolve(SITES), SITES) is None


@pytest.mark.parametrize("numbers", [(1.0, 2.0), (0.0, -0.0)], ids=["two", "two-zeros"])
def test_gates_with_equal_numbers_are_no_outline_of_gates_with_different_ones(numbers):
    def spec(*thresholds: float) -> Spec:
        gates = (
            Gate([1.0] * 8, 0, kind="sigmoid", threshold=one, bias=3.0, sharpness=4.0)
            for one in thresholds
        )
        return Spec(edits=tuple(Add([1.0] * 8, layer=1, scale=5.0, gate=gate) for gate in gates))

    first, found = _meanings(spec(1.0, 1.0), spec(*numbers))
    assert not _is_fitted(first, found)
    assert len({edit.gate.digest for edit in found.edits}) == 2
    assert found == spec(*numbers).resolve(SITES)


def test_edits_with_equal_vectors_are_no_outline_of_edits_with_different_ones():
    one = Spec(edits=(Add([1.0] * 8, layer=0), Add([1.0] * 8, layer=1)))
    other = Spec(edits=(Add([1.0] * 8, layer=0), Add([2.0] * 8, layer=1)))
    first, found = _meanings(one, other)
    assert not _is_fitted(first, found)
    assert found == other.resolve(SITES)


def test_outlines_and_their_specs_take_at_most_the_bytes_that_are_counted(monkeypatch):
    """Each spec here edits other tokens, so that it has an outline of its own."""
    monkeypatch.setattr(spec, "REMEMBERED_BYTES", 1 << 18)
    monkeypatch.setattr(spec, "OUTLINE_BYTES", 1 << 20)
    meanings, rows = Meanings(SITES), _row(0, 600)
    used: set[bytes] = set()

    def use(i: int) -> None:
        gate = Gate(rows[i], 0, threshold=i + 0.5)
        one = Spec(edits=(Add(rows[-i], layer=1, tokens=[i % 20, i // 20], gate=gate),))
        used.update(one.packed.arrays)
        asked = meanings.of(one.packed, one.arrays, {})
        program = RequestProgram.compile(asked, SITES, HERE, len(IDS), IDS)
        assert program.held(program.columns(90)).cost.vectors
        keys = BlockKeys(asked.edits, len(IDS), IDS, b"", asked.shared)
        assert any(keys.key(start, start + 8) for start in range(0, 24, 8))

    use(300)
    tracemalloc.start()
    for i in range(300):
        use(i)
        assert meanings.num_bytes <= (1 << 20) + (1 << 18)
    counted = meanings.num_bytes
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    meanings.forget_arrays(used)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert meanings.num_bytes == 0
    # They are freed at once: no reference leads from one of them to itself.
    assert counted / 2 < before - after < counted


def test_a_spec_of_many_edits_is_made_of_an_outline_as_fast_as_it_is_resolved():
    def of(seed: int) -> Spec:
        numbers = seed + np.arange(1024).reshape(256, 4) / 1024
        return Spec(edits=tuple(
            Add(
                [1.0] * 8, layer=2, scale=float(a),
                gate=Gate(
                    [2.0] * 8, 0, kind="sigmoid", threshold=float(b), bias=float(c),
                    sharpness=float(d),
                ),
            )
            for a, b, c, d in numbers
        ))  # fmt: skip

    first, second = of(1), of(2)

    def took(once: bool) -> float:
        meanings = Meanings(SITES)
        if not once:
            meanings.of(first.packed, first.arrays, {})
        began = time.thread_time()
        meanings.of(second.packed, second.arrays, {})
        return time.thread_time() - began

    # The first of an outline is resolved, and of the second the outline is made.
    assert min(took(False) for _ in range(5)) < 3 * min(took(True) for _ in range(5))


def test_an_outline_names_every_field_of_a_resolved_spec():
    found = _meanings(*(Spec(edits=_cells(seed, 1)["added"]) for seed in (0, 1)))[1]
    assert {each.name for each in fields(Resolved)} <= found.__dict__.keys()


@pytest.mark.parametrize("kind", _cells(0, 1))
def test_a_spec_of_the_last_ones_edits_is_packed_as_any_other(kind):
    last = Spec(edits=_cells(0, 1)[kind])
    for seed, layer, tokens in ((5, 3, None), (6, 1, None), (7, 2, [7])):
        edits = _cells(seed, layer)[kind]
        if tokens is not None and not isinstance(edits[0], Replace):
            edits = (replace(edits[0], tokens=tokens), *edits[1:])
        expected = Spec(edits=edits)
        last = last.with_edits(edits)
        assert last == expected
        assert last.packed == expected.packed
        assert last.arrays == expected.arrays
        assert last.modules == ()


@pytest.mark.parametrize(
    "other",
    [
        Add([2.0] * 8, layer=1, tokens=[1]),
        Add([2.0] * 8, layer=1, scale=2.0),
        Add([2.0] * 8, layers=[0, 1]),
        Add([2.0] * 8, layer=1, gate=Gate([1.0] * 8, layer=0)),
        Add("module", layer=1),
        Add([2.0] * 8, site="resid_pre", layer=1),
        Ablate([2.0] * 8, layer=1),
    ],
    ids=["tokens", "scale", "layers", "gate", "module", "site", "kind"],
)
def test_a_spec_of_another_edit_is_packed_anew(other):
    found = Spec(edits=(Add([1.0] * 8, layer=0),)).with_edits((other,))
    assert (found, found.packed) == (Spec(edits=(other,)), Spec(edits=(other,)).packed)
    assert found.modules == Spec(edits=(other,)).modules


def test_a_spec_of_the_last_ones_gate_is_packed_with_the_gates_vector():
    gate = Gate([3.0] * 8, layer=0)
    edits = [Add([size] * 8, layer=1, gate=gate) for size in (1.0, 2.0)]
    found, expected = Spec(edits=(edits[0],)).with_edits((edits[1],)), Spec(edits=(edits[1],))
    assert (found.packed, found.arrays) == (expected.packed, expected.arrays)
    assert Spec.unpack(found.packed, found.arrays) == expected
