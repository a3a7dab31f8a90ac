"""The server's answers: choices with their rows and scores, as numpy.

Owns:  Completion, Choice, Chunk, ScoredToken, ScopeData, and the parsing of a choice's `scope`.
From:  server.encode (the JSON), server.store (the files).

Each size that the server names is checked against the bytes that it sent.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError, shown
from vllm_scope.request.sites import ALIASES

#: (site, layer, "after" or "before")
_Stream = tuple[str, int, str]
#: dtype in JSON and in safetensors -> numpy's; bfloat16 as its bits.
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"} | {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8",
}  # fmt: skip


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
    bits: NDArray[Any]
    dtype: str

    @property
    def numpy(self) -> NDArray[Any]:
        """The rows in their dtype; bfloat16 becomes float32 without loss."""
        if self.dtype != "bfloat16":
            return self.bits
        return (self.bits.astype("<u4") << 16).view("<f4")


class Scores(Mapping[str, NDArray[np.float32]]):
    """Name of a probe -> its scores, float32 [n], in position order; NaN if not finite."""

    def __init__(self, values: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]):
        self._values = values

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._values[name][1]

    def positions(self, name: str) -> NDArray[np.int64]:
        """int64 [n], ascending."""
        return self._values[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class ScopeData:
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
            its files (paths for the operator).
    """

    status: str = "streaming"
    error: str | None = None
    expected: int = 0
    delivered: int = 0
    dropped: int = 0
    rows: Mapping[_Stream, Rows] = field(default_factory=dict, repr=False)
    scores: Scores = field(default_factory=lambda: Scores({}), repr=False)
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def keys(self) -> list[tuple[str, int]]:
        """(site, layer) of each stream."""
        return list(dict.fromkeys((site, layer) for site, layer, _ in self.rows))

    def __getitem__(self, stream: tuple[str, int] | _Stream | str) -> NDArray[Any]:
        return self._find(stream).numpy

    def positions(self, *stream: Any) -> NDArray[np.int64]:
        """int64 [n], ascending, of `data.positions("resid_post", 5)`."""
        return self._find(stream).positions

    def tensor(self, *stream: Any) -> Any:
        """As a torch tensor, in the model's dtype.

        Raises:
            ImportError: torch is not installed.
        """
        import torch

        rows = self._find(stream)
        found = torch.from_numpy(np.array(rows.bits))
        return found.view(torch.bfloat16) if rows.dtype == "bfloat16" else found

    def _find(self, stream: Any) -> Rows:
        words = (stream,) if isinstance(stream, str) else tuple(stream)
        site = ALIASES.get(str(words[0]), words[0])
        layer = words[1] if len(words) > 1 else 0
        for when in words[2:3] or ("after", "before"):
            if (site, layer, when) in self.rows:
                return self.rows[site, layer, when]
        names = ", ".join(f"{site!r} {layer}" for site, layer in self.keys()) or "nothing"
        raise KeyError(f"{stream} is not here; this choice read {names}.")


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
class Choice:
    """One completion.

    Attributes:
        scope: None if the request had no actions.
        tokens: of a request with probes, the generated tokens with their texts and scores;
            empty if the server does not send them.
    """

    index: int
    text: str
    finish_reason: str | None
    scope: ScopeData | None
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. `raw` is its JSON."""

    choices: tuple[Choice, ...]
    raw: Mapping[str, Any] = field(repr=False)

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


@dataclass(frozen=True)
class Chunk:
    """The new part of one choice.

    Attributes:
        scope: the new scores, and rows if asked.
        tokens: those whose scores have arrived, each once; mostly tokens of the text of the
            chunk before. Empty without probes.
    """

    index: int
    text: str
    finish_reason: str | None
    scope: ScopeData | None
    tokens: tuple[ScoredToken, ...] = ()


def parse_scope(body: Mapping[str, Any], file: bytes | None) -> ScopeData:
    """A choice's `scope`.

    Args:
        file: the content of its `result`, if it has one.

    Raises:
        ScopeError: a server of this version does not send that.
    """
    rows: dict[_Stream, Rows] = {}
    scores: dict[str, Any] = {}
    # The file has all values; an entry without values says which of them are new.
    filed_rows, filed_scores = ({}, {}) if file is None else _parse_file(file)
    for entry in body.get("rows", ()):
        stream = (entry["site"], entry["layer"], entry.get("when", "after"))
        if "data" in entry:
            rows[stream] = _rows(entry)
        elif stream in filed_rows:
            whole = filed_rows[stream]
            some = np.isin(whole.positions, _positions(entry["spans"]))
            rows[stream] = Rows(whole.positions[some], whole.bits[some], whole.dtype)
    for name, entry in body.get("scores", {}).items():
        if "values" in entry:
            values = [math.nan if v is None else v for v in entry["values"]]
            scores[name] = (_positions(entry["spans"]), np.array(values, np.float32))
        elif name in filed_scores:
            positions, numbers = filed_scores[name]
            some = np.isin(positions, _positions(entry["spans"]))
            scores[name] = (positions[some], numbers[some])
    return ScopeData(
        body.get("status", "streaming"), body.get("error"), body.get("expected", 0),
        body.get("delivered", 0), body.get("dropped", 0), rows, Scores(scores),
        body.get("sinks", {}),
    )  # fmt: skip


def parse_tokens(body: Mapping[str, Any]) -> tuple[ScoredToken, ...]:
    """The tokens of a choice's `scope`.

    Raises:
        ScopeError: a server of this version does not send that.
    """
    try:
        return tuple(
            ScoredToken(
                int(each["id"]), str(each["text"]), int(each["position"]),
                {name: math.nan if v is None else float(v) for name, v in each["scores"].items()},
            )
            for each in body.get("tokens", ())
        )  # fmt: skip
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ScopeError(
            f"the server's tokens are not of id, text, position and scores: "
            f"{shown(body.get('tokens'))}."
        ) from None


def parse_file(file: bytes) -> ScopeData:
    """The content of a result's file."""
    rows, scores = _parse_file(file)
    return ScopeData(status="complete", rows=rows, scores=Scores(scores))


