"""The arriving rows of one request.

Owns:  Pending, Piece (values of one message).
Runs:  in the front-end. The receiver's thread writes the values. Any thread may read the values.
From:  inbox.   To: result (snapshots).

Promise: the values in a snapshot never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from vllm_scope.batch.by_position import Transcript
from vllm_scope.control.policy import Decided
from vllm_scope.program.compiler import points_of
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.heads import Bank, Head
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.results.allocator import PLAIN, CachingAllocator
from vllm_scope.results.budget import FULL, Share
from vllm_scope.results.copiers import Copy
from vllm_scope.results.result import ScopeResult, Status
from vllm_scope.results.snapshot import What
from vllm_scope.results.streams import dtype_of
from vllm_scope.results.table import ArrivedParts, Table, TableKey
from vllm_scope.sinks import Manifest
from vllm_scope.sinks.metrics import count_decision

#: Largest number of positions that a new table has room for, if not all selectors are uniform.
FIRST_ROOM = 64
#: The same number for a request whose selectors are all uniform (Selector.uniform).
MOST_ROOM = 4096

LATE = (
    "this process did not read its rows for deliver_timeout_s, and the worker dropped the rows; "
    "send the request again, and find out what blocked this process"
)


class Piece(NamedTuple):
    """Values of one kind (snapshot.What), from tokens with the same layout.

    Attributes:
        key: the key of the table that gets the values.
        columns: the columns in `values`. If the message has the values of one tap only, these are
            fewer columns than `key` has.
        values: uint8 [num_tokens, num_columns, bytes of a value], in memory that the worker reuses.
    """

    key: TableKey
    columns: tuple[int, ...]
    values: np.ndarray


def pieces_of(layout: Layout, local: Layout, data: np.ndarray, widths: Widths) -> list[Piece]:
    """The data of some tokens, divided into Pieces.

    Args:
        layout: the whole layout of the tokens.
        local: the part of the layout whose values are in `data`.
        data: uint8 [num_tokens, bytes of a token].
        widths: number of bytes of a raw row, for each kind of site.
    """

    def piece(key: TableKey, columns: tuple[int, ...], first: int, size: int, used: int) -> Piece:
        values = data[:, first : first + len(columns) * size]
        return Piece(key, columns, values.reshape(len(data), len(columns), size)[:, :, :used])

    found = []
    for kind, points, first, num_slots in local.rows_at(widths):
        whole = points if local is layout else layout.points_of(kind)
        key = TableKey(None, whole, layout.also)
        size, start = num_slots * SLOT_BYTES, first * SLOT_BYTES
        found.append(piece(key, points, start, size, widths.row_bytes[kind]))
    if local.encoded:
        keys = _keys_of(layout)
        for key, some in groupby(local.encoded_at(widths), lambda one: keys[one[0]]):
            each = list(some)
            head, _, first, num_slots = each[0]
            points = tuple(point for _, here, _, _ in each for point in here)
            size, start = num_slots * SLOT_BYTES, first * SLOT_BYTES
            used = head.row_bytes if isinstance(head, Bank) else size
            found.append(piece(key, points, start, size, used))
    return found


@lru_cache(maxsize=1024)
def _keys_of(layout: Layout) -> dict[Head, TableKey]:
    """Maps a head to the key of the table for the head's values. Neighbouring banks that differ
    only in their digests share one table. For example, the banks of a probe over several layers
    share one table."""
    found: dict[Head, TableKey] = {}
    for what, some in groupby(layout.encoded, lambda pair: _what(pair[0])):
        pairs = list(some)
        key = TableKey(what, tuple(p for _, points in pairs for p in points), layout.also)
        found |= {head: key for head, _ in pairs}
    return found


def _what(head: Head) -> Head:
    return head.nameless if isinstance(head, Bank) else head


class Pending:
    """The arriving rows and scores of one request.

    Args:
        asked: the reads, probes and features whose values go to the sink `memory`.
        share: the request's part of the budget. None offline.
        allocator: makes the memory for the rows.

    Attributes:
        key: the request's key, unique among all front-ends.
        manifests: the request's manifest at each sink, by the sink's name.
        decisions: the decisions of the request's policy.
        done: a future that is done when every pipeline stage has sent its last row or an error, or
            when no further message will come.
        num_came: a counter that grows when values arrive or are lost, or a decision arrives.
    """

    def __init__(
        self,
        key: int,
        asked: Resolved,
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
        share: Share | None = None,
        allocator: CachingAllocator = PLAIN,
    ) -> None:
        self.key = key
        self._share, self._allocator = share, allocator
        self.done: Future[None] = Future()
        self.num_came = 0
        self.error: str | None = None
        self.manifests: dict[str, Manifest] = {}
        self.decisions: list[Decided] = []
        self._reading = bool(asked.delivering)
        self.asked, self.sites = asked, sites
        self.prompt_ids = prompt_ids
        self._stages_left = set(range(num_stages))
        self._tables: dict[TableKey, Table] = {}
        #: Tables with values that were added and are not committed yet.
        self._added: list[Table] = []
        everything = all(selector.uniform for selector in asked.read_selectors)
        expected = len(prompt_ids) + max_tokens - 1
        self._room = min(expected, MOST_ROOM if everything else FIRST_ROOM)

    def add(self, pieces: Sequence[Piece], labels: np.ndarray, some: slice | np.ndarray) -> None:
        """Make room for values from tokens with the same layout.

        Args:
            labels: int64 [2, num_tokens]: positions, and arrival numbers. Of two rows of one
                position, the row that was computed later has the larger arrival number.
            some: the indices of this request's tokens.
        """
        if not self._reading:
            return  # all rows of this request go to other sinks, or were lost
        own, coming = labels[:, some], 0
        mine: list[tuple[Table, tuple[int, ...], np.ndarray]] = []
        for key, columns, values in pieces:
            table = self._table(key, values.shape[2])
            here = values[some]
            if len(table.columns) < len(key.columns):
                # The table lacks the columns whose values go only to other sinks.
                at = [i for i, column in enumerate(columns) if column in table.columns]
                if not at:
                    continue
                columns, here = tuple(columns[i] for i in at), here[:, at]
            mine.append((table, columns, here))
            coming += here.nbytes + own.nbytes
        if self._share is not None and not self._share.add(coming):
            self.lose(FULL)
            return
        for table, columns, here in mine:
            self._added.append(table)
            if columns == table.columns:
                table.write(own, here, self._room)
            else:
                for i, column in enumerate(columns):
                    table.write_one(column, own, here[:, i], self._room)

    def copies(self) -> list[Copy]:
        """The copies that must be done before `commit`."""
        # In the usual case, values were added to one table only. This case must be fast, because a
        # message can have values of many requests.
        if len(self._added) == 1:
            return self._added[0].copies()
        return [copy for table in dict.fromkeys(self._added) for copy in table.copies()]

    def commit(self) -> None:
        """Let snapshots see the values that were added and copied."""
        for table in self._added:
            table.commit()
        self._added.clear()
        self.num_came += 1  # last, because a thread that sees the new number must find the values

    def revert(self) -> None:
        """Forget the values that were added and not committed."""
        for table in self._added:
            table.revert()
        self._added.clear()

    def _table(self, key: TableKey, value_bytes: int) -> Table:
        """The table of a key. The table has only the requested columns, which may be none."""
        table = self._tables.get(key)
        if table is None:
            dtype = torch.float32 if isinstance(key.what, Bank) else torch.uint8
            dtype = dtype_of(self.sites) if key.what is None else dtype
            # `names` maps each column to its requested points. With many layers, this mapping takes
            # time to compute. Therefore it is stored in `asked`, which many requests share.
            known: dict[TableKey, dict[int, tuple[int, ...]]]
            known = self.asked.__dict__.setdefault("_table_names", {})
            names = known.get(key)
            if names is None:
                names = known[key] = key.names(self._wanted(key.what))
            table = self._tables[key] = Table(names, value_bytes, dtype, self._allocator)
        return table

    def _wanted(self, what: What) -> set[int]:
        """The points at which the request asked for values of this kind."""
        return {
            each.point for each in points_of(self.asked)
            if what == (None if each.head is None else _what(each.head))
        }  # fmt: skip

    def finish(
        self, stage: int, error: str | None, manifests: Mapping[str, Manifest] | None = None
    ) -> None:
        if stage in self._stages_left:
            for sink, manifest in (manifests or {}).items():
                known = self.manifests.get(sink)
                self.manifests[sink] = manifest if known is None else known.joined(manifest)
        self._stages_left.discard(stage)
        self.error = self.error or error
        if not self._stages_left and not self.done.done():
            self.done.set_result(None)

    def await_nothing(self) -> None:
        """Resolve `done` now. The caller knows that workers send no messages about this request."""
        self._stages_left.clear()
        self.done.set_result(None)

    def decide(self, decided: Decided) -> None:
        """Add a decision of the request's policy."""
        self.decisions.append(decided)
        self.num_came += 1
        if self.asked.policy is not None:
            count_decision(self.asked.policy.name, decided)

    def lose(self, why: str, over: bool = False) -> None:
        """Drop the values of the request that have arrived, and the values in later messages. The
        result gets the reason `why`. vLLM's request continues.

        Args:
            over: True if some pipeline stages will not report the end of the request. If so, `done`
                is resolved now.
        """
        self.error = self.error or why
        self.clear()
        self.num_came += 1
        if over and not self.done.done():
            self.done.set_result(None)

    def clear(self) -> None:
        """Drop the values that have arrived, and the values of later messages. Earlier snapshots
        keep their rows."""
        self._reading, self._tables = False, {}
        if self._share is not None:
            self._share.give_back()

    def snapshot(self, output_ids: list[int], finish_reason: str | None) -> ScopeResult:
        """The request's result, with the values that have arrived so far.

        Args:
            output_ids: all tokens generated so far. The caller may extend the list later.
            finish_reason: as in vLLM. None while the request runs.
        """
        ids = Transcript(self.prompt_ids, output_ids, len(output_ids))
        # Take the values before the error, because `lose` sets the error and then drops the values.
        parts = ArrivedParts(self._tables)
        why = self._why()
        return ScopeResult(
            self.asked, self.sites, ids, len(self.prompt_ids), parts,
            self._status(finish_reason, why), why, dict(self.manifests), tuple(self.decisions),
        )  # fmt: skip

    def _why(self) -> str | None:
        if self.error or not self.manifests:
            return self.error
        failed = (m.reason for m in self.manifests.values() if m.status == "error")
        return next(failed, None)

    def _status(self, finish_reason: str | None, why: str | None) -> Status:
        if why is not None:
            return "failed"
        if finish_reason is None:
            return "streaming"
        if finish_reason in ("abort", "error"):
            return "aborted"
        whole = all(manifest.status == "ok" for manifest in self.manifests.values())
        return "complete" if whole and self.done.done() else "incomplete"
