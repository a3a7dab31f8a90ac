"""Scores, aggregates and verdicts out of a probe's numbers, at once and in parts."""

from __future__ import annotations

import math
import time
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.oracle import aggregates_of, scores_of
from vllm_scope import AttentionPool, Ema, Probe, RollingMean, Spec
from vllm_scope.batch.readout import Read, Readout, Verdict
from vllm_scope.request.nets import MAX_WINDOW
from vllm_scope.request.resolved import ResolvedProbe
from vllm_scope.request.sites import Sites

SITES = Sites(2, 4, "float32", (0, 2, 4))
NAN, INF = math.nan, math.inf


def probe(num_heads: int = 0, **fields: Any) -> ResolvedProbe:
    """A linear probe; an AttentionPool if it has heads."""
    weight: Any = np.ones(4)
    if num_heads:
        weight = AttentionPool(np.ones((num_heads, 4)), np.ones((num_heads, 4)))
    asked = Spec(probes=(Probe(weight, layer=1, name="p", **fields),)).resolve(SITES)
    return asked.probes[0]


def read(of: ResolvedProbe, numbers: Tensor, cuts: list[int] | None = None) -> Read:
    """What a Readout makes of the numbers in parts, which end at `cuts`; nothing may warn."""
    readout, found, count = Readout(of), [], len(numbers)
    edges = [0, *sorted(min(cut, count) for cut in cuts or []), count]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start, stop in pairwise(edges):
            found.append(readout.read(numbers[start:stop], np.arange(start, stop)))
    for part, start, stop in zip(found, edges[:-1], edges[1:], strict=True):
        assert (part.scores.dtype, part.scores.shape) == (torch.float32, (stop - start,))
        assert (part.aggregates is None) == (of.aggregate is None)
    if of.aggregate is None:
        return Read(torch.cat([part.scores for part in found]), None)
    return Read(*(torch.cat([part[i] for part in found]) for i in range(2)))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def equal(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, but any NaN is a NaN."""
    same = one.view(torch.int32) == other.view(torch.int32)
    return bool((same | (one.isnan() & other.isnan())).all())


AGGREGATES = ["max", "mean", Ema(0.0), Ema(0.9), RollingMean(1), RollingMean(3),
              RollingMean(3, "max"), RollingMean(40), RollingMean(40, "max")]  # fmt: skip
#: Few distinct numbers, so that sums cancel; and any numbers.
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e4, -1e4, 3e38, -3e38])
SANE = st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1.0, -1.0, 2000.0, -2000.0])


@st.composite
def cases(draw: Any, floats: st.SearchStrategy[float]) -> tuple[ResolvedProbe, Tensor, list[int]]:
    num_heads = draw(st.integers(0, 3))
    found = probe(
        num_heads,
        bias=draw(st.sampled_from([0.0, 0.1, -3.0])),
        activation=draw(st.sampled_from([None, "sigmoid"])),
        aggregate=draw(st.sampled_from([None, *AGGREGATES])),
    )
    width, count = 2 * num_heads or 1, draw(st.integers(0, 40))
    numbers = draw(st.lists(floats, min_size=width * count, max_size=width * count))
    cuts = draw(st.lists(st.integers(0, count), max_size=5))
    return found, torch.tensor(numbers, dtype=torch.float32).view(count, width), cuts


@given(cases(FLOATS))
def test_parts_change_no_bit(case):
    of, numbers, cuts = case
    whole, parts = read(of, numbers), read(of, numbers, cuts)
    assert equal(whole.scores, parts.scores)
    if of.aggregate is not None:
        assert equal(whole.aggregates, parts.aggregates)


@given(cases(SANE))
def test_scores_and_aggregates_are_those_of_a_plain_loop(case):
    of, numbers, cuts = case
    found = read(of, numbers, cuts)
    size = float(numbers.abs().max()) if numbers.numel() else 0.0
    scores = torch.tensor(scores_of(of, numbers), dtype=torch.float64)
    torch.testing.assert_close(found.scores.double(), scores, rtol=1e-6, atol=1e-6 * size + 1e-6)
    if of.aggregate is not None:
        # Of the scores as they are delivered.
        expected = aggregates_of(of.aggregate, found.scores.double().tolist())
        torch.testing.assert_close(
            found.aggregates.double(), torch.tensor(expected, dtype=torch.float64),
            rtol=1e-6, atol=1e-9 * size,
        )  # fmt: skip


@pytest.mark.parametrize("aggregate", [None, *AGGREGATES], ids=str)
@pytest.mark.parametrize("num_heads", [0, 2])
def test_long_requests_in_parts_of_one_token_are_those_in_one_part(num_heads, aggregate):
    """As they stream, and as they come at the end: 41 is no multiple of a vector's length."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2001, 2 * num_heads or 1, generator=generator) * 5
    for activation in (None, "sigmoid"):
        of = probe(num_heads, aggregate=aggregate, activation=activation)
        whole = read(of, numbers)
        for cuts in (range(2001), range(0, 2001, 41)):
            parts = read(of, numbers, list(cuts))
            assert equal(whole.scores, parts.scores)
            assert aggregate is None or equal(whole.aggregates, parts.aggregates)


@pytest.mark.parametrize("num_heads", [0, 1])
@pytest.mark.parametrize("aggregate", [None, *AGGREGATES], ids=str)
def test_nothing_of_nothing(aggregate, num_heads):
    found = read(probe(num_heads, aggregate=aggregate), torch.empty((0, 2 * num_heads or 1)))
    assert found.scores.tolist() == []
    assert aggregate is None or found.aggregates.tolist() == []


# Aggregates


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("max", [2.0, 2.0, 3.0, 3.0, 3.0]),
        ("mean", [2.0, 1.5, 2.0, 1.5, 1.6]),
        (Ema(0.5), [2.0, 1.5, 2.25, 1.125, 1.5625]),
        (Ema(0.0), [2.0, 1.0, 3.0, 0.0, 2.0]),
        (RollingMean(2), [2.0, 1.5, 2.0, 1.5, 1.0]),
        (RollingMean(2, "max"), [2.0, 1.5, 2.0, 2.0, 2.0]),
        (RollingMean(3), [2.0, 1.5, 2.0, 4 / 3, 5 / 3]),
        # Before the first full window it is the mean of all.
        (RollingMean(4, "max"), [2.0, 1.5, 2.0, 1.5, 1.5]),
        (RollingMean(9, "max"), [2.0, 1.5, 2.0, 1.5, 1.6]),
        (RollingMean(1, "max"), [2.0, 2.0, 3.0, 3.0, 3.0]),
    ],
    ids=str,
)
def test_an_aggregate_at_each_position_is_of_all_scores_up_to_there(aggregate, expected):
    found = read(probe(aggregate=aggregate), column(2, 1, 3, 0, 2)).aggregates
    assert torch.equal(found, torch.tensor(expected))
    assert aggregates_of(aggregate, [2, 1, 3, 0, 2]) == pytest.approx(expected)


