"""Requests that a probe may stop, whose rows are made up, and a Watch that is shown them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tests.unit.delivered import banks_of, labels_of
from vllm_scope import Policy, Probe, Spec
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.program.layout import Layout, Widths, slots_of_row
from vllm_scope.request.resolved import ResolvedProbe
from vllm_scope.request.sites import Sites, boundary_of_point, point_of
from vllm_scope.results.scores import summed
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.watch import Judged, Watch

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
        begun: the probes with a verdict, as the worker's program knows them.
        step_tokens: as in Sites.
    """

    key: int
    probes: Sequence[Probe]
    num_prompt: int = 4
    read: frozenset[int] = frozenset()
    accepted: int = 0
    policy: Policy | None = None
    numbers: dict[tuple[Any, int], np.ndarray] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    step_tokens: int = 1

    def __post_init__(self) -> None:
        sites = replace(SITES, step_tokens=self.step_tokens)
        self.asked = Spec(probes=tuple(self.probes), policy=self.policy).resolve(sites)
        random = np.random.default_rng(self.key)
        for head, points in banks_of(self.asked):
            for point in points:
                found = random.integers(-8, 9, (LENGTH, head.row_bytes // 4)) / 4
                self.numbers[head, point] = found.astype(np.float32)

    def layout_of(self, position: int) -> Layout:
        phase = "generated" if position >= self.num_prompt else "prompt"
        names = [
            p.name for p in self.asked.probes
            if p.tokens.to_json() in ("all", phase) and (p.after is None or p.after in self.begun)
        ]  # fmt: skip
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
        """What the front-end finds at the accepted positions, for the probes that stop."""
        for one in self.asked.stopping:
            verdict = self.verdict_of(one)
            if verdict is not None:
                yield verdict, one.name

    def verdict_of(self, one: ResolvedProbe) -> Verdict | None:
        cells = [self.numbers[c.bank, c.place.point()][: self.accepted] for c in one.cells]
        first, last = {
            "all": (0, LENGTH), "prompt": (0, self.num_prompt),
            "generated": (self.num_prompt, LENGTH),
        }[one.tokens.to_json()]  # fmt: skip
        if one.after is not None:
            (stage,) = (probe for probe in self.asked.probes if probe.name == one.after)
            verdict = self.verdict_of(stage)
            if verdict is None:
                return None
            first = one.begins(verdict.position, self.num_prompt)
        readout, positions = Readout(one), np.arange(self.accepted)[first:last]
        readout.read(summed(one, [torch.from_numpy(x[first:last]) for x in cells]), positions)
        return readout.verdict

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

    def __init__(self, *requests: Request, drafts: bool = False, tell: Any = None) -> None:
        told = {} if tell is None else {"tell": tell}
        self.watch, self.leases = Watch(WIDTHS, drafts, **told), list[Lease]()
        for one in requests:
            self.watch.add_request(one.key, f"r{one.key}", one.num_prompt, one.asked)

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
        """Request -> why it is stopped."""
        return {req: one.stops for req, one in self.judged().items() if one.stops is not None}

    def judged(self) -> dict[str, Judged]:
        return self.watch.judge(self.watch.take())


def rising(*probes: Probe, scores: dict[int, dict[int, float]], **fields: Any) -> Request:
    """A request with these scores at a layer's positions; all others are 0."""
    found = Request(1, probes, **fields)
    for (_, point), numbers in found.numbers.items():
        numbers[:] = 0
        for position, score in scores.get(boundary_of_point(point) // 2 - 1, {}).items():
            numbers[position] = score
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