def _positions(spans: list[list[int]]) -> NDArray[np.int64]:
    parts = [np.arange(first, last, dtype=np.int64) for first, last in spans]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _rows(entry: Mapping[str, Any]) -> Rows:
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in _DTYPES:
        raise ScopeError(f"the server's rows are {shown(dtype)}, which this client does not know.")
    bits = np.frombuffer(base64.b64decode(entry["data"]), _DTYPES[dtype])
    if bits.size != math.prod(shape):
        raise ScopeError(f"the server sent {bits.size} numbers for rows of shape {shape}.")
    return Rows(_positions(entry["spans"]), bits.reshape(shape), dtype)


def _parse_file(file: bytes) -> tuple[dict[_Stream, Rows], dict[str, Any]]:
    import safetensors

    try:
        entries = dict(safetensors.deserialize(file))
    except safetensors.SafetensorError as error:
        raise ScopeError(f"the server's result is not safetensors: {error}.") from None
    arrays = {
        name: np.frombuffer(e["data"], _DTYPES[e["dtype"]]).reshape(e["shape"])
        for name, e in entries.items()
    }
    rows: dict[_Stream, Rows] = {}
    scores: dict[str, Any] = {}
    for name in (n for n in arrays if f"{n}.positions" in arrays):
        positions = arrays[f"{name}.positions"]
        if name.startswith("scores."):
            scores[name.removeprefix("scores.")] = (positions, arrays[name])
            continue
        site, layer, *when = name.split(".")
        dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[entries[name]["dtype"]]
        rows[site, int(layer), when[0] if when else "after"] = Rows(positions, arrays[name], dtype)
    return rows, scores
