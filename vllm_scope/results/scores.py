"""The scores and features of a result.

Owns:  Scored (one probe's values), Asked (the probes and features of a spec), ScoreTable (the
       values of all probes and features), Named (base class of the mappings by name), Scores (the
       scores of probes by name).
Runs:  in the front-end.
From:  table (the numbers of each bank), batch.readout.   To: result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Chosen, Ints, Part, choose
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.batch.sparse import SparseRows, sparse_rows
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.request.heads import Bank
from vllm_scope.request.resolved import Resolved, ResolvedFeatures, ResolvedProbe
from vllm_scope.request.selectors import Selector
from vllm_scope.results.snapshot import Snapshot

T = TypeVar("T")
#: A bank (whose nets compute numbers from a row), the row's point, and the selector of the tokens
#: whose numbers are wanted.
CellKey = tuple[Bank, int, Selector]
#: (The column of each point, the positions and arrivals as a Part, the numbers as float32 [n,
#: num_columns, numbers of the bank]).
_Table = tuple[dict[int, int], Part, np.ndarray]


class Scored(NamedTuple):
    """A probe's values.

    Attributes:
        scores: float32 [n], CPU.
        positions: int64 [n], ascending.
        aggregates: float32 [n]. None if the probe has no aggregate.
        verdict: None if the probe has no verdict so far.
    """

    scores: Tensor
    positions: Ints
    aggregates: Tensor | None = None
    verdict: Verdict | None = None

    def copied(self) -> Scored:
        aggregates = None if self.aggregates is None else self.aggregates.clone()
        return self._replace(scores=self.scores.clone(), aggregates=aggregates)


def cells_of(one: ResolvedProbe | ResolvedFeatures) -> list[CellKey]:
    """The keys of the cells of a probe or of a `Features`. A cell is the probe or the `Features` at
    one layer. Cells with the same bank, point and tokens have the same key."""
    known: list[CellKey] | None = one.__dict__.get("_cell_keys")
    if known is None:  # cached in `one`, because many requests share a monitor's probe
        banks: dict[Bank, Bank] = {}
        named = ((cell.bank.nameless, cell.place.point()) for cell in one.cells)
        found = [(banks.setdefault(bank, bank), point, one.tokens) for bank, point in named]
        known = one.__dict__["_cell_keys"] = found
    return known


def summed(one: ResolvedProbe | ResolvedFeatures, numbers: Sequence[Tensor]) -> Tensor:
    """The sum over the cells of a probe or of a `Features`, float32 [n, num_values].

    Args:
        numbers: for each cell, the numbers of the cell's bank, [n, numbers of the bank].
    """
    count = one.num_values
    parts = [
        some if some.shape[1] == count else some[:, cell.first : cell.first + count]
        for cell, some in zip(one.cells, numbers, strict=True)
    ]
    return reduce(torch.add, parts)


class Asked:
    """The probes and features of a spec, in the groups that results use.

    Attributes:
        probes, features: the probes and the features of the spec, by name.
        own: the names of all probes and features that do not belong to an operator's monitors. The
            counts and the `tokens` of an answer contain only the probes and features in `own`.
        aggregated: the probes with an aggregate.
        judging: the names of the probes that can have verdicts.
        later: the probes that wait for the verdict of another probe (`after`).
    """

    def __init__(
        self, probes: Sequence[ResolvedProbe], features: Sequence[ResolvedFeatures]
    ) -> None:
        self.probes = {probe.name: probe for probe in probes}
        self.features = {one.name: one for one in features}
        self.own = frozenset(n for n in (*self.probes, *self.features) if not is_monitor(n))
        self.aggregated = {probe.name: probe for probe in probes if probe.aggregate}
        self.judging = [probe.name for probe in probes if probe.judges]
        self.later = [probe for probe in probes if probe.after is not None]

    @cached_property
    def monitors(self) -> Asked:
        """An Asked with only the probes of an operator's monitors."""
        return Asked([one for one in self.probes.values() if is_monitor(one.name)], ())

    @cached_property
    def banks(self) -> frozenset[Bank]:
        """The banks that compute the numbers for the probes and features."""
        every: Iterable[ResolvedProbe | ResolvedFeatures]
        every = chain(self.probes.values(), self.features.values())
        return frozenset(bank for one in every for bank, _, _ in cells_of(one))

    @cached_property
    def alike(self) -> list[tuple[tuple[CellKey, ...], ResolvedProbe | ResolvedFeatures, int]]:
        """The probes and features of `own`, in groups with the same cells. A group is (the cells,
        the group's first probe or `Features`, the size of the group)."""
        found: dict[tuple[CellKey, ...], list[ResolvedProbe | ResolvedFeatures]] = {}
        every: Iterable[ResolvedProbe | ResolvedFeatures]
        every = chain(self.probes.values(), self.features.values())
        for one in (each for each in every if each.name in self.own):
            found.setdefault(tuple(cells_of(one)), []).append(one)
        return [(keys, some[0], len(some)) for keys, some in found.items()]


