"""Scores of a later stage in a result, and while it is streamed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.results.test_cursor import SIZE, deliver, pairs, pending_of
from vllm_scope import Probe
from vllm_scope.results.cursor import Cursor

#: `deliver` makes scores of positions: the first stage's verdict is at the first position above.
FIRST = Probe(np.ones(SIZE), layer=1, name="a", threshold=4.5)
SECOND = Probe(np.ones((2, SIZE)), layers=[0, 1], name="b", after="a", threshold=15.0)
THIRD = Probe(np.ones(SIZE), layer=2, name="c", after="b", aggregate="max")
PROMPT = [1, 2, 3]


def test_a_later_stage_counts_from_its_first_position_on():
    pending = pending_of(THIRD, SECOND, FIRST, prompt_ids=PROMPT)
    deliver(pending, range(14), 0, rows=False)
    pending.finish(0, None)
    for num_tokens, begun in ((3, {}), (4, {"b": 7}), (6, {"b": 7}), (12, {"b": 7, "c": 10})):
        result = pending.snapshot([5] * num_tokens, "stop")
        assert result.begun == begun
        processed = 3 + num_tokens - 1
        for name in ("b", "c"):
            first = begun.get(name, processed)
            assert result.scores.positions(name).tolist() == list(range(first, processed))
        assert result.expected == result.delivered == sum(map(len, result.scores.values()))
        assert result.status == "complete"
    assert result.verdicts == {"a": (5, 5.0), "b": (8, 16.0)}
    again = pickle.loads(pickle.dumps(result))
    assert again.begun == result.begun
    assert again.scores["c"].tolist() == result.scores["c"].tolist() == [10.0, 11.0, 12.0, 13.0]


def test_scores_that_are_missing_are_told():
    pending = pending_of(SECOND, FIRST, prompt_ids=PROMPT)
    deliver(pending, range(10), 0, rows=False, layers=[1])  # layer 0 of the second stage is lost
    pending.finish(0, None)
    result = pending.snapshot([5] * 8, "stop")
    assert result.begun == {"b": 7}
    assert (result.expected, result.delivered, result.status) == (10 + 3, 10, "incomplete")


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_output=st.integers(1, 11), preempted=st.integers(0, 13))
def test_streamed_scores_and_verdicts_are_those_of_the_result(data, num_output, preempted):
    pending = pending_of(THIRD, FIRST, SECOND, prompt_ids=PROMPT)
    cursor, handed = Cursor(rows=False), {}
    last = len(PROMPT) + num_output - 1
    todo = [*range(min(preempted, last)), *range(last)]
    output: list[int] = []
    while todo:
        count = data.draw(st.integers(1, len(todo)))
        step, todo = todo[:count], todo[count:]
        for layer in data.draw(st.permutations([0, 1, 2])):
            deliver(pending, step, 0, rows=False, layers=[layer])
        output = [5] * max(len(output), max(step) + 2 - len(PROMPT))
        if data.draw(st.booleans()):
            result = pending.snapshot(output, None)
            cursor.look(result)
            for column in cursor.take():
                handed.setdefault(column.label, []).extend(pairs(column))
            # What is settled has all of its scores.
            for name, first in cursor.begun().items():
                known = [position for position, _ in handed.get(name, [])]
                assert known[: cursor.settled - first] == list(range(first, cursor.settled))
    pending.finish(0, None)
    result = pending.snapshot(output, "length")
    verdicts, begun = cursor.verdicts(), cursor.begun()
    assert verdicts.items() <= result.verdicts.items()
    assert begun.items() <= result.begun.items()
    for column in cursor.rest(result):
        handed.setdefault(column.label, []).extend(pairs(column))
    for column in result.columns():
        assert sorted(handed.get(column.label, [])) == pairs(column)


@pytest.mark.parametrize("looks", [3, 30])
def test_a_stream_tells_of_a_later_stage_while_it_goes_on(looks):
    pending = pending_of(FIRST, SECOND, prompt_ids=PROMPT)
    cursor, told = Cursor(rows=False), []
    deliver(pending, [0, 1], 0, rows=False)
    for num_tokens in range(1, looks):
        deliver(pending, [num_tokens + 1], 0, rows=False)
        cursor.look(pending.snapshot([5] * num_tokens, None))
        cursor.take()
        told.append((set(cursor.verdicts()), cursor.begun()))
    assert told[0] == (set(), {})
    if looks > 20:
        assert told[-1] == ({"a", "b"}, {"b": 7})


def test_a_later_stage_is_streamed_whatever_other_probes_of_the_same_tokens_wait_for():
    """The later stage begins when another probe's State has just been replaced."""
    first = Probe(np.ones(SIZE), layer=0, name="a", threshold=0.5)
    other = Probe(np.ones(SIZE), layer=2, name="d", tokens="generated")
    later = Probe(np.ones(SIZE), layer=1, name="b", after="a", tokens="generated")
    pending = pending_of(first, other, later, prompt_ids=[1, 2])
    cursor, handed, output = Cursor(rows=False), [], []

    def step():
        cursor.look(pending.snapshot(list(output), None))
        for column in cursor.take():
            handed.extend((column.label, position) for position, _ in pairs(column))

    deliver(pending, [0, 1], 1, rows=False, layers=[0])
    output.append(5)
    step()  # with the verdict of the first stage
    output.append(5)
    step()  # the scores of position 2 are late, and the later stage begins at position 3
    deliver(pending, [2], 2, rows=False, layers=[0, 2])
    for position in range(3, 8):
        deliver(pending, [position], position, rows=False)
        output.append(5)
        step()
    assert [position for name, position in handed if name == "b"] == [3, 4, 5, 6, 7]
    assert not cursor.late(7)
