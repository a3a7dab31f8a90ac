"""What workers hold of what EngineCore told them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Ablate, Add, Policy, Probe, Read, ScopeError, Spec
from vllm_scope.core import news as module
from vllm_scope.core.assignments import Assignment, RankKind
from vllm_scope.core.news import Entrant, Heard, StepNews, Told
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Widths
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient

SITES = Sites(2, 64, "float32", (0, 2, 4))


def _asked(vector: int, scale: float):
    edit = Add([float(vector + 1)] * 64, layer=0, scale=scale)
    return Spec((Read("embed"),), edits=(edit,)).resolve(SITES)


def _given(asked) -> Assignment:
    return Assignment(asked, {}).pack()


def _programs(asked, here, drains: bool = True):
    """The programs of a request with two tokens of prompt, as EngineCore makes them."""
    program = RequestProgram.compile(asked, SITES, frozenset(here), 2, [5, 6], drains)
    held = program.held(program.columns(3), (asked.mark, tuple(here), drains))
    held.make(Widths((256,)))
    return program, held


def _send(news: StepNews) -> StepNews:
    """As vLLM sends a step's output to workers in other processes."""
    return pickle.loads(pickle.dumps(news))


def test_a_spec_travels_once_and_so_does_a_vector():
    told, heard = Told(), Heard()
    first, second = _given(_asked(0, 1.0)), _given(_asked(0, 2.0))
    sent = []
    for one in (first, second, first):
        news = StepNews()
        number = told.number_of(one, news)
        sent.append((len(news.specs), len(news.arrays)))
        heard.take(_send(news))
        assert heard[number].asked == one.asked
    assert sent == [(1, 1), (1, 0), (0, 0)]
    assert heard[0].asked.edits[0].values is heard[1].asked.edits[0].values


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5), max_size=30))
def test_workers_always_hold_what_a_step_needs_and_never_more_than_the_bounds(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPEC_BYTES", 12_000)
        patch.setattr(module, "ARRAY_BYTES", 3 * 256)
        told, heard = Told(), Heard()
        every = {}
        for step in steps:
            news, numbers = StepNews(), {}
            for i, (vector, scale) in enumerate(step):
                given = every.setdefault((vector, scale), _given(_asked(vector, scale)))
                number = numbers[i] = told.number_of(given, news)
                news.entrants[str(i)] = Entrant(Recipient(i, "f"), number)
            came = _send(news)
            heard.take(came)
            for i, key in enumerate(step):
                assert heard[came.entrants[str(i)].spec].asked == every[key].asked
            heard.forget(came)
            assert len(heard._arrays) <= 3
            assert len(heard._specs) <= 8


def test_a_worker_in_the_same_process_takes_the_assignment_as_it_is():
    told, here, elsewhere = Told(), Heard(), Heard()
    given, news = _given(_asked(0, 1.0)), StepNews()
    number = told.number_of(given, news)
    here.take(news)
    elsewhere.take(_send(news))
    assert here[number] is given
    assert elsewhere[number] is not given
    assert elsewhere[number].asked == given.asked


@pytest.mark.parametrize("num_edits", [1, 20], ids=["few", "many"])
@pytest.mark.parametrize("drains", [True, False], ids=["delivers", "edits-alone"])
def test_programs_come_as_enginecore_made_them_and_their_edits_stay_behind(num_edits, drains):
    edits = tuple(Ablate([float(i + 1)] * 64, layer=i % 2, tokens=[i]) for i in range(num_edits))
    asked = Spec((Read("embed"),), edits=edits).resolve(SITES)
    kind, (program, held) = RankKind(0, drains), _programs(asked, SITES.boundaries, drains)
    assert held.few == (num_edits == 1)
    given = Assignment(asked, {kind: held}, program.columns(3)).pack()
    came = Assignment.of(given.parcel, given.arrays)
    assert (came.asked.edits, came.asked.reads) == ((), asked.reads)
    there = came.held[kind]
    again = RequestProgram.holding(there, 2, [5, 6])
    assert (again.has_vectors, again.checks) == (program.has_vectors, program.checks)
    assert there == held
    assert list(map(there.layout, range(len(there)))) == list(map(held.layout, range(len(held))))
    for position in range(3):
        (column,), (same,) = (one.distinct_at(position, 1)[0] for one in (program, again))
        assert np.array_equal(column, same)
        assert there.find([column]) == held.find([column])
    if held.few:
        assert there.programs == held.programs
    else:
        rows, came_rows = held.rows(Widths((256,))), there.rows(Widths((256,)))
        for name, values in vars(rows).items():
            np.testing.assert_equal(getattr(came_rows, name), values)
    with pytest.raises(ScopeError, match="never held"):
        again._compiled._build(np.ones(len(again._compiled.picks), np.int32))


def test_a_policy_gets_the_edits_whose_scales_it_sets():
    edit = Add([1.0] * 64, layer=0, name="mine")
    probe = Probe([1.0] * 64, layer=0, name="p")
    asked = Spec(probes=(probe,), edits=(edit,), policy=Policy("some")).resolve(SITES)
    program, held = _programs(asked, SITES.boundaries)
    given = Assignment(asked, {RankKind(0, True): held}, program.columns(3)).pack()
    came = Assignment.of(given.parcel, given.arrays)
    assert (came.asked, came.columns) == (asked, given.columns)


def test_a_step_that_changes_nothing_has_no_news():
    assert not StepNews()
    assert StepNews(zeroed=[1])
    assert StepNews().entrants is not StepNews().entrants
