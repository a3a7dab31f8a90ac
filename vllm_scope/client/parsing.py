"""Parses the server's JSON, files and binary answers into the types of answers.py.

Owns:  `parse_scope` (of a choice), `parse_tokens`, `parse_file`, `converted`.
From:  server.encode (the JSON), server.store (the files), frames (binary answers).   To: calls.

Each size that the server names is checked against the bytes that the server sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

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
from vllm_scope.client.bodies import (
    FeaturesBody,
    FileBody,
    LensBody,
    RowsBody,
    ScopeBody,
    ScoresBody,
    Span,
    TokenBody,
)
from vllm_scope.client.features import NamedFeatures, SparseFeatures, sparse_features
from vllm_scope.client.frames import FileTensor, metadata_of, tensors_of
from vllm_scope.client.lens import TopTokens
from vllm_scope.control.policy import Decided
from vllm_scope.errors import ScopeError, shown
from vllm_scope.request.read_features import NOT_KNOWN, ReadFeatures

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
#: Maps a dtype in the JSON to numpy's dtype. bfloat16 is read as uint16.
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8"}
#: The largest number of digits of a layer.
MAX_DIGITS = 9
#: Maps a dtype in safetensors to the dtype in the JSON.
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


def converted(found: object, kind: type[T], what: str) -> T:
    """Convert the server's JSON to the type `kind`. Raises ScopeError if the JSON has another form,
    or if the name of a field has half of a surrogate pair."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ScopeError(f"the server's {what} has an unknown form: {error}.") from None


def parse_scope(
    body: Mapping[str, object],
    file: bytes | None,
    beside: Mapping[str, FileTensor] | None = None,
    read: MutableMapping[str, ReadFeatures] | None = None,
) -> ScopeData:
    """The ScopeData of a choice, from its `scope`.

    Args:
        file: the content of the file that `result` names; None if there is no `result`.
        beside: the choice's tensors in a binary answer.
        read: for a chunk, the features that each `Features` reads, by its name. Only the choice's
            first chunk with values of a `Features` names these features. Therefore the caller
            passes the same mapping for all chunks, and `parse_scope` adds the new names to it.

    Raises:
        ScopeError: the `scope` does not have the format of this version.
    """
    counts = converted(body, Counts, "scope")
    told = converted(body, ScopeBody, "scope")
    at = _Elsewhere(_parse_tensors(beside or {}), ScopeData() if file is None else parse_file(file))
    scores: dict[str, Scored] = {}
    aggregates: dict[str, Scored] = {}
    for name, one in told.scores.items():
        _take_scores(name, one, at.filed, scores, aggregates)
    rows = {(one.site, one.layer, one.when): _rows(one, at) for one in told.rows}
    read = {} if read is None else read
    features = {name: _features(name, one, at, read) for name, one in told.features.items()}
    lens: dict[str, dict[int, TopTokens]] = {}
    for each in told.lens:
        if (tokens := _lens(each, at)) is not None:
            lens.setdefault(each.name, {})[each.layer] = tokens
    verdicts = {
        name: Verdict(each.position, math.inf if each.value is None else each.value)
        for name, each in told.verdicts.items()
    }
    return ScopeData(
        **vars(counts), rows=_there(rows), scores=Scores(scores), aggregates=Scores(aggregates),
        features=NamedFeatures(_there(features)), lens=lens, verdicts=verdicts, begun=told.begun,
        decisions=tuple(Decided(*msgspec.structs.astuple(one)) for one in told.decisions),
    )  # fmt: skip


class _Elsewhere(NamedTuple):
    """Values that are not in the JSON.

    Attributes:
        beside: the tensors of a binary answer. An item of the JSON names its tensor.
        filed: the values in the result's file, which has all values of the choice. If an item of
            the JSON has only positions, the item's values are the file's values at these positions.
    """

    beside: ScopeData
    filed: ScopeData


def _rows(one: RowsBody, at: _Elsewhere) -> Rows | None:
    stream = (one.site, one.layer, one.when)
    if one.tensor is not None:
        return _named(at.beside.rows, stream, one.tensor)
    if one.data is not None:
        rows = _array(one.data, one.dtype, one.shape)
        return Rows(_positions(one.spans, rows.shape), rows, one.dtype)
    filed = at.filed.rows.get(stream)
    return None if filed is None else filed.at(_among(one.spans, filed.positions))


def _take_scores(
    name: str,
    one: ScoresBody,
    filed: ScopeData,
    scores: dict[str, Scored],
    aggregates: dict[str, Scored],
) -> None:
    if one.values is not None:
        scores[name] = _scored(one, one.values)
        if one.aggregates is not None:
            aggregates[name] = _scored(one, one.aggregates)
        return
    for known, found in ((filed.scores, scores), (filed.aggregates, aggregates)):
        if name in known:
            found[name] = known.at(name, _among(one.spans, known.positions(name)))