def test_an_aggregate_is_of_the_scores_with_bias_and_activation():
    found = read(probe(aggregate="mean", bias=1.0, activation="sigmoid"), column(-1, -1, 99))
    assert found.scores.tolist() == [0.5, 0.5, 1.0]
    assert torch.equal(found.aggregates, torch.tensor([0.5, 0.5, 2 / 3]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("then", [None, "max"])
def test_a_score_leaves_no_trace_in_a_rolling_mean_that_has_gone_past_it(bad, then):
    numbers = column(1, bad, 2, 3, 4, 5, 6)
    for cuts in ([], [1, 2, 3, 4, 5, 6], [2, 5]):
        found = read(probe(aggregate=RollingMean(2, then)), numbers, cuts).aggregates
        if then is None:
            assert found[3:].tolist() == [2.5, 3.5, 4.5, 5.5]
            assert not found[1:3].isfinite().any() or bad == 1e30
        elif bad == -INF:
            assert found[3:].tolist() == [2.5, 3.5, 4.5, 5.5]
        else:  # the largest mean so far
            assert equal(found[2:], found[2].expand(5))


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
@pytest.mark.parametrize("numbers", [[NAN], [1, NAN, 2], [INF, -INF, 1], [-INF, -INF], [NAN, INF]])
def test_scores_that_are_not_finite_are_passed_on(numbers, aggregate):
    found = read(probe(aggregate=aggregate), column(*numbers))
    assert equal(found.scores, torch.tensor(numbers, dtype=torch.float32))
    first = next(i for i, number in enumerate(numbers) if not math.isfinite(number))
    assert found.aggregates[:first].isfinite().all()
    assert not found.aggregates[first].isfinite()


def test_the_sigmoid_of_any_number_is_from_0_to_1():
    numbers = column(-3e38, -1000, -100, 0, 100, 1000, 3e38, INF, -INF, NAN)
    found = read(probe(activation="sigmoid"), numbers).scores
    assert found[[0, 1, 3, 4, 5, 6, 7, 8]].tolist() == [0, 0, 0.5, 1, 1, 1, 1, 0]
    assert 0 < found[2] < 1e-43
    assert found[9].isnan()


def test_the_widest_window_costs_a_token_little():
    """Its sums go on from the last token."""
    readout, numbers = Readout(probe(aggregate=RollingMean(MAX_WINDOW))), torch.ones(1, 1)
    readout.read(torch.ones(MAX_WINDOW - 2000, 1), np.arange(MAX_WINDOW - 2000))
    least = min(_seconds(readout, numbers, i) for i in range(1000))
    assert least < 100e-6


def _seconds(readout: Readout, numbers: Tensor, position: int) -> float:
    started = time.perf_counter()
    readout.read(numbers, np.array([position]))
    return time.perf_counter() - started


# AttentionPool


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param([2000.0] * 5, id="all-large"),
        pytest.param([-2000.0] * 5, id="all-small"),
        pytest.param([-2000, 2000, 0, 1999, 2000], id="far-apart"),
        pytest.param([2000, -2000, 1000, -1000, 0], id="falling"),
        pytest.param([-2000, -1000, 0, 1000, 2000], id="rising"),
        pytest.param([0, 700, 0, 1400, 700], id="steps-of-700"),
        pytest.param([3e38, -3e38, 3e38, 0, 3e38], id="at-float32s-end"),
        pytest.param([255.9, 256.1, 255.9, 512.1, 511.9], id="around-multiples-of-256"),
    ],
)
def test_an_attention_pool_is_a_softmax_loop_in_float64(logits):
    values = [1.0, -2.0, 3.0, 5.0, -7.0]
    one = torch.tensor([logits, values]).T.contiguous()
    # The same, and the other way round as a second head.
    two = torch.tensor([logits, logits[::-1], values, values]).T.contiguous()
    for num_heads, numbers in ((1, one), (2, two)):
        of = probe(num_heads, bias=0.25)
        expected = torch.tensor(scores_of(of, numbers), dtype=torch.float64).float()
        for cuts in ([], [1, 2, 3, 4], [3]):
            torch.testing.assert_close(
                read(of, numbers, cuts).scores, expected, rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize(
    ("logits", "finite"),
    [
        pytest.param([0, NAN, 1, 1], [True, False, False, False], id="nan"),
        pytest.param([0, INF, 1, 1], [True, False, False, False], id="infinite"),
        pytest.param([0, -INF, 1, 1], [True, True, True, True], id="no-weight"),
        pytest.param([-INF, -INF, 1, 1], [False, False, True, True], id="no-weights-yet"),
    ],
)
def test_logits_that_are_not_finite_raise_nothing_and_reach_no_earlier_score(logits, finite):
    numbers = torch.tensor([logits, [1.0, 2.0, 3.0, 4.0]]).T.contiguous()
    for cuts in ([], [1, 2, 3]):
        found = read(probe(1), numbers, cuts).scores
        assert found.isfinite().tolist() == finite
        if finite == [False, False, True, True]:
            assert found[2:].tolist() == [3.0, 3.5]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_values_that_are_not_finite_reach_no_earlier_score(bad):
    numbers = torch.tensor([[0.0, 1.0], [0.0, bad], [0.0, 3.0]])
    found = read(probe(1, aggregate="max"), numbers)
    assert found.scores[0] == found.aggregates[0] == 1.0
    assert not found.scores[1:].isfinite().any()


def test_growing_logits_take_no_longer_than_others():
    """Each is the largest so far."""
    numbers = torch.stack([torch.arange(20_000.0) / 7, torch.ones(20_000)], dim=1)
    started = time.perf_counter()
    found = read(probe(1), numbers).scores
    assert time.perf_counter() - started < 0.1
    torch.testing.assert_close(found, torch.ones(20_000))


# Verdicts


@pytest.mark.parametrize(
    ("fields", "numbers", "verdict"),
    [
        pytest.param({}, [1, 2, 9], None, id="no-threshold"),
        pytest.param({"threshold": 3.0}, [1, 3, 2], None, id="not-above"),
        pytest.param({"threshold": 3.0}, [1, 4, 2, 9], (1, 4.0), id="the-first"),
        pytest.param({"threshold": 3.0, "bias": 2.0}, [1, 4], (1, 6.0), id="with-its-bias"),
        pytest.param({"threshold": 3.0}, [NAN, INF, 4], (1, INF), id="nan-is-not-above"),
        pytest.param(
            {"threshold": 3.0, "aggregate": "mean"}, [1, 6, 1, 9], (1, 3.5), id="of-the-aggregate"
        ),
        pytest.param(
            {"threshold": 0.5, "activation": "sigmoid"}, [0, -1, 99], (2, 1.0), id="activated"
        ),
    ],
)
def test_a_verdict_is_the_first_position_above_the_threshold(fields, numbers, verdict):
    for cuts in ([], [1, 2, 3], [2]):
        readout, edges = Readout(probe(**fields)), [0, *cuts, len(numbers)]
        for start, stop in pairwise(edges):
            readout.read(column(*numbers[start:stop]), 10 + np.arange(start, stop))
        expected = None if verdict is None else Verdict(10 + verdict[0], verdict[1])
        assert readout.verdict == expected
