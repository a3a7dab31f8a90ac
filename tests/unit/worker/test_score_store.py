"""The scores of a KV block are delivered again byte by byte, or not at all."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivered import labels_of
from vllm_scope.batch.labels import Labels
from vllm_scope.core.score_index import TURNS
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, boundaries_of, slots_of_row
from vllm_scope.request.heads import Bank
from vllm_scope.request.sites import boundary_of_point, point_of
from vllm_scope.transport.ring import Lease
from vllm_scope.worker import score_store
from vllm_scope.worker.drain_items import joined
from vllm_scope.worker.score_store import MOST_STEPS_KEPT, Filled, ScoreStore

WIDTHS = Widths((64,))
SIZE = 4
P, Q = b"probes", b"other probes"
SIX, ONE = Bank.of([b"six"], 6), Bank.of([b"one"], 1)
A, B = point_of(0, 1), point_of(2, 1)
#: Two slots at the boundary 0, three at 2; and one at 2.
WIDE, NARROW = Layout((), ((SIX, (A, B)), (ONE, (B,)))), Layout((), ((ONE, (B,)),))


class Token(NamedTuple):
    key: int
    position: int
    layout: Layout = WIDE


def slots_at(layout: Layout, boundary: int | None) -> list[int]:
    """Which of a token's slots one tap delivers; all of them without."""
    at, found = 0, []
    for head, points in layout.encoded:
        for point in points:
            here = boundary in (None, boundary_of_point(point))
            found += list(range(at, at + slots_of_row(head.row_bytes))) if here else []
            at += slots_of_row(head.row_bytes)
    return found


def lease_of(slots: np.ndarray) -> Lease:
    return Lease(0, len(slots), torch.from_numpy(slots), threading.Lock())


class Worker:
    """A ScoreStore, and what it must know.

    Attributes:
        last: the bytes of each token as they came last, [slots of a token, SLOT_BYTES].
        joins: how many steps come at once.
    """

    def __init__(self, *keys: int, layout: Layout = WIDE, joins: int = 1) -> None:
        self.store, self.last, self.joins = ScoreStore(WIDTHS), dict[Token, np.ndarray](), joins
        self._random = np.random.default_rng(0)
        self._waiting: list[tuple[Labels, np.ndarray]] = []
        for key in keys:
            self.store.begin(key, layout, SIZE)

    def step(self, *tokens: Token, by_tap: bool = False, lost: tuple[int | None, ...] = ()) -> None:
        """The tokens of one forward, as a whole or tap by tap, whose rows come unless lost."""
        layouts = tuple(dict.fromkeys(token.layout for token in tokens))
        taps = sorted(set[int]().union(*map(boundaries_of, layouts))) if by_tap else [None]
        data = {
            token: self._random.integers(0, 256, (len(slots_at(token.layout, None)), SLOT_BYTES))
            .astype(np.uint8)
            for token in tokens
        }  # fmt: skip
        keys, positions, _ = zip(*tokens, strict=True)
        labels = labels_of(keys, positions, [layouts.index(x.layout) for x in tokens], layouts)
        for tap in taps:
            room = max(len(slots_at(layout, tap)) for layout in layouts) if by_tap else 0
            parts = [data[token][slots_at(token.layout, tap)] for token in tokens]
            parts = [np.pad(part, ((0, max(0, room - len(part))), (0, 0))) for part in parts]
            slots = np.concatenate(parts)
            if tap not in lost:
                self._collect(labels, slots, tap)
        self.last |= data

    def _collect(self, labels: Labels, slots: np.ndarray, tap: int | None) -> None:
        if tap is None:
            if self._waiting and self._waiting[-1][0].layouts != labels.layouts:
                self.collect()
            self._waiting.append((labels, slots))
            if len(self._waiting) == self.joins:
                self.collect()
            return
        self.collect()
        self.store.collect(labels, lease_of(slots), tap, [len(labels.keys)])
        slots[:] = 0  # the ring's memory is used again

    def collect(self) -> None:
        """Let the store take the steps that wait."""
        if not self._waiting:
            return
        every, parts = zip(*self._waiting, strict=True)
        self._waiting.clear()
        slots = np.concatenate(parts)
        self.store.collect(
            joined(every), lease_of(slots), None, [len(labels.keys) for labels in every]
        )
        slots[:] = 0

    def keep(self, key: int, first: int = 0, count: int = 1, probes: bytes = P) -> list[bytes]:
        hashes = [b"%d:%d" % (key, i) for i in range(first, first + count)]
        self.collect()
        self.store.keep([Filled(key, first, hashes, probes)])
        return hashes

    def stored(self, *hashes: bytes, layout: Layout = WIDE, probes: bytes = P) -> np.ndarray | None:
        """[num_tokens, slots of a token, SLOT_BYTES]; None if some are missing."""
        num_slots = len(slots_at(layout, None))
        slots = np.full((len(hashes) * SIZE * num_slots, SLOT_BYTES), 7, np.uint8)
        if not self.store.fill(hashes, probes, lease_of(slots)):
            assert (slots == 7).all()
            return None
        return slots.reshape(-1, num_slots, SLOT_BYTES)

    def check(self, key: int, *hashes: bytes, first: int = 0, layout: Layout = WIDE) -> None:
        """These blocks have what came last of their tokens."""
        found = self.stored(*hashes, layout=layout)
        assert found is not None
        for position, slots in enumerate(found, first * SIZE):
            assert (slots == self.last[Token(key, position, layout)]).all(), position


