"""The scores of a result, by probe.

Owns:  Scored (one probe's values), ScoreTable (those of all probes), Scores (how callers see it).
Runs:  in the front-end.
From:  table (the numbers of each bank), batch.readout.   To: result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints, Part, last_values
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.request.heads import Bank
from vllm_scope.request.resolved import ResolvedProbe
from vllm_scope.request.selectors import Selector

#: A bank at a point, and the tokens whose numbers are wanted.
CellKey = tuple[Bank, int, Selector]


class Scored(NamedTuple):
    """A probe's values.

    Attributes:
        scores: float32 [n], CPU.
        positions: int64 [n], ascending.
        aggregates: float32 [n]; None without an aggregate.
        verdict: None if there is none so far.
    """

    scores: Tensor
    positions: Ints
    aggregates: Tensor | None = None
    verdict: Verdict | None = None

    def copied(self) -> Scored:
        """The same in memory of its own."""
        aggregates = None if self.aggregates is None else self.aggregates.clone()
        return self._replace(scores=self.scores.clone(), aggregates=aggregates)


def cells_of(probe: ResolvedProbe) -> list[CellKey]:
    """Where the numbers of a probe are; probes of one bank have the same key."""
    return [(cell.bank.nameless, cell.place.point(), probe.tokens) for cell in probe.cells]


def summed(probe: ResolvedProbe, numbers: Sequence[Tensor]) -> Tensor:
    """float32 [n, numbers of the probe]: the sum over its cells.

    Args:
        numbers: of each cell, [n, numbers of its bank].
    """
    parts = [
        some[:, cell.first : cell.first + probe.num_values]
        for cell, some in zip(probe.cells, numbers, strict=True)
    ]
    return reduce(torch.add, parts)


class Snapshot(Protocol):
    """Where the numbers are: a ScopeResult."""

    def arrived(self, bank: Bank, point: int) -> list[Part]:
        """The parts of a bank at a point."""

    def wanted_by(self, selectors: Sequence[Selector]) -> Ints:
        """The processed positions that some selectors select."""


class ScoreTable:
    """All probes' scores in one snapshot, computed when they are asked for.

    It does not hold the snapshot, which holds it: memory is freed without the garbage collector.
    """

    def __init__(self, probes: Sequence[ResolvedProbe]) -> None:
        self.probes = {probe.name: probe for probe in probes}
        self._found: dict[str, Scored] = {}
        self._numbers: dict[CellKey, tuple[Tensor, Ints]] = {}

    def score(self, name: str, of: Snapshot) -> Scored:
        if name not in self._found:
            probe = self.probes[name]
            cells = [self._of(key, of) for key in cells_of(probe)]
            positions = cells[0][1]
            numbers = [values for values, _ in cells]
            if not all(np.array_equal(positions, other) for _, other in cells):
                # A stage's or a tap's numbers are missing.
                positions = reduce(np.intersect1d, (at for _, at in cells))
                numbers = [
                    values[torch.from_numpy(at.searchsorted(positions))] for values, at in cells
                ]
            readout = Readout(probe)
            read = readout.read(summed(probe, numbers), positions)
            self._found[name] = Scored(read.scores, positions, read.aggregates, readout.verdict)
        return self._found[name]

    def _of(self, key: CellKey, of: Snapshot) -> tuple[Tensor, Ints]:
        if key not in self._numbers:
            bank, point, selector = key
            empty = torch.empty((0, bank.row_bytes // 4))
            parts = of.arrived(bank, point)
            self._numbers[key] = last_values(parts, of.wanted_by((selector,)), empty)
        return self._numbers[key]

    def accounts(self, of: Snapshot) -> Iterator[tuple[Ints, Ints, int]]:
        """(positions that are wanted, those that arrived, number of probes)"""
        alike: dict[tuple[CellKey, ...], list[str]] = {}
        for name, probe in self.probes.items():
            alike.setdefault(tuple(cells_of(probe)), []).append(name)
        for keys, names in alike.items():
            known = self._found.get(names[0])
            arrived = self._came(keys, of) if known is None else known.positions
            yield of.wanted_by(keys[0][2:]), arrived, len(names)

    @staticmethod
    def _came(keys: Sequence[CellKey], of: Snapshot) -> Ints:
        if len(keys) == 1:
            return positions_of(of.arrived(*keys[0][:2]))
        return reduce(np.intersect1d, (positions_of(of.arrived(*key[:2])) for key in keys))

    def own(self, of: Snapshot) -> ScoreTable:
        """A copy with every score, in memory of its own."""
        found = ScoreTable(tuple(self.probes.values()))
        found._found = {name: self.score(name, of).copied() for name in self.probes}
        return found


def positions_of(parts: Sequence[Part]) -> Ints:
    """The positions that arrived, in the order of their arrival."""
    if len(parts) == 1:
        return parts[0].positions
    return np.concatenate([p.positions for p in parts]) if parts else np.zeros(0, np.int64)


class Scores(Mapping[str, Tensor]):
    """Name of the probe -> its scores: float32 [num_positions], CPU, in position order.

    Args:
        aggregates: the aggregates of these scores instead, of the probes that have one.
    """

    def __init__(self, table: ScoreTable, of: Snapshot, aggregates: bool = False) -> None:
        self._table, self._of, self._aggregates = table, of, aggregates
        self._names = [
            name for name, probe in table.probes.items() if probe.aggregate or not aggregates
        ]

    def __getitem__(self, name: str) -> Tensor:
        found = self._scored(name)
        values = found.aggregates if self._aggregates else found.scores
        assert values is not None
        return values

    def positions(self, name: str) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the scores."""
        return torch.from_numpy(self._scored(name).positions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        word = "Aggregates" if self._aggregates else "Scores"
        return f"{word}({', '.join(f'{name}: {len(self[name])} values' for name in self)})"

    def _scored(self, name: str) -> Scored:
        if name not in self._names:
            asked = ", ".join(self._names) or "none"
            what = "probe with an aggregate" if self._aggregates else "probe"
            raise KeyError(f"no {what} of this request is called {name!r}; its probes: {asked}.")
        return self._table.score(name, self._of)
