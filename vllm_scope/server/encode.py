"""Encodes results as JSON (counts, positions, scores and features), and as named tensors.

Owns:  the format of a choice's `scope`, which docs/http.md describes.

Positions are written as half-open spans: [[0, 3], [7, 8]] means 0, 1, 2 and 7. JSON has no NaN,
therefore a score that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.readout import Verdict
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.control.policy import Decided
from vllm_scope.files.buffers import bytes_of
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.results.column import Column
from vllm_scope.results.features import SparseFeatures
from vllm_scope.results.lens import TopTokens
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import Manifest

Json = dict[str, object]
#: A tensor's bytes, without a copy.
Buffer = bytes | memoryview
#: A function that adds a column's values to the answer. The function returns fields for the
#: column's JSON item, which say where the values are.
Values = Callable[[Column], Json]
#: The name of a column. The name of a stream is (site, layer, "after" or "before"). The name of a
#: probe or of features is the action's name. For one layer of a lens, the name is the
#: result of `request.resolved.lens_label`.
Label = tuple[str, int, str] | str
Spans = list[list[int]]

#: The largest count of numbers of scores, features and lenses inside the answer, for one choice.
MAX_INLINE_SCORES = 16_384
#: The largest number of exact spans for columns whose values are in a file. For more spans, the
#: result of `wide_spans` is used, because so many spans could take more memory and time than the
#: values.
MAX_LATE_SPANS = 16_384
#: Endings of tensor names in a file. Every column has a tensor with the ending `.positions`.
#: Features also have tensors with the endings `.indices` and `.tokens`. Lenses also have a tensor
#: with the ending `.token_ids`.
POSITIONS, INDICES, TOKENS = ".positions", ".indices", ".tokens"
TOKEN_IDS = ".token_ids"
ENDINGS = (POSITIONS, INDICES, TOKENS, TOKEN_IDS)

#: The result of `wide_spans` if the exact spans are few.
NO_SPANS: Mapping[Label, Spans] = {}


def for_callers(columns: Iterable[Column]) -> list[Column]:
    """The columns that callers receive: all columns except the scores of an operator's monitors."""
    return [c for c in columns if not (isinstance(c.label, str) and is_monitor(c.label))]


def spans(positions: np.ndarray) -> Spans:
    """Convert ascending positions to half-open spans."""
    if not len(positions):
        return []
    first, last = int(positions[0]), int(positions[-1]) + 1
    if last - first == len(positions):  # the most frequent case: no position is missing
        return [[first, last]]
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    ends = positions[np.concatenate([breaks, [len(positions) - 1]])] + 1
    return [[int(a), int(b)] for a, b in zip(starts, ends, strict=True)]


def wide_spans(late: Sequence[Column], whole: Iterable[Column]) -> dict[Label, Spans]:
    """Spans for columns whose values are in a file, if their exact spans would be more than
    MAX_LATE_SPANS. Otherwise empty.

    The file has all values of a column, at some positions. A wide span can also contain positions
    at which the file has no value. For example, the file has values at 0, 2, 4 and 7, and `late`
    has 0, 2 and 4. The exact spans are [[0, 1], [2, 3], [4, 5]], and the only wide span is [0, 5].

    Args:
        late: columns with the positions that a chunk or an answer names.
        whole: columns with all positions, which include the columns of `late`.
    """
    num_spans = 0
    for column in late:
        num_spans += int(np.count_nonzero(np.diff(column.positions) != 1)) + 1
        if num_spans > MAX_LATE_SPANS:
            break
    else:
        return {}
    every = {column.label: column.positions for column in whole}
    return {one.label: _wide(one.positions, every[one.label]) for one in late}


def _wide(positions: np.ndarray, every: np.ndarray) -> Spans:
    """Half-open spans that contain all `positions`, and no other position of `every`. Both arrays
    are ascending."""
    places = spans(np.searchsorted(every, positions))
    return [[int(every[first]), int(every[last - 1]) + 1] for first, last in places]


def counts(result: ScopeResult) -> Json:
    """The status and counts of the request, and of each sink. The request's counts leave out the
    rows and scores that go to sinks."""
    body = _fields(result, "status", "error")
    if result.manifests:
        body["sinks"] = {sink: _manifest(found) for sink, found in result.manifests.items()}
    return body


