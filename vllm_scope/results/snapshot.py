"""The interface through which the values of one snapshot of a request are read.

Owns:  Snapshot, Source, What (a kind of values), Parts (the arrived values, by kind).
To:    streams and scores (read a snapshot), result (is a snapshot), cursor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_scope.batch.by_position import Ints, Part
from vllm_scope.request.heads import Head
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import Phase

if TYPE_CHECKING:
    from vllm_scope.results.table import FrozenTable

#: A stream before or after the edits of its site: (site, layer, phase).
StreamKey = tuple[str, int, Phase]
#: The kind of values: raw rows (None), encoded rows, or the numbers of a bank or of another head.
What = Head | None
#: The parts that arrived, by the kind of their values and by point.
Parts = Mapping[What, Mapping[int, list[Part]]]


@dataclass(frozen=True)
class Source:
    """Identifies the values of a stream, or the numbers of a bank, in a snapshot.

    Attributes:
        label: as in Column. None for the numbers of a bank.
        place: the values' point (request.sites.Place.point), which is a number.
        row_shape: as in Column.
        after: for a bank, the `after` of the bank's probes.
    """

    label: StreamKey | None
    selectors: tuple[Selector, ...]
    what: What
    place: int
    row_shape: tuple[int, ...] = ()
    after: str | None = None


class Snapshot(Protocol):
    """The values of a request that have arrived. ScopeResult is a Snapshot."""

    def arrived(self, what: What, place: int) -> list[Part]:
        """The parts with values of the kind `what`, at the point `place`."""

    def arrived_of(self, what: What) -> Mapping[int, list[Part]]:
        """The parts with values of the kind `what`, by point."""

    def only_table(self, what: What) -> FrozenTable | None:
        """The table that has all values of a kind. None if there is no table, or several tables,
        with values of this kind."""

    def wanted_by(self, selectors: Sequence[Selector]) -> Ints:
        """The processed positions that at least one of the selectors selects."""

    @property
    def num_prompt(self) -> int: ...
