"""Scores by name, and rows on both sides of an edit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from tests.unit.delivered import banks_of, labels_of, reads_at
from tests.unit.programs import all_programs
from tests.unit.roads import SITES, number_of
from vllm_scope import Add, Probe, Read, Spec
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.sites import Sites, point_of
from vllm_scope.sinks import RowBatch

V = [1.0, 2.0, 0.0, -1.0]


def test_scores_are_found_by_name_in_the_order_asked(road):
    pending = road.open(
        Probe(V, layer=1, name="late", tokens="generated"),
        Probe(V, bias=2.0, layer=0, name="early"),
        Read("resid_post", layers=[0]),
    )
    one, both = (reads_at(2, encoded=banks_of(pending.asked, *names)) for names in (["early"], ()))
    road.send([(pending.key, p, one, 0) for p in (0, 1, 2)])
    road.send([(pending.key, 3, both, 0), (pending.key, 4, both, 0)])
    road.finish(pending)
    result = pending.snapshot([5, 6, 7], "stop")
    assert list(result.scores) == ["late", "early"]
    assert len(result.scores) == 2
    at = {"late": point_of(4, 1), "early": point_of(2, 1)}
    late, early = ([number_of(at[name], 0, p, 0) for p in range(5)] for name in at)
    assert result.scores["late"].tolist() == late[3:]
    assert result.scores.positions("late").tolist() == [3, 4]
    assert result.scores["early"].tolist() == [score + 2.0 for score in early]
    assert result.scores["early"].dtype == torch.float32
    assert "late" in result.scores
    assert "never" not in result.scores
    assert dict(result.scores).keys() == {"late", "early"}
    assert (result.expected, result.delivered, result.status) == (12, 12, "complete")
    assert repr(result) == "ScopeResult(complete, 1 streams, 2 probes, 12 of 12 values)"
    assert repr(result.scores) == "Scores(late: 2 values, early: 5 values)"


def test_a_score_that_was_not_asked_for_is_a_key_error_that_names_those_that_were(road):
    pending = road.open(Probe(V, layer=1, name="a"), Probe(V, layer=1, name="b"))
    result = pending.snapshot([], None)
    with pytest.raises(KeyError, match=r"no probe of this request is called 'c'; .*: a, b\."):
        result.scores["c"]
    with pytest.raises(KeyError, match="'c'"):
        result.scores.positions("c")
    with pytest.raises(KeyError, match="this request read nothing"):
        result["embed"]
    assert result.scores["a"].tolist() == []


def test_a_missing_score_is_counted_and_reported(road):
    pending = road.open(Probe(V, layer=1, name="a"))
    road.send([(pending.key, p, Layout((), banks_of(pending.asked)), 0) for p in (0, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.expected, result.delivered, result.dropped) == (3, 2, 1)
    assert result.status == "incomplete"
    assert result.scores.positions("a").tolist() == [0, 2]


def test_rows_before_and_after_an_edit_have_keys_of_their_own(road):
    pending = road.open(
        Read("resid_post", layers=[0, 1], when="before"),
        Read("post_block", layers=[0], tokens="prompt"),
        Add(V, layer=[0, 1]),
    )
    before, after = point_of(2, 0), point_of(2, 1)
    layout = Layout((before, after, point_of(4, 0)))
    road.send([(pending.key, p, layout, 0) for p in (0, 1, 2)])
    road.send([(pending.key, 3, Layout((before, point_of(4, 0))), 0)])
    road.finish(pending)
    result = pending.snapshot([5, 6], "stop")
    assert result.keys() == [("resid_post", 0), ("resid_post", 1)]
    assert result["resid_post", 0, "before"][:, :2].tolist() == [[p, before] for p in range(4)]
    assert result["resid_post", 0, "after"][:, :2].tolist() == [[p, after] for p in range(3)]
    # The plain key is the one after, where both were read, and else the one there is.
    assert torch.equal(result["resid_post", 0], result["resid_post", 0, "after"])
    assert torch.equal(result["resid_post", 1], result["resid_post", 1, "before"])
    assert result.positions("resid_post", 0, "before").tolist() == [0, 1, 2, 3]
    assert result.positions("resid_post", 0).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="was not asked for"):
        result["resid_post", 1, "after"]
    assert (result.expected, result.delivered, result.status) == (11, 11, "complete")


def test_a_row_that_two_reads_name_is_found_by_both(road):
    """The exit of a layer and the entry of the next: no edit is between them, says the layout."""
    pending = road.open(Read("resid_post", layer=0), Read("resid_pre", layer=1, tokens=[1, 2]))
    exit_, entry = point_of(2, 1), point_of(2, 2)
    both, second = Layout((exit_,), (), ((entry, exit_),)), Layout((exit_, entry))
    road.send([(pending.key, 0, Layout((exit_,)), 0), (pending.key, 1, both, 1)])
    road.send([(pending.key, 2, second, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result["resid_post", 0][:, :2].tolist() == [[p, exit_] for p in (0, 1, 2)]
    assert result["resid_pre", 1][:, :2].tolist() == [[1, exit_], [2, entry]]
    assert (result.expected, result.delivered, result.status) == (5, 5, "complete")


def test_rows_that_no_read_to_memory_names_are_left_out(road):
    pending = road.open(Read("resid_pre", layer=1))
    exit_, entry = point_of(2, 1), point_of(2, 2)
    # A sink reads the exit: one row for both.
    layout = Layout((exit_, point_of(4, 1)), (), ((entry, exit_),))
    road.send([(pending.key, p, layout, 0) for p in (0, 1, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result["resid_pre", 1][:, :2].tolist() == [[p, exit_] for p in (0, 1, 2)]
    assert (result.expected, result.delivered, result.status) == (3, 3, "complete")


@pytest.mark.parametrize(
    ("key", "alias"),
    [
        pytest.param(("resid_post", 1), ("post_block", 1), id="post_block"),
        pytest.param(("resid_mid", 0), ("post_attn", 0), id="post_attn"),
        pytest.param(("resid_pre", 2), ("pre_attn", 2), id="pre_attn"),
        pytest.param(("resid_pre", 2), ("pre_attn", 2, "after"), id="three-words"),
        pytest.param(("embed", 0), "embed", id="the-embedding-has-no-layer"),
    ],
)
def test_a_key_may_be_an_alias(key, alias, road):
    pending = road.open("embed", *(Read(s, layers=k) for s, k in (
        ("post_block", 1), ("resid_mid", 0), ("resid_pre", 2))))  # fmt: skip
    layout = Layout((point_of(0, 1), point_of(1, 1), point_of(4, 1), point_of(4, 2)))
    road.send([(pending.key, p, layout, 0) for p in (0, 1, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert torch.equal(result[alias], result[key])
    assert len(result[alias]) == 3
    words = (alias, 0) if isinstance(alias, str) else alias
    assert result.positions(*words).tolist() == [0, 1, 2]
    assert key in result


@pytest.mark.parametrize("key", [("post_block", 1), ("resid_post", 1, "after")])
def test_a_result_contains_every_stream_that_it_returns(key, road):
    result = road.open(Read("resid_post", layer=1)).snapshot([], None)
    assert result[key].shape == (0, 4)
    assert key in result


def test_tap_by_tap_tokens_of_unlike_layouts_have_equal_room(road):
    one = road.open(
        Read("resid_post", layer=0), *(Probe(V, layer=0, name=f"{i}") for i in range(5))
    )
    two = road.open("embed", Read("resid_post", layer=0, when="before"), Add(V, layer=0))
    many = Layout((point_of(2, 1),), banks_of(one.asked))
    few = Layout((point_of(0, 1), point_of(2, 0)))
    step = [(p.key, at, many if p is one else few, at) for at in (0, 1, 2) for p in (one, two)]
    for boundary in (0, 2):
        road.send([*step, (-1, 0, (6,), 9)], boundary)
    road.finish(one)
    road.finish(two)
    result = one.snapshot([5], "stop")
    assert result["resid_post", 0].tolist() == [[p, point_of(2, 1), p, 7] for p in (0, 1, 2)]
    for i in range(5):
        numbers = [number_of(point_of(2, 1), i, p, p) for p in (0, 1, 2)]
        assert result.scores[f"{i}"].tolist() == numbers
    other = two.snapshot([5], "stop")
    assert other["embed"].tolist() == [[p, point_of(0, 1), p, 7] for p in (0, 1, 2)]
    assert other["resid_post", 0].tolist() == [[p, point_of(2, 0), p, 7] for p in (0, 1, 2)]
    assert result.status == other.status == "complete"


def test_rows_come_without_the_padding_of_their_last_slot(road):
    # bf16 rows of 5 numbers: 10 bytes of a slot of 16.
    sites = Sites(3, 5, "bfloat16", tuple(range(7)))
    spec = Spec(
        (Read("embed"), Read("resid_post", layer=0)), (Probe([1.0] * 5, layer=0, name="p"),)
    )
    pending = road.inbox.open(spec.resolve(sites), sites, [1] * 3, 4, 1)
    layout = reads_at(0, 2, encoded=banks_of(pending.asked))
    labels = labels_of([pending.key] * 3, range(3), layouts=(layout,))
    lease = road.ring.acquire(9)
    content = torch.randn(3, 3, 8).bfloat16()
    content[:, 2, :2] = torch.tensor([[1.5], [2.5], [3.5]]).view(torch.bfloat16)
    lease.slots.copy_(content.view(9, 8).view(torch.uint8))
    road.sender.send_rows(RowBatch(labels, lease, Widths((10,))))
    lease.release()
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result["embed"].dtype == torch.bfloat16
    assert torch.equal(result["embed"], content[:, 0, :5])
    assert torch.equal(result["resid_post", 0], content[:, 1, :5])
    assert result.scores["p"].tolist() == [1.5, 2.5, 3.5]


def test_a_pickled_result_has_its_scores_and_both_sides(road):
    pending = road.open(
        Read("resid_post", layer=0), Read("resid_post", layer=0, when="before"), Add(V, layer=0),
        Probe(V, layer=0, name="p"),
    )  # fmt: skip
    layout = Layout((point_of(2, 0), point_of(2, 1)), banks_of(pending.asked))
    road.send([(pending.key, p, layout, 0) for p in (0, 1, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    again = pickle.loads(pickle.dumps(result))
    assert repr(again) == repr(result)
    numbers = [number_of(point_of(2, 1), 0, p, 0) for p in (0, 1, 2)]
    assert again.scores["p"].tolist() == numbers
    assert again.scores.positions("p").tolist() == [0, 1, 2]
    for when in ("before", "after"):
        assert torch.equal(again["resid_post", 0, when], result["resid_post", 0, when])
    assert (again.expected, again.delivered, again.status) == (9, 9, "complete")


def test_a_pickled_result_holds_its_scores_and_not_the_whole_table(road):
    pending = road.open(*(Probe(V, layer=0, name=f"{i}") for i in range(8)), max_tokens=4000)
    layout = Layout((), banks_of(pending.asked))
    road.send([(pending.key, p, layout, 0) for p in (0, 1, 2)])
    road.finish(pending)
    assert len(pickle.dumps(pending.snapshot([5], "stop"))) < 10_000


def test_a_pickled_result_holds_no_programs(road):
    pending = road.open(Read("embed"), Add(V, layer=0))
    road.finish(pending)
    before = pickle.dumps(pending.snapshot([5], "stop"))
    # As the front-end does, to see whether there is room.
    ids = np.ones(3, np.int64)
    here = frozenset(SITES.boundaries)
    assert all_programs(RequestProgram.compile(pending.asked, SITES, here, 3, ids), 9)
    assert len(pickle.dumps(pending.snapshot([5], "stop"))) == len(before)


def test_an_operators_monitors_are_in_no_count_and_change_no_status(road):
    mine, other = Probe(V, layer=1, name="mine"), Probe(V, layer=1, name="monitor/alike")
    pending = road.open(other, mine, Probe(V, layer=0, name="monitor/lost"))
    banks = banks_of(pending.asked, "mine", "monitor/alike")
    road.send([(pending.key, p, Layout((), banks), 0) for p in (0, 1, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.expected, result.delivered, result.dropped) == (3, 3, 0)
    assert result.status == "complete"
    assert result.own_probes == ["mine"]
    assert len(result.scores["monitor/alike"]) == 3, "who has the engine may look"
    assert [result.num_lost(f"monitor/{name}") for name in ("alike", "lost")] == [0, 3]
    copied = pickle.loads(pickle.dumps(result))
    assert (copied.expected, copied.delivered) == (3, 3)


def test_a_lost_score_counts_beside_monitors_that_are_whole(road):
    pending = road.open(Probe(V, layer=0, name="mine"), Probe(V, layer=1, name="monitor/whole"))
    banks = banks_of(pending.asked, "monitor/whole")
    road.send([(pending.key, p, Layout((), banks), 0) for p in (0, 1, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.expected, result.delivered, result.dropped) == (3, 0, 3)
    assert result.status == "incomplete"
    assert [result.num_lost(name) for name in ("mine", "monitor/whole")] == [3, 0]


def test_with_monitors_alone_nothing_is_counted(road):
    pending = road.open(Probe(V, layer=1, name="monitor/a", threshold=-1e30))
    road.send([(pending.key, 0, Layout((), banks_of(pending.asked)), 0)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.expected, result.delivered, result.status) == (0, 0, "complete")
    assert set(result.verdicts) == {"monitor/a"}
