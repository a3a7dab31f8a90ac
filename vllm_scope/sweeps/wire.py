"""Writes and reads a sweep and its table as JSON, for HTTP.

Owns:  AskedSweep (a request's body), `head`, `cell`, `end` and `whole` (the server's answers), and
       TableReader (which makes a table from the events of a server's stream).
To:    server.sweeps, client. docs/http.md shows the forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError, SpecError, checked_flag, shown
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import as_numbers
from vllm_scope.request.sites import parse_layers
from vllm_scope.sweeps.metrics import KL, LogitDifference, Logprob, Metric
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.sweep import Sweep, is_prompts
from vllm_scope.sweeps.table import SweepTable

Json = dict[str, Any]
METRICS: Final[dict[str, type[Any]]] = {
    "logit_difference": LogitDifference, "logprob": Logprob, "kl": KL,
}  # fmt: skip
#: The largest number of dimensions of the caller's rows. The dimensions are prompts, layers,
#: positions, heads, and the numbers of a head.
MOST_DIMENSIONS: Final = 5
#: The largest number of values of a table that a client accepts. The values take 1 GiB.
MOST_VALUES: Final = 1 << 27
#: Fields of a Sweep that have the same form in JSON.
_PLAIN: Final = ("site", "layers", "positions", "heads", "mode", "scale", "together", "receivers")


@dataclass(frozen=True)
class AskedSweep:
    """The body of the request POST /v1/scope/sweeps.

    Attributes:
        prompts: prompts in a form that `vllm_scope.sweep` accepts.
        stream: whether the server sends cells as soon as they are computed. If False, the server
            sends the whole table at the end.
    """

    prompts: list[object]
    sweep: Sweep
    stream: bool = False

    @staticmethod
    def from_json(body: object) -> AskedSweep:
        """Parse the body of a request. Raises SpecError if a field is missing, unknown or wrong."""
        known = ("prompts", "source", "metric", "stream", *_PLAIN)
        given = _object(body, "the body", known, ("prompts", "source", "metric"))
        stream = given.get("stream", False)
        for name in ("stream", "together"):
            checked_flag(given.get(name, False), name)
        plain = {name: given[name] for name in _PLAIN if name in given}
        sweep = Sweep(_source(given["source"]), metric=_metric(given["metric"]), **plain)
        return AskedSweep(_prompts(given["prompts"], "prompts"), sweep, stream)

    def to_json(self) -> Json:
        """The body of the request. Raises SpecError if prompts, metric or rows cannot be sent."""
        sweep = self.sweep
        given = {name: as_numbers(getattr(sweep, name)) for name in _PLAIN}
        return given | {
            "layers": parse_layers(sweep.layers, sweep.site, "Sweep.layers"),
            "prompts": _told(self.prompts), "source": _told_source(sweep),
            "metric": _told_metric(sweep.metric), "stream": self.stream,
        }  # fmt: skip


def _object(body: object, where: str, known: Sequence[str], needed: Sequence[str]) -> Json:
    if not isinstance(body, dict):
        raise SpecError(f"{where} is {shown(body)}; it must be an object with {', '.join(needed)}.")
    for name in body:
        if name not in known:
            raise SpecError(f"{where} has {shown(name)}; it may have {', '.join(known)}.")
    for name in needed:
        if name not in body:
            raise SpecError(f"{where} has no {name!r}; it needs {', '.join(needed)}.")
    return body


def _prompts(value: object, where: str) -> list[object]:
    """Parse one or several prompts. A prompt is a text or a list of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and _is_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise SpecError(
            f"{where} is {shown(value)}; it must be a text, a list of token ids, or a list of "
            "these."
        )
    for i, one in enumerate(value):
        if not isinstance(one, str) and not (isinstance(one, list) and _is_ids(one)):
            raise SpecError(
                f"{where}[{i}] is {shown(one)}; it must be a text or a list of token ids."
            )
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in value]


def _is_ids(value: list[object]) -> bool:
    return bool(value) and all(type(one) is int and one >= 0 for one in value)


def _source(value: object) -> Any:
    kinds = ("prompts", "rows", "module")
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= set(kinds):
        raise SpecError(
            f"source is {shown(value)}; it must be an object with one of {', '.join(kinds)}."
        )
    if "prompts" in value:
        return _prompts(value["prompts"], "source.prompts")
    if "module" in value:
        return value
    return Array.parse(value["rows"], "source.rows", MOST_DIMENSIONS).numpy


def _metric(value: object) -> Metric:
    kind = value.get("kind") if isinstance(value, dict) else None
    made = METRICS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise SpecError(
            f"metric is {shown(value)}; it must be an object whose kind is one of "
            f"{', '.join(METRICS)}."
        )
    names = [field.name for field in fields(made)]
    given = _object(value, "metric", ["kind", *names], names)
    metric: Metric = made(**{name: given[name] for name in names})
    return metric


def _told(value: object) -> object:
    """Prompts in the form of a request's body."""
    each = value if isinstance(value, list | tuple) else [value]
    return [_told_one(one) for one in each]


