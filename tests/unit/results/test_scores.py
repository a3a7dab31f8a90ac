"""Scores out of the numbers of several layers, which come in messages of their own."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import roads
from tests.unit.delivered import banks_of
from tests.unit.oracle import aggregates_of, scores_of
from tests.unit.roads import SITES, Road, numbers_of
from vllm_scope import AttentionPool, Ema, Probe, RollingMean
from vllm_scope.batch.readout import Verdict
from vllm_scope.program.layout import Layout
from vllm_scope.request.sites import Place, boundary_of_point
from vllm_scope.results import scores as module
from vllm_scope.results.buffer import Pending
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.result import ScopeResult

V = [1.0, 2.0, 0.0, -1.0]
#: Of layers 0, 1 and 2.
BOUNDARIES = (2, 4, 6)
ALL = Probe([V] * 3, layers=[0, 1, 2], name="all", bias=0.5)
NUM_POSITIONS = 6


def exact(pending: Pending, name: str, positions: Any, number: Any = 0) -> list[float]:
    """The scores that follow from what `Road.send` sends, float32."""
    (probe,) = (probe for probe in pending.asked.probes if probe.name == name)
    numbers = [numbers_of(probe, position, number).numpy() for position in positions]
    rows = np.array(numbers).reshape(-1, probe.num_values)
    return torch.tensor(scores_of(probe, rows), dtype=torch.float32).tolist()


def send(
    road: Road, pending: Pending, positions: Any, boundaries: Any, number: int = 0,
    whole: bool = False,
) -> None:  # fmt: skip
    """The numbers of all probes at some boundaries.

    Args:
        whole: in one message of a stage that has these boundaries; else one for each tap.
    """
    banks = banks_of(pending.asked)
    if whole:
        banks = tuple(
            (bank, tuple(p for p in points if boundary_of_point(p) in boundaries))
            for bank, points in banks
        )
        banks = tuple((bank, points) for bank, points in banks if points)
    tokens = [(pending.key, p, Layout((), banks), number) for p in positions]
    for boundary in (None,) if whole else boundaries:
        road.send(tokens, boundary)


def ended(road: Road, pending: Pending) -> ScopeResult:
    road.finish(pending)
    return pending.snapshot([5] * (NUM_POSITIONS - 2), "stop")


# In whatever order


@pytest.mark.parametrize("order", list(itertools.permutations(BOUNDARIES)), ids=str)
def test_tap_by_tap_a_score_is_the_sum_of_its_layers_whatever_comes_first(order, road):
    pending = road.open(ALL)
    for positions in (range(3), range(3, NUM_POSITIONS)):
        send(road, pending, positions, order)
    result = ended(road, pending)
    assert result.scores["all"].tolist() == exact(pending, "all", range(NUM_POSITIONS))
    assert result.scores.positions("all").tolist() == list(range(NUM_POSITIONS))
    assert (result.expected, result.delivered, result.status) == (6, 6, "complete")


@pytest.mark.parametrize("split", [((2,), (4, 6)), ((2, 4), (6,))], ids=str)
@pytest.mark.parametrize("ahead", [0, 1], ids=["first-stage-first", "last-stage-first"])
def test_layers_of_two_stages_are_one_score(ahead, split, road):
    pending = road.open(ALL, num_stages=2)
    for stage in (ahead, 1 - ahead):
        for positions in ([0, 1, 2], [3], [4, 5]):
            send(road, pending, positions, split[stage], whole=True)
    road.finish(pending, num_stages=2)
    result = pending.snapshot([5] * 4, "stop")
    assert result.scores["all"].tolist() == exact(pending, "all", range(NUM_POSITIONS))
    assert result.status == "complete"


def test_a_layer_that_was_computed_again_is_added_as_it_was_last(road):
    pending = road.open(ALL)
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES, number=1)
    send(road, pending, [2, 3], BOUNDARIES[:2], number=2)
    result = ended(road, pending)
    found = result.scores["all"].tolist()
    again = Place("resid_post", 2).point()
    assert found[2:4] == exact(pending, "all", [2, 3], lambda point: 1 if point == again else 2)
    assert found[:2] + found[4:] == exact(pending, "all", [0, 1, 4, 5], 1)


def test_each_probe_adds_its_own_layers_with_its_own_numbers(road):
    """Layer 1 has numbers of all three, layer 0 of two; two of them have equal weights."""
    pending = road.open(
        Probe([V, [9.0, 0, 0, 0]], layers=[0, 1], name="two"),
        Probe(V, layer=1, name="one"),
        Probe([V, V], layers=[1, 0], name="equal", bias=-1.0),
    )
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES[:2])
    result = ended(road, pending)
    for name in ("two", "one", "equal"):
        assert result.scores[name].tolist() == exact(pending, name, range(NUM_POSITIONS))
    assert len({tuple(result.scores[name].tolist()) for name in result.scores}) == 3
    assert (result.expected, result.delivered) == (18, 18)


def test_a_pool_of_two_layers_attends_by_the_sum_of_their_logits(road):
    heads = [[V, V[::-1]], [[0.5, 0, 0, 0]] * 2]
    pools = [AttentionPool(query, query) for query in heads]
    pending = road.open(Probe(pools, layers=[0, 2], name="pool", aggregate="max"))
    for boundary in (6, 2):
        send(road, pending, range(NUM_POSITIONS), [boundary])
    result = ended(road, pending)
    expected = exact(pending, "pool", range(NUM_POSITIONS))
    assert result.scores["pool"].tolist() == pytest.approx(expected, rel=1e-6)
    assert result.aggregates["pool"].tolist() == aggregates_of(
        "max", result.scores["pool"].tolist()
    )


# Through a cursor


@pytest.mark.parametrize("aggregate", [None, "mean", Ema(0.5), RollingMean(2, "max")], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(BOUNDARIES)), ids=str)
def test_chunk_by_chunk_each_position_comes_once_when_its_last_layer_has_come(
    order, aggregate, road
):
    pending = road.open(Probe([V] * 3, layers=[0, 1, 2], name="all", aggregate=aggregate))
    cursor, taken = Cursor(rows=False), []
    first, second, last = order
    for positions, boundary, come in (
        (range(4), first, 0),
        (range(2), second, 0),
        (range(3), last, 2),  # now 0 and 1 have all
        (range(2, 4), second, 3),
        (range(3, 6), last, 4),
        (range(4, 6), second, 4),
        (range(4, 6), first, 6),
    ):
        send(road, pending, positions, [boundary])
        road.settle()
        cursor.look(pending.snapshot([5] * (NUM_POSITIONS - 2), None))
        taken += cursor.take()
        assert sum(len(column.positions) for column in taken) == come
        # A track that has more than another one waits for it.
        assert cursor.late(5) == (come < 6)
    result = ended(road, pending)
    assert [len(column.positions) for column in cursor.rest(result)] == [0]
    assert np.concatenate([c.positions for c in taken]).tolist() == list(range(NUM_POSITIONS))
    scores = torch.cat([column.values for column in taken])
    assert scores.tolist() == exact(pending, "all", range(NUM_POSITIONS))
    assert torch.equal(scores, result.scores["all"])
    if aggregate is not None:
        told = torch.cat([column.aggregates for column in taken])
        assert torch.equal(told, result.aggregates["all"])
        assert told.tolist() == pytest.approx(aggregates_of(aggregate, scores.tolist()))


def test_what_a_cursor_held_back_for_a_lost_layer_comes_at_the_end(road):
    pending = road.open(ALL)
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES[:2])
    send(road, pending, [0, 1, 3, 5], BOUNDARIES[2:])
    road.settle()
    cursor = Cursor(rows=False)
    cursor.look(pending.snapshot([5] * 4, None))
    (column,) = cursor.take()
    assert column.positions.tolist() == [0, 1]
    (rest,) = cursor.rest(ended(road, pending))
    assert rest.positions.tolist() == [3, 5]
    assert rest.values.tolist() == exact(pending, "all", [3, 5])


# What is missing


@pytest.mark.parametrize("lost", BOUNDARIES)
def test_a_position_that_lacks_a_layer_is_not_delivered_and_no_part_of_an_aggregate(lost, road):
    probe = Probe([V] * 3, layers=[0, 1, 2], name="p", aggregate="mean")
    pending = road.open(probe, Probe(V, layer=1, name="one"))
    for boundary in BOUNDARIES:
        there = [0, 2, 3, 5] if boundary == lost else range(NUM_POSITIONS)
        send(road, pending, there, [boundary])
    result = ended(road, pending)
    alone = 4 if lost == 4 else 6
    assert (result.expected, result.delivered) == (12, 4 + alone)
    assert (result.dropped, result.status) == (8 - alone, "incomplete")
    assert result.scores.positions("p").tolist() == [0, 2, 3, 5]
    scores = exact(pending, "p", [0, 2, 3, 5])
    assert result.scores["p"].tolist() == scores
    assert result.aggregates["p"].tolist() == pytest.approx(aggregates_of("mean", scores))
    assert len(result.scores["one"]) == alone
    # Once the scores are known, the counts are the same.
    later = pending.snapshot([5] * 4, "stop")
    assert (later.delivered, dict(later.scores).keys()) == (4 + alone, {"p", "one"})
    assert later.delivered == result.delivered


def test_a_layer_of_which_nothing_came_leaves_no_score(road):
    pending = road.open(ALL)
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES[:2])
    result = ended(road, pending)
    assert result.scores["all"].shape == (0,)
    assert (result.expected, result.delivered) == (6, 0)


# What a result has of them


def _full(road: Road) -> tuple[Pending, ScopeResult]:
    pending = road.open(
        ALL,
        Probe(V, layer=1, name="mean", aggregate="mean", tokens="generated"),
        Probe([V, V], layers=[0, 2], name="top", aggregate="max", threshold=150.0),
    )
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES)
    return pending, ended(road, pending)


def test_aggregates_are_of_the_probes_that_have_one(road):
    pending, result = _full(road)
    assert list(result.scores) == ["all", "mean", "top"]
    assert list(result.aggregates) == ["mean", "top"]
    assert len(result.aggregates) == 2
    assert "all" not in result.aggregates
    scores = exact(pending, "mean", [3, 4, 5])
    assert result.scores["mean"].tolist() == scores
    assert result.aggregates["mean"].tolist() == pytest.approx(aggregates_of("mean", scores))
    assert result.aggregates["mean"].dtype == torch.float32
    assert result.aggregates.positions("mean").tolist() == [3, 4, 5]
    assert repr(result.aggregates) == "Aggregates(mean: 3 values, top: 6 values)"
    words = "no probe with an aggregate of this request is called 'all'; its probes: mean, top"
    with pytest.raises(KeyError, match=words):
        result.aggregates["all"]
    nothing = road.open(ALL).snapshot([], None)
    with pytest.raises(KeyError, match="its probes: none"):
        nothing.aggregates["all"]


def test_a_column_has_the_aggregates_of_its_scores(road):
    _, result = _full(road)
    columns = {column.label: column for column in result.columns()}
    assert columns["all"].aggregates is None
    for name in ("mean", "top"):
        assert torch.equal(columns[name].values, result.scores[name])
        assert torch.equal(columns[name].aggregates, result.aggregates[name])
        assert columns[name].positions.tolist() == result.scores.positions(name).tolist()
    some = columns["top"].at(np.array([1, 4]))
    assert some.positions.tolist() == [1, 4]
    assert torch.equal(some.values, result.scores["top"][[1, 4]])
    assert torch.equal(some.aggregates, result.aggregates["top"][[1, 4]])


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_pickled_result_has_its_scores_aggregates_and_verdicts(looked_at, road):
    pending, result = _full(road)
    if looked_at:
        dict(result.scores)
    again = pickle.loads(pickle.dumps(result))
    assert repr(again) == repr(result)
    for name in result.scores:
        assert torch.equal(again.scores[name], result.scores[name])
        assert torch.equal(again.scores.positions(name), result.scores.positions(name))
    for name in result.aggregates:
        assert torch.equal(again.aggregates[name], result.aggregates[name])
    assert (again.expected, again.delivered, again.status) == (15, 15, "complete")
    scores = exact(pending, "top", range(NUM_POSITIONS))
    first = next(i for i, score in enumerate(scores) if score > 150)
    assert again.verdicts == result.verdicts == {"top": Verdict(first, scores[first])}
    twice = pickle.loads(pickle.dumps(again))
    assert torch.equal(twice.scores["top"], result.scores["top"])


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda some: pickle.loads(pickle.dumps(some))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_the_scores_alone_has_all_scores(copied, road):
    _, result = _full(road)
    again, aggregates = copied(copied(result.scores)), copied(result.aggregates)
    assert repr(again) == repr(result.scores)
    for name in result.scores:
        assert torch.equal(again[name], result.scores[name])
        assert torch.equal(again.positions(name), result.scores.positions(name))
    assert list(aggregates) == list(result.aggregates)
    for name in result.aggregates:
        assert torch.equal(aggregates[name], result.aggregates[name])


@pytest.mark.parametrize("lost", [False, True])
def test_an_operators_monitors_have_a_result_that_the_caller_cannot_change(lost, road):
    """Also if a layer lost some numbers, and the columns of its bank differ."""
    pending = road.open(
        ALL,
        Probe(V, layer=1, name="monitor/one", threshold=150.0),
        Probe([V, V], layers=[0, 2], name="monitor/top", aggregate="max", threshold=150.0),
    )
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES[:1])
    send(road, pending, range(2 * lost, NUM_POSITIONS), BOUNDARIES[1:])
    result = ended(road, pending)
    names = ("monitor/one", "monitor/top")
    whole = {name: (result.scores[name].clone(), result.num_lost(name)) for name in names}
    verdicts, aggregates = dict(result.verdicts), result.aggregates["monitor/top"].clone()
    monitored = result.monitored()
    for name in names:
        result.scores[name].mul_(-100)
        result.scores.positions(name).add_(7)
    assert list(monitored.scores) == list(names)
    for name, (scores, num_lost) in whole.items():
        assert torch.equal(monitored.scores[name], scores)
        assert monitored.num_lost(name) == num_lost == 2 * lost
    assert torch.equal(monitored.aggregates["monitor/top"], aggregates)
    assert monitored.verdicts == verdicts
    assert verdicts.keys() == set(names)
    assert monitored._parts.keys() <= set(monitored._score_table._asked.banks)


def test_a_snapshot_of_scores_stays_as_it_was_while_numbers_keep_coming(road):
    pending = road.open(ALL)
    send(road, pending, [0, 1], BOUNDARIES, number=1)
    road.settle()
    early = pending.snapshot([], None)
    send(road, pending, range(1, NUM_POSITIONS), BOUNDARIES, number=2)
    late = ended(road, pending)
    assert early.scores["all"].tolist() == exact(pending, "all", [0, 1], 1)
    assert late.scores["all"].tolist() == [
        *exact(pending, "all", [0], 1), *exact(pending, "all", range(1, NUM_POSITIONS), 2)
    ]  # fmt: skip


def test_a_thousand_probes_of_one_bank_put_its_numbers_in_order_once(road, monkeypatch):
    calls, choose = [], module.choose
    monkeypatch.setattr(module, "choose", lambda *a: calls.append(a) or choose(*a))
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(1024, SITES.hidden_size))
    pending = road.open(*(Probe(w, layer=1, name=f"{i}") for i, w in enumerate(weights)))
    (bank,) = pending.asked.banks
    assert bank.row_bytes == 4 * 1024
    # Computed twice, so that they must be put in order.
    for number in (1, 2):
        send(road, pending, range(NUM_POSITIONS), [4], number)
    result = ended(road, pending)
    assert (result.expected, result.delivered) == (6 * 1024, 6 * 1024)
    assert not calls
    for i in (0, 1, 511, 1023):
        assert result.scores[f"{i}"].tolist() == exact(pending, f"{i}", range(NUM_POSITIONS), 2)
    assert {len(values) for values in dict(result.scores).values()} == {6}
    assert len(calls) == 1


def test_probes_of_unlike_tokens_have_their_own_positions_of_one_bank(road):
    pending = road.open(
        Probe(V, layer=1, name="last", tokens="last"),
        Probe(V, layer=1, name="few", tokens=[0, 4], aggregate="mean"),
        Probe(V, layer=1, name="prompt", tokens="prompt"),
    )
    send(road, pending, range(NUM_POSITIONS), [4])
    result = ended(road, pending)
    for name, positions in (("last", [5]), ("few", [0, 4]), ("prompt", [0, 1, 2])):
        assert result.scores.positions(name).tolist() == positions
        assert result.scores[name].tolist() == exact(pending, name, positions)
    few = result.scores["few"].tolist()
    assert result.aggregates["few"].tolist() == pytest.approx([few[0], math.fsum(few) / 2])
    assert (result.expected, result.delivered) == (6, 6)


@pytest.mark.parametrize(
    ("sent", "score"),
    [
        pytest.param([3e38, 3e38, 3e38], math.inf, id="overflow"),
        pytest.param([math.inf, -math.inf, 1.0], math.nan, id="no-number"),
    ],
)
def test_a_sum_over_layers_that_is_no_finite_number_is_a_score_and_no_warning(
    road, monkeypatch, sent, score
):
    monkeypatch.setattr(
        roads, "number_of", lambda point, *_: sent[boundary_of_point(point) // 2 - 1]
    )
    pending = road.open(ALL)
    send(road, pending, range(NUM_POSITIONS), BOUNDARIES, whole=True)
    road.finish(pending)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pending.snapshot([5] * 4, "stop").scores["all"]
    np.testing.assert_array_equal(found, np.full(NUM_POSITIONS, score))
