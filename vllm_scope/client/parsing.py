"""The server's JSON, files and binary answers, parsed into answers.

Owns:  `parse_scope` (of a choice), `parse_tokens`, `parse_file`, `converted`.
From:  server.encode (the JSON), server.store (the files), frames (binary answers).   To: calls.

Each size that the server names is checked against the bytes that it sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.client.answers import (
    Counts,
    Rows,
    ScopeData,
    Scored,
    ScoredToken,
    Scores,
    StreamKey,
    Verdict,
)
from vllm_scope.client.features import SparseFeatures, sparse_features
from vllm_scope.client.frames import FileTensor, tensors_of
from vllm_scope.client.lens import TopTokens
from vllm_scope.control.policy import Decided
from vllm_scope.errors import ScopeError, shown

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
#: dtype in JSON -> numpy's; bfloat16 as its bits.
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8"}
#: dtype in safetensors -> in JSON.
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


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
    counts = converted(body, Counts, "scope")
    told = converted(body, _ScopeBody, "scope")
    rows: dict[StreamKey, Rows] = {}
    scores: dict[str, Scored] = {}
    aggregates: dict[str, Scored] = {}
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
    rows: dict[StreamKey, Rows] = {}
    scores: dict[str, Scored] = {}
    aggregates: dict[str, Scored] = {}
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
