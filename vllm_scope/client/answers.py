"""The server's answers: choices with their rows and scores, as numpy.

Owns:  Completion, Choice, Chunk, ScoredToken, ScopeData, Verdict.
From:  parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_scope.client.features import Named, NamedFeatures, SparseFeatures
from vllm_scope.client.lens import TopTokens
from vllm_scope.control.policy import Decided
from vllm_scope.errors import ScopeError
from vllm_scope.request.arrays import of_bfloat16
from vllm_scope.request.sites import ALIASES, layer_of
from vllm_scope.request.streams import OverStreams

if TYPE_CHECKING:
    from torch import Tensor

#: The key of a stream: (site, layer, "after" or "before").
StreamKey = tuple[str, int, str]
#: Positions of a probe's scores, int64 [n], and the scores, float32 [n].
Scored = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True)
class Rows:
    """Rows in the dtype in which the server sent them.

    Attributes:
        positions: the positions of the rows, int64 [n], ascending.
        bits: the rows as an array [n, hidden_size] or [n, num_heads, head_size]. The array is
            uint16 if `dtype` is bfloat16, because numpy has no bfloat16.
        dtype: the dtype of the rows, which is float32, float16 or bfloat16.
    """

    positions: NDArray[np.int64]
    bits: NDArray[np.generic]
    dtype: str

    @property
    def numpy(self) -> NDArray[np.generic]:
        """The rows in their dtype; bfloat16 becomes float32 without loss."""
        if self.dtype != "bfloat16":
            return self.bits
        return of_bfloat16(np.asarray(self.bits, np.uint16))

    def at(self, positions: NDArray[np.int64]) -> Rows:
        """The rows at the given positions."""
        here = np.isin(self.positions, positions)
        return Rows(self.positions[here], self.bits[here], self.dtype)


class Scores(Named[NDArray[np.float32]]):
    """Maps the name of a probe to the probe's scores or aggregates, float32 [n], in the order of
    positions. A value that is not finite is NaN."""

    what = "scores"

    def __init__(self, values: Mapping[str, Scored]) -> None:
        super().__init__({name: scores for name, (_, scores) in values.items()})
        self._positions = {name: positions for name, (positions, _) in values.items()}

    def positions(self, name: str) -> NDArray[np.int64]:
        """The positions of a probe's scores, int64 [n], ascending."""
        self[name]  # raises the error of __missing__ for an unknown name
        return self._positions[name]

    def at(self, name: str, positions: NDArray[np.int64]) -> Scored:
        """The positions and the scores of a probe, at the given positions."""
        here = np.isin(self._positions[name], positions)
        return self._positions[name][here], self[name][here]


@dataclass(frozen=True)
class Verdict:
    """The first position at which the value of a probe is above the probe's threshold.

    Attributes:
        position: the token's position, counted from the prompt's first token.
        value: the aggregate at this position, or the score if the probe has no aggregate. A value
            that overflowed is inf.
    """

    position: int
    value: float


