"""All programs that one request can need.

Owns:  Held.
Runs:  in EngineCore and in the front-end, to compute the Cost of a request; in workers, when a
       request arrives. numpy, no torch.
From:  compiled.   To: core.admission, graph.tap.program_tables, worker.plan.

The docstring of compiled.py explains the words program, pick and column.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.compiled import Column, Compiled, as_columns
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.program.operations import Cost, Program, num_vectors
from vllm_scope.program.table_rows import TableRows

#: If the number of columns (distinct programs) times the number of actions is at most _FEW,
#: programs are built one by one. Otherwise all programs are computed together (table_rows.py).
_FEW = 16


class Held:
    """The programs that a request holds while the request runs. Requests whose Held objects are
    equal share the programs.

    Attributes:
        key: a key that is equal for equal programs.
        index_of: the index of a column's program, by the column's bytes. A column is the values of
            the spec's picks for one token (compiled.py). The values of picks that this rank does
            not use are 0.
    """

    def __init__(self, compiled: Compiled, columns: Iterable[bytes], key: Hashable) -> None:
        """
        Args:
            columns: the distinct columns of the request's tokens, which this or another process has
                computed.
            key: a key that is equal for equal specs.
        """
        self._compiled = compiled
        if len(compiled.used) < len(compiled.picks):
            columns = _masked(tuple(columns), compiled.uses)
        self.index_of = {column: i for i, column in enumerate(dict.fromkeys(columns))}
        self.key = key, tuple(self.index_of)
        self._layouts: dict[bytes, Layout] = {}
        self._rows: dict[Widths, TableRows] = {}

    @cached_property
    def _columns(self) -> NDArray[np.int32]:
        """[num_picks, num_programs]"""
        return as_columns(self.index_of)

    def __len__(self) -> int:
        return len(self.index_of)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.key == other.key

    def is_of(self, compiled: Compiled) -> bool:
        """True if these programs belong to `compiled`."""
        return self._compiled is compiled

    def find(self, columns: Iterable[Column]) -> list[int] | None:
        """The indices of the programs of these columns. None if a column has no program here."""
        try:
            return [self.index_of[column.tobytes()] for column in columns]
        except KeyError:
            return None

    @property
    def few(self) -> bool:
        """True if it is faster to build programs one by one (`programs`) than together (`rows`).
        One case is a request with few operations. The other case is a request without vectors,
        because many requests share such programs."""
        compiled = self._compiled
        return not compiled.has_vectors or len(self) * compiled.num_actions <= _FEW

    @property
    def programs(self) -> list[Program | None]:
        """The programs, built one by one. Programs without reads are not cached, because it takes
        less time to build them again."""
        columns = (np.frombuffer(column, np.int32) for column in self.index_of)
        made = self._compiled.program if self._compiled.reads else self._compiled.build
        return [made(column) for column in columns]

    def rows(self, widths: Widths) -> TableRows:
        """The programs as rows of the op table, the device table of operations. The rows are
        cached. If the worker runs in EngineCore's process, EngineCore calls this method before the
        worker does. The thread that launches the model then does not wait for the rows."""
        found = self._rows.get(widths)
        if found is None:
            found = self._rows[widths] = self._compiled.op_list.at(self._columns, widths)
        return found

    def layout(self, index: int) -> Layout:
        """The layout of the program with this index."""
        column = self._columns[:, index]
        delivers = (column[self._compiled.delivering] > 0).tobytes()
        if delivers not in self._layouts:
            self._layouts[delivers] = self._compiled.layout(column)
        return self._layouts[delivers]

    @property
    def layouts(self) -> list[Layout]:
        """The distinct layouts of the programs."""
        return list(dict.fromkeys(map(self.layout, range(len(self)))))

    @cached_property
    def _counted(self) -> tuple[int, int, dict[bytes, int]]:
        num_programs, num_ops, keys, heads = self._compiled.count(tuple(self.index_of))
        banks = self._compiled.banks
        if not banks:
            return num_programs, num_ops, dict.fromkeys(keys, 1)
        nets = (net for bank in banks if bank in heads for net in banks[bank])
        weights = {w.digest: num_vectors(w) for net in nets for w, _ in net.layers}
        return num_programs, num_ops, dict.fromkeys(keys, 1) | weights

    @property
    def num_programs(self) -> int:
        return self._counted[0]

    @property
    def num_ops(self) -> int:
        return self._counted[1]

    @property
    def vectors(self) -> dict[bytes, int]:
        """For each key, the number of vectors that the key adds to the Cost: 1 for the key of a
        vector, and the number of rows for the key of a probe's weight."""
        return self._counted[2]

    @property
    def cost(self) -> Cost:
        return Cost(sum(self.vectors.values()), self.num_programs, self.num_ops)


def _masked(columns: Sequence[bytes], uses: NDArray[np.bool_]) -> list[bytes]:
    """A copy of the columns. In the copy, the value of each pick outside `uses` is 0."""
    data = (np.frombuffer(b"".join(columns), np.int32).reshape(-1, len(uses)) * uses).tobytes()
    size = 4 * len(uses)
    return [data[at : at + size] for at in range(0, len(data), size)]
