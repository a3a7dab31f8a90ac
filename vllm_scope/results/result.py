"""The rows and scores of one completion, as the caller reads them.

Owns:  ScopeResult (a snapshot).
Runs:  in the front-end, on any thread, and in every process that it is pickled to.
From:  buffer.

Promise: one row per (site, layer, position), the last that was computed, of the positions that
were asked for and processed; and counts that say whether any is missing. Messages of stages and
steps may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Part, last_values, num_processed, wanted_positions
from vllm_scope.batch.readout import Verdict
from vllm_scope.codecs.packed import EncodedRows, packing_of
from vllm_scope.control.policy import Decided
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.request.heads import Encoding, Head
from vllm_scope.request.resolved import Resolved, ResolvedFeatures, ResolvedProbe, lens_label
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import ALIASES, Phase, Place, SiteLayer, Sites
from vllm_scope.results.column import Column, shaped
from vllm_scope.results.features import Features, SparseFeatures
from vllm_scope.results.lens import Lenses, TopTokens
from vllm_scope.results.scores import Scores, ScoreTable, cells_of, positions_of
from vllm_scope.sinks import Manifest

if TYPE_CHECKING:
    from vllm_scope.analysis.cache import ActivationCache
    from vllm_scope.views.document import Picture

#: A stream on one side of the edits of its site: site, layer, phase.
_Stream = tuple[str, int, Phase]
#: Rows [n, ...], maybe encoded, and their positions, int64 [n].
_Rows = tuple[Tensor | EncodedRows, np.ndarray]
#: The kind of values: raw rows (None), encoded rows, or numbers of a bank of probes.
What = Head | None
#: Kind of values -> point -> what arrived.
Parts = Mapping[What, Mapping[int, list[Part]]]
Status = Literal["streaming", "complete", "incomplete", "aborted", "failed"]


@dataclass(frozen=True)
class Source:
    """Where the values of a stream, or the numbers of a bank, are.

    Attributes:
        label: as in Column; None for the numbers of a bank.
        place: the point.
        row_shape: as in Column.
        after: as in Probe, of a bank.
    """

    label: _Stream | None
    selectors: tuple[Selector, ...]
    what: What
    place: int
    row_shape: tuple[int, ...] = ()
    after: str | None = None


class ScopeResult:
    """The rows and scores of one completion.

    `result["resid_post", 5]` is a tensor [num_positions, hidden_size], model dtype,
    CPU, in position order; `result["q", 5]` and other sites inside the attention
    [num_positions, heads, numbers of a head]. `result.positions("resid_post", 5)` are
    the absolute positions (index into prompt + generated). Row p is the state while
    token p is processed, so the token sampled last has none. If a stream was read
    before and after the edits of its site, the key takes a third word:
    `result["resid_post", 5, "before"]`. Rows of a read with a codec are decoded;
    `result.encoded("resid_post", 5)` returns them encoded.

    Attributes:
        scores: by the probes' names, float32 [num_positions]; `scores.positions(name)`.
        features: by the names of `Features`: SparseFeatures, with positions, indices and values.
        lens: by the names of `LensTopK`: LensTokens, by layer the likeliest tokens.
        aggregates: as `scores`, for probes with an aggregate: at each position, the aggregate of
            all scores up to there.
        verdicts: by the names of probes with a threshold, the first position where the value was
            above it, and the value.
        begun: by the names of probes with `after`, the first position that they score; without
            those whose first stage has no verdict.
        decisions: of the request's policy, in the order of positions. The last one has an `error`
            if the policy does not control the request any more.
        status: "streaming" while the request runs, "complete" if everything that
            was asked for has arrived, "incomplete" if not, "aborted" if the request
            was, "failed" if its reads or edits failed (see `error`).
        error: the reason, if status is "failed".
        manifests: by sink, what became of the reads that went elsewhere than to memory;
            complete once the request has ended. A failed one makes the status
            "failed", a partial one "incomplete"; rows in memory are not affected.
        expected: rows and scores that were asked for, of the tokens processed so far.
        delivered: the number of those that have arrived.
        dropped: expected - delivered, once the request has ended; 0 before.
    """

    def __init__(
        self,
        asked: Resolved,
        sites: Sites,
        token_ids: Sequence[int],
        num_prompt: int,
        parts: Parts,
        status: Status,
        error: str | None,
        manifests: Mapping[str, Manifest] | None = None,
        decisions: tuple[Decided, ...] = (),
    ) -> None:
        self.manifests, self.decisions = dict(manifests or {}), decisions
        self._asked, self._sites = asked, sites
        self._token_ids, self._num_prompt = token_ids, num_prompt
        self._parts = parts
        self._status, self.error = status, error
        self._wanted_by: dict[tuple[Selector, ...], np.ndarray] = {}
        self._streams: dict[_Stream, _Rows] = {}
        self._decoded: dict[_Stream, Tensor] = {}
        self._score_table = ScoreTable(asked.probes, asked.features)

    @property
    def num_processed(self) -> int:
        """Positions processed so far: all tokens but the one sampled last."""
        return num_processed(len(self._token_ids), self._num_prompt)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far; `token_ids[p]` is the token at position p."""
        return list(self._token_ids)

    @property
    def transcript(self) -> Sequence[int]:
        """`token_ids` without a copy."""
        return self._token_ids

    @property
    def sites(self) -> Sites:
        """What the engine taps."""
        return self._sites

    @property
    def num_prompt(self) -> int:
        return self._num_prompt

    @property
    def scores(self) -> Scores:
        return Scores(self._score_table, self)

    @property
    def features(self) -> Features:
        every = self._score_table.features
        return Features([name for name in every if every[name].lens is None], self._features_of)

    @property
    def lens(self) -> Lenses:
        layers: dict[str, list[int]] = {}
        for one in self._score_table.features.values():
            if one.lens is not None:
                layers.setdefault(one.lens[0], []).append(one.cells[0].place.layer)
        return Lenses(layers, self._tokens_of)

    def _tokens_of(self, name: str, layer: int) -> TopTokens:
        rows, positions = self._score_table.sparse(lens_label(name, layer), self)
        return TopTokens.of_rows(rows, torch.from_numpy(positions))

    def _features_of(self, name: str) -> SparseFeatures:
        rows, positions = self._score_table.sparse(name, self)
        width = self._score_table.features[name].num_features
        return SparseFeatures(rows, torch.from_numpy(positions), width)

    @property
    def aggregates(self) -> Scores:
        return Scores(self._score_table, self, aggregates=True)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Name of the probe -> position and value of its verdict, for the probes that have one."""
        known = {
            p.name: self._score_table.score(p.name, self).verdict
            for p in self._asked.probes
            if p.judges
        }
        return {name: verdict for name, verdict in known.items() if verdict is not None}

    @property
    def begun(self) -> dict[str, int]:
        """Name of a probe with `after` -> the first position that it scores."""
        later = (probe for probe in self._asked.probes if probe.after is not None)
        known = {probe.name: self._score_table.begins(probe, self) for probe in later}
        return {name: first for name, first in known.items() if first is not None}

    @property
    def probes(self) -> tuple[ResolvedProbe, ...]:
        """As they were asked for."""
        return self._asked.probes

    @property
    def asked_features(self) -> tuple[ResolvedFeatures, ...]:
        return self._asked.features

    @property
    def edited(self) -> frozenset[SiteLayer]:
        """The streams that the request itself edited."""
        return frozenset(edit.stream for edit in self._asked.edits)

    def keys(self) -> list[SiteLayer]:
        """The streams that were asked for."""
        return list(dict.fromkeys((site, layer) for site, layer, _ in self._read_streams()))

    def __iter__(self) -> Iterator[SiteLayer]:
        return iter(self.keys())

    def __contains__(self, stream: object) -> bool:
        try:
            return bool(self._find(stream))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False

    def __getitem__(self, stream: SiteLayer | _Stream | str) -> Tensor:
        key = self._find(stream)
        rows, _ = self._rows_of(key)
        if isinstance(rows, EncodedRows):
            if key not in self._decoded:
                self._decoded[key] = rows.decode()
            rows = self._decoded[key]
        return shaped(rows, self._sites.row_shape(key[0]))

    def encoded(self, site: str, layer: int = 0, when: Phase | None = None) -> EncodedRows | None:
        """The encoded rows, with their `codec` and its `parts`; None without a codec."""
        rows = self._stream(_key(site, layer, when))[0]
        return rows if isinstance(rows, EncodedRows) else None

    def positions(self, site: str, layer: int = 0, when: Phase | None = None) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the rows."""
        return torch.from_numpy(self._stream(_key(site, layer, when))[1])

    @property
    def expected(self) -> int:
        return self._totals[0]

    @property
    def delivered(self) -> int:
        return self._totals[1]

    @cached_property
    def _totals(self) -> tuple[int, int]:
        """(expected, delivered)"""
        accounts = self._accounts()
        return (
            sum(len(wanted) * times for wanted, _, times in accounts),
            sum(_num_in(wanted, arrived) * times for wanted, arrived, times in accounts),
        )

    @property
    def dropped(self) -> int:
        return 0 if self._status == "streaming" else self.expected - self.delivered

    @property
    def status(self) -> Status:
        if self._status == "complete" and self.dropped:
            return "incomplete"
        return self._status

    def columns(self) -> list[Column]:
        """Every stream, then every probe, then all features, in the request's order."""
        streams = [
            Column(s, *self._rows_of(s), self._sites.row_shape(s[0])) for s in self._read_streams()
        ]
        table = self._score_table
        sparse = (Column(name, *table.sparse(name, self)) for name in table.features)
        return [*streams, *map(self.column_of, table.probes), *sparse]

    def column_of(self, probe: str) -> Column:
        """The scores of a probe."""
        found = self._score_table.score(probe, self)
        return Column(probe, found.scores, found.positions, aggregates=found.aggregates)

    def sources(self, rows: bool = True) -> list[Source]:
        """The streams, then the distinct numbers of which scores and features are made.

        Args:
            rows: False leaves the streams out.
        """
        streams = self._stream_sources.values() if rows else ()
        keys = {key: one.after for one in self._asked.banked for key in cells_of(one)}
        banks = (
            Source(None, (tokens,), bank, point, after=after)
            for (bank, point, tokens), after in keys.items()
        )
        return [*streams, *banks]

    def parts_of(self, source: Source) -> list[Part]:
        """What arrived so far, in order of arrival; a later snapshot has these and more."""
        return self.arrived(source.what, source.place)

    def wanted(self, selectors: Sequence[Selector], first: int = 0) -> np.ndarray:
        """int64, ascending: the processed positions from `first` on that any selector selects."""
        return wanted_positions(
            selectors, self._token_ids, self._num_prompt, self._status != "streaming", first
        )

    def as_cache(self) -> ActivationCache:
        """The rows under TransformerLens's names: [1, num_positions, hidden_size] each, of
        sites inside the attention [1, num_positions, heads, numbers of a head].

        Raises:
            SpecError: not every position from 0 on was read, or rows are missing.
        """
        from vllm_scope.analysis.cache import ActivationCache

        return ActivationCache(self, num_layers=self._sites.num_layers)

    def __repr__(self) -> str:
        return (
            f"ScopeResult({self.status}, {len(self.keys())} streams, {len(self.scores)} probes, "
            + f"{len(self.features)} features, " * bool(self.features)
            + f"{len(self.lens)} lenses, " * bool(self.lens)
            + f"{self.delivered} of {self.expected} values)"
        )

    def picture(self, tokenizer: Any = None) -> Picture:
        """Status, counts, what arrived, and the scores of each token.

        Args:
            tokenizer: with `decode`, such as `llm.get_tokenizer()`; None shows token ids.
        """
        from vllm_scope.views.result import result_picture

        return result_picture(self, tokenizer)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def __getstate__(self) -> dict[str, object]:
        # Copies: a view would be pickled with the whole table.
        for stream in self._read_streams():
            rows, positions = self._stream(stream)
            own = rows.kept() if isinstance(rows, EncodedRows) else rows.contiguous().clone()
            self._streams[stream] = (own, positions)
        table, ids = self._score_table.own(self), list(self._token_ids)
        state = {**self.__dict__, "_token_ids": ids, "_parts": {}, "_decoded": {}}
        return state | {"_score_table": table}

    def _read_streams(self) -> list[_Stream]:
        return list(self._stream_sources)

    @property
    def _stream_sources(self) -> Mapping[_Stream, Source]:
        """Made once for all results of one request's meaning, which many requests share."""
        known = self._asked.__dict__.get("_stream_sources")
        if known is None or known[0] is not self._sites:
            made = _stream_sources(self._asked, self._sites)
            known = self._asked.__dict__["_stream_sources"] = self._sites, made
        found: Mapping[_Stream, Source] = known[1]
        return found

    def _accounts(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(positions that are wanted, those that arrived, number of streams or probes).

        Streams with identical position arrays are counted together.
        """
        found: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]] = {}

        def add(wanted: np.ndarray, arrived: np.ndarray) -> None:
            key = id(wanted), id(arrived)  # `found` keeps both, so no other array gets an id
            found[key] = (wanted, arrived, found[key][2] + 1 if key in found else 1)

        for stream in self._read_streams():
            known = self._streams.get(stream)
            arrived = positions_of(self._parts_of(stream)) if known is None else known[1]
            add(self._wanted_of(stream), arrived)
        return [*found.values(), *self._score_table.accounts(self)]

    def wanted_by(self, selectors: Sequence[Selector]) -> np.ndarray:
        """The processed positions that any selector selects."""
        key = tuple(selectors)
        if key not in self._wanted_by:
            self._wanted_by[key] = self.wanted(selectors)
        return self._wanted_by[key]

    def _wanted_of(self, stream: _Stream) -> np.ndarray:
        return self.wanted_by(self._selectors_of(stream))

    def _selectors_of(self, stream: _Stream) -> tuple[Selector, ...]:
        return self._stream_sources[stream].selectors

    def _parts_of(self, stream: _Stream) -> list[Part]:
        return self.parts_of(self._stream_sources[stream])

    def arrived(self, what: What, place: int) -> list[Part]:
        return self.arrived_of(what).get(place, [])

    def arrived_of(self, what: What) -> Mapping[int, list[Part]]:
        return self._parts.get(what, {})

    def _stream(self, key: SiteLayer | _Stream | str) -> _Rows:
        return self._rows_of(self._find(key))

    def _rows_of(self, stream: _Stream) -> _Rows:
        if stream not in self._streams:
            encoding = self._stream_sources[stream].what
            if not isinstance(encoding, Encoding):
                size, dtype = self._sites.row_size(stream[0]), dtype_of(self._sites)
            else:
                packing = packing_of(encoding)
                size, dtype = packing.num_slots * SLOT_BYTES, torch.uint8
            data, positions = last_values(
                self._parts_of(stream), self._wanted_of(stream), torch.empty((0, size), dtype=dtype)
            )
            encoded = isinstance(encoding, Encoding)
            rows = EncodedRows(packing.codec, data) if encoded else data
            self._streams[stream] = (rows, positions)
        return self._streams[stream]

    def _find(self, key: SiteLayer | _Stream | str) -> _Stream:
        """The stream of a key, whose site may be an alias."""
        words = tuple(key) if isinstance(key, tuple | list) else (key, 0)
        site = ALIASES.get(str(words[0]), words[0])
        asked = self._read_streams()
        for stream in asked:
            # If the stream was read on both sides of the edits, the plain key means after.
            if stream == (site, *words[1:]) or (
                len(words) == 2
                and stream[:2] == (site, words[1])
                and (stream[2] == "after" or (*stream[:2], "after") not in asked)
            ):
                return stream
        names = ", ".join(f"{site!r} {layer}" for site, layer in self.keys()) or "nothing"
        raise KeyError(f"{key} was not asked for; this request read {names}.")


def _stream_sources(asked: Resolved, sites: Sites) -> dict[_Stream, Source]:
    """The streams that were asked for, in the request's order."""
    found: dict[_Stream, Source] = {}
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


def _key(site: str, layer: int, when: Phase | None) -> SiteLayer | _Stream:
    return (site, layer) if when is None else (site, layer, when)


def _num_in(wanted: np.ndarray, arrived: np.ndarray) -> int:
    if np.array_equal(wanted, arrived[: len(wanted)]):  # the usual case
        return len(wanted)
    return int(np.isin(wanted, arrived).sum())


def dtype_of(sites: Sites) -> torch.dtype:
    dtype = getattr(torch, sites.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