def _scored(one: ScoresBody, values: Sequence[float | None]) -> Scored:
    numbers = np.array(values, np.float32)  # None becomes NaN
    return _positions(one.spans, numbers.shape), numbers


def _features(
    name: str, one: FeaturesBody, at: _Elsewhere, read: MutableMapping[str, ReadFeatures]
) -> SparseFeatures | None:
    known = read.setdefault(name, ReadFeatures(one.num_features, one.asked))
    if one.tensor is not None:
        found = _named(at.beside.features, name, one.tensor)
    elif one.indices is not None and one.values is not None:
        tokens = _positions(one.spans, (len(one.indices),))
        found = sparse_features(tokens, one.indices, one.values)
    elif name in at.filed.features:
        filed = at.filed.features[name]
        found = filed.at(_among(one.spans, filed.tokens))
    else:
        return None
    return replace(found, num_features=known.num_features, asked=known.asked)


def _lens(one: LensBody, at: _Elsewhere) -> TopTokens | None:
    if one.tensor is not None:
        return _named(at.beside.lens.get(one.name, {}), one.layer, one.tensor)
    if one.token_ids is not None and one.log_probs is not None:
        ids, log_probs = _table(one.token_ids), _table(one.log_probs)
        positions = _positions(one.spans, ids.shape)
        return TopTokens(positions, ids.astype(np.int64), log_probs.astype(np.float32))
    filed = at.filed.lens.get(one.name, {}).get(one.layer)
    return None if filed is None else filed.at(_among(one.spans, filed.positions))


def _there(found: Mapping[K, V | None]) -> dict[K, V]:
    return {key: value for key, value in found.items() if value is not None}


def _named(found: Mapping[K, V], key: K, tensor: str) -> V:
    if key not in found:
        raise ScopeError(f"the server's answer names the tensor {shown(tensor)} but lacks it.")
    return found[key]