@dataclass(frozen=True)
class Counts:
    """How the scope of a choice ended, and how many of the choice's rows and scores arrived."""

    status: str = "streaming"
    error: str | None = None
    expected: int = 0
    delivered: int = 0
    dropped: int = 0
    sinks: Mapping[str, Mapping[str, object]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ScopeData(OverStreams, Counts):
    """The rows and scores of one choice; in a chunk, only the new rows and scores.

    `data["resid_post", 5]` is an array [positions, hidden_size], and `data["q", 5]` is an array
    [positions, num_heads, head_size]. The dtype of an array is float32 or float16; bfloat16
    becomes float32. `data["resid_post", 5, "before"]` has rows that were read before edits.
    Iteration, `len` and `in` use the (site, layer) of each stream, as in a ScopeResult.

    Attributes:
        status: "complete", "incomplete", "aborted" or "failed"; "streaming" in every chunk except
            the last chunk of its choice.
        error: the reason why the scope failed, if status is "failed".
        expected, delivered, dropped: the number of rows and scores that were expected, delivered or
            dropped. 0 while `status` is "streaming".
        sinks: maps the name of each sink to the sink's fields: `status`, `reason`, `expected`,
            `delivered`, `dropped` and `names` (the names of the sink's files). If the request was
            sent with the operator's key, a sink also has the field `details`, with the paths of the
            files.
        features: maps the name of a `Features` to its SparseFeatures.
        lens: the TopTokens, by the name of a `LensTopK` and then by layer.
        aggregates: maps the name of each probe that has an aggregate to the probe's aggregates.
        verdicts: maps the name of each probe that has a verdict to the verdict. A chunk repeats the
            verdicts of the earlier chunks.
        begun: maps the name of a probe with `after` to the first position that the probe scores. A
            probe has no entry before the verdict of the probe that its `after` names. A chunk
            repeats the entries of the earlier chunks.
        decisions: the decisions of the request's policy; in a stream, only in the last chunk.
    """

    rows: Mapping[StreamKey, Rows] = field(default_factory=dict, repr=False)
    scores: Scores = field(default_factory=lambda: Scores({}), repr=False)
    features: Mapping[str, SparseFeatures] = field(default_factory=NamedFeatures, repr=False)
    lens: Mapping[str, Mapping[int, TopTokens]] = field(default_factory=dict, repr=False)
    aggregates: Scores = field(default_factory=lambda: Scores({}), repr=False)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict, repr=False)
    begun: Mapping[str, int] = field(default_factory=dict, repr=False)
    decisions: tuple[Decided, ...] = field(default=(), repr=False)

    def keys(self) -> list[tuple[str, int]]:
        """The site and the layer of each stream."""
        return list(dict.fromkeys((site, layer) for site, layer, _ in self.rows))

    def _at(self, stream: object) -> Rows:
        return self._find(*((stream,) if isinstance(stream, str) else stream))  # type: ignore[misc]

    def __getitem__(self, stream: tuple[str, int] | StreamKey | str) -> NDArray[np.generic]:
        return self._at(stream).numpy

    def positions(
        self, site: str, layer: int | None = None, when: str | None = None
    ) -> NDArray[np.int64]:
        """The positions of a stream's rows, int64 [n], ascending. An example of a call is
        `data.positions("resid_post", 5)`."""
        return self._find(site, layer, when).positions

    def tensor(self, site: str, layer: int | None = None, when: str | None = None) -> Tensor:
        """The rows of a stream as a torch tensor, in the dtype in which the server sent them.

        Raises:
            ImportError: torch is not installed.
        """
        import torch

        rows = self._find(site, layer, when)
        found = torch.from_numpy(np.array(rows.bits))
        return found.view(torch.bfloat16) if rows.dtype == "bfloat16" else found

    def _find(self, site: str, layer: int | None = None, when: str | None = None) -> Rows:
        site, layer = ALIASES.get(site, site), layer_of(site, layer)
        for side in (when,) if when else ("after", "before"):
            if (rows := self.rows.get((site, layer, side))) is not None:
                return rows
        names = ", ".join(f"{site!r} {layer}" for site, layer in self.keys()) or "nothing"
        asked = f"{site!r} {layer}" + (f" {when!r} edits" if when else "")
        raise KeyError(f"{asked} is not here; this choice read {names}.")


@dataclass(frozen=True)
class ScoredToken:
    """One token and the scores of its own row.

    Attributes:
        position: the token's position, counted from the prompt's first token.
        scores: maps the name of each probe that scored the token to the score. A score that is not
            finite is NaN. The mapping is empty for the token that was sampled last, because the
            model never computes the row of this token.
    """

    id: int
    text: str
    position: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class _Generated:
    index: int
    text: str
    finish_reason: str | None
    scope: ScopeData | None
    tokens: tuple[ScoredToken, ...] = ()
    stop_reason: int | str | None = None


class Choice(_Generated):
    """One completion.

    Attributes:
        scope: the rows and scores. If the request had no actions, `scope` has only the verdicts of
            the operator's monitors, or is None if no monitor has a verdict.
        tokens: the generated tokens with their texts and scores. `tokens` is empty if the request
            has no probes, or if the scores are too many for the answer.
        stop_reason: if finish_reason is "stop", the stop string, the stop token's id, or a sentence
            about the probe or the policy that stopped the choice. None if the model ended the
            choice.
    """


class Chunk(_Generated):
    """The new part of one choice.

    Attributes:
        scope: the new scores. With `scope_stream="rows"`, `scope` also has the new rows. Otherwise
            only the last chunk has rows: all rows of the choice.
        tokens: the tokens whose scores have arrived. Each token is in one chunk only. The text of
            most of these tokens is in the chunk before this chunk. `tokens` is empty if the request
            has no probes.
        stop_reason: as in a Choice. Only the last chunk has a stop_reason.
    """


@dataclass(frozen=True)
class Completion:
    """A whole answer. `raw` is the JSON of the answer."""

    choices: tuple[Choice, ...]
    raw: Mapping[str, object] = field(repr=False)

    @property
    def text(self) -> str:
        return self._only.text

    @property
    def scope(self) -> ScopeData | None:
        return self._only.scope

    @property
    def _only(self) -> Choice:
        if len(self.choices) != 1:
            raise ScopeError(f"there are {len(self.choices)} choices; use answer.choices[i].")
        return self.choices[0]
