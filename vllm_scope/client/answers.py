"""The server's answers: choices with their rows and scores, as numpy.

Owns:  Completion, Choice, Chunk, ScoredToken, ScopeData, Verdict, and the parsing of a choice's
       `scope`.
From:  server.encode (the JSON), server.store (the files), frames (binary answers).

Each size that the server names is checked against the bytes that it sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.client.features import SparseFeatures, sparse_features
from vllm_scope.client.frames import FileTensor, tensors_of
from vllm_scope.client.lens import TopTokens
from vllm_scope.control.policy import Decided
from vllm_scope.errors import ScopeError, shown
from vllm_scope.request.sites import ALIASES

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
#: (site, layer, "after" or "before")
_Stream = tuple[str, int, str]
#: Positions of a probe's scores, int64 [n], and the scores, float32 [n].
_Scored = tuple[NDArray[np.int64], NDArray[np.float32]]
#: dtype in JSON -> numpy's; bfloat16 as its bits.
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8"}
#: dtype in safetensors -> in JSON.
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


@dataclass(frozen=True)
class Rows:
    """Rows in the dtype in which the server sent them.

    Attributes:
        positions: int64 [n], ascending.
        bits: [n, hidden_size], or [n, heads, numbers of a head]; uint16 if dtype is bfloat16,
            which numpy does not have.
        dtype: float32, float16 or bfloat16.
    """

    positions: NDArray[np.int64]
    bits: NDArray[np.generic]
    dtype: str

    @property
    def numpy(self) -> NDArray[np.generic]:
        """The rows in their dtype; bfloat16 becomes float32 without loss."""
        if self.dtype != "bfloat16":
            return self.bits
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


class Scores(dict[str, NDArray[np.float32]]):
    """Name of a probe -> its scores or its aggregates, float32 [n], in position order; NaN if not
    finite."""

    def __init__(self, values: Mapping[str, _Scored]) -> None:
        super().__init__({name: scores for name, (_, scores) in values.items()})
        self._positions = {name: positions for name, (positions, _) in values.items()}

    def positions(self, name: str) -> NDArray[np.int64]:
        """int64 [n], ascending."""
        return self._positions[name]


@dataclass(frozen=True)
class Verdict:
    """The first position at which a probe's value is above its threshold.

    Attributes:
        position: absolute, counted from the prompt's first token.
        value: the aggregate there, or the score if there is no aggregate; inf if it overflowed.
    """

    position: int
    value: float


@dataclass(frozen=True)
class _Counts:
    status: str = "streaming"
    error: str | None = None
    expected: int = 0
    delivered: int = 0
    dropped: int = 0
    sinks: Mapping[str, Mapping[str, object]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ScopeData(_Counts):
    """Rows and scores of one choice, or what is new of them in one chunk.

    `data["resid_post", 5]` is [positions, hidden_size], `data["q", 5]` [positions, heads,
    numbers of a head]: float32 or float16, and float32 for bfloat16.
    `data["resid_post", 5, "before"]` has rows that were read before edits.

    Attributes:
        status: "complete", "incomplete", "aborted" or "failed"; "streaming" in a chunk
            that is not its choice's last.
        error: the reason, if status is "failed".
        expected, delivered, dropped: numbers of rows and scores; 0 while streaming.
        sinks: name of a sink -> status, reason, expected, delivered, dropped, and the names of
            its files (with the operator's key also `details`, which has their paths).
        features: name of a `Features` -> its SparseFeatures.
        lens: name of a `LensTopK` -> layer -> its TopTokens.
        aggregates: as `scores`, of the probes with an aggregate.
        verdicts: name of a probe -> its verdict, for the probes that have one. A chunk has those
            of the earlier chunks too.
        begun: name of a probe with `after` -> the first position that it scores, if its first
            stage has a verdict. A chunk has those of the earlier chunks too.
        decisions: of the request's policy; in a stream, the last chunk has them.
    """

    rows: Mapping[_Stream, Rows] = field(default_factory=dict, repr=False)
    scores: Scores = field(default_factory=lambda: Scores({}), repr=False)
    features: Mapping[str, SparseFeatures] = field(default_factory=dict, repr=False)
    lens: Mapping[str, Mapping[int, TopTokens]] = field(default_factory=dict, repr=False)
    aggregates: Scores = field(default_factory=lambda: Scores({}), repr=False)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict, repr=False)
    begun: Mapping[str, int] = field(default_factory=dict, repr=False)
    decisions: tuple[Decided, ...] = field(default=(), repr=False)

    def keys(self) -> list[tuple[str, int]]:
        """(site, layer) of each stream."""
        return list(dict.fromkeys((site, layer) for site, layer, _ in self.rows))

    def __getitem__(self, stream: tuple[str, int] | _Stream | str) -> NDArray[np.generic]:
        return self._find(*((stream,) if isinstance(stream, str) else stream)).numpy

    def positions(self, site: str, layer: int = 0, when: str | None = None) -> NDArray[np.int64]:
        """int64 [n], ascending, of `data.positions("resid_post", 5)`."""
        return self._find(site, layer, when).positions

    def tensor(self, site: str, layer: int = 0, when: str | None = None) -> Tensor:
        """As a torch tensor, in the model's dtype.

        Raises:
            ImportError: torch is not installed.
        """
        import torch

        rows = self._find(site, layer, when)
        found = torch.from_numpy(np.array(rows.bits))
        return found.view(torch.bfloat16) if rows.dtype == "bfloat16" else found

    def _find(self, site: str, layer: int = 0, when: str | None = None) -> Rows:
        site = ALIASES.get(site, site)
        for side in (when,) if when else ("after", "before"):
            if (rows := self.rows.get((site, layer, side))) is not None:
                return rows
        names = ", ".join(f"{site!r} {layer}" for site, layer in self.keys()) or "nothing"
        raise KeyError(f"{(site, layer, when or 'after')} is not here; this choice read {names}.")


@dataclass(frozen=True)
class ScoredToken:
    """One token and the scores of its own row.

    Attributes:
        position: absolute, counted from the prompt's first token.
        scores: by the probe's name; NaN if not finite. Empty for the token sampled last, whose
            row is never computed.
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


class Choice(_Generated):
    """One completion.

    Attributes:
        scope: None if the request had no actions.
        tokens: of a request with probes, the generated tokens with their texts and scores;
            empty if the server does not send them.
    """


class Chunk(_Generated):
    """The new part of one choice.

    Attributes:
        scope: the new scores, and the new rows if the request asks for them in chunks.
        tokens: the tokens whose scores have arrived, each in one chunk only; mostly tokens of
            the text of the chunk before. Empty without probes.
    """


@dataclass(frozen=True)
class Completion:
    """A whole answer. `raw` is its JSON."""

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


class _RowsBody(msgspec.Struct):
    site: str
    layer: int
    spans: list[tuple[int, int]]
    dtype: str
    shape: list[int]
    when: str = "after"
    data: bytes | None = None
    tensor: str | None = None


class _ScoresBody(msgspec.Struct):
    spans: list[tuple[int, int]]
    values: list[float | None] | None = None
    aggregates: list[float | None] | None = None


class _FeaturesBody(msgspec.Struct):
    spans: list[tuple[int, int]]
    indices: list[list[int]] | None = None
    values: list[list[float | None]] | None = None
    tensor: str | None = None


class _LensBody(msgspec.Struct):
    name: str
    layer: int
    spans: list[tuple[int, int]]
    token_ids: list[list[int]] | None = None
    log_probs: list[list[float | None]] | None = None
    tensor: str | None = None


class _VerdictBody(msgspec.Struct):
    position: int
    value: float | None


class _DecidedBody(msgspec.Struct):
    position: int
    acts_from: int | None
    scale: dict[str, float]
    stop: bool
    flag: str | None
    error: str | None


class _ScopeBody(msgspec.Struct):
    rows: list[_RowsBody] = []
    scores: dict[str, _ScoresBody] = {}
    features: dict[str, _FeaturesBody] = {}
    lens: list[_LensBody] = []
    verdicts: dict[str, _VerdictBody] = {}
    begun: dict[str, int] = {}
    decisions: list[_DecidedBody] = []


class _TokenBody(msgspec.Struct):
    id: int
    text: str
    position: int
    scores: dict[str, float | None]


def converted(found: object, kind: type[T], what: str) -> T:
    """The server's JSON as a `kind`. Raises ScopeError if it has another form."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ScopeError(f"the server's {what} has an unknown form: {error}.") from None


def parse_scope(
    body: Mapping[str, object], file: bytes | None, beside: Mapping[str, FileTensor] | None = None
) -> ScopeData:
    """A choice's `scope`.

    Args:
        file: the content of its `result`, if it has one.
        beside: the choice's tensors in a binary answer.

    Raises:
        ScopeError: a server of this version does not send that.
    """
    counts = converted(body, _Counts, "scope")
    told = converted(body, _ScopeBody, "scope")
    rows: dict[_Stream, Rows] = {}
    scores: dict[str, _Scored] = {}
    aggregates: dict[str, _Scored] = {}
    # The file has all values; an item without values says which of them are new.
    filed = ScopeData() if file is None else parse_file(file)
    here = _parse_tensors(beside or {})
    for one in told.rows:
        stream, positions = (one.site, one.layer, one.when), _positions(one.spans)
        if one.tensor is not None:
            rows[stream] = _here(here.rows, stream, one.tensor)
        elif one.data is not None:
            rows[stream] = Rows(positions, _array(one.data, one.dtype, one.shape), one.dtype)
        elif stream in filed.rows:
            whole = filed.rows[stream]
            new = np.isin(whole.positions, positions)
            rows[stream] = Rows(whole.positions[new], whole.bits[new], whole.dtype)
    for name, each in told.scores.items():
        positions = _positions(each.spans)
        if each.values is not None:
            scores[name] = (positions, _numbers(each.values))
            if each.aggregates is not None:
                aggregates[name] = (positions, _numbers(each.aggregates))
        elif name in filed.scores:
            at = filed.scores.positions(name)
            new = np.isin(at, positions)
            scores[name] = (at[new], filed.scores[name][new])
            if name in filed.aggregates:
                aggregates[name] = (at[new], filed.aggregates[name][new])
    features = {}
    for name, sparse in told.features.items():
        tokens = _positions(sparse.spans)
        if sparse.tensor is not None:
            features[name] = _here(here.features, name, sparse.tensor)
        elif sparse.indices is not None and sparse.values is not None:
            features[name] = sparse_features(tokens, sparse.indices, sparse.values)
        elif name in filed.features:
            features[name] = filed.features[name].at(tokens)
    lens: dict[str, dict[int, TopTokens]] = {}
    for each_lens in told.lens:
        positions, (name, layer) = _positions(each_lens.spans), (each_lens.name, each_lens.layer)
        if each_lens.tensor is not None:
            own = lens.setdefault(name, {})
            own[layer] = _here(here.lens.get(name, {}), layer, each_lens.tensor)
        elif each_lens.token_ids is not None and each_lens.log_probs is not None:
            ids, log_probs = _table(each_lens.token_ids), _table(each_lens.log_probs)
            lens.setdefault(name, {})[layer] = TopTokens(
                positions, ids.astype(np.int64), log_probs.astype(np.float32)
            )
        elif layer in filed.lens.get(name, {}):
            lens.setdefault(name, {})[layer] = filed.lens[name][layer].at(positions)
    verdicts = {
        name: Verdict(each.position, math.inf if each.value is None else each.value)
        for name, each in told.verdicts.items()
    }
    return ScopeData(
        **vars(counts), rows=rows, scores=Scores(scores), aggregates=Scores(aggregates),
        features=features, lens=lens, verdicts=verdicts, begun=told.begun,
        decisions=tuple(Decided(*msgspec.structs.astuple(one)) for one in told.decisions),
    )  # fmt: skip


def _here(found: Mapping[K, V], key: K, tensor: str) -> V:
    if key not in found:
        raise ScopeError(f"the server's answer names the tensor {shown(tensor)} and has none.")
    return found[key]


def parse_tokens(body: Mapping[str, object]) -> tuple[ScoredToken, ...]:
    """The tokens of a choice's `scope`.

    Raises:
        ScopeError: a server of this version does not send that.
    """
    given = body.get("tokens", [])
    try:
        found = msgspec.convert(given, list[_TokenBody])
    except msgspec.ValidationError:
        raise ScopeError(
            f"the server's tokens are not of id, text, position and scores: {shown(given)}."
        ) from None
    return tuple(
        ScoredToken(
            each.id, each.text, each.position,
            {name: math.nan if value is None else value for name, value in each.scores.items()},
        )
        for each in found
    )  # fmt: skip


def parse_file(file: bytes) -> ScopeData:
    """The content of a result's file.

    Raises:
        ScopeError: it is not a file of a server of this version.
    """
    return _parse_tensors(tensors_of(file, "result"))


def _parse_tensors(found: Mapping[str, FileTensor]) -> ScopeData:
    dtypes = {name: _FILE_DTYPES.get(one["dtype"], one["dtype"]) for name, one in found.items()}
    arrays = {name: _array(o["data"], dtypes[name], o["shape"]) for name, o in found.items()}
    rows: dict[_Stream, Rows] = {}
    scores: dict[str, _Scored] = {}
    aggregates: dict[str, _Scored] = {}
    features: dict[str, SparseFeatures] = {}
    lens: dict[str, dict[int, TopTokens]] = {}
    for name in (n for n in arrays if f"{n}.positions" in arrays):
        if name.startswith("features."):
            coo = (arrays[f"{name}.{part}"] for part in ("positions", "indices", "tokens"))
            at, indices, tokens = (one.astype(np.int64, copy=False) for one in coo)
            values = arrays[name].astype(np.float32, copy=False)
            features[name.removeprefix("features.")] = SparseFeatures(at, indices, values, tokens)
            continue
        positions = arrays[f"{name}.positions"].astype(np.int64, copy=False)
        if name.startswith("lens."):
            called, _, layer = name.removeprefix("lens.").rpartition(".")
            ids = arrays[f"{name}.token_ids"].astype(np.int64, copy=False)
            values = arrays[name].astype(np.float32, copy=False)
            lens.setdefault(called, {})[int(layer)] = TopTokens(positions, ids, values)
            continue
        if name.startswith("scores."):
            probe = name.removeprefix("scores.")
            for tensor, into in ((name, scores), (f"aggregates.{probe}", aggregates)):
                if tensor in arrays:
                    into[probe] = (positions, arrays[tensor].astype(np.float32, copy=False))
            continue
        site, layer, *when = name.split(".")
        stream = (site, int(layer), when[0] if when else "after")
        rows[stream] = Rows(positions, arrays[name], dtypes[name])
    return ScopeData(
        status="complete", rows=rows, scores=Scores(scores), aggregates=Scores(aggregates),
        features=features, lens=lens,
    )  # fmt: skip


def _table(values: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """[n, k]; None becomes NaN."""
    return np.array(values, np.float64).reshape(len(values), -1 if values else 0)


def _numbers(values: Sequence[float | None]) -> NDArray[np.float32]:
    """None becomes NaN."""
    return np.array(values, np.float32)


def _positions(spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    parts = [np.arange(first, last, dtype=np.int64) for first, last in spans]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _array(data: bytes, dtype: str, shape: Sequence[int]) -> NDArray[np.generic]:
    if dtype not in _DTYPES:
        raise ScopeError(f"the server's rows are {shown(dtype)}, which this client does not know.")
    bits = np.frombuffer(data, _DTYPES[dtype])
    if bits.size != math.prod(shape):
        raise ScopeError(f"the server sent {bits.size} numbers for rows of shape {shape}.")
    return bits.reshape(shape)
