"""What a sink says of a request, checked, and made into the manifest that callers get.

Runs:  on a lane's thread. What a plugin returns is not believed: it goes to another
process, and must not be what breaks the message that says that a request has ended.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, get_args

import msgspec

from vllm_scope.errors import shown
from vllm_scope.sinks import Ending, Manifest, Report, Status


def checked(report: object) -> Report:
    """Raises TypeError for what is no report, or cannot be sent."""
    if report is None:
        return Report()
    if not isinstance(report, Report):
        raise TypeError(f"finish returned {shown(report)}; it returns a Report, or None")
    if report.status not in (None, *get_args(Status)):
        raise TypeError(f"its report has the status {shown(report.status)}")
    if not isinstance(report.published, Future | None):
        raise TypeError(f"its report has {shown(report.published)} as published; it is a Future")
    manifest = Manifest(
        "ok", report.reason, 0, 0, 0, report.files, report.streams, [dict(report.details)]
    )
    try:
        msgspec.convert(msgspec.to_builtins(manifest), Manifest)
        msgspec.msgpack.encode(manifest)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"its report cannot be sent: {error}") from None
    return report


def manifest_of(ending: Ending, streams: dict[str, Any], report: Report) -> Manifest:
    """Args:
    streams: what the sink was given; the report may say more of them.
    """
    if ending.status == "ok" and report.status is not None:
        ending = replace(ending, status=report.status, reason=report.reason)
    failed = ending.status == "error"
    delivered = 0 if failed else ending.delivered
    return Manifest(
        ending.status, ending.reason, ending.expected, delivered, ending.expected - delivered,
        [] if failed else report.files, {} if failed else {**streams, **report.streams},
        [dict(report.details)] if report.details else [],
    )  # fmt: skip
