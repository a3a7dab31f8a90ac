"""Messages of rows, shared out to threads and taken apart, layout by layout."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.delivered import banks_of
from vllm_scope import Probe, Read
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.sites import ATTENTION_SITES, Heads, Place, Sites, boundary_of_point
from vllm_scope.request.spec import Spec
from vllm_scope.results.allocator import CachingAllocator
from vllm_scope.results.budget import Asker, asking
from vllm_scope.results.copiers import PARALLEL_BYTES, copy_all, shares_of
from vllm_scope.results.inbox import UNKEPT, Inbox, inbox
from vllm_scope.results.table import SMALL_BYTES, Table
from vllm_scope.sinks import Manifest
from vllm_scope.transport.messages import FinishHeader, RowsMessage

LAYERS = range(4)
HEADS = Heads(8, 8, 64, 64)
SITES = Sites(
    len(LAYERS), 512, "float32",
    (
        *(2 * layer + 2 for layer in LAYERS),
        *sorted(Place(site, layer).boundary for site in ATTENTION_SITES for layer in LAYERS),
    ),
    HEADS,
)  # fmt: skip
WIDTHS = Widths(tuple(4 * size for size in SITES.row_sizes))
NUM_TOKENS = 4000
#: Read or scored beside what every token delivers.
SOME = [0, NUM_TOKENS // 2, NUM_TOKENS - 1]


def layouts_of(spec):
    """What most tokens deliver, and what SOME do, with reads of all tokens first."""
    asked = spec.resolve(SITES)
    every, some = (
        {s.point(read.when) for s in read.streams} for read in (*asked.reads, *asked.reads[:1])[:2]
    )
    banks = banks_of(asked)
    return asked, [Layout(tuple(sorted(every))), Layout(tuple(sorted(every | some)), banks)]


@pytest.mark.parametrize(
    "spec",
    [
        Spec((Read("q"), Read("resid_post", layers=[2], tokens=SOME))),
        Spec((Read("resid_post"),), (Probe([1.0] * 512, layer=1, name="p", tokens=SOME),)),
    ],
    ids=["a-read-of-some", "a-probe-of-some"],
)
def test_layouts_of_one_request_that_share_a_table_are_not_mixed_up(spec):
    """Each number of a token's row is the token's position, and stays so, though four
    threads copy."""
    asked, layouts = layouts_of(spec)
    layout_of = np.isin(np.arange(NUM_TOKENS), SOME).astype(np.int64)
    sizes = np.array([layout.slots(WIDTHS) for layout in layouts])[layout_of]
    numbers = np.repeat(np.arange(NUM_TOKENS, dtype=np.float32), sizes * SLOT_BYTES // 4)
    slots = torch.from_numpy(numbers.view(np.uint8).reshape(-1, SLOT_BYTES))
    assert slots.numel() > PARALLEL_BYTES
    inbox = Inbox(num_copiers=4)
    try:
        for _ in range(3):
            pending = inbox.open(asked, SITES, list(range(NUM_TOKENS)), 1, 1)
            inbox._on_rows(RowsMessage(
                np.full(NUM_TOKENS, pending.key), np.arange(NUM_TOKENS), layout_of, layouts,
                None, WIDTHS, slots,
            ))  # fmt: skip
            pending.finish(0, None)
            result = pending.snapshot([5], "length")
            assert (result.status, result.dropped) == ("complete", 0)
            for stream in result:
                rows = result[stream].flatten(1)
                assert torch.equal(rows[:, 0], result.positions(*stream).float())
            for name in result.scores:
                assert result.scores[name].tolist() == SOME
    finally:
        inbox.close()


@pytest.mark.parametrize("boundary", [None, 2])
def test_a_layout_without_tokens_is_skipped(boundary):
    """Over TCP a large message comes in pieces, each with all layouts."""
    _, layouts = layouts_of(Spec((Read("resid_post", layers=[0]), Read("resid_post", layers=[1]))))
    num_slots = layouts[0].slots(WIDTHS)
    slots = torch.arange(3 * num_slots).to(torch.uint8)[:, None].expand(-1, SLOT_BYTES).contiguous()
    ((layout, tokens, data),) = by_layout(layouts, np.zeros(3, np.int64), boundary, WIDTHS, slots)
    assert layout is layouts[0]
    assert tokens.tolist() == [0, 1, 2]
    assert np.array_equal(data, slots.numpy().reshape(3, -1))


@pytest.mark.parametrize("boundary", [None, 2])
@pytest.mark.parametrize("num_layouts", [1, 2])
def test_a_batch_without_tokens_has_no_layout_with_tokens(num_layouts, boundary):
    _, layouts = layouts_of(Spec((Read("resid_post", layers=[0]), Read("resid_post", layers=[1]))))
    none, few = np.zeros(0, np.int64), layouts[:num_layouts]
    empty = torch.zeros((0, SLOT_BYTES), dtype=torch.uint8)
    assert list(by_layout(few, none, boundary, WIDTHS, empty)) == []
    slots = torch.zeros((4, SLOT_BYTES), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"has 4 slots|cannot reshape array of size"):
        list(by_layout(few, none, boundary, WIDTHS, slots))


def test_sizes_that_do_not_add_up_to_what_came_are_refused_before_anything_is_made():
    _, layouts = layouts_of(Spec((Read("resid_post", layers=[0]), Read("resid_post", layers=[1]))))
    huge = Widths((1 << 36,))
    slots = torch.zeros((64, SLOT_BYTES), dtype=torch.uint8)
    with pytest.raises(ValueError, match="has 64 slots, but its layouts need"):
        list(by_layout(layouts, np.array([0, 1]), None, huge, slots))


def test_a_request_whose_rows_cannot_be_kept_costs_its_neighbours_nothing(monkeypatch):
    asked, layouts = layouts_of(Spec((Read("resid_post"),)))
    inbox = Inbox(num_copiers=2)
    try:
        broken, whole = (inbox.open(asked, SITES, list(range(2000)), 1, 1) for _ in range(2))
        monkeypatch.setattr(broken, "add", None)
        keys = np.repeat([broken.key, whole.key], 2000)
        slots = torch.zeros((4000 * layouts[0].slots(WIDTHS), SLOT_BYTES), dtype=torch.uint8)
        inbox._on_rows(RowsMessage(
            keys, np.tile(np.arange(2000), 2), np.zeros(4000, np.int64), layouts[:1],
            None, WIDTHS, slots,
        ))  # fmt: skip
        for pending in (broken, whole):
            pending.finish(0, None)
        assert whole.snapshot([5], "length").status == "complete"
        lost = broken.snapshot([5], "length")
        assert (lost.status, lost.error) == ("failed", UNKEPT)
    finally:
        inbox.close()


@pytest.mark.parametrize("fails", ["room", "copy", "layouts"])
def test_the_row_of_a_rejected_draft_does_not_stand_for_a_row_that_could_not_be_kept(
    fails, monkeypatch
):
    asked, layouts = layouts_of(Spec((Read("resid_post", layers=[1]),)))
    inbox = Inbox(num_copiers=1)

    def fail(*_):
        raise MemoryError

    def send(*positions):
        count = len(positions)
        slots = torch.zeros((count * layouts[0].slots(WIDTHS), SLOT_BYTES), dtype=torch.uint8)
        inbox._on_rows(RowsMessage(
            np.full(count, pending.key), np.array(positions), np.zeros(count, np.int32),
            layouts[:1], None, WIDTHS, slots,
        ))  # fmt: skip

    try:
        pending = inbox.open(asked, SITES, [1, 2], 8, 1)
        send(0, 1)
        send(2, 3)  # the token at position 3 is a draft that is rejected
        with monkeypatch.context() as broken:
            if fails == "room":
                broken.setattr(Table, "write", fail)
                send(3)
            elif fails == "layouts":
                broken.setattr("vllm_scope.results.inbox.pieces_of", fail)
                with pytest.raises(MemoryError):
                    send(3)
            else:
                broken.setattr(inbox._copiers, "run", fail)
                with pytest.raises(MemoryError):
                    send(3)
        send(4)
        pending.finish(0, None)
        result = pending.snapshot([5, 6, 7, 8], "length")
        assert (result.status, result.error, result.delivered) == ("failed", UNKEPT, 0)
    finally:
        inbox.close()


def test_a_fork_gets_its_own_rows_under_its_own_keys():
    of_parent = inbox()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = inbox()
        others = own.address.path != of_parent.address.path and own.address.pid == os.getpid()
        runs = own._receiver._thread.is_alive()
        distinct = next(own._keys) != next(of_parent._keys)
        os.write(write, bytes([others, runs, distinct]))
        own.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 3) == bytes([1, 1, 1])
    os.close(read)
    os.close(write)
    assert inbox() is of_parent
    assert os.path.exists(of_parent.address.path)


def test_results_stay_as_they_are_while_memory_is_used_again():
    """Eight rounds of two requests; of each round the caller keeps one view, or none."""
    asked, layouts = layouts_of(Spec((Read("resid_post"),)))
    allocator = CachingAllocator(256 << 20)
    inbox = Inbox(num_copiers=3, allocator=allocator)
    kept = []
    try:
        for value in range(8):
            pending = [inbox.open(asked, SITES, list(range(1000)), 1, 1) for _ in range(2)]
            for half in range(2):
                count = 500 * layouts[0].slots(WIDTHS)
                numbers = np.repeat(np.float32([value, value + 100]), 4 * count)
                inbox._on_rows(RowsMessage(
                    np.repeat([one.key for one in pending], 500),
                    np.tile(np.arange(500) + 500 * half, 2), np.zeros(1000, np.int64), layouts[:1],
                    None, WIDTHS, torch.from_numpy(numbers.view(np.uint8).reshape(-1, SLOT_BYTES)),
                ))  # fmt: skip
            for one in pending:
                one.finish(0, None)
            first, second = (one.snapshot([5], "length") for one in pending)
            assert (first.status, second.status) == ("complete", "complete")
            assert (first["resid_post", 3] == value).all()
            assert (second["resid_post", 0] == value + 100).all()
            if value % 2:
                kept.append((second["resid_post", 1][value:], value + 100))
                kept.append((first["resid_post", 2].numpy().T, value))
            del pending, one, first, second
            assert all(bool((rows == number).all()) for rows, number in kept)
        assert allocator.stats.reused > 0
        kept.clear()
        assert allocator.stats.lent == 0
    finally:
        inbox.close()


def test_rows_that_a_worker_took_back_are_not_seen_and_leave_no_hole():
    asked, layouts = layouts_of(Spec((Read("resid_post"),)))
    inbox = Inbox(num_copiers=1)
    try:
        pending = inbox.open(asked, SITES, list(range(8)), 1, 1)
        for first, whole in ((0, True), (4, False), (4, True)):
            slots = torch.full((4 * layouts[0].slots(WIDTHS), SLOT_BYTES), first + whole)
            inbox._on_rows(RowsMessage(
                np.full(4, pending.key), np.arange(first, first + 4), np.zeros(4, np.int64),
                layouts[:1], None, WIDTHS, slots.to(torch.uint8), lambda whole=whole: whole,
            ))  # fmt: skip
        rows = pending.snapshot([5], None)["resid_post", 1].view(torch.uint8)
        assert rows[:, 0].tolist() == [1] * 4 + [5] * 4
    finally:
        inbox.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6), st.integers(1, 5))
def test_copies_are_shared_out_evenly_and_each_part_once(shapes, count):
    copies, first = [], 0
    for shape in shapes:
        source = np.arange(first, first + math.prod(shape)).reshape(shape)
        copies.append((np.zeros_like(source), source))
        first += source.size
    total = sum(to.nbytes for to, _ in copies)
    shares = shares_of(copies, count, total)
    assert len(shares) <= count
    sizes = [sum(to.nbytes for to, _ in share) for share in shares]
    assert sum(sizes) == total
    # A cut is between tokens, which have at most five numbers here.
    assert max(sizes) <= -(-total // count) + 5 * 8
    for share in shares:
        copy_all(share)
    assert all(np.array_equal(to, source) for to, source in copies)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
@example([7, 3, 5, 9])
@example([1, 2, 3] * 4)
@example([1, 1, 2, 1])
def test_every_place_of_a_key_is_found_in_order(keys):
    keys = np.asarray(keys)
    found = list(by_key(keys))
    assert [key for key, _ in found] == sorted(set(keys.tolist()))
    for key, some in found:
        at = np.flatnonzero(keys == key)
        assert np.array_equal(np.arange(len(keys))[some], at)
        assert isinstance(some, slice) == (len(set(np.diff(at).tolist())) < 2)


@pytest.fixture(params=[0, SMALL_BYTES], ids=["copied-later", "copied-at-once"])
def copied(request, monkeypatch: pytest.MonkeyPatch):
    """Tables copy small values at once, or not."""
    monkeypatch.setattr("vllm_scope.results.table.SMALL_BYTES", request.param)


@pytest.mark.usefixtures("copied")
def test_a_column_that_lost_a_message_leaves_the_others_at_their_places():
    table = Table({3: (3,), 8: (8,)}, 4, torch.float32)

    def labels(*positions):
        return np.array([positions, [100 + p for p in positions]])

    def values(*numbers):
        return np.array(numbers, np.float32)[..., None].view(np.uint8)

    def commit():
        copy_all(table.copies())
        table.commit()

    table.write(labels(0, 1), values([0, 10], [1, 11]), 0)
    commit()
    before = table.freeze().parts()
    assert before[3].positions is before[8].positions
    table.write_one(8, labels(2), values(12), 0)
    commit()
    table.write(labels(3), values([3, 13]), 0)
    commit()
    table.write(labels(9), values([9, 19]), 0)
    table.revert()
    table.write(labels(4), values([4, 14]), 0)  # not committed: nobody sees it
    for snapshot, positions in (
        (before, [[0, 1]] * 2),
        (table.freeze().parts(), [[0, 1, 3], [0, 1, 2, 3]]),
    ):
        for column, at, first in zip((3, 8), positions, (0, 10), strict=True):
            part = snapshot[column]
            assert part.positions.tolist() == at
            assert part.arrivals.tolist() == [100 + p for p in at]
            assert part.rows[:, 0].tolist() == [first + p for p in at]


@pytest.mark.usefixtures("copied")
def test_columns_that_came_tap_by_tap_share_their_labels_while_they_are_the_same():
    table = Table({3: (3,), 8: (8,)}, 4, torch.float32)

    def add(column, arrivals, *positions):
        labels = np.array([positions, [arrivals + p for p in positions]])
        values = np.array([column * 100 + p for p in positions], np.float32)
        table.write_one(column, labels, values[:, None].view(np.uint8), 0)
        copy_all(table.copies())
        table.commit()

    def seen():
        parts = table.freeze().parts()
        for column, part in parts.items():
            assert part.rows[:, 0].tolist() == [column * 100 + p for p in part.positions]
        shared = parts[3].positions is parts[8].positions
        return shared, [parts[column].positions.tolist() for column in (3, 8)]

    add(3, 0, 0, 1)
    assert seen() == (False, [[0, 1], []])
    add(8, 0, 0, 1)
    before = table.freeze().parts()
    assert seen() == (True, [[0, 1], [0, 1]])
    add(3, 0, 2)
    assert seen() == (False, [[0, 1, 2], [0, 1]])
    add(8, 0, 2)
    whole = np.array([[300, 800]], np.float32)[..., None] + 3
    table.write(np.array([[3], [3]]), whole.view(np.uint8), 0)
    copy_all(table.copies())
    table.commit()
    assert seen() == (True, [[0, 1, 2, 3]] * 2)
    add(3, 10, 4)
    add(8, 20, 4)  # it came with another step
    assert seen() == (False, [[0, 1, 2, 3, 4]] * 2)
    assert [part.positions.tolist() for part in before.values()] == [[0, 1]] * 2


def test_the_taps_of_one_step_have_the_same_numbers_and_those_of_a_later_one_larger_numbers():
    inbox, widths = Inbox(num_copiers=0), Widths((16,))
    asked = Spec((Read("resid_post", layers=[0, 1]),)).resolve(SITES)
    pending = inbox.open(asked, SITES, [1, 2], 4, 1)
    points = tuple(sorted(s.point("after") for s in asked.reads[0].streams))
    taps = [boundary_of_point(point) for point in points]
    numbers = []
    # A step; the same tokens again; then only the last tap of one that lost the first.
    for boundary in (*taps, *taps, taps[1]):
        inbox._on_rows(
            RowsMessage(
                np.full(2, pending.key), np.arange(2), np.zeros(2, np.int32), [Layout(points)],
                boundary, widths, torch.zeros((2, SLOT_BYTES), dtype=torch.uint8),
            )
        )  # fmt: skip
        parts = pending.snapshot([3], None).arrived_of(None)
        numbers.append(parts[points[taps.index(boundary)]][0].arrivals[-2:].tolist())
    assert numbers[0] == numbers[1] < numbers[2] == numbers[3] < numbers[4]
    inbox.close()


class _Growing(Table):
    """Another thread appends, and the table grows, between two looks at it."""

    between = None

    @property
    def _labels(self):
        if self.between:
            append, self.between = self.between, None
            append()
        return self.__dict__["labels"]

    @_labels.setter
    def _labels(self, labels):
        self.__dict__["labels"] = labels


def test_a_snapshot_while_rows_arrive_has_a_row_for_each_position():
    table = _Growing({1: (1,)}, 4, torch.float32)

    def append(first, count):
        positions = np.arange(first, first + count)
        labels, values = np.stack([positions, positions]), np.zeros((count, 1, 4), np.uint8)
        table.write(labels, values, 0)
        copy_all(table.copies())
        table.commit()

    append(0, 64)
    table.between = lambda: append(64, 1)
    (part,) = table.freeze().parts().values()
    assert table.between is None
    assert len(part.positions) == len(part.rows) == len(part.arrivals) == 64


FAILED = Manifest(
    "error", "sink 'files' failed: FileError: /srv/secret/x cannot be written", 4, 0, 4
)
KEPT = Manifest(
    "partial", "1 of 4 rows did not come", 4, 3, 1, ["x.safetensors"], {"embed.0": {}},
    [{"root": "/srv/secret", "paths": ["/srv/secret/x.safetensors"]}],
)  # fmt: skip


@pytest.mark.parametrize(
    ("asker", "whole"),
    [
        pytest.param(None, True, id="offline"),
        pytest.param(Asker("key", operator=False), False, id="a-key"),
        pytest.param(Asker("key", operator=True), True, id="the-operator"),
    ],
)
def test_only_the_operator_sees_paths_and_error_texts_of_sinks(asker, whole):
    inbox = Inbox(num_copiers=0)
    token = None if asker is None else asking.set(asker)
    try:
        pending = inbox.open(Spec((Read("q", to="files"),)).resolve(SITES), SITES, [1], 1, 1)
    finally:
        if token is not None:
            asking.reset(token)
    try:
        manifests = {"files": FAILED, "more": KEPT}
        inbox._on_finish(FinishHeader(pending.key, 0, None, manifests))
        result = pending.snapshot([2], "length")
        assert result.status == "failed"
        if whole:
            assert result.manifests == manifests
            assert result.error == FAILED.reason
            return
        assert "secret" not in repr((result.manifests, result.error))
        assert result.error == "sink 'files' failed; the server's log says why"
        assert result.manifests["files"].dropped == 4
        assert result.manifests["more"].reason == KEPT.reason
        assert result.manifests["more"].files == ["x.safetensors"]
    finally:
        inbox.close()