class ScoreTable:
    """The scores of all probes and all features in one snapshot, computed at first use.

    The snapshot has a reference to the table, but the table has no reference to the snapshot.
    Without a cycle of references, Python frees the memory without the garbage collector.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._found: dict[str, Scored] = {}
        self._sparse: dict[str, tuple[SparseRows, Ints]] = {}
        self._numbers: dict[CellKey, tuple[Tensor, Ints]] = {}
        self._tables: dict[Bank, _Table | None] = {}
        #: Maps (ids of the parts' position arrays, tokens, `after`) to (the chosen values, the
        #: parts). The parts are kept because a new array could get the id of a freed array.
        self._chosen: dict[
            tuple[tuple[int, ...], Selector, str | None], tuple[Chosen, Sequence[Part]]
        ] = {}

    @staticmethod
    def of(asked: Resolved) -> ScoreTable:
        """Make an empty table for a request.

        Args:
            asked: the Resolved that all requests with the same spec share. For a thousand probes it
                takes time to make an Asked. Therefore the Asked is stored in this Resolved.
        """
        known = asked.__dict__.get("_scored")
        if known is None:
            known = asked.__dict__["_scored"] = Asked(asked.probes, asked.features)
        return ScoreTable(known)

    def monitors(self) -> tuple[ScoreTable, frozenset[Bank]]:
        """A new table with only the operator's monitors, and the banks of these monitors."""
        return ScoreTable(self._asked.monitors), self._asked.monitors.banks

    @property
    def probes(self) -> Mapping[str, ResolvedProbe]:
        return self._asked.probes

    @property
    def features(self) -> Mapping[str, ResolvedFeatures]:
        return self._asked.features

    @property
    def own_probes(self) -> list[str]:
        return [name for name in self.probes if name in self._asked.own]

    @property
    def aggregated(self) -> Mapping[str, ResolvedProbe]:
        return self._asked.aggregated

    def score(self, name: str, of: Snapshot) -> Scored:
        if name not in self._found:
            probe = self.probes[name]
            numbers, positions = self._summed(probe, of)
            readout = Readout(probe)
            read = readout.read(numbers, positions)
            self._found[name] = Scored(read.scores, positions, read.aggregates, readout.verdict)
        return self._found[name]

    def sparse(self, name: str, of: Snapshot) -> tuple[SparseRows, Ints]:
        """Returns the features of the action with this name, and the positions of the features."""
        if name not in self._sparse:
            asked = self.features[name]
            words, positions = self._summed(asked, of)
            self._sparse[name] = sparse_rows(asked, words), positions
        return self._sparse[name]

    def _summed(self, one: ResolvedProbe | ResolvedFeatures, of: Snapshot) -> tuple[Tensor, Ints]:
        together = self._together(one, of)
        if together is not None:
            return together
        cells = [self._of(key, one, of) for key in cells_of(one)]
        positions = cells[0][1]
        numbers = [values for values, _ in cells]
        if not all(at is positions or np.array_equal(positions, at) for _, at in cells):
            # Some cells lack positions, because a message of their pipeline stage or tap is
            # missing.
            positions = reduce(np.intersect1d, (at for _, at in cells))
            numbers = [values[torch.from_numpy(at.searchsorted(positions))] for values, at in cells]
        return summed(one, numbers), positions

    def _together(
        self, one: ResolvedProbe | ResolvedFeatures, of: Snapshot
    ) -> tuple[Tensor, Ints] | None:
        """The result of `_summed`, without a copy of the cells' numbers. Returns None if the
        numbers are in several tables, or if the wanted numbers are not a slice of their table. This
        method must be fast, because it runs for every request with a monitor."""
        keys = cells_of(one)
        bank = keys[0][0]
        if any(key[0] is not bank for key in keys):
            return None
        found = self._table_of(bank, of)
        if found is None:
            return None
        columns, part, numbers = found
        at = [columns.get(point) for _, point, _ in keys]
        if None in at:
            return None
        chosen = self._choose((part,), one, of)
        if not isinstance(chosen.index, slice):
            return None
        numbers, count = numbers[chosen.index], one.num_values
        if len(keys) == 1 and bank.row_bytes == 4 * count:
            return torch.from_numpy(numbers[:, at[0]]), chosen.positions
        parts = [
            numbers[:, i, cell.first : cell.first + count]
            for i, cell in zip(at, one.cells, strict=True)
        ]
        total = parts[0]
        if len(parts) > 1:
            # Add in the same order as `summed`. numpy takes a third of torch's time for few
            # numbers.
            with np.errstate(over="ignore", invalid="ignore"):
                total = parts[0] + parts[1]
                for more in parts[2:]:
                    total += more
        return torch.from_numpy(total), chosen.positions

    def _table_of(self, bank: Bank, of: Snapshot) -> _Table | None:
        """A bank's numbers. None if the numbers are not all in one table, or if this table is empty
        or its columns have different positions."""
        if bank not in self._tables:
            table = of.only_table(bank)
            found = None if table is None else table.together()
            if table is None or found is None:
                self._tables[bank] = None
            else:
                columns = {name: i for i, names in enumerate(table.names) for name in names}
                self._tables[bank] = columns, found[0], found[1].view(np.float32)
        return self._tables[bank]

    def begins(self, one: ResolvedProbe | ResolvedFeatures, of: Snapshot) -> int | None:
        """The first position that a probe may score. None while the probe waits for a verdict."""
        if isinstance(one, ResolvedFeatures) or one.after is None:
            return 0
        verdict = self.score(one.after, of).verdict
        return None if verdict is None else one.begins(verdict.position, of.num_prompt)

    def verdicts(self, of: Snapshot) -> dict[str, Verdict]:
        """The verdict of each probe, by name. Probes without a verdict are left out."""
        found = {name: self.score(name, of).verdict for name in self._asked.judging}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    def begun(self, of: Snapshot) -> dict[str, int]:
        """For each probe that has `after`, the first position at which the probe scores, by the
        name of the probe. Probes are left out if the probe that `after` names has no verdict."""
        found = {probe.name: self.begins(probe, of) for probe in self._asked.later}
        return {name: first for name, first in found.items() if first is not None}

    def _wanted(self, one: ResolvedProbe | ResolvedFeatures, of: Snapshot) -> Ints:
        wanted, first = of.wanted_by((one.tokens,)), self.begins(one, of)
        if first == 0:
            return wanted
        return wanted[:0] if first is None else wanted[wanted.searchsorted(first) :]

    def _of(
        self, key: CellKey, one: ResolvedProbe | ResolvedFeatures, of: Snapshot
    ) -> tuple[Tensor, Ints]:
        """Returns the numbers of a cell, and the positions of the numbers. All probes of the cell's
        bank begin at the same position."""
        known = self._numbers.get(key)
        if known is None:
            bank, point, _ = key
            parts = of.arrived(bank, point)
            if parts:
                chosen = self._choose(parts, one, of)
                known = chosen.of(parts), chosen.positions
            else:
                known = torch.empty((0, bank.row_bytes // 4)), np.zeros(0, np.int64)
            self._numbers[key] = known
        return known

    def _choose(
        self, parts: Sequence[Part], one: ResolvedProbe | ResolvedFeatures, of: Snapshot
    ) -> Chosen:
        """The values of some parts that a probe or a `Features` uses. Layers that are computed
        together share their position arrays, and one choice is made for all these layers."""
        key = tuple(id(part.positions) for part in parts), one.tokens, one.after
        known = self._chosen.get(key)
        if known is None:
            known = self._chosen[key] = choose(parts, self._wanted(one, of)), parts
        return known[0]

    def accounts(self, of: Snapshot) -> Iterator[tuple[Ints, Ints, int]]:
        """Yields (wanted positions, positions that arrived, number of probes or features), without
        monitors."""
        for keys, first, count in self._asked.alike:
            yield self._wanted(first, of), self._arrived(keys, first.name, of), count

    def num_lost(self, name: str, of: Snapshot) -> int:
        """The number of missing scores of a probe or of an operator's monitor: the number of wanted
        positions minus the number of scores. `score` returns no scores at other positions."""
        return len(self._wanted(self.probes[name], of)) - len(self.score(name, of).positions)

    def _arrived(self, keys: Sequence[CellKey], name: str, of: Snapshot) -> Ints:
        known, sparse = self._found.get(name), self._sparse.get(name)
        return known.positions if known else sparse[1] if sparse else self._came(keys, of)

    def _came(self, keys: Sequence[CellKey], of: Snapshot) -> Ints:
        if len({bank for bank, _, _ in keys}) == 1:
            together = self._table_of(keys[0][0], of)
            if together is not None and all(point in together[0] for _, point, _ in keys):
                return together[1].positions
        if len(keys) == 1:
            return positions_of(of.arrived(*keys[0][:2]))
        return reduce(np.intersect1d, (positions_of(of.arrived(*key[:2])) for key in keys))

    def own(self, of: Snapshot) -> ScoreTable:
        """A copy with all scores and features in new memory."""
        found = ScoreTable(self._asked)
        found._found = {name: self.score(name, of).copied() for name in self.probes}
        found._sparse = {name: self.sparse(name, of) for name in self.features}
        return found


def positions_of(parts: Sequence[Part]) -> Ints:
    """The positions of all parts, one part after another."""
    if len(parts) == 1:
        return parts[0].positions
    return np.concatenate([p.positions for p in parts]) if parts else np.zeros(0, np.int64)


class Named(Mapping[str, T]):
    """Values of a result, by the names in the request. A value is computed when it is accessed. A
    pickled mapping, or a copy of the mapping, has all values and no rows."""

    def __init__(self, names: Collection[str], table: ScoreTable, of: Snapshot) -> None:
        self._names, self._table, self._of = names, table, of

    def __getstate__(self) -> dict[str, object]:
        # The snapshot, which has the arrived numbers, is not pickled. The result of
        # `ScoreTable.own` has every value, and therefore needs no snapshot.
        names, table = list(self._names), self._table.own(self._of)
        return {**self.__dict__, "_names": names, "_table": table, "_of": None}

    def _check(self, name: str, whose: str, there: str) -> None:
        """Raise KeyError if the request has no such name."""
        if name not in self._names:
            asked = ", ".join(self._names) or "none"
            raise KeyError(f"no {whose} called {name!r}; {there}: {asked}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}: {self[name]!r}" for name in self)
        return f"{type(self).__name__}({values})"


class Scores(Named[Tensor]):
    """The scores of each probe by name, float32 [num_positions], CPU, in position order.

    Args:
        aggregates: if True, the mapping has aggregates instead of scores, and has only the probes
            with an aggregate.
    """

    def __init__(self, table: ScoreTable, of: Snapshot, aggregates: bool = False) -> None:
        super().__init__(table.aggregated if aggregates else table.probes, table, of)
        self._aggregates = aggregates

    def __getitem__(self, name: str) -> Tensor:
        found = self._scored(name)
        values = found.aggregates if self._aggregates else found.scores
        assert values is not None
        return values

    def positions(self, name: str) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the scores. A copy."""
        return torch.from_numpy(self._scored(name).positions.copy())

    def __repr__(self) -> str:
        word = "Aggregates" if self._aggregates else "Scores"
        return f"{word}({', '.join(f'{name}: {len(self[name])} values' for name in self)})"

    def _scored(self, name: str) -> Scored:
        probe = "probe with an aggregate" if self._aggregates else "probe"
        self._check(name, f"{probe} of this request is", "its probes")
        return self._table.score(name, self._of)