def _fields(of: ScopeResult | Manifest, *names: str) -> Json:
    return {name: getattr(of, name) for name in (*names, "expected", "delivered", "dropped")}


def _manifest(found: Manifest) -> Json:
    """A sink's counts. A manifest has `details` only if the request has the operator's key."""
    body = _fields(found, "status", "reason") | {"names": found.files}
    return body | ({"details": found.details} if found.details else {})


def tensor_name(column: Column) -> str:
    """The name of a column's tensor in a file."""
    if isinstance(column.label, str):
        lens = column.source.lens if isinstance(column.source, SparseRows) else None
        sparse = isinstance(column.source, SparseRows)
        kind = "lens" if lens is not None else "features" if sparse else "scores"
        return f"{kind}.{column.label}"
    site, layer, when = column.label
    return f"{site}.{layer}" + (".before" if when == "before" else "")


def tensors(result: ScopeResult) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole result as the tensors and the metadata of a safetensors file."""
    found: dict[str, Tensor] = {}
    read: dict[str, Json] = {}
    for column in for_callers(result.columns()):
        found |= tensors_of(column)
        if isinstance(column.source, SparseRows) and column.source.lens is None:
            read[str(column.label)] = _read(column.source)
    body = counts(result) | ({"features": read} if read else {})
    return found, {"scope": json.dumps(body)}


def tensors_of(column: Column) -> dict[str, Tensor]:
    """The values and the positions of a column as contiguous tensors, by name."""
    name = tensor_name(column)
    positions = torch.from_numpy(np.ascontiguousarray(column.positions))
    if isinstance(column.source, SparseRows):
        return _sparse_tensors(name, column.source, positions)
    found = {name: column.values.contiguous(), f"{name}{POSITIONS}": positions}
    if column.aggregates is not None:
        found[f"aggregates.{column.label}"] = column.aggregates.contiguous()
    return found


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor. If the tensor is contiguous, the bytes are not copied."""
    return bytes_of(tensor).data


def _sparse_tensors(name: str, rows: SparseRows, positions: Tensor) -> dict[str, Tensor]:
    """The tensors of a column of features or of a lens. Features become a sparse matrix (COO) and
    the positions whose features arrived. The tokens of a lens become two dense tensors (ids and
    log-probabilities) and the tokens' positions."""
    if rows.lens is not None:
        top = TopTokens.of_rows(rows, positions)
        return {
            name: top.log_probs.contiguous(), f"{name}{POSITIONS}": positions,
            f"{name}{TOKEN_IDS}": top.token_ids.contiguous(),
        }  # fmt: skip
    sparse = SparseFeatures(rows, positions)
    return {
        name: sparse.values, f"{name}{POSITIONS}": sparse.positions,
        f"{name}{INDICES}": sparse.indices, f"{name}{TOKENS}": sparse.tokens,
    }  # fmt: skip


def rows(
    columns: Iterable[Column], values: Values | None, wide: Mapping[Label, Spans] = NO_SPANS
) -> list[Json]:
    """The items of the field `rows`. If `values` is None, the items have no values, and `wide` is
    the result of `wide_spans`."""
    return [_rows(column, wide) | (values(column) if values else {}) for column in columns]


def _spans(column: Column, wide: Mapping[Label, Spans]) -> Spans:
    """The column's spans in `wide`, or the column's exact spans."""
    return wide[column.label] if column.label in wide else spans(column.positions)


def _rows(column: Column, wide: Mapping[Label, Spans]) -> Json:
    assert not isinstance(column.label, str)
    site, layer, when = column.label
    body: Json = {"site": site, "layer": layer}
    if when == "before":
        body["when"] = when
    body |= {
        "spans": _spans(column, wide),
        "dtype": str(column.source.dtype).removeprefix("torch."),
        "shape": [len(column.positions), *column.row_shape],
    }
    if isinstance(column.source, EncodedRows):
        body["codec"] = column.source.codec.codec
    return body


