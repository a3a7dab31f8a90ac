"""Results as JSON: counts, positions, scores, and tensors in base64.

Owns:  what a choice's `scope` looks like; docs/http.md describes it.

Positions are written as half-open spans: [[0, 3], [7, 8]] is 0, 1, 2 and 7. JSON has
no NaN: a score that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
import pybase64
import torch
from torch import Tensor

from vllm_scope.batch.readout import Verdict
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.results.column import Column
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import Manifest

Json = dict[str, object]
#: A column's: site, layer and "after" or "before" of a stream; a probe's name.
Label = tuple[str, int, str] | str

#: At most so many scores of a choice are inside the answer.
MAX_INLINE_SCORES = 16_384
#: In a file, a tensor's positions have its name and this ending.
POSITIONS = ".positions"


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
    found = {}
    for column in for_callers(result.columns()):
        name = tensor_name(column.label)
        found[name] = column.values.contiguous()
        found[f"{name}{POSITIONS}"] = torch.from_numpy(np.ascontiguousarray(column.positions))
        if column.aggregates is not None:
            found[f"aggregates.{column.label}"] = column.aggregates.contiguous()
    return found, {"scope": json.dumps(counts(result))}


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


def scores(columns: Iterable[Column], inline: bool) -> Json:
    """`scores`, by the probes' names; without the values if they are not inline."""
    return {str(column.label): _scores(column, inline) for column in columns}


def _scores(column: Column, inline: bool) -> Json:
    body: Json = {"spans": spans(column.positions)}
    if inline:
        body["values"] = _numbers(column.values)
        if column.aggregates is not None:
            body["aggregates"] = _numbers(column.aggregates)
    return body


def verdicts(found: Mapping[str, Verdict]) -> Json:
    """The field `verdicts`; absent if there is none."""
    if not found:
        return {}
    told = {
        name: {"position": position, "value": value if math.isfinite(value) else None}
        for name, (position, value) in found.items()
    }
    return {"verdicts": told}


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