def tokens(key: int, *positions: int, layout: Layout = WIDE) -> list[Token]:
    return [Token(key, position, layout) for position in positions]


@pytest.mark.parametrize("by_tap", [False, True], ids=["whole", "by-tap"])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([range(8)], id="at-once"),
        pytest.param([range(50)], id="many-at-once"),
        pytest.param([[p] for p in range(8)], id="one-by-one"),
        pytest.param([range(3), [3], [4], range(5, 8)], id="mixed"),
        pytest.param([range(6), range(2, 8), [7]], id="computed-again-at-once"),
        pytest.param([[p] for p in range(6)] + [range(4), [4], range(5, 8)], id="computed-again"),
        pytest.param([range(4), [4], range(5, 8), [5], [6], [7]], id="drafts-that-were-rejected"),
        pytest.param([range(8), [3]], id="one-again"),
        pytest.param([range(8), range(2, 6)], id="some-again"),
        pytest.param([range(8), range(2, 12)], id="some-again-and-more"),
        pytest.param([[0, 2, 1, 3, 4, 5, 6, 7]], id="in-another-order"),
        pytest.param([[0], range(7), [7]], id="one-then-more"),
    ],
)
@pytest.mark.parametrize("joins", [1, 3, 60])
def test_blocks_have_the_last_bytes_of_their_tokens(steps, by_tap, joins):
    worker = Worker(1, joins=joins)
    for positions in steps:
        worker.step(*tokens(1, *positions), by_tap=by_tap)
    hashes = worker.keep(1, 0, 2)
    worker.check(1, *hashes)
    worker.check(1, hashes[1], first=1)
    assert worker.store.take_missing() == []


def test_a_later_block_of_a_run_has_its_own_tokens():
    worker = Worker(1)
    worker.step(*tokens(1, *range(9)))
    worker.check(1, *worker.keep(1, 1, 1), first=1)


def test_a_run_with_a_gap_makes_the_blocks_that_it_has():
    worker = Worker(1)
    worker.step(*tokens(1, 0, 1, 2, 3, 5, 6, 7, 8))
    first, second = worker.keep(1, 0, 2)
    worker.check(1, first)
    assert worker.stored(second) is None


def test_a_block_without_all_its_tokens_is_not_kept_and_is_reported_at_once():
    """EngineCore believes that it is there: the next request would miss its scores."""
    worker = Worker(1)
    worker.step(*tokens(1, *range(6)))
    worker.step(*tokens(1, *range(7, 12)))
    first, second, third = worker.keep(1, 0, 3)
    assert worker.store.take_missing() == [(second, P)]
    worker.check(1, first)
    worker.check(1, third, first=2)
    assert worker.stored(first, second, third) is None


