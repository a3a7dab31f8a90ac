"""What workers hold of what EngineCore told them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Add, Read, Spec
from vllm_scope.core import news as module
from vllm_scope.core.news import Entrant, Heard, StepNews, Told, know_digest, packed_of
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient

SITES = Sites(2, 64, "float32", (0, 2, 4))


def _asked(vector: int, scale: float):
    edit = Add([float(vector + 1)] * 64, layer=0, scale=scale)
    return Spec((Read("embed"),), edits=(edit,)).resolve(SITES)


def _send(news: StepNews) -> StepNews:
    """As vLLM sends a step's output to workers in other processes."""
    return pickle.loads(pickle.dumps(news))


def test_a_spec_travels_once_and_so_does_a_vector():
    told, heard = Told(), Heard()
    first, second = _asked(0, 1.0), _asked(0, 2.0)
    sent = []
    for asked in (first, second, first):
        news = StepNews()
        number = told.number_of(asked, news)
        sent.append((len(news.specs), len(news.arrays)))
        heard.take(_send(news))
        assert heard[number] == asked
    assert sent == [(1, 1), (1, 0), (0, 0)]
    assert heard[0].edits[0].values is heard[1].edits[0].values


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
                asked = every.setdefault((vector, scale), _asked(vector, scale))
                number = numbers[i] = told.number_of(asked, news)
                news.entrants[str(i)] = Entrant(Recipient(i, "f"), number)
            came = _send(news)
            heard.take(came)
            for i, key in enumerate(step):
                assert heard[came.entrants[str(i)].spec] == every[key]
            heard.forget(came)
            assert len(heard._arrays) <= 3
            assert len(heard._specs) <= 8


def test_a_worker_in_the_same_process_takes_the_spec_as_it_is():
    told, here, elsewhere = Told(), Heard(), Heard()
    asked, news = _asked(0, 1.0), StepNews()
    number = told.number_of(asked, news)
    program = RequestProgram.compile(asked, SITES, frozenset(SITES.boundaries), 2, [5, 6])
    held = news.held["r"] = program.held(program.columns(3))
    assert (news.held, _send(news).held) == ({"r": held}, {})
    here.take(news)
    elsewhere.take(_send(news))
    assert here[number] is asked
    assert elsewhere[number] is not asked
    assert elsewhere[number] == asked
    assert here.digest_of(number) == elsewhere.digest_of(number)


def test_for_the_only_worker_in_this_process_nothing_is_packed():
    told, heard, news = Told(here=True), Heard(), StepNews()
    asked, again = _asked(0, 1.0), _asked(0, 1.0)
    numbers = [told.number_of(one, news) for one in (asked, again, asked)]
    assert (numbers, news.specs, news.arrays) == ([0, 1, 0], {}, {})
    know_digest(again, b"of the ticket")
    heard.take(news)
    assert [heard[number] for number in numbers] == [asked, again, asked]
    assert heard[0] is asked
    assert heard.digest_of(0) == packed_of(asked)[0].digest
    assert heard.digest_of(1) == b"of the ticket"


def test_a_step_that_changes_nothing_has_no_news():
    assert not StepNews()
    assert StepNews(zeroed=[1])
    assert StepNews().entrants is not StepNews().entrants
