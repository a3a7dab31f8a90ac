"""A verdict is the one that the front-end finds in the same scores, as soon as it can be known."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivered import banks_of, labels_of
from vllm_scope import AttentionPool, Ema, Probe, RollingMean, Spec
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.program.layout import Layout, Widths, slots_of_row
from vllm_scope.request.sites import Sites, boundary_of_point, point_of
from vllm_scope.results.scores import summed
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.watch import Watch

SITES, WIDTHS = Sites(2, 4, "float32", (0, 2, 4)), Widths((16,))
#: A row that is read besides, at some positions.
READ = point_of(0, 1)
#: The number of a draft that is rejected: above every threshold.
POISON = 1e6
LENGTH = 40


def probe(name: str, threshold: float, layers: Any = 1, **fields: Any) -> Probe:
    fields = {"action": "stop", "layers": layers} | fields
    return Probe(fields.pop("weight", np.ones(4)), name=name, threshold=threshold, **fields)


@dataclass
class Request:
    """A request whose rows are made up.

    Attributes:
        read: positions whose rows are read as well, so that their layout is another one.
        numbers: (bank, point) -> what the bank makes of each position's row, [LENGTH, n].
        accepted: positions below it were computed for tokens that are accepted.
    """

    key: int
    probes: Sequence[Probe]
    num_prompt: int = 4
    read: frozenset[int] = frozenset()
    accepted: int = 0
    numbers: dict[tuple[Any, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = Spec(probes=tuple(self.probes)).resolve(SITES)
        random = np.random.default_rng(self.key)
        for head, points in banks_of(self.asked):
            for point in points:
                found = random.integers(-8, 9, (LENGTH, head.row_bytes // 4)) / 4
                self.numbers[head, point] = found.astype(np.float32)

    def layout_of(self, position: int) -> Layout:
        phase = "generated" if position >= self.num_prompt else "prompt"
        names = [p.name for p in self.asked.probes if p.tokens.to_json() in ("all", phase)]
        banks = banks_of(self.asked, *names) if names else ()
        return Layout((READ,) if position in self.read else (), banks)

    def parts_of(self, position: int, rejected: bool) -> Iterator[tuple[int, np.ndarray]]:
        """(boundary, float32 in whole slots) of one token, in the order of its layout."""
        layout = self.layout_of(position)
        for point in layout.points:
            yield boundary_of_point(point), np.full(4, np.nan, np.float32)
        for head, points in layout.encoded:
            for point in points:
                slots = np.full(4 * slots_of_row(head.row_bytes), POISON, np.float32)
                if not rejected:
                    slots[: head.row_bytes // 4] = self.numbers[head, point][position]
                yield boundary_of_point(point), slots

    def verdicts(self) -> Iterator[tuple[Verdict, str]]:
        """What the front-end finds at the accepted positions."""
        for one in self.asked.stopping:
            cells = [self.numbers[c.bank, c.place.point()][: self.accepted] for c in one.cells]
            first, last = {
                "all": (0, LENGTH), "prompt": (0, self.num_prompt),
                "generated": (self.num_prompt, LENGTH),
            }[one.tokens.to_json()]  # fmt: skip
            readout, positions = Readout(one), np.arange(self.accepted)[first:last]
            readout.read(summed(one, [torch.from_numpy(x[first:last]) for x in cells]), positions)
            if readout.verdict is not None:
                yield readout.verdict, one.name

    @property
    def reason(self) -> str | None:
        """Why it is stopped: the verdict at the first position."""
        found = min(self.verdicts(), key=lambda x: x[0].position, default=None)
        if found is None:
            return None
        (position, value), name = found
        return f"probe {name!r}: {value:.6g} at position {position}"


class Worker:
    """A Watch, and the drain that shows it rows."""

    def __init__(self, *requests: Request, drafts: bool = False) -> None:
        self.watch, self.leases = Watch(WIDTHS, drafts), list[Lease]()
        for one in requests:
            self.watch.add_request(one.key, f"r{one.key}", one.num_prompt, one.asked.stopping)

    def forward(
        self, *computed: tuple[Request, Iterable[int], int], by_tap: bool = False, lost: int = -1
    ) -> None:
        """One step: of each request its positions, and how many of the last are rejected.

        Args:
            lost: the boundary whose rows are lost.
        """
        tokens = [
            (one, position, position >= max(positions) + 1 - num_rejected)
            for one, positions, num_rejected in computed
            for position in positions
            if one.layout_of(position) != Layout()
        ]
        if not tokens:
            return
        layout_of = [one.layout_of(position) for one, position, _ in tokens]
        layouts = tuple(dict.fromkeys(layout_of))
        labels = labels_of(
            [one.key for one, *_ in tokens], [position for _, position, _ in tokens],
            [layouts.index(layout) for layout in layout_of], layouts,
        )  # fmt: skip
        for tap in (0, 2, 4) if by_tap else (None,):
            parts = [
                np.concatenate([np.zeros(0, np.float32), *(
                    part for at, part in one.parts_of(*token) if tap in (None, at)
                )])
                for one, *token in tokens
            ]  # fmt: skip
            room = max(map(len, parts)) if by_tap else 0
            if (room or not by_tap) and tap != lost:
                self.show(labels, [np.pad(x, (0, max(0, room - len(x)))) for x in parts], tap)

    def show(self, labels: Labels | None, parts: list[np.ndarray], tap: int | None = None) -> Lease:
        slots = torch.from_numpy(np.concatenate(parts)).view(torch.uint8).view(-1, 16)
        lease = Lease(0, len(slots), slots, threading.Lock())
        self.leases.append(lease)
        self.watch.add(lambda: labels, lambda: None, lease, tap)
        lease.release()  # the drain's own hold
        return lease

    def settle(self) -> None:
        """Make room in the ring; its memory is used again."""
        self.watch.settle()
        for lease in self.leases:
            assert lease.free
            lease.slots.view(torch.float32).fill_(POISON)

    def judge(self) -> dict[str, str]:
        return self.watch.judge(self.watch.take())


def rising(*probes: Probe, scores: dict[int, dict[int, float]], **fields: Any) -> Request:
    """A request with these scores at a layer's positions; all others are 0."""
    found = Request(1, probes, **fields)
    for (_, point), numbers in found.numbers.items():
        numbers[:] = 0
        for position, score in scores.get(boundary_of_point(point) // 2 - 1, {}).items():
            numbers[position] = score
    return found


def test_a_request_is_stopped_once_with_the_step_that_brought_the_verdict():
    one = rising(probe("p", 1.0), scores={1: {2: 0.5, 5: 2.0, 6: 3.0}})
    worker = Worker(one)
    for positions, found in (
        (range(4), {}), ([4], {}), ([5], {"r1": "probe 'p': 2 at position 5"}), ([6], {})
    ):  # fmt: skip
        worker.forward((one, positions, 0))
        assert worker.judge() == found
    assert not worker.watch
    assert "r1" not in worker.watch
    assert all(lease.free for lease in worker.leases)


def test_of_several_probes_the_first_position_above_is_told():
    one = rising(probe("late", 1.0), probe("early", 2.0, 0), scores={1: {3: 2.0}, 0: {1: 4.0}})
    for by_tap in (False, True):
        worker = Worker(one)
        worker.forward((one, range(4), 0), by_tap=by_tap)
        assert worker.judge() == {"r1": "probe 'early': 4 at position 1"}


def test_a_position_that_is_computed_again_counts_once():
    one = rising(probe("p", 1.5, aggregate=RollingMean(2)), scores={1: {2: 2.0, 3: 1.0, 4: 3.0}})
    worker = Worker(one)
    for positions in (range(3), range(3), [2], range(2)):
        worker.forward((one, positions, 0))
        assert worker.judge() == {}
    worker.forward((one, range(2, 4), 0))
    worker.forward((one, [4], 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 4"}


def test_a_rejected_draft_does_not_count_whatever_else_is_read_there():
    """The draft at 6 has a layout of its own; 5 is a draft of the same step."""
    one = rising(probe("p", 1.0), scores={}, read=frozenset([6]))
    worker = Worker(one, drafts=True)
    worker.forward((one, range(4), 0))
    worker.forward((one, range(4, 8), 3))
    assert worker.judge() == {}
    worker.forward((one, range(5, 9), 3))
    assert worker.judge() == {}


@pytest.mark.parametrize("tokens", ["all", "prompt"])
def test_a_prompt_is_judged_with_its_step_though_later_tokens_may_be_drafts(tokens):
    """If only the prompt is probed, no later row tells that its end was accepted."""
    one = rising(probe("p", 1.0, tokens=tokens), scores={1: {3: 2.0}})
    worker = Worker(one, drafts=True)
    worker.forward((one, range(4), 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 3"}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("steps", [[[0]], [range(4)], [range(4), range(2)]], ids=str)
def test_a_verdict_is_never_late(steps, drafts):
    """Of tokens in several layouts, and if the request is preempted before anybody looks."""
    one = rising(probe("p", 1.0), scores={1: {max(steps[0]): 2.0}}, read=frozenset([1]))
    worker = Worker(one, drafts=drafts)
    for positions in steps:
        worker.forward((one, positions, 0))
    worker.settle()
    assert worker.judge() == {"r1": f"probe 'p': 2 at position {max(steps[0])}"}


def test_a_position_that_lost_the_rows_of_one_layer_is_left_out():
    """As the front-end does."""
    asked = probe("p", 1.0, [0, 1], weight=np.ones((2, 4)), aggregate="mean")
    one = rising(asked, scores={0: {1: 9.0, 2: 1.0}, 1: {2: 2.0}})
    worker = Worker(one)
    worker.forward((one, range(2), 0), by_tap=True, lost=4)
    worker.forward((one, range(2, 4), 0), by_tap=True)
    assert worker.judge() == {"r1": "probe 'p': 3 at position 2"}


def test_labels_are_asked_for_after_the_rows_are_there():
    one, calls = rising(probe("p", 1.0), scores={}), []
    lease = Lease(0, 1, torch.zeros(1, 16, dtype=torch.uint8), threading.Lock())
    watch = Worker(one).watch
    watch.add(lambda: calls.append("labels"), lambda: calls.append("wait"), lease, None)
    assert watch.judge(watch.take()) == {}
    assert calls == ["wait", "labels"]


def test_a_request_that_has_ended_or_whose_rows_were_lost_has_no_verdict():
    one, other = (Request(key, [probe("p", -9.0)]) for key in (1, 2))
    worker = Worker(one, other)
    worker.forward((one, range(4), 0), (other, range(4), 0))
    worker.watch.finish_request(1)
    assert list(worker.judge()) == ["r2"]
    worker = Worker(one)
    worker.show(None, [np.zeros(4, np.float32)])
    assert worker.judge() == {}
    assert all(lease.free for lease in worker.leases)


def test_a_fault_in_one_step_costs_no_other_request_its_verdict(caplog):
    one = rising(probe("p", 1.0), scores={1: {3: 2.0}})
    worker = Worker(one)
    broken = worker.show(labels_of([1], [0], layouts=(Layout(), Layout((READ,)))), [np.zeros(8)])
    worker.forward((one, range(4), 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 3"}
    assert broken.free
    assert "verdicts of a step could not be made" in caplog.text


def test_rows_that_cannot_be_read_do_not_end_the_step_that_needs_room(caplog):
    """`settle` runs while the worker waits for the ring."""
    worker = Worker(rising(probe("p", 1.0), scores={}))
    lease = worker.show(labels_of([1], [0], layouts=(Layout(), Layout((READ,)))), [np.zeros(8)])
    worker.watch.settle()
    assert lease.free
    assert "verdicts of a step could not be made" in caplog.text


def test_requests_may_end_on_another_thread_while_one_is_looked_for():
    watch = Worker(*(Request(key, [probe("p", 1.0)]) for key in range(3))).watch

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            watch.finish_request(2)
            return str.__eq__(self, other)

    assert Name("r9") not in watch
    assert Name("r1") in watch


def test_what_was_read_is_not_kept():
    one = rising(probe("p", 1.0, [0, 1], weight=np.ones((2, 4))), scores={})
    worker = Worker(one)
    worker.forward((one, range(4), 0))
    for position in range(4, LENGTH):
        worker.forward((one, [position], 0))
        worker.judge()
    assert [some for some in worker.watch._watched[1].probes[0].waiting if some] == []


AGGREGATES = [None, "max", "mean", Ema(0.5), RollingMean(3), RollingMean(3, "max")]


@st.composite
def probes(draw: st.DrawFn) -> list[Probe]:
    found = []
    for i in range(draw(st.integers(1, 3))):
        pool = AttentionPool(np.ones(4), np.ones(4))
        weight, layers = draw(
            st.sampled_from([(np.ones(4), [1]), (np.ones((2, 4)), [0, 1]), (pool, [0])])
        )
        found.append(
            Probe(
                weight, layers=layers, name=f"p{i}", threshold=draw(st.integers(0, 10)) / 4,
                action=draw(st.sampled_from(["stop", "stop", "flag"])),
                aggregate=draw(st.sampled_from(AGGREGATES)),
                tokens=draw(st.sampled_from(["all", "prompt", "generated"])),
            )
        )  # fmt: skip
    return found


class Running:
    """What vLLM does with a request: `num_known` tokens, the last of which is computed next."""

    def __init__(self, request: Request) -> None:
        self.request, self.num_known, self.num_computed = request, request.num_prompt, 0

    def forward(self, count: int, num_accepted: int, drafts: bool) -> tuple[range, int]:
        """Some positions are computed. Returns them, and how many of the last are rejected."""
        first, rejected = self.num_computed, 0
        last = min(first + count, self.num_known)
        if drafts and last == self.num_known > self.request.num_prompt:
            rejected = max(0, count - num_accepted)
            self.num_known += count - rejected
            last += count
        self.num_computed = last - rejected
        if self.num_computed == self.num_known:
            self.num_known += 1
        sure = min(last, self.request.num_prompt)
        accepted = max(first, sure) if drafts else last
        self.request.accepted = max(self.request.accepted, accepted)
        return range(first, last), rejected


#: Of one request in one step: tokens to compute (0 to be preempted), drafts that are accepted.
TURNS = st.tuples(st.sampled_from([1, 1, 1, 2, 3, 5, 0]), st.integers(0, 3))


@given(
    st.lists(st.tuples(probes(), st.integers(1, 8), st.frozensets(st.integers(0, 20)))
             , min_size=1, max_size=3),
    st.lists(
        st.tuples(st.lists(TURNS, min_size=3, max_size=3), st.booleans(), st.booleans(),
                  st.booleans()),
        min_size=1, max_size=12,
    ),
    st.booleans(),
)  # fmt: skip
def test_every_request_is_stopped_as_soon_as_the_front_end_would_find_a_verdict(
    asked, steps, drafts
):
    requests = [Request(key, *one) for key, one in enumerate(asked)]
    running, worker = [Running(one) for one in requests], Worker(*requests, drafts=drafts)
    stopped: set[int] = set()
    for turns, by_tap, settles, judges in [*steps, ([(1, 0)] * 3, False, False, True)]:
        computed = []
        for one, (count, num_accepted) in zip(running, turns, strict=False):
            if not count:
                one.num_computed = min(one.num_computed, 2 * num_accepted)
            elif one.num_known < LENGTH - 10:
                computed.append((one.request, *one.forward(count, num_accepted, drafts)))
        worker.forward(*computed, by_tap=by_tap)
        if settles:
            worker.settle()
        if judges:
            here = [one for one in requests if one.key not in stopped and one.reason]
            assert worker.judge() == {f"r{one.key}": one.reason for one in here}
            stopped |= {one.key for one in here}
    assert all(lease.free for lease in worker.leases)