def test_a_block_that_lost_the_rows_of_one_tap_is_not_kept():
    worker = Worker(1)
    worker.step(*tokens(1, *range(4)), by_tap=True, lost=(2,))
    assert worker.stored(*worker.keep(1)) is None


def test_blocks_of_a_request_that_is_not_collected_are_reported():
    worker = Worker(1)
    worker.step(*tokens(2, *range(4)))
    (block,) = worker.keep(2)
    assert worker.store.take_missing() == [(block, P)]
    assert worker.stored(block) is None


def test_a_block_that_is_kept_again_without_its_tokens_is_gone():
    """Between the two the model's weights may have changed."""
    worker = Worker(1)
    worker.step(*tokens(1, *range(4)))
    (block,) = worker.keep(1)
    worker.store.end(1)
    worker.keep(1)
    assert worker.stored(block) is None


def test_what_was_looked_for_in_vain_is_reported_once():
    worker = Worker(1)
    worker.step(*tokens(1, *range(4)))
    (block,) = worker.keep(1)
    assert worker.stored(b"x", block, b"y") is None
    assert worker.store.take_missing() == [(b"x", P), (b"y", P)]
    assert worker.store.take_missing() == []


def test_scores_are_kept_for_their_probes_until_they_are_forgotten():
    worker = Worker(1)
    worker.step(*tokens(1, *range(4)))
    (block,) = worker.keep(1)
    assert worker.stored(block, probes=Q) is None
    worker.store.forget([(block, Q), (b"x", P)])
    worker.check(1, block)
    worker.store.forget([(block, P)])
    assert worker.stored(block) is None


def test_an_ended_request_leaves_nothing_to_the_next():
    worker = Worker(1, 9)
    for position in range(8):
        worker.step(Token(1, position))
    worker.store.end(1)
    worker.store.end(1)
    worker.store.begin(2, WIDE, SIZE)
    worker.step(Token(1, 7))
    for position in range(4, 7):
        worker.step(Token(2, position))
    assert worker.stored(*worker.keep(2, 0)) is worker.stored(*worker.keep(2, 1)) is None


def test_nothing_is_collected_once_all_have_ended():
    worker = Worker(1, 2)
    for key in (1, 2):
        assert worker.store
        worker.store.end(key)
    assert not worker.store
    assert not worker.store._singles


def test_many_requests_come_and_go_with_rows_of_their_own():
    """One token of each in a step, which are kept together."""
    worker = Worker(*range(20))
    for position in range(6):
        worker.step(*(Token(key, position) for key in range(20)))
    worker.store.end(7)
    for key in range(20, 60):
        worker.store.begin(key, WIDE, SIZE)
    here = [key for key in range(20) if key != 7]
    for position in (6, 7):
        worker.step(*(Token(key, position) for key in here))
    for key in here:
        worker.check(key, *worker.keep(key, 0, 2))


