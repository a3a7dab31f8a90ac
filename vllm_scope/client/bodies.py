"""The JSON of a choice's `scope`, in the server's format (docs/http.md).

Owns:  ScopeBody and its parts; ResultBody (the name of a result's file); TokenBody; FileBody (the
       metadata of a result's file).
From:  server.encode (which writes the JSON).   To: parsing.

The values of an item are in the JSON (`data`, `values`, ...), in a tensor of a binary answer
(`tensor`), or in the result's file.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_scope.request.read_features import ReadFeatures

#: A number that fits in int64.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
#: A number that is not negative and fits in int64.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Span = tuple[Natural, Natural]


class RowsBody(msgspec.Struct):
    site: str
    layer: int
    spans: list[Span]
    dtype: str
    shape: list[Natural]
    when: str = "after"
    data: bytes | None = None
    tensor: str | None = None


class ScoresBody(msgspec.Struct):
    spans: list[Span]
    values: list[float | None] | None = None
    aggregates: list[float | None] | None = None


class FeaturesBody(msgspec.Struct):
    spans: list[Span]
    indices: list[list[Int64]] | None = None
    values: list[list[float | None]] | None = None
    tensor: str | None = None
    num_features: int | None = None
    asked: tuple[int, ...] | None = None


class LensBody(msgspec.Struct):
    name: str
    layer: int
    spans: list[Span]
    token_ids: list[list[Int64]] | None = None
    log_probs: list[list[float | None]] | None = None
    tensor: str | None = None


class ResultBody(msgspec.Struct):
    id: str


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
