"""Columns that are kept for requests with equal picks are those that each request would make."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.unit.programs import forget_ranges
from vllm_scope import Add, Read, Spec, SpecError
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request.actions import Action
from vllm_scope.request.sites import Sites

SITES = Sites(256, 4, "float32", tuple(range(513)))
V = [1.0, 2.0, 0.0, -1.0]


def _program(actions: tuple[Action, ...], num_prompt: int) -> RequestProgram:
    reads = tuple(one for one in actions if isinstance(one, Read))
    edits = tuple(one for one in actions if isinstance(one, Add))
    ids, here = np.ones(num_prompt, np.int64), frozenset(SITES.boundaries)
    asked = Spec(reads, edits=edits).resolve(SITES)
    return RequestProgram.compile(asked, SITES, here, num_prompt, ids)


class _Request(NamedTuple):
    actions: tuple[Action, ...]
    num_prompt: int = 8
    num_positions: int = 20
    drafts: bool = True
    first: int = 0
    count: int = 20

    def made(self) -> tuple[object, ...]:
        """Its columns; those of a range of positions, and which of them each position has."""
        program = _program(self.actions, self.num_prompt)
        each, which = program.distinct_at(self.first, self.count)
        columns = program.columns(self.num_positions, self.drafts)
        return columns, [column.tolist() for column in each], which.tolist()


_ENDS = Add(V, layer=0, tokens=[-1]), Add(V, layer=1, tokens=[5])
_READS = Read("resid_post", layer=0, tokens=[3]), Read("resid_post", layer=1, tokens=[12])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(_Request(_ENDS), _Request(_ENDS, 6), id="prompt"),
        pytest.param(_Request(_READS), _Request(_READS, 8, 10), id="positions"),
        pytest.param(_Request(_READS), _Request(_READS, drafts=False), id="drafts"),
        pytest.param(_Request(_READS), _Request(_READS, first=10), id="first-of-a-range"),
        pytest.param(_Request(_READS), _Request(_READS, count=7), id="length-of-a-range"),
        pytest.param(_Request(_READS), _Request(_READS[:1]), id="number-of-picks"),
        pytest.param(_Request(_READS), _Request(_READS[::-1]), id="order-of-picks"),
        pytest.param(_Request(_ENDS), _Request((*_ENDS, *_READS)), id="reads-beside-edits"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["in-order", "swapped"])
def test_a_requests_columns_are_its_own_after_a_request_that_differs_in(one, other, swapped):
    first, then = (other, one) if swapped else (one, other)
    forget_ranges()
    before = first.made()
    found = then.made()
    forget_ranges()
    expected = then.made()
    assert found == expected != before


@pytest.mark.parametrize("few_first", [True, False])
def test_the_bound_on_operations_holds_after_a_request_with_equal_picks(few_first):
    """41 picks, and one of them at 1 or at 256 layers; the others differ in their positions."""
    single = [Add(V, layer=0, tokens=[position]) for position in range(40)]
    few, many = (_program((Add(V, layers=layers), *single), 8) for layers in ([0], "all"))
    assert few._compiled.picks_key == many._compiled.picks_key
    forget_ranges()
    if few_first:
        few.columns(50)
    with pytest.raises(SpecError, match="reads, scores and edits together; at most 8,192"):
        many.columns(50)
    assert len(few.columns(50)) == 41
