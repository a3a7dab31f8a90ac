"""The programs of a request that are made at once are those that are built one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.programs import cost_of, on_the_device, programs_of
from tests.unit.strategies import VOCAB, specs
from vllm_scope import (
    Ablate,
    Add,
    Clamp,
    Ema,
    Gate,
    Hysteresis,
    Latch,
    Pid,
    Probe,
    Replace,
    Spec,
    SpecError,
)
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program import held as held_programs
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import NO_PROGRAM
from vllm_scope.request.heads import Strongest
from vllm_scope.request.resolved import Cell, ResolvedFeatures
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place, Sites

NUM_LAYERS, HIDDEN_SIZE = 2, 4
EVERYWHERE = tuple(range(2 * NUM_LAYERS + 1))
SITES = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", EVERYWHERE)
V = [1.0, 2.0, 0.0, -1.0]
_CELL = Cell(Place("resid_post", 1), Strongest.of_sae("sae", 2), None, 0)
FEATURES = (ResolvedFeatures("sae", Word("all"), (_CELL,)),)


def _tables() -> Tables:
    widths, device = Widths((4 * HIDDEN_SIZE,)), torch.device("cpu")
    return Tables(EVERYWHERE, 1, HIDDEN_SIZE, widths, device, 2**-8, num_programs=64, num_ops=1024)


@st.composite
def asked(draw: Any) -> Spec:
    """Any spec. Some of its probes may wait for verdicts of others; some of its edits have gates,
    also with states, and doses, which may be equal."""
    found = draw(specs(NUM_LAYERS))
    after = draw(st.lists(st.sampled_from([None, "first", "other"]), max_size=3))
    if any(after):
        firsts = [Probe(V, layer=0, name=name, threshold=1.0) for name in ("first", "other")]
        later = [Probe(V, layer=1, name=f"later {i}", after=one) for i, one in enumerate(after)]
        found = replace(found, probes=(*found.probes, *firsts, *later))
    if not found.edits or not draw(st.booleans()):
        return found
    site = draw(st.sampled_from(["embed", "resid_post"]))
    gates = [None, Gate(V, 0, site=site, name="g"), Gate(V, 0, site=site, threshold=1.5)]
    gates += [
        Gate(V, 0, site=site, name="h", state=Ema(0.5)),
        Gate(V, 0, site=site, state=Hysteresis(-1.0)),
        Gate(V, 0, site=site, state=Pid(1.0, 0.5)),
    ]
    edits = []
    for i, edit in enumerate(found.edits):
        if not isinstance(edit, Replace):
            edit = replace(edit, gate=draw(st.sampled_from(gates)))
        if len(edit.layer_numbers or ()) == 1:
            edit = replace(edit, dose=draw(st.sampled_from([None, f"dose {i}"])))
        edits.append(edit)
    return replace(found, edits=tuple(edits))


#: The last layer has two banks. The last token of the prompt picks the first bank by "both". Other
#: tokens pick this bank by "plain", after the second bank.
TWO_BANKS = Spec(
    probes=(
        Probe([V, V], layers=[0, 1], name="both", tokens="last_prompt"),
        Probe(V, layer=0, name="first", threshold=1.0),
        Probe(V, layer=1, name="later", after="first"),
        Probe(V, layer=1, name="plain"),
    )
)


@given(
    asked(),
    st.sampled_from([(), FEATURES]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.sampled_from([EVERYWHERE, (0, 1, 2), (2, 3), (4,)]),
    st.booleans(),
)
@example(TWO_BANKS, (), [0], EVERYWHERE, True)
@pytest.mark.parametrize("few", [0, 1 << 20], ids=["at-once", "one-by-one"])
def test_programs_made_at_once_are_those_built_one_by_one(
    few, spec, features, prompt, here, drains
):
    try:
        resolved = replace(spec.resolve(SITES), features=features)
    except SpecError:  # a gate after its edit
        assume(False)
    ids = np.array(prompt, np.int64)
    program = RequestProgram.compile(resolved, SITES, frozenset(here), len(ids), ids, drains)
    # From a process that has all boundaries.
    whole = RequestProgram.compile(resolved, SITES, frozenset(EVERYWHERE), len(ids), ids)
    columns = whole.columns(len(prompt) + 6)
    held, tables, one_by_one = program.held(columns), _tables(), _tables()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_programs, "_FEW", few)
        program_ids = tables.hold(held)
    expected = {}
    stages = program, *program._later_stages()
    for stage, position in product(stages, range(len(prompt) + 6)):
        columns_here, of_tokens = stage.distinct_at(position, 1)
        column = columns_here[of_tokens[0]]
        found = int(program_ids[held.find([column])[0]])
        one = program.program(column)
        if one is None:
            assert found == NO_PROGRAM
            continue
        number = one_by_one.program_id(one, hold=True)
        assert on_the_device(tables, found) == on_the_device(one_by_one, number)
        assert tables.layout_of(found) == one.layout
        assert tables.num_slots[found] == one_by_one.num_slots[number]
        assert tables.num_delivered[found] == one_by_one.num_delivered[number]
        expected[one] = found
    assert len(set(expected.values())) == len(expected)
    cost = cost_of(programs_of(program, columns), resolved.banks_on_rows())
    if any(isinstance(edit, Replace) for edit in spec.edits):
        # A replacement's row counts also beside an equal vector of another edit.
        assert cost.vectors <= held.cost.vectors
        cost = structs.replace(cost, vectors=held.cost.vectors)
    assert held.cost == cost
    tables.release_set(held)
    tables._drop_idle_sets()
    assert tables.hold(held) is not program_ids


GATED = Gate([1.0, 2.0, 3.0, 4.0], 0)
FEW_EDITS = {
    "a-replaced-row": Replace([V], positions=[1], layer=0),
    "replaced-rows": Replace([V, V], positions=[1, -1], layer=0),
    "an-added-vector": Add(V, layer=1, tokens=[0]),
    "an-ablated-direction": Ablate(V, layer=1, tokens=[0, 2]),
    "a-clamped-direction": Clamp(V, layer=1, lo=0.0, tokens="generated"),
    "two-layers": Add(V, layers=[0, 1], tokens=[0]),
    "a-gated-vector": Add(V, layer=1, gate=GATED),
    "two-layers-of-a-gate": Add(V, layers=[1, 0], tokens=[0], gate=GATED),
    "a-gate-with-a-state": Add(V, layer=1, gate=Gate(V, 0, state=Latch())),
}
MORE = Ablate(V, layer=0, tokens=[0]), Add(V, layer=1, gate=Gate(V, 0, threshold=2.0))


@pytest.mark.parametrize("here", [EVERYWHERE, (0, 1), (2,)], ids=["all", "first", "between"])
@pytest.mark.parametrize("edit", FEW_EDITS.values(), ids=FEW_EDITS)
@pytest.mark.parametrize("more", [(), MORE], ids=["alone", "with-more"])
def test_few_edits_are_counted_as_their_list_of_operations(edit, more, here):
    """With and without the check of each token; columns where no token or all tokens are edited."""
    asked = Spec(edits=(edit, *more)).resolve(SITES)
    program = RequestProgram.compile(asked, SITES, frozenset(here), 4, [1, 2, 3, 4])
    compiled = program._compiled
    num_picks = len(compiled.picks)
    every = np.array(list(product(range(2), repeat=num_picks)), np.int32).T
    alike = every[:, [0, -1]]
    for columns in (every, alike, alike[:, :1], alike[:, 1:], every[:, [0, 1, 1]]):
        given = tuple(column.tobytes() for column in columns.T)
        for _ in range(2):  # the second time it is remembered
            counted, expected = compiled.count(given), compiled.op_list.count(columns)
            assert (*counted[:2], sorted(counted[2])) == (*expected[:2], sorted(expected[2]))
