"""The rows and scores of one completion, in the form that the caller reads.

Owns:  ScopeResult (a snapshot).
Runs:  in the front-end, on any thread, and in every process that unpickles a result.
From:  buffer.   To: streams, scores (which read the result as a Snapshot).

Promise: a result has one row for each (site, layer, position) that was requested and processed. If
a row was computed several times, the result has the last one of these rows. `expected` and
`delivered` show whether a row is missing. Messages of different pipeline stages may arrive in any
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Part, num_processed, wanted_positions
from vllm_scope.batch.readout import Verdict
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.control.policy import Decided
from vllm_scope.request.resolved import Resolved, ResolvedFeatures, ResolvedProbe
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import Phase, SiteLayer, Sites, layer_of
from vllm_scope.request.streams import OverStreams
from vllm_scope.results.column import Column
from vllm_scope.results.features import Features
from vllm_scope.results.lens import Lenses
from vllm_scope.results.scores import Scores, ScoreTable, cells_of
from vllm_scope.results.snapshot import Parts, Source, StreamKey, What
from vllm_scope.results.streams import Rows, StreamTable
from vllm_scope.results.table import ArrivedParts, FrozenTable
from vllm_scope.sinks import Manifest

if TYPE_CHECKING:
    from vllm_scope.analysis.cache import ActivationCache
    from vllm_scope.views.document import Picture

Status = Literal["streaming", "complete", "incomplete", "aborted", "failed"]


class ScopeResult(OverStreams):
    """The rows and scores of one completion.

    `result["resid_post", 5]` is a tensor [num_positions, hidden_size] on the CPU, in the model's
    dtype and in the order of positions. At a site inside the attention, such as "q", the tensor
    `result["q", 5]` is [num_positions, num_heads, head_size]. The absolute positions of the
    rows are `result.positions("resid_post", 5)`. A position is an index into the prompt and the
    generated tokens. The row of position p is computed while the model processes the token at
    position p. The token sampled last has no row. If a stream was read before and after the edits
    of its site, `result["resid_post", 5]` has the rows after the edits. The rows before the edits
    are `result["resid_post", 5, "before"]`. Rows of a read with a codec are decoded.
    `result.encoded("resid_post", 5)` returns the encoded rows.

    Attributes:
        scores: the scores of each probe by name, float32 [num_positions]. The positions of the
            scores are `scores.positions(name)`.
        features: the SparseFeatures (positions, indices, values) of each `Features` by name.
        lens: the LensTokens (the likeliest tokens of each layer) of each `LensTopK` by name.
        aggregates: for each probe with an aggregate, by name, float32 [num_positions]. The value at
            a position is the aggregate of all scores up to this position.
        verdicts: for each probe with a verdict, by name, the first position at which the probe's
            value was above the threshold, and the value at this position.
        begun: for each probe with `after`, by name, the first position that the probe scores.
            Probes are left out if the probe that `after` names has no verdict.
        decisions: the decisions of the request's policy, in the order of positions. If the policy
            has stopped controlling the request, the last decision has an `error`.
        status: "streaming" while the request runs. "failed" if reads or edits failed (see `error`).
            After the end: "complete" if all requested values have arrived, "incomplete" if values
            are missing, "aborted" if the request was aborted or vLLM ended it with an error.
        error: the reason if `status` is "failed", else None.
        manifests: the request's manifest at each sink except memory, by the sink's name. If a
            manifest has the status "error", the result has the status "failed". If a manifest has
            the status "partial", the result has the status "incomplete". The manifests have no
            effect on the rows of the result.
        expected: number of values that the caller requested for the tokens processed so far: rows,
            scores, and one value per token for each `Features` and each layer of a lens. `expected`
            and `status` ignore scores of an operator's monitors.
        delivered: number of expected values that have arrived.
        dropped: 0 while `status` is "streaming", else expected - delivered.
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
        self.manifests, self.decisions = manifests or {}, decisions
        self._asked, self._sites = asked, sites
        self._token_ids, self._num_prompt = token_ids, num_prompt
        self._parts = parts
        self._status, self.error = status, error
        self._wanted_by: dict[tuple[Selector, ...], np.ndarray] = {}

    # `_stream_table` and `_score_table` are made at first use. A streaming request makes a result
    # for each token, and most of these results are never read.

    @cached_property
    def _stream_table(self) -> StreamTable:
        return StreamTable.of(self._asked, self._sites)

    @cached_property
    def _score_table(self) -> ScoreTable:
        return ScoreTable.of(self._asked)

    @property
    def num_processed(self) -> int:
        """Number of positions processed so far: all tokens except the token sampled last."""
        return num_processed(len(self._token_ids), self._num_prompt)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the prompt's tokens and of the tokens generated so far. `token_ids[p]` is the
        token at position p."""
        return list(self._token_ids)

    @property
    def transcript(self) -> Sequence[int]:
        """The same ids as `token_ids`, without a copy."""
        return self._token_ids

    @property
    def sites(self) -> Sites:
        """The sites and layers that the engine taps."""
        return self._sites

    @property
    def num_prompt(self) -> int:
        return self._num_prompt

    @property
    def scores(self) -> Scores:
        return Scores(self._score_table, self)

    @property
    def features(self) -> Features:
        return Features(self._score_table, self)

    @property
    def lens(self) -> Lenses:
        return Lenses(self._score_table, self)

    @property
    def aggregates(self) -> Scores:
        return Scores(self._score_table, self, aggregates=True)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return self._score_table.verdicts(self)

    @property
    def begun(self) -> dict[str, int]:
        return self._score_table.begun(self)

    @property
    def probes(self) -> tuple[ResolvedProbe, ...]:
        """The request's own probes and the probes of an operator's monitors."""
        return self._asked.probes

    @property
    def own_probes(self) -> list[str]:
        """The names of the probes that the caller requested, without an operator's monitors."""
        return self._score_table.own_probes

    @property
    def asked_features(self) -> tuple[ResolvedFeatures, ...]:
        return self._asked.features

    @property
    def edited(self) -> frozenset[SiteLayer]:
        """The streams that the request's own edits change."""
        return frozenset(edit.stream for edit in self._asked.edits)

    def keys(self) -> list[SiteLayer]:
        streams = self._stream_table.names()
        return list(dict.fromkeys((site, layer) for site, layer, _ in streams))

    def _at(self, stream: object) -> StreamKey:
        return self._stream_table.find(stream, self.manifests)  # type: ignore[arg-type]

    def __getitem__(self, stream: SiteLayer | StreamKey | str) -> Tensor:
        return self._stream_table.tensor(self._at(stream), self)

    def encoded(
        self, site: str, layer: int | None = None, when: Phase | None = None
    ) -> EncodedRows | None:
        """The encoded rows, which have the attributes `codec` and `parts`. None if the read has no
        codec."""
        rows = self._rows_of(site, layer, when)[0]
        return rows if isinstance(rows, EncodedRows) else None

    def positions(self, site: str, layer: int | None = None, when: Phase | None = None) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the rows."""
        return torch.from_numpy(self._rows_of(site, layer, when)[1])

    def _rows_of(self, site: str, layer: int | None, when: Phase | None) -> Rows:
        at = layer_of(site, layer)
        key = (site, at) if when is None else (site, at, when)
        return self._stream_table.rows(self._stream_table.find(key, self.manifests), self)

    @property
    def expected(self) -> int:
        return self._totals[0]

    @property
    def delivered(self) -> int:
        return self._totals[1]

    @cached_property
    def _totals(self) -> tuple[int, int]:
        """(expected, delivered)"""
        accounts = [*self._stream_table.accounts(self), *self._score_table.accounts(self)]
        return (
            sum(len(wanted) * times for wanted, _, times in accounts),
            sum(_num_in(wanted, arrived) * times for wanted, arrived, times in accounts),
        )

    def num_lost(self, probe: str) -> int:
        """The number of missing scores of a probe or of an operator's monitor."""
        return self._score_table.num_lost(probe, self)

    @property
    def dropped(self) -> int:
        return 0 if self._status == "streaming" else self.expected - self.delivered

    @property
    def status(self) -> Status:
        if self._status == "complete" and self.dropped:
            return "incomplete"
        return self._status

    def columns(self) -> list[Column]:
        """The columns of all streams, then of all probes, then of all features. The streams, the
        probes and the features are in the order of the request."""
        streams, table = self._stream_table, self._score_table
        rows = (streams.column(stream, self) for stream in streams.names())
        sparse = (Column(name, *table.sparse(name, self)) for name in table.features)
        return [*rows, *map(self.column_of, table.probes), *sparse]

    def column_of(self, probe: str) -> Column:
        """The scores of a probe."""
        found = self._score_table.score(probe, self)
        return Column(probe, found.scores, found.positions, aggregates=found.aggregates)

    def sources(self, rows: bool = True) -> list[Source]:
        """The sources of streams, then of the numbers that scores and features are computed from.

        Args:
            rows: if False, leave out the sources of streams.
        """
        streams = self._stream_table
        of_rows = map(streams.source, streams.names()) if rows else ()
        keys = {key: one.after for one in self._asked.banked for key in cells_of(one)}
        banks = (
            Source(None, (tokens,), bank, point, after=after)
            for (bank, point, tokens), after in keys.items()
        )
        return [*of_rows, *banks]

    def parts_of(self, source: Source) -> list[Part]:
        """The values of a source that have arrived so far. Each part has its values in order of
        arrival. In a later snapshot, the same part begins with the same values."""
        return self.arrived(source.what, source.place)

    def wanted(self, selectors: Sequence[Selector], first: int = 0) -> np.ndarray:
        """The processed positions, from `first` on, that a selector selects, as ascending int64."""
        return wanted_positions(
            selectors, self._token_ids, self._num_prompt, self._status != "streaming", first
        )

    def as_cache(self) -> ActivationCache:
        """The rows by the names that TransformerLens uses, [1, num_positions, hidden_size]. At
        sites inside the attention the shape is [1, num_positions, num_heads, head_size].

        Raises:
            SpecError: a stream does not have the positions 0, 1, 2, ... without a gap, or rows are
                missing.
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
        """A picture of the status, the counts, the arrived values, and the first probes' scores.

        Args:
            tokenizer: an object with `decode`, such as `llm.get_tokenizer()`. None: token ids.
        """
        from vllm_scope.views.result import result_picture

        return result_picture(self, tokenizer)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def monitored(self) -> ScopeResult:
        """A result with only the scores of an operator's monitors. If the caller changes tensors of
        this result, the scores of the new result stay the same. If no row of this result was used
        yet, the new result keeps no reference to the memory of the rows."""
        found = ScopeResult.__new__(ScopeResult)  # `copy.copy` would call __getstate__
        found.__dict__.update(self.__dict__)
        found._score_table, banks = self._score_table.monitors()
        found._parts = self._parts.only(banks) if isinstance(self._parts, ArrivedParts) else {}
        found._wanted_by = {}
        return found

    def __getstate__(self) -> dict[str, object]:
        streams, scores = self._stream_table.own(self), self._score_table.own(self)
        state = {**self.__dict__, "_token_ids": list(self._token_ids), "_parts": {}}
        return state | {"_stream_table": streams, "_score_table": scores}

    def wanted_by(self, selectors: Sequence[Selector]) -> np.ndarray:
        """The processed positions that a selector selects."""
        key = tuple(selectors)
        if key not in self._wanted_by:
            self._wanted_by[key] = self.wanted(selectors)
        return self._wanted_by[key]

    def arrived(self, what: What, place: int) -> list[Part]:
        return self.arrived_of(what).get(place, [])

    def only_table(self, what: What) -> FrozenTable | None:
        return self._parts.only_table(what) if isinstance(self._parts, ArrivedParts) else None

    def arrived_of(self, what: What) -> Mapping[int, list[Part]]:
        return self._parts.get(what, {})


def _num_in(wanted: np.ndarray, arrived: np.ndarray) -> int:
    if np.array_equal(wanted, arrived[: len(wanted)]):  # the usual case
        return len(wanted)
    return int(np.isin(wanted, arrived).sum())
