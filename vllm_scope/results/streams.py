"""The rows of a result, by stream.

Owns:  StreamTable.
Runs:  in the front-end.
From:  table (the rows that arrived), through a Snapshot.   To: result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints, Part, last_values
from vllm_scope.codecs.packed import EncodedRows, packing_of
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.request.heads import Encoding
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import ALIASES, Place, SiteLayer, Sites, layer_of
from vllm_scope.results.column import Column, shaped
from vllm_scope.results.scores import positions_of
from vllm_scope.results.snapshot import Snapshot, Source, StreamKey

#: (The rows or encoded rows [n, ...], the positions of the rows as int64 [n]).
Rows = tuple[Tensor | EncodedRows, Ints]


class StreamTable:
    """The rows of all streams in one snapshot. The parts of a stream are joined when the stream is
    used for the first time.

    The snapshot has a reference to the table, but the table has no reference to the snapshot.
    Without a cycle of references, Python frees the memory without the garbage collector.
    """

    def __init__(self, sources: Mapping[StreamKey, Source], sites: Sites) -> None:
        self._sources, self._sites = sources, sites
        self._rows: dict[StreamKey, Rows] = {}
        self._decoded: dict[StreamKey, Tensor] = {}

    @staticmethod
    def of(asked: Resolved, sites: Sites) -> StreamTable:
        """An empty table for a request. The sources are cached in `asked`, because requests with
        the same spec share `asked`."""
        known = asked.__dict__.get("_stream_sources")
        if known is None or known[0] is not sites:
            known = asked.__dict__["_stream_sources"] = sites, _sources_of(asked, sites)
        return StreamTable(known[1], sites)

    def names(self) -> list[StreamKey]:
        return list(self._sources)

    def find(self, key: SiteLayer | StreamKey | str, sinks: Iterable[str]) -> StreamKey:
        """The stream that a key names. The site in the key may be an alias. Raises KeyError if the
        request does not read this stream to memory.

        Args:
            sinks: the names of the request's other sinks, for the error text.
        """
        words = tuple(key) if isinstance(key, tuple | list) else (key, layer_of(key, None))
        site = ALIASES.get(str(words[0]), words[0])
        asked = self.names()
        for stream in asked:
            # If the stream was read in both phases, a key without a phase means "after".
            if stream == (site, *words[1:]) or (
                len(words) == 2
                and stream[:2] == (site, words[1])
                and (stream[2] == "after" or (*stream[:2], "after") not in asked)
            ):
                return stream
        places = dict.fromkeys((site, layer) for site, layer, _ in asked)
        names = ", ".join(f"{site!r} {layer}" for site, layer in places) or "nothing"
        elsewhere = ", ".join(sinks)
        if elsewhere:
            raise KeyError(
                f"{key} was not asked for in memory; this request read {names} to memory. Rows "
                f"that a read sent to another destination ({elsewhere}) are there: see `manifests`."
            )
        raise KeyError(f"{key} was not asked for; this request read {names}.")

    def rows(self, stream: StreamKey, of: Snapshot) -> Rows:
        """For each wanted position, the row that was computed last."""
        if stream not in self._rows:
            encoding = self._sources[stream].what
            if not isinstance(encoding, Encoding):
                size, dtype = self._sites.row_size(stream[0]), dtype_of(self._sites)
            else:
                packing = packing_of(encoding)
                size, dtype = packing.num_slots * SLOT_BYTES, torch.uint8
            data, positions = last_values(
                self._arrived(stream, of),
                of.wanted_by(self._sources[stream].selectors),
                torch.empty((0, size), dtype=dtype),
            )
            encoded = isinstance(encoding, Encoding)
            rows = EncodedRows(packing.codec, data) if encoded else data
            self._rows[stream] = (rows, positions)
        return self._rows[stream]

    def tensor(self, stream: StreamKey, of: Snapshot) -> Tensor:
        """The rows, in the shape of the site's rows. The first call decodes encoded rows."""
        rows, _ = self.rows(stream, of)
        if isinstance(rows, EncodedRows):
            if stream not in self._decoded:
                self._decoded[stream] = rows.decode()
            rows = self._decoded[stream]
        return shaped(rows, self._sites.row_shape(stream[0]))

    def column(self, stream: StreamKey, of: Snapshot) -> Column:
        return Column(stream, *self.rows(stream, of), self._sites.row_shape(stream[0]))

    def source(self, stream: StreamKey) -> Source:
        return self._sources[stream]

    def accounts(self, of: Snapshot) -> Iterator[tuple[Ints, Ints, int]]:
        """Yields (wanted positions, positions that arrived, number of streams).

        Streams with identical position arrays are counted together.
        """
        found: dict[tuple[int, int], tuple[Ints, Ints, int]] = {}
        for stream in self.names():
            known = self._rows.get(stream)
            arrived = positions_of(self._arrived(stream, of)) if known is None else known[1]
            wanted = of.wanted_by(self._sources[stream].selectors)
            key = id(wanted), id(arrived)  # unique, because `found` keeps both arrays
            found[key] = (wanted, arrived, found[key][2] + 1 if key in found else 1)
        yield from found.values()

    def own(self, of: Snapshot) -> StreamTable:
        """A copy for pickle, with all rows in new memory. The rows of this object are views of
        larger arrays, and pickle would store the whole arrays."""
        found = StreamTable(self._sources, self._sites)
        for stream in self.names():
            rows, positions = self.rows(stream, of)
            own = rows.kept() if isinstance(rows, EncodedRows) else rows.contiguous().clone()
            found._rows[stream] = (own, positions)
        return found

    def _arrived(self, stream: StreamKey, of: Snapshot) -> list[Part]:
        source = self._sources[stream]
        return of.arrived(source.what, source.place)


def _sources_of(asked: Resolved, sites: Sites) -> dict[StreamKey, Source]:
    """The source of each stream, in the order of the request."""
    found: dict[StreamKey, Source] = {}
    for read in asked.reads:
        for site, layer in read.streams:
            key = (site, layer, read.when)
            if key in found:
                also = found[key].selectors
                found[key] = replace(found[key], selectors=(*also, read.tokens))
            else:
                point = Place(site, layer).point(read.when)
                shape = sites.row_shape(site)
                found[key] = Source(key, (read.tokens,), read.encoding, point, shape)
    return found


def dtype_of(sites: Sites) -> torch.dtype:
    dtype = getattr(torch, sites.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
