"""Results as JSON: counts, positions, scores, and tensors in base64.

Owns:  what a choice's `scope` looks like; docs/http.md describes it.

Positions are written as half-open spans: [[0, 3], [7, 8]] is 0, 1, 2 and 7. JSON has
no NaN: a score that is not finite is null.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.results.column import Column
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import Manifest

#: At most so many scores of a choice are inside the answer.
MAX_INLINE_SCORES = 16_384
#: In a file, a tensor's positions have its name and this ending.
POSITIONS = ".positions"


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


def counts(result: ScopeResult) -> dict[str, Any]:
    """The request's status and counts; and those of each sink, which the counts leave out."""
    body: dict[str, Any] = {
        "status": result.status,
        "error": result.error,
        "expected": result.expected,
        "delivered": result.delivered,
        "dropped": result.dropped,
    }
    if result.manifests:
        body["sinks"] = {sink: _manifest(found) for sink, found in result.manifests.items()}
    return body


def _manifest(found: Manifest) -> dict[str, Any]:
    """A sink's counts. Only the operator's manifests have `details`."""
    body: dict[str, Any] = {
        name: getattr(found, name)
        for name in ("status", "reason", "expected", "delivered", "dropped")
    }
    body["names"] = found.files
    return body | ({"details": found.details} if found.details else {})


def columns(found: Iterable[Column], inline_rows: bool, inline_scores: bool) -> dict[str, Any]:
    """`rows` and `scores`; without the values of what is not inline."""
    rows, scores = [], {}
    for column in found:
        if isinstance(column.label, str):
            scores[column.label] = _scores(column, inline_scores)
        else:
            rows.append(_rows(column, inline_rows))
    return {"rows": rows, "scores": scores}


def tensor_name(label: tuple[str, int, str] | str) -> str:
    """The name of a column's tensor in a file."""
    if isinstance(label, str):
        return f"scores.{label}"
    site, layer, when = label
    return f"{site}.{layer}" + (".before" if when == "before" else "")


def tensors(result: ScopeResult) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole result as the tensors and the metadata of a safetensors file."""
    found = {}
    for column in result.columns():
        name = tensor_name(column.label)
        found[name] = column.values.contiguous()
        found[f"{name}{POSITIONS}"] = torch.from_numpy(np.ascontiguousarray(column.positions))
    return found, {"scope": json.dumps(counts(result))}


def _rows(column: Column, inline: bool) -> dict[str, Any]:
    assert not isinstance(column.label, str)
    site, layer, when = column.label
    body: dict[str, Any] = {"site": site, "layer": layer}
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
        body["data"] = base64.b64encode(data.data).decode()
    return body


def _scores(column: Column, inline: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"spans": spans(column.positions)}
    if inline:
        values = column.values.tolist()
        body["values"] = [value if math.isfinite(value) else None for value in values]
    return body