def parse_tokens(body: Mapping[str, object]) -> tuple[ScoredToken, ...]:
    """The tokens of a choice's `scope`.

    Raises:
        ScopeError: the tokens do not have the format of this version.
    """
    given = body.get("tokens", [])
    try:
        found = msgspec.convert(given, list[TokenBody])
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise ScopeError(
            f"the server's tokens must have id, text, position and scores; they are {shown(given)}."
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
        ScopeError: the file does not have the format of this version.
    """
    tensors = tensors_of(file, "result")
    try:
        told = msgspec.convert(json.loads(metadata_of(file).get("scope", "{}")), FileBody)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ScopeError(f"the server's result has metadata of an unknown form: {error}.") from None
    return _parse_tensors(tensors, told.features)


def _parse_tensors(
    found: Mapping[str, FileTensor], read: Mapping[str, ReadFeatures] | None = None
) -> ScopeData:
    """The values in the tensors of a file or of a binary answer.

    Args:
        read: the features that each `Features` reads, by its name. If a name is not in `read`, its
            features are not known.

    Raises:
        ScopeError: a tensor has an unknown name, dtype or size, or lacks a tensor that belongs to
            it.
    """
    dtypes = {name: _FILE_DTYPES.get(one["dtype"], one["dtype"]) for name, one in found.items()}
    arrays = {name: _array(o["data"], dtypes[name], o["shape"]) for name, o in found.items()}
    rows: dict[StreamKey, Rows] = {}
    scores: dict[str, Scored] = {}
    aggregates: dict[str, Scored] = {}
    features: dict[str, SparseFeatures] = {}
    lens: dict[str, dict[int, TopTokens]] = {}
    for name in (n for n in arrays if f"{n}.positions" in arrays):
        if name.startswith("features."):
            called = name.removeprefix("features.")
            features[called] = _coo(arrays, name, (read or {}).get(called, NOT_KNOWN))
            continue
        positions = arrays[f"{name}.positions"].astype(np.int64, copy=False)
        _check_lengths(name, arrays[name].shape, positions)
        if name.startswith("lens."):
            called, _, number = name.removeprefix("lens.").rpartition(".")
            layer = _layer(number, name)
            ids = _beside(arrays, name, "token_ids").astype(np.int64, copy=False)
            values = arrays[name].astype(np.float32, copy=False)
            lens.setdefault(called, {})[layer] = TopTokens(positions, ids, values)
            continue
        if name.startswith("scores."):
            probe = name.removeprefix("scores.")
            for tensor, into in ((name, scores), (f"aggregates.{probe}", aggregates)):
                if tensor in arrays:
                    _check_lengths(tensor, arrays[tensor].shape, positions)
                    into[probe] = (positions, arrays[tensor].astype(np.float32, copy=False))
            continue
        site, _, place = name.partition(".")
        number, _, when = place.partition(".")
        stream = (site, _layer(number, name), when or "after")
        rows[stream] = Rows(positions, arrays[name], dtypes[name])
    return ScopeData(
        status="complete", rows=rows, scores=Scores(scores), aggregates=Scores(aggregates),
        features=NamedFeatures(features), lens=lens,
    )  # fmt: skip


def _coo(
    arrays: Mapping[str, NDArray[np.generic]], name: str, read: ReadFeatures
) -> SparseFeatures:
    """The features whose values are the tensor `name`."""
    coo = (_beside(arrays, name, part) for part in ("positions", "indices", "tokens"))
    at, indices, tokens = (one.astype(np.int64, copy=False) for one in coo)
    _check_lengths(name, arrays[name].shape, at, indices)
    _check_lengths(name, tokens.shape, tokens)
    _check_order(name, at, tokens)
    values = arrays[name].astype(np.float32, copy=False)
    return SparseFeatures(at, indices, values, tokens, read.num_features, read.asked)


def _beside(arrays: Mapping[str, NDArray[np.generic]], name: str, part: str) -> NDArray[np.generic]:
    """The tensor "{name}.{part}", which belongs to the tensor `name`. Raises ScopeError if the
    server did not send this tensor."""
    found = arrays.get(f"{name}.{part}")
    if found is None:
        raise ScopeError(f"the server sent the tensor {shown(name)} without its {part}.")
    return found


def _check_lengths(name: str, shape: Sequence[int], *beside: NDArray[np.int64]) -> None:
    """Raises ScopeError if an array in `beside` does not have one number for each item of the
    tensor `name`. `shape` is the shape of this tensor."""
    for one in beside:
        if one.ndim != 1 or one.shape != tuple(shape[:1]):
            raise ScopeError(
                f"the server's tensor {shown(name)} has the shape {list(shape)}, and a tensor "
                f"beside it has the shape {list(one.shape)}; it must have one number for each item."
            )


def _check_order(name: str, at: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Raises ScopeError if the positions `at` or `tokens` are not ascending, or if a position in
    `at` is not in `tokens`."""
    ascending = (at[1:] >= at[:-1]).all() and (tokens[1:] > tokens[:-1]).all()
    if not ascending or not np.isin(at, tokens).all():
        raise ScopeError(
            f"the server's tensor {shown(name)} has values at positions that are not ascending, or "
            "that are not in its tokens."
        )


def _layer(text: str, name: str) -> int:
    """The number of the layer in the name of a tensor."""
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ScopeError(
            f"the server's tensor {shown(name)} has the layer {shown(text)}; it must be a number "
            f"of at most {MAX_DIGITS} digits."
        )
    return int(text)


def _table(values: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """The values as an array [n, k]; None becomes NaN.

    Raises:
        ScopeError: the items of `values` have different lengths.
    """
    lengths = {len(some) for some in values}
    if len(lengths) > 1:
        raise ScopeError(
            f"the server sent tokens of a lens with {shown(sorted(lengths))} items at different "
            "positions; each position must have the same number of items."
        )
    return np.array(values, np.float64).reshape(len(values), -1 if values else 0)


def _positions(spans: Sequence[Span], shape: Sequence[int]) -> NDArray[np.int64]:
    """The positions in the spans, for values of the given shape.

    Raises:
        ScopeError: the spans are not ascending, or do not have one position for each value.
    """
    ends = _ends(spans)
    num_positions = int((ends[1::2] - ends[::2]).sum())
    if tuple(shape[:1]) != (num_positions,):
        raise ScopeError(
            f"the server sent values of shape {list(shape)} for {num_positions} positions; each "
            "position must have one item of the values."
        )
    parts = [np.arange(first, last, dtype=np.int64) for first, last in spans]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _among(spans: Sequence[Span], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the positions that are in the spans. Raises ScopeError if the spans are not
    ascending."""
    # A position is in a span if an odd number of the spans' starts and ends are at or below the
    # position.
    here: NDArray[np.bool_] = np.searchsorted(_ends(spans), positions, side="right") % 2 == 1
    return positions[here]


def _ends(spans: Sequence[Span]) -> NDArray[np.int64]:
    """The start and the end of each span, one after the other. Raises ScopeError if these numbers
    are not ascending."""
    ends: NDArray[np.int64] = np.array(spans, np.int64).reshape(-1)
    if (ends[1:] < ends[:-1]).any():
        raise ScopeError(f"the server sent the spans {shown(spans)}; spans must be ascending.")
    return ends


def _array(data: bytes, dtype: str, shape: Sequence[int]) -> NDArray[np.generic]:
    if dtype not in _DTYPES:
        raise ScopeError(
            f"the rows have the dtype {shown(dtype)}, which this client does not know."
        )
    found: NDArray[np.generic] | None = None
    with suppress(ValueError):
        found = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    # Refuse rows without bytes. A server could send the shape [10**12, 0] without a byte, and the
    # positions of these rows would fill the memory.
    if found is None or (not found.size and len(found)):
        raise ScopeError(
            f"the server sent {len(data)} bytes for rows of {dtype} of shape {shown(list(shape))}; "
            "the bytes must fill this shape."
        )
    return found
