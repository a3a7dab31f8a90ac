"""The rows of a result, by stream.

Owns:  StreamTable.
Runs:  in the front-end.
From:  table (the rows that arrived), by way of a Snapshot.   To: result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints, Part, last_values
from vllm_scope.codecs.packed import EncodedRows, packing_of
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.request.heads import Encoding
from vllm_scope.request.resolved import ResolvedRead
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import ALIASES, Place, SiteLayer, Sites
from vllm_scope.results.column import Column, shaped
from vllm_scope.results.scores import positions_of
from vllm_scope.results.snapshot import Snapshot, Source, Stream

#: Rows [n, ...], maybe encoded, and their positions, int64 [n].
Rows = tuple[Tensor | EncodedRows, Ints]


class StreamTable:
    """All streams' rows in one snapshot, joined when they are asked for.

    It does not hold the snapshot, as ScoreTable.
    """

    def __init__(self, reads: Sequence[ResolvedRead], sites: Sites) -> None:
        self._reads, self._sites = reads, sites
        self._rows: dict[Stream, Rows] = {}
        self._decoded: dict[Stream, Tensor] = {}

    def names(self) -> list[Stream]:
        """The streams that were asked for."""
        return list(dict.fromkeys((*s, read.when) for read in self._reads for s in read.streams))

    def find(self, key: SiteLayer | Stream | str) -> Stream:
        """The stream of a key, whose site may be an alias. Raises KeyError."""
        words = tuple(key) if isinstance(key, tuple | list) else (key, 0)
        site = ALIASES.get(str(words[0]), words[0])
        asked = self.names()
        for stream in asked:
            # If the stream was read on both sides of the edits, the plain key means after.
            if stream == (site, *words[1:]) or (
                len(words) == 2
                and stream[:2] == (site, words[1])
                and (stream[2] == "after" or (*stream[:2], "after") not in asked)
            ):
                return stream
        places = dict.fromkeys((site, layer) for site, layer, _ in asked)
        names = ", ".join(f"{site!r} {layer}" for site, layer in places) or "nothing"
        raise KeyError(f"{key} was not asked for; this request read {names}.")

    def rows(self, stream: Stream, of: Snapshot) -> Rows:
        """The last row of each wanted position."""
        if stream not in self._rows:
            encoding = self._encoding_of(stream)
            if encoding is None:
                size, dtype = self._sites.row_size(stream[0]), dtype_of(self._sites)
            else:
                packing = packing_of(encoding)
                size, dtype = packing.num_slots * SLOT_BYTES, torch.uint8
            data, positions = last_values(
                self._arrived(stream, of),
                of.wanted_by(self._selectors_of(stream)),
                torch.empty((0, size), dtype=dtype),
            )
            rows = data if encoding is None else EncodedRows(packing.codec, data)
            self._rows[stream] = (rows, positions)
        return self._rows[stream]

    def tensor(self, stream: Stream, of: Snapshot) -> Tensor:
        """The rows in the shape of the site's; decoded once."""
        rows, _ = self.rows(stream, of)
        if isinstance(rows, EncodedRows):
            if stream not in self._decoded:
                self._decoded[stream] = rows.decode()
            rows = self._decoded[stream]
        return shaped(rows, self._sites.row_shape(stream[0]))

    def column(self, stream: Stream, of: Snapshot) -> Column:
        return Column(stream, *self.rows(stream, of), self._sites.row_shape(stream[0]))

    def source(self, stream: Stream) -> Source:
        return Source(
            stream, self._selectors_of(stream), self._encoding_of(stream), _point_of(stream),
            self._sites.row_shape(stream[0]),
        )  # fmt: skip

    def accounts(self, of: Snapshot) -> Iterator[tuple[Ints, Ints, int]]:
        """(positions that are wanted, those that arrived, number of streams).

        Streams with identical position arrays are counted together.
        """
        found: dict[tuple[int, int], tuple[Ints, Ints, int]] = {}
        for stream in self.names():
            known = self._rows.get(stream)
            arrived = positions_of(self._arrived(stream, of)) if known is None else known[1]
            wanted = of.wanted_by(self._selectors_of(stream))
            key = id(wanted), id(arrived)  # `found` keeps both, so no other array gets an id
            found[key] = (wanted, arrived, found[key][2] + 1 if key in found else 1)
        yield from found.values()

    def own(self, of: Snapshot) -> StreamTable:
        """A copy with all rows, in memory of its own: a view would be pickled with its table."""
        found = StreamTable(self._reads, self._sites)
        for stream in self.names():
            rows, positions = self.rows(stream, of)
            own = rows.kept() if isinstance(rows, EncodedRows) else rows.contiguous().clone()
            found._rows[stream] = (own, positions)
        return found

    def _selectors_of(self, stream: Stream) -> tuple[Selector, ...]:
        return tuple(read.tokens for read in self._reads if _reads_it(read, stream))

    def _encoding_of(self, stream: Stream) -> Encoding | None:
        return next(read.encoding for read in self._reads if _reads_it(read, stream))

    def _arrived(self, stream: Stream, of: Snapshot) -> list[Part]:
        return of.arrived(self._encoding_of(stream), _point_of(stream))


def _reads_it(read: ResolvedRead, stream: Stream) -> bool:
    return read.when == stream[2] and stream[:2] in read.streams


def _point_of(stream: Stream) -> int:
    return Place(*stream[:2]).point(stream[2])


def dtype_of(sites: Sites) -> torch.dtype:
    dtype = getattr(torch, sites.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
