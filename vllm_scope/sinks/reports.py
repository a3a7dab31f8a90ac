"""Checks a sink's report of a request, and makes the manifest that callers get.

Owns:  `plain` and `failure` (text of limited length that can be encoded), Log, `checked`,
       `manifest_of`.
Runs:  on a sink thread. A plugin's return values and exceptions are checked here. Without these
       checks, a wrong value could prevent the message about a request's end.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from vllm_scope.errors import shown
from vllm_scope.files.index import STATUSES
from vllm_scope.sinks import Block, Ending, Manifest, Report

logger = logging.getLogger("vllm.vllm_scope")

#: Largest number of characters of a reason, and largest number of characters of one failure in the
#: log.
MOST_REASON, MOST_LOGGED = 500, 8000
#: Largest encoded size of a report, in bytes.
MOST_REPORT_BYTES = 1 << 20
#: Number of failures of a sink that can be logged without a pause.
_BURST = 30
#: Largest number of frames of a traceback in the log.
_MOST_FRAMES = 20


def plain(text: str, most: int = MOST_REASON) -> str:
    """The text, cut to `most` characters. `?` replaces each lone surrogate, because UTF-8 cannot
    encode lone surrogates."""
    if len(text) > most:
        text = text[: most - 3] + "..."
    return text.encode("utf-8", "replace").decode()


def failure(error: BaseException, most: int = MOST_REASON) -> str:
    """An exception's class and text."""
    try:
        text = str(error)[:most]
    except Exception:
        text = "its text cannot be made"
    return plain(f"{type(error).__name__}: {text}", most)


class Log:
    """The operator's log of one sink. Up to _BURST failures are logged without a pause, then one
    failure per second. Any thread may use the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: At the time `_at`, the number of failures that could be logged without a pause.
        self._room, self._at = float(_BURST), time.monotonic()

    def failure(self, error: BaseException) -> None:
        """Log an exception with its traceback."""
        frames = "".join(traceback.format_tb(error.__traceback__, -_MOST_FRAMES))
        where = plain(frames, MOST_LOGGED // 2)
        said = failure(error, MOST_LOGGED // 2)
        self.say(f"sink {self._name!r} failed: Traceback (most recent call last):\n{where}{said}")

    def say(self, text: str) -> None:
        now = time.monotonic()
        self._room, self._at = min(_BURST, self._room + now - self._at), now
        if self._room >= 1:
            self._room -= 1
            logger.error("vllm-scope: %s", text)


def facts_of(block: Block) -> dict[str, object]:
    """The shape, dtype and codec of a block, which become the entry of the block's stream in a
    manifest."""
    dtype = str(block.values.dtype).removeprefix("torch.")
    facts: dict[str, object] = {"shape": list(block.values.shape), "dtype": dtype}
    return facts if block.encoded is None else facts | {"codec": block.encoded.codec.metadata()}


def checked(report: object) -> Report:
    """The report, with all texts changed so that UTF-8 can encode them. None replaces NaN and
    infinity, which JSON does not have. If `report` is None, an empty Report.

    Raises:
        TypeError: `report` is not a Report, has a wrong field, or is too large.
    """
    if report is None:
        return Report()
    if not isinstance(report, Report):
        raise TypeError(f"finish returned {shown(report)}; it must return a Report or None")
    if report.status not in (None, *STATUSES):
        raise TypeError(f"its report has the status {shown(report.status)}")
    if not isinstance(report.published, Future | None):
        raise TypeError(
            f"its report has {shown(report.published)} as published; it must be a Future"
        )
    manifest = Manifest(
        "ok", report.reason, 0, 0, 0, report.files, report.streams, [dict(report.details)]
    )
    try:
        body = _cleaned(msgspec.to_builtins(manifest))
        cleaned = msgspec.convert(body, Manifest)
        num_bytes = len(msgspec.msgpack.encode(cleaned))
        if num_bytes <= MOST_REPORT_BYTES:
            msgspec.json.encode(cleaned)  # raises TypeError if JSON cannot have a key
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"its report cannot be sent: {failure(error)}") from None
    if num_bytes > MOST_REPORT_BYTES:
        raise TypeError(f"its report takes {num_bytes:,} bytes, of at most {MOST_REPORT_BYTES:,}")
    return replace(
        report, files=cleaned.files, streams=cleaned.streams, reason=cleaned.reason,
        details=cleaned.details[0],
    )  # fmt: skip


def _cleaned(value: object) -> object:
    """The same value, with all texts changed so that UTF-8 can encode them, and None instead of NaN
    and infinity."""
    if isinstance(value, str):
        return plain(value, len(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(one) for key, one in value.items()}
    return type(value)(map(_cleaned, value)) if isinstance(value, list | tuple) else value


def manifest_of(ending: Ending, streams: dict[str, dict[str, object]], report: Report) -> Manifest:
    """The manifest of a request at one sink.

    Args:
        streams: shape, dtype and codec of the blocks that the sink got, by stream. If the report
            has the same stream, the report's entry is used.
    """
    if ending.status == "ok" and report.status is not None:
        ending = replace(ending, status=report.status, reason=report.reason)
    failed = ending.status == "error"
    reason = None if ending.reason is None else plain(ending.reason)
    delivered = 0 if failed else ending.delivered
    return Manifest(
        ending.status, reason, ending.expected, delivered, ending.expected - delivered,
        [] if failed else report.files, {} if failed else {**streams, **report.streams},
        [dict(report.details)] if report.details else [],
        not report.public and bool(report.reason or report.streams),
    )  # fmt: skip
