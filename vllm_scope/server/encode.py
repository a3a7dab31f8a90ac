"""Results as JSON: counts, positions, scores, features, and tensors in base64.

Owns:  what a choice's `scope` looks like; docs/http.md describes it.

Positions are written as half-open spans: [[0, 3], [7, 8]] is 0, 1, 2 and 7. JSON has
no NaN: a score that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pybase64
import torch
from torch import Tensor

from vllm_scope.batch.readout import Verdict
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.control.policy import Decided
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.results.column import Column
from vllm_scope.results.features import SparseFeatures
from vllm_scope.results.lens import TopTokens
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import Manifest

Json = dict[str, object]
#: A column's: site, layer and "after" or "before" of a stream; the name of a probe or of features.
Label = tuple[str, int, str] | str

#: At most so many numbers of scores, features and lenses of a choice are inside the answer.
MAX_INLINE_SCORES = 16_384
#: In a file, a tensor's positions have its name and this ending; and the other tensors of features
#: and lenses.
POSITIONS, INDICES, TOKENS = ".positions", ".indices", ".tokens"
TOKEN_IDS = ".token_ids"


def for_callers(columns: Iterable[Column]) -> list[Column]:
    """The columns without the scores of an operator's monitors."""
    return [c for c in columns if not (isinstance(c.label, str) and c.label.startswith(MONITOR))]


def spans(positions: np.ndarray) -> list[list[int]]:
    """Ascending positions as half-open spans."""
    if not len(positions):
        return []
    first, last = int(positions[0]), int(positions[-1]) + 1
    if last - first == len(positions):  # most often
        return [[first, last]]
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    ends = positions[np.concatenate([breaks, [len(positions) - 1]])] + 1
    return [[int(a), int(b)] for a, b in zip(starts, ends, strict=True)]


def counts(result: ScopeResult) -> Json:
    """The request's status and counts; and those of each sink, which the counts leave out."""
    body = _fields(result, "status", "error")
    if result.manifests:
        body["sinks"] = {sink: _manifest(found) for sink, found in result.manifests.items()}
    return body


def _fields(of: ScopeResult | Manifest, *names: str) -> Json:
    return {name: getattr(of, name) for name in (*names, "expected", "delivered", "dropped")}


def _manifest(found: Manifest) -> Json:
    """A sink's counts. Only the operator's manifests have `details`."""
    body = _fields(found, "status", "reason") | {"names": found.files}
    return body | ({"details": found.details} if found.details else {})


def tensor_name(label: Label) -> str:
    """The name of a column's tensor in a file."""
    if isinstance(label, str):
        return f"scores.{label}"
    site, layer, when = label
    return f"{site}.{layer}" + (".before" if when == "before" else "")