@pytest.mark.parametrize("joins", [1, SIZE, 100])
def test_a_long_request_takes_no_more_memory_than_a_short_one(joins):
    worker = Worker(1, joins=joins)
    for position in range(100 * SIZE):
        worker.step(Token(1, position))
        if position % SIZE == SIZE - 1:
            block = position // SIZE
            worker.check(1, *worker.keep(1, block), first=block)
    (collected,), (singles,) = worker.store._requests.values(), worker.store._singles.values()
    assert not collected.runs
    assert singles.values.shape[1] <= 4 * SIZE + TURNS + MOST_STEPS_KEPT + 2
    for first in range(100 * SIZE, 120 * SIZE, SIZE):
        worker.step(*tokens(1, *range(first, first + SIZE)))
        worker.keep(1, first // SIZE)
    assert not collected.runs


def test_single_tokens_beside_a_prompt_take_no_memory_of_their_own():
    worker = Worker(1, 2, joins=2)
    for position in range(20 * SIZE):
        worker.step(*tokens(1, position), *tokens(2, *range(2 * position, 2 * position + 2)))
    worker.collect()
    assert [len(each.runs) for each in worker.store._requests.values()] == [0, 20 * SIZE]


def test_an_unknown_request_takes_nothing_from_the_step_before():
    worker = Worker(1, joins=2)
    worker.step(Token(1, 0))
    worker.step(Token(9, 0), Token(1, 1))
    assert not worker.store._requests[1].runs


def test_tokens_of_a_request_that_has_ended_take_nothing_from_the_others():
    worker = Worker(1, 2)
    worker.step(*tokens(1, 0, 1), *tokens(2, 0))
    worker.store.end(1)
    worker.step(*tokens(1, 2, 3), *tokens(2, 1))
    worker.step(*tokens(2, 2, 3))
    worker.check(2, *worker.keep(2))


def test_each_layout_of_joined_steps_has_its_own_steps():
    worker = Worker(1, joins=2)
    worker.store.begin(2, NARROW, SIZE)
    worker.step(*tokens(1, *range(9)), *tokens(2, *range(4), layout=NARROW))
    worker.step(*tokens(1, 9), *tokens(2, 0, layout=NARROW))
    worker.check(2, *worker.keep(2), layout=NARROW)


def test_a_layout_that_nobody_collects_takes_nothing_from_the_next_one():
    worker = Worker(1)
    worker.step(Token(9, 0, NARROW), *tokens(1, *range(SIZE)))
    worker.check(1, *worker.keep(1))


def test_a_request_for_which_there_is_no_memory_takes_nothing_from_the_others(monkeypatch):
    worker = Worker(1)
    with monkeypatch.context() as patch:
        patch.setattr(score_store._Singles, "take", lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            worker.store.begin(2, NARROW, SIZE)
    worker.step(*tokens(2, *range(SIZE), layout=NARROW), *tokens(1, *range(SIZE)))
    worker.check(1, *worker.keep(1))


@st.composite
def forwards(draw: st.DrawFn) -> list[tuple[dict[int, tuple[int, int]], bool, str]]:
    """Of each: key -> how many positions it goes back and how many tokens it computes; whether it
    is drained tap by tap; what of it is lost."""
    back = st.sampled_from([0, 0, 0, 1, 2, 6])
    some = st.dictionaries(
        st.integers(0, 3), st.tuples(back, st.sampled_from([1, 1, 1, 2, 3, 9])), min_size=1
    )
    lost = st.sampled_from(["nothing"] * 8 + ["a tap", "all"])
    return draw(st.lists(st.tuples(some, st.booleans(), lost), min_size=1, max_size=30))


@given(forwards(), st.integers(0, 2), st.sampled_from([1, 2, 5, 16]))
def test_whatever_is_computed_in_whatever_order_a_block_is_right_or_missing(steps, late, joins):
    """Requests 0 to 2 are collected, and 2 has a layout of its own."""
    worker = Worker(1, 0, joins=joins)
    worker.store.begin(2, NARROW, SIZE)
    ends, named, lost_tokens = [0] * 4, [0] * 4, set[Token]()
    history: list[list[int]] = []  # of `ends`, as blocks are named `late` steps later
    for some, by_tap, lost in steps:
        computed: list[Token] = []
        for key, (back, count) in some.items():
            first = max(0, ends[key] - (back if lost == "nothing" else 0))
            ends[key] = max(ends[key], first + count)
            computed += tokens(
                key, *range(first, first + count), layout=NARROW if key == 2 else WIDE
            )
        gone = {"nothing": (), "a tap": (2,), "all": (0, 2, None)}[lost]
        worker.step(*computed, by_tap=by_tap, lost=gone)
        if None in gone or (gone and by_tap):
            lost_tokens |= set(computed)
        else:
            lost_tokens -= set(computed)
        history.append(list(ends))
        for key, end in enumerate(history[max(0, len(history) - 1 - late)]):
            count = end // SIZE - named[key]
            if count:
                _check_kept(worker, key, named[key], count, lost_tokens)
                named[key] += count


def _check_kept(worker: Worker, key: int, first: int, count: int, lost: set[Token]) -> None:
    layout = NARROW if key == 2 else WIDE
    for i, block in enumerate(worker.keep(key, first, count), first):
        here = tokens(key, *range(i * SIZE, (i + 1) * SIZE), layout=layout)
        if key == 3 or lost & set(here):
            assert worker.stored(block, layout=layout) is None
        else:
            worker.check(key, block, first=i, layout=layout)


@pytest.mark.parametrize("steps", [range(SIZE), range(SIZE - 1)], ids=["whole", "one-is-not-whole"])
def test_blocks_of_many_requests_are_kept_at_once(steps):
    """Decoding requests of two layouts, one of which had a prompt, and one that has ended."""
    worker = Worker(1, 2, 3)
    worker.store.begin(4, NARROW, SIZE)
    worker.step(*tokens(3, *range(SIZE)))
    for position in range(SIZE):
        some = [Token(key, position, WIDE) for key in (1, 2) if key == 1 or position in steps]
        worker.step(*some, Token(4, position, NARROW))
    worker.store.end(5)
    hashes = {key: b"%d:0" % key for key in (1, 2, 3, 4, 5)}
    worker.store.keep([Filled(key, 0, [one], P) for key, one in hashes.items()])
    worker.check(1, hashes[1])
    worker.check(3, hashes[3])
    worker.check(4, hashes[4], layout=NARROW)
    missing = [(hashes[5], P)]
    if len(steps) >= SIZE:
        worker.check(2, hashes[2])
    else:
        missing.append((hashes[2], P))
        assert worker.stored(hashes[2]) is None
        missing.append((hashes[2], P))
    assert sorted(worker.store.take_missing()) == sorted(missing)


def test_a_block_is_freed_without_those_that_were_kept_with_it():
    worker = Worker(1, 2)
    for position in range(SIZE):
        worker.step(*tokens(1, position), *tokens(2, position))
    worker.store.keep([Filled(key, 0, [b"%d:0" % key], P) for key in (1, 2)])
    worker.store.begin(3, WIDE, SIZE)
    worker.step(*tokens(3, *range(2 * SIZE)))
    worker.keep(3, 0, 2)
    assert len(worker.store._blocks) == 4
    assert all(block.base is None for block in worker.store._blocks.values())


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("step_tokens", [1, 4])
def test_a_block_is_whole_also_if_it_is_kept_some_steps_later(size, step_tokens):
    """The longest that the drain and EngineCore take. All but the last step have drafts that are
    accepted, and the last one writes where the block's tokens may lie."""
    store = ScoreStore(WIDTHS, step_tokens)
    store.begin(1, NARROW, size)
    num_slots = len(slots_at(NARROW, None))

    def step(first: int, count: int) -> None:
        keys, positions = [1] * count, range(first, first + count)
        labels = labels_of(keys, positions, [0] * count, (NARROW,))
        slots = np.full((count * num_slots, SLOT_BYTES), first % 256, np.uint8)
        store.collect(labels, lease_of(slots), None, [count])

    for position in range(size):
        step(position, 1)
    num_steps = TURNS + 1 + MOST_STEPS_KEPT
    for i in range(num_steps):
        step(size + i * step_tokens, step_tokens)
    step(size + num_steps * step_tokens, 1)
    store.keep([Filled(1, 0, [b"0"], P)])
    assert store.take_missing() == []


def test_a_single_token_of_another_layout_takes_no_row_of_its_ring():
    worker = Worker(1)
    worker.store.begin(2, NARROW, SIZE)
    for position in range(SIZE):
        worker.step(Token(2, position, NARROW))
    # A later stage of request 1 delivers what request 2 always does.
    worker.step(Token(1, 1, NARROW))
    (block,) = worker.keep(2)
    worker.check(2, block, layout=NARROW)


def test_a_block_that_cannot_be_kept_is_missing_and_the_others_are_kept(monkeypatch, caplog):
    worker = Worker(1, 2, 3)
    for position in range(SIZE):
        worker.step(*tokens(1, position), *tokens(3, position))
    worker.step(*tokens(2, *range(SIZE)))
    made = ScoreStore._made

    def failing(self, collected, start, count):
        if collected is self._requests[2]:
            raise MemoryError
        return made(self, collected, start, count)

    monkeypatch.setattr(ScoreStore, "_made", failing)
    worker.store.keep([Filled(key, 0, [b"%d:0" % key], P) for key in (1, 2, 3)])
    worker.check(1, b"1:0")
    worker.check(3, b"3:0")
    assert worker.store.take_missing() == [(b"2:0", P)]
    assert "could not be kept" in caplog.text