def told(
    columns: Iterable[Column],
    late: Iterable[Column] = (),
    values: Values | None = None,
    said: Container[object] = (),
    wide: Mapping[Label, Spans] = NO_SPANS,
) -> Json:
    """The field `scores`, and the fields `features` and `lens` if they are not empty.

    Args:
        late: columns whose values are left out.
        values: a function that receives the values of features and lenses. If `values` is None, the
            values of features and lenses are numbers in the JSON.
        said: labels of features whose `num_features` and `asked` are left out, because an earlier
            chunk has these fields.
        wide: the result of `wide_spans` for `late`.
    """
    of_probes: list[list[Column]] = [[], []]
    of_features: dict[str, Json] = {}
    of_lenses: list[Json] = []
    for i, some in enumerate((columns, late)):
        for column in some:
            if not isinstance(column.source, SparseRows):
                of_probes[i].append(column)
                continue
            inline = i == 0
            body = values(column) if inline and values else {}
            if column.source.lens is not None:
                of_lenses.append(_lens(column, column.source, inline and not values, wide) | body)
            else:
                found = _features(column, column.source, inline and not values, wide)
                read = {} if column.label in said else _read(column.source)
                of_features[str(column.label)] = found | body | read
    fields: Json = {"scores": scores(of_probes[0], True) | scores(of_probes[1], False, wide)}
    fields |= {"features": of_features} if of_features else {}
    return fields | ({"lens": of_lenses} if of_lenses else {})


def scores(columns: Iterable[Column], inline: bool, wide: Mapping[Label, Spans] = NO_SPANS) -> Json:
    """The field `scores`, by the probes' names. If `inline` is False, the field has no values, and
    `wide` is the result of `wide_spans`."""
    return {str(column.label): _scores(column, inline, wide) for column in columns}


def _features(column: Column, rows: SparseRows, inline: bool, wide: Mapping[Label, Spans]) -> Json:
    """Encode the result of one `Features` as JSON. `indices` and `values` have a list for each
    position of `spans`."""
    body: Json = {"spans": _spans(column, wide)}
    if inline:
        sparse = SparseFeatures(rows, torch.arange(len(rows)))
        counts = rows.counts.tolist()
        body["indices"] = [some.tolist() for some in sparse.indices.split(counts)]
        body["values"] = [_numbers(some) for some in sparse.values.split(counts)]
    return body


def _read(rows: SparseRows) -> Json:
    """The fields `num_features` and `asked`. A field whose value is not known is absent."""
    found: Json = msgspec.to_builtins(rows.read)
    return found


def _lens(column: Column, rows: SparseRows, inline: bool, wide: Mapping[Label, Spans]) -> Json:
    """Encode one layer of a lens as JSON. `token_ids` and `log_probs` have a list for each position
    of `spans`."""
    assert rows.lens is not None
    name, layer = rows.lens
    body: Json = {"name": name, "layer": layer, "spans": _spans(column, wide)}
    if inline:
        top = TopTokens.of_rows(rows, torch.from_numpy(column.positions))
        body["token_ids"] = top.token_ids.tolist()
        body["log_probs"] = [_numbers(some) for some in top.log_probs]
    return body


def num_numbers(columns: Iterable[Column]) -> int:
    """How many numbers `told` writes into the JSON for columns of scores, features and lenses."""
    total = 0
    for column in columns:
        if isinstance(column.source, SparseRows):
            # Each position counts as one number, because the JSON has an empty list for a position
            # without features.
            total += len(column.positions) + 2 * int(column.source.counts.sum())
        else:
            total += len(column.positions) * (1 if column.aggregates is None else 2)
    return total


def _scores(column: Column, inline: bool, wide: Mapping[Label, Spans]) -> Json:
    body: Json = {"spans": _spans(column, wide)}
    if inline:
        body["values"] = _numbers(column.values)
        if column.aggregates is not None:
            body["aggregates"] = _numbers(column.aggregates)
    return body


def verdicts(found: Mapping[str, Verdict], begun: Mapping[str, int]) -> Json:
    """The fields `verdicts` and `begun`. An empty field is absent."""
    told: Json = {
        name: {"position": position, "value": value if math.isfinite(value) else None}
        for name, (position, value) in found.items()
    }
    body: Json = {"verdicts": told, "begun": dict(begun)}
    return {name: value for name, value in body.items() if value}


def decisions(found: Sequence[Decided]) -> Json:
    """The field `decisions`, which is absent if no policy has made a decision."""
    told = [msgspec.structs.asdict(one) for one in found]
    return {"decisions": told} if told else {}


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
