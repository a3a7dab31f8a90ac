"""A stream's new values: each once, in order, as soon as they can be, at a cost of their own."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.delivered import keep
from tests.unit.oracle import aggregates_of
from tests.unit.roads import SITES
from vllm_scope import Ema, Except, Probe, Read, RollingMean, Spec, TokenIds, Union
from vllm_scope.request.sites import Place
from vllm_scope.results.budget import FULL
from vllm_scope.results.buffer import Pending, Piece
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.table import TableKey

SIZE = SITES.hidden_size
POINT = Place("resid_post", 1).point()
PROBE = Probe(np.ones(SIZE), layer=1, name="p")
#: Layers of a probe, and what comes with its scores.
LAYERS = [[1], [0, 2], [2, 0, 1]]
AGGREGATES = [None, "max", "mean", Ema(0.5), RollingMean(2), RollingMean(3, "max")]
SELECTORS = [
    "all", "prompt", "generated", "last_prompt", "last", [0, 2, 5], slice(1, None, 2),
    TokenIds(3, 7), Union("prompt", TokenIds(4)), Except("all", TokenIds(3)),
    Except("generated", "last"), Union([6], Except("generated", "last")),
]  # fmt: skip


def pending_of(*actions, prompt_ids, max_tokens=64):
    reads = tuple(a for a in actions if isinstance(a, Read))
    probes = tuple(a for a in actions if isinstance(a, Probe))
    asked = Spec(reads, probes, ()).resolve(SITES)
    return Pending(1, asked, SITES, prompt_ids, max_tokens, 1)


def deliver(pending, positions, number, rows=True, layers=None):
    """Computation `number` of some positions: a value is its position, and a bit of it.

    Args:
        layers: of the probe, whose numbers come; None for all.
    """
    at = np.array(positions, np.int64)
    labels = np.stack([at, np.full(len(at), number)])
    value = at + number / 1024
    found = []
    if rows:
        values = np.repeat(value.astype(np.float32), SIZE).view(np.uint8)
        found.append(
            Piece(TableKey(None, (POINT,)), (POINT,), values.reshape(len(at), 1, SIZE * 4))
        )
    for probe in pending.asked.probes:
        for cell in probe.cells:
            if layers is None or cell.place.layer in layers:
                point = (cell.place.point(),)
                values = value.astype(np.float32).view(np.uint8).reshape(len(at), 1, 4)
                found.append(Piece(TableKey(cell.bank.nameless, point), point, values))
    keep(pending, found, labels)


def pairs(column):
    """position -> value"""
    values = column.values if isinstance(column.label, str) else column.values[:, 0]
    assert len(values) == len(column.positions)
    return list(zip(column.positions.tolist(), values.tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num_prompt=st.integers(1, 6), num_output=st.integers(1, 8))
def test_each_value_is_returned_once_in_order_as_soon_as_all_before_it_have_arrived(
    data, num_prompt, num_output
):
    selector = data.draw(st.sampled_from(SELECTORS))
    ids = data.draw(st.lists(st.integers(0, 9), min_size=14, max_size=14))
    read = Read("resid_post", layers=[1], tokens=selector)
    layers = data.draw(st.sampled_from(LAYERS))
    probe = Probe(
        np.ones((len(layers), SIZE)), layers=layers, name="p", tokens=selector,
        aggregate=data.draw(st.sampled_from(AGGREGATES)),
    )  # fmt: skip
    pending = pending_of(read, probe, prompt_ids=ids[:num_prompt])
    output = []
    cursor, handed, times = Cursor(rows=True), {}, dict.fromkeys(range(14), 0)
    aggregates = []
    todo, number = list(range(num_prompt + num_output - 1)), 0
    if data.draw(st.booleans()):  # preempted: computed again from the start
        again = data.draw(st.integers(0, len(todo)))
        todo = todo[:again] + todo
    while todo:
        count = data.draw(st.integers(1, len(todo)))
        step, todo = todo[:count], todo[count:]
        number += 1
        for kind in data.draw(st.permutations(["rows", *layers])):
            part = data.draw(st.permutations(step)) if data.draw(st.booleans()) else step
            half = data.draw(st.integers(0, len(part)))
            for some in (part[:half], part[half:]):
                deliver(pending, some, number, kind == "rows", [kind])
                if data.draw(st.booleans()):
                    at_least = max(0, max(step) + 1 - num_prompt)
                    count = max(len(output), at_least, data.draw(st.integers(0, num_output)))
                    output += ids[num_prompt + len(output) : num_prompt + count]
                    look(cursor, pending.snapshot(output, None), handed, aggregates)
        for position in step:
            times[position] += 1
    output += ids[num_prompt + len(output) : num_prompt + num_output]
    pending.finish(0, None)
    result = pending.snapshot(output, "length")
    for column in cursor.rest(result):
        take(column, handed, aggregates)
    for column in result.columns():
        full, sent = dict(pairs(column)), handed.get(column.label, [])
        assert sorted(p for p, _ in sent) == list(full), "each position once, none too much"
        added = len(layers) if column.label == "p" else 1
        for position, value in sent:
            assert int(value / added) == position
            if times[position] == 1:
                assert value == full[position]
        in_order = aggregates == sorted(aggregates)  # not if `last` adds an earlier one at the end
        if column.aggregates is not None and max(times.values()) == 1 and in_order:
            told = zip(column.positions.tolist(), column.aggregates.tolist(), strict=True)
            assert aggregates == list(told)
            scores = column.values.double().tolist()
            expected = torch.tensor(aggregates_of(probe.aggregate, scores), dtype=torch.float32)
            torch.testing.assert_close(column.aggregates, expected, rtol=1e-6, atol=1e-6)


def take(column, handed, aggregates):
    handed.setdefault(column.label, []).extend(pairs(column))
    if column.aggregates is not None:
        aggregates += zip(column.positions.tolist(), column.aggregates.tolist(), strict=True)


def look(cursor, result, handed, aggregates):
    """One look, and what is to be handed on after it: of a probe, what all of its layers have."""
    cursor.look(result)
    for column in cursor.take():
        take(column, handed, aggregates)
    came, late = {}, []
    for source in result.sources():
        some = {p for part in result.parts_of(source) for p in part.positions.tolist()}
        label = source.label or "p"
        came[label] = came[label] & some if label in came else some
    for label, some in came.items():
        wanted = result.wanted(result.sources()[0].selectors).tolist()
        missing = next((i for i, p in enumerate(wanted) if p not in some), len(wanted))
        assert [p for p, _ in handed.get(label, [])] == wanted[:missing]
        late += wanted[missing:]
        if label == "p":
            assert cursor.settled == min([*wanted[missing:], result.num_processed])
    assert not cursor.late(min(late, default=99) - 1)
    assert cursor.late(99) == bool(late)


def test_probes_alone_are_followed_where_rows_are_not_asked_for():
    pending = pending_of(Read("resid_post", layers=[1]), PROBE, prompt_ids=[1, 2])
    cursor = Cursor(rows=False)
    deliver(pending, [0, 1], 0)
    cursor.look(pending.snapshot([5], None))
    assert [column.label for column in cursor.take()] == ["p"]
    assert cursor.settled == 2


def test_encoded_rows_are_joined_without_decoding():
    from vllm_scope.codecs.packed import packing_of

    pending = pending_of(Read("resid_post", layers=[1], codec="fp16"), prompt_ids=[1, 2])
    (read,) = pending.asked.reads
    packing = packing_of(read.encoding)
    rows = torch.arange(5.0)[:, None].expand(5, SIZE).contiguous()
    data = packing.pack(rows).numpy()
    cursor = Cursor(rows=True)
    for at, count in (([0, 1], 1), ([2], 2), ([4, 3], 4)):
        labels = np.stack([np.array(at), np.array(at)])
        piece = Piece(TableKey(read.encoding, (POINT,)), (POINT,), data[at][:, None])
        keep(pending, [piece], labels)
        cursor.look(pending.snapshot(list(range(count)), None))
    (column,) = cursor.take()
    assert column.positions.tolist() == [0, 1, 2, 3, 4]
    assert column.values.tolist() == rows.tolist()


def test_streams_of_one_table_are_followed_together(monkeypatch):
    from vllm_scope.results import cursor as module

    asked = []
    follow = module.follow
    monkeypatch.setattr(module, "follow", lambda *a: asked.append(a) or follow(*a))
    layers = [0, 1, 2]
    pending = pending_of(Read("resid_post", layers=layers), prompt_ids=[1, 2])
    points = tuple(Place("resid_post", layer).point() for layer in layers)
    cursor = Cursor(rows=True)
    for i in range(20):
        at = [0, 1] if i == 0 else [i + 1]
        values = np.repeat(np.array(at, np.float32), 3 * SIZE).view(np.uint8)
        piece = Piece(TableKey(None, points), points, values.reshape(len(at), 3, SIZE * 4))
        keep(pending, [piece], np.array([at, at]))
        cursor.look(pending.snapshot([7] * (i + 1), None))
    assert len(asked) == 20
    assert [c.positions.tolist() for c in cursor.take()] == [list(range(21))] * 3


@pytest.mark.parametrize("selector", ["all", [3, -1], TokenIds(7), Union("prompt", [40_000])])
def test_a_token_costs_the_same_after_a_long_prompt_as_after_a_short_one(selector):
    def cost(num_prompt):
        """The least seconds that a token takes: its snapshot, and what is new of it."""
        ids = [i % 100 for i in range(num_prompt)]
        probe = Probe(np.ones(SIZE), layer=1, name="p", tokens=selector)
        pending = pending_of(probe, prompt_ids=ids, max_tokens=500)
        cursor, output, least = Cursor(rows=False), [5], 1.0
        deliver(pending, range(num_prompt), 0, rows=False)
        for i in range(400):
            started = time.perf_counter()
            cursor.look(pending.snapshot(output, None))
            cursor.take()
            least = min(least, time.perf_counter() - started)
            deliver(pending, [num_prompt + i], i + 1, rows=False)
            output.append(7)
        return least

    short, long = cost(1_000), cost(32_000)
    assert long < 1.5 * short + 20e-6
    assert long < 200e-6


def test_a_stream_goes_on_after_its_rows_were_dropped():
    pending = pending_of(Read("resid_post", layers=[1]), PROBE, prompt_ids=[1, 2, 3])
    cursor, output = Cursor(rows=True), [7]
    deliver(pending, [0, 1, 2], 1)
    cursor.look(pending.snapshot(output, None))
    assert [len(column.positions) for column in cursor.take()] == [3, 3]
    deliver(pending, [3, 4], 2)  # the token at position 4 is not known yet
    output.append(8)
    cursor.look(pending.snapshot(output, None))
    assert [column.positions.tolist() for column in cursor.take()] == [[3], [3]]
    pending.lose(FULL)
    for token in (9, 10):
        output.append(token)
        cursor.look(pending.snapshot(output, None))
        assert cursor.take() == []
    pending.finish(0, None)
    result = pending.snapshot(output, "length")
    cursor.look(result)
    assert [len(column.positions) for column in (*cursor.take(), *cursor.rest(result))] == [0, 0]
    assert (result.status, result.error) == ("failed", FULL)


def test_tokens_do_not_wait_for_the_scores_of_an_operators_monitors():
    late = Probe(np.ones(SIZE), layer=2, name="monitor/late")
    pending = pending_of(PROBE, late, prompt_ids=[1, 2, 3])
    cursor = Cursor(rows=False)
    deliver(pending, [0, 1, 2], 0, rows=False, layers=[1])
    cursor.look(pending.snapshot([4], None))
    assert cursor.settled == 3