def _told_one(prompt: object) -> object:
    if not isinstance(prompt, Mapping):
        return as_numbers(prompt)
    if "prompt_token_ids" not in prompt:
        raise SpecError(
            f"a prompt is {shown(prompt)}; it must be a text or {{'prompt_token_ids': ...}}."
        )
    return as_numbers(prompt["prompt_token_ids"])


def _told_source(sweep: Sweep) -> Json:
    if sweep.module is not None:
        return {"module": sweep.module.name}
    value = sweep.source
    if is_prompts(value):
        return {"prompts": _told(value)}
    return {"rows": Array.parse(value, "Sweep.source", MOST_DIMENSIONS).to_json()}


def _told_metric(metric: Metric) -> Json:
    kind = next((kind for kind, made in METRICS.items() if type(metric) is made), None)
    if kind is None:
        raise SpecError(
            f"Sweep.metric is {shown(metric)}; over HTTP it must be one of {', '.join(METRICS)}."
        )
    return {"kind": kind} | {name: as_numbers(value) for name, value in vars(metric).items()}


# The answer


def head(table: SweepTable) -> Json:
    """The shape and the names of a table as JSON, without the values."""
    return {
        "shape": list(table.values.shape), "tokens": table.tokens, "layers": table.layers,
        "positions": table.positions, "heads": table.heads, "metric": table.metric,
        "site": table.site, "mode": table.mode,
    }  # fmt: skip


def cell(table: SweepTable, one: Cell) -> Json:
    """One cell as JSON. A cell that failed has the value null, and an `error`."""
    error = table.errors.get(table.index_of(one))
    return {**one._asdict(), "value": _number(one.value)} | ({"error": error} if error else {})


def end(table: SweepTable, num_cells: int) -> Json:
    """The fields of the answer that are known only when all cells have arrived."""
    numbers = {name: [_number(x) for x in getattr(table, name).tolist()]
               for name in ("plain", "source")}  # fmt: skip
    return numbers | {"counts": {"cells": num_cells, "failed": len(table.errors)}}


def whole(table: SweepTable, num_cells: int) -> Json:
    """The whole table as JSON, with `values` as a flat list in C order."""
    errors = [{"at": list(at), "error": why} for at, why in table.errors.items()]
    values = [_number(x) for x in table.values.ravel().tolist()]
    return head(table) | {"values": values, "errors": errors} | end(table, num_cells)


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


class _Head(msgspec.Struct):
    shape: list[int]
    tokens: list[list[str]]
    layers: list[int]
    positions: list[int] | None
    heads: list[int] | None
    metric: str
    site: str
    mode: str


class _Cell(msgspec.Struct):
    prompt: int
    layer: int
    position: int | None
    head: int | None
    value: float | None
    error: str | None = None


class _Event(msgspec.Struct):
    """An event of a server's stream. Each event has some of these fields."""

    table: _Head | None = None
    cells: list[_Cell] = []
    plain: list[float | None] = []
    source: list[float | None] = []
    counts: dict[str, int] | None = None


class TableReader:
    """Makes a table from the events of a server's stream.

    Attributes:
        table: the table with the cells that have arrived, or None before the first event.
    """

    def __init__(self) -> None:
        self.table: SweepTable | None = None

    def take(self, body: object) -> list[Cell]:
        """Put the cells of an event into the table, and return these cells.

        Raises:
            ScopeError: the event has a form that a server of this version does not send, or its
                table is too large.
        """
        try:
            found = msgspec.convert(body, _Event)
            if found.table is not None:
                self.table = _empty(found.table)
            if self.table is None:
                raise ScopeError(f"the server's first event has no table: {shown(body)}.")
            cells = [self._put(self.table, one) for one in found.cells]
            if found.counts is not None:
                self.table.plain[:], self.table.source[:] = (
                    _floats(found.plain), _floats(found.source),
                )  # fmt: skip
        except (msgspec.ValidationError, ValueError, KeyError) as error:
            if isinstance(error, ScopeError):
                raise
            raise ScopeError(f"the server's sweep has an unknown form: {error}.") from None
        return cells

    def _put(self, table: SweepTable, one: _Cell) -> Cell:
        value = np.nan if one.value is None else one.value
        found = Cell(one.prompt, one.layer, one.position, one.head, value)
        at = table.index_of(found)
        table.values[at] = value
        if one.error is not None:
            table.errors[at] = one.error
        return found


def _floats(values: list[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if x is None else x for x in values], np.float64)


def _empty(told: _Head) -> SweepTable:
    """Make a table without values. Raises ScopeError if the names do not fit the shape, or if the
    table would have more than MOST_VALUES values."""
    names = (told.layers, told.positions, told.heads)
    lengths = [len(told.tokens), *(len(each) for each in names if each is not None)]
    if lengths != told.shape:
        raise ScopeError(f"the server's table has names for {lengths} and the shape {told.shape}.")
    # The event has only the names. A few names in each dimension can give a table that is far
    # larger than the event.
    if math.prod(lengths) > MOST_VALUES:
        raise ScopeError(
            f"the server's table has {math.prod(lengths):,} values; at most {MOST_VALUES:,}. Send "
            "several sweeps, each of fewer prompts, layers, positions or heads."
        )
    return SweepTable.empty(
        told.tokens, told.layers, told.positions, told.heads, told.metric, told.site, told.mode
    )