def tensors(result: ScopeResult) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole result as the tensors and the metadata of a safetensors file."""
    found: dict[str, Tensor] = {}
    for column in for_callers(result.columns()):
        if isinstance(column.source, SparseRows):
            found |= _sparse_tensors(column, column.source)
            continue
        name = tensor_name(column.label)
        found[name] = column.values.contiguous()
        found[f"{name}{POSITIONS}"] = torch.from_numpy(np.ascontiguousarray(column.positions))
        if column.aggregates is not None:
            found[f"aggregates.{column.label}"] = column.aggregates.contiguous()
    return found, {"scope": json.dumps(counts(result))}


def _sparse_tensors(column: Column, rows: SparseRows) -> dict[str, Tensor]:
    """COO, and the positions that were encoded; of a lens two dense tensors."""
    positions = torch.from_numpy(np.ascontiguousarray(column.positions))
    if rows.lens is not None:
        top, name = TopTokens.of_rows(rows, positions), f"lens.{column.label}"
        return {
            name: top.log_probs.contiguous(), f"{name}{POSITIONS}": positions,
            f"{name}{TOKEN_IDS}": top.token_ids,
        }  # fmt: skip
    sparse = SparseFeatures(rows, positions)
    name = f"features.{column.label}"
    return {
        name: sparse.values, f"{name}{POSITIONS}": sparse.positions,
        f"{name}{INDICES}": sparse.indices, f"{name}{TOKENS}": sparse.tokens,
    }  # fmt: skip


def rows(columns: Iterable[Column], inline: bool) -> list[Json]:
    """`rows`; without the values if they are not inline."""
    return [_rows(column, inline) for column in columns]


def _rows(column: Column, inline: bool) -> Json:
    assert not isinstance(column.label, str)
    site, layer, when = column.label
    body: Json = {"site": site, "layer": layer}
    if when == "before":
        body["when"] = when
    body |= {
        "spans": spans(column.positions),
        "dtype": str(column.source.dtype).removeprefix("torch."),
        "shape": [len(column.positions), *column.row_shape],
    }
    if isinstance(column.source, EncodedRows):
        body["codec"] = column.source.codec.codec
    if inline:
        data = column.values.contiguous().view(torch.uint8).numpy()
        body["data"] = pybase64.b64encode_as_string(data.data)
    return body


def told(columns: Iterable[Column], late: Iterable[Column] = ()) -> Json:
    """The field `scores`, and the fields `features` and `lens` if there are any; those of `late`
    without the values."""
    of_probes: list[list[Column]] = [[], []]
    of_features: dict[str, Json] = {}
    of_lenses: list[Json] = []
    for i, some in enumerate((columns, late)):
        for column in some:
            if isinstance(column.source, SparseRows) and column.source.lens is not None:
                of_lenses.append(_lens(column, column.source, i == 0))
            elif isinstance(column.source, SparseRows):
                of_features[str(column.label)] = _features(column, column.source, i == 0)
            else:
                of_probes[i].append(column)
    found: Json = {"scores": scores(of_probes[0], True) | scores(of_probes[1], False)}
    found |= {"features": of_features} if of_features else {}
    return found | ({"lens": of_lenses} if of_lenses else {})


def scores(columns: Iterable[Column], inline: bool) -> Json:
    """`scores`, by the probes' names; without the values if they are not inline."""
    return {str(column.label): _scores(column, inline) for column in columns}


def _features(column: Column, rows: SparseRows, inline: bool) -> Json:
    """`indices` and `values` have a list for each position of `spans`."""
    body: Json = {"spans": spans(column.positions)}
    if inline:
        sparse = SparseFeatures(rows, torch.arange(len(rows)))
        counts = rows.counts.tolist()
        body["indices"] = [some.tolist() for some in sparse.indices.split(counts)]
        body["values"] = [_numbers(some) for some in sparse.values.split(counts)]
    return body


def _lens(column: Column, rows: SparseRows, inline: bool) -> Json:
    """One layer of a lens. `token_ids` and `log_probs` have a list for each position of `spans`."""
    assert rows.lens is not None
    name, layer = rows.lens
    body: Json = {"name": name, "layer": layer, "spans": spans(column.positions)}
    if inline:
        top = TopTokens.of_rows(rows, torch.from_numpy(column.positions))
        body["token_ids"] = top.token_ids.tolist()
        body["log_probs"] = [_numbers(some) for some in top.log_probs]
    return body


def num_numbers(columns: Iterable[Column]) -> int:
    """How many numbers of scores, features and lenses `scores` writes inline."""
    total = 0
    for column in columns:
        if isinstance(column.source, SparseRows):
            # An empty position takes a pair of brackets.
            total += len(column.positions) + 2 * int(column.source.counts.sum())
        else:
            total += len(column.positions) * (1 if column.aggregates is None else 2)
    return total


def _scores(column: Column, inline: bool) -> Json:
    body: Json = {"spans": spans(column.positions)}
    if inline:
        body["values"] = _numbers(column.values)
        if column.aggregates is not None:
            body["aggregates"] = _numbers(column.aggregates)
    return body


def verdicts(found: Mapping[str, Verdict], begun: Mapping[str, int]) -> Json:
    """The fields `verdicts` and `begun`; each is absent if it has nothing."""
    told: Json = {
        name: {"position": position, "value": value if math.isfinite(value) else None}
        for name, (position, value) in found.items()
    }
    body: Json = {"verdicts": told, "begun": dict(begun)}
    return {name: value for name, value in body.items() if value}


def decisions(found: Sequence[Decided]) -> Json:
    """The field `decisions`; absent if a policy has decided nothing."""
    told = [msgspec.structs.asdict(one) for one in found]
    return {"decisions": told} if told else {}


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
