"""The JSON of a choice's `scope`, in the server's format (docs/http.md).

Owns:  ScopeBody and its parts; TokenBody; FileBody (the metadata of a result's file).
From:  server.encode (which writes the JSON).   To: parsing.

The values of an item are in the JSON (`data`, `values`, ...), in a tensor of a binary answer
(`tensor`), or in the result's file.
"""

from __future__ import annotations

import msgspec

from vllm_scope.request.read_features import ReadFeatures


class RowsBody(msgspec.Struct):
    site: str
    layer: int
    spans: list[tuple[int, int]]
    dtype: str
    shape: list[int]
    when: str = "after"
    data: bytes | None = None
    tensor: str | None = None


class ScoresBody(msgspec.Struct):
    spans: list[tuple[int, int]]
    values: list[float | None] | None = None
    aggregates: list[float | None] | None = None


class FeaturesBody(msgspec.Struct):
    spans: list[tuple[int, int]]
    indices: list[list[int]] | None = None
    values: list[list[float | None]] | None = None
    tensor: str | None = None
    num_features: int | None = None
    asked: tuple[int, ...] | None = None


class LensBody(msgspec.Struct):
    name: str
    layer: int
    spans: list[tuple[int, int]]
    token_ids: list[list[int]] | None = None
    log_probs: list[list[float | None]] | None = None
    tensor: str | None = None


class VerdictBody(msgspec.Struct):
    position: int
    value: float | None


class DecidedBody(msgspec.Struct):
    position: int
    acts_from: int | None
    scale: dict[str, float]
    stop: bool
    flag: str | None
    error: str | None


class ScopeBody(msgspec.Struct):
    rows: list[RowsBody] = []
    scores: dict[str, ScoresBody] = {}
    features: dict[str, FeaturesBody] = {}
    lens: list[LensBody] = []
    verdicts: dict[str, VerdictBody] = {}
    begun: dict[str, int] = {}
    decisions: list[DecidedBody] = []


class FileBody(msgspec.Struct):
    """The metadata of a result's file."""

    features: dict[str, ReadFeatures] = {}


class TokenBody(msgspec.Struct):
    id: int
    text: str
    position: int
    scores: dict[str, float | None]
