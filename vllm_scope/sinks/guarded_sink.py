"""Calls a sink that may raise exceptions, hang, or return a wrong value.

Owns:  GuardedSink.
Runs:  on the sink's thread. Any thread may read `stalled`.
From:  sink_thread.   To: a Sink, reports (which writes the log).

Promise: exceptions of a sink do not reach the caller. `stalled` tells whether the sink hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_scope.sinks import Block, Ending, Report, Sink
from vllm_scope.sinks.reports import Log, checked, failure, plain


class GuardedSink:
    """A sink whose calls may raise exceptions or hang.

    Args:
        count_error: a function that GuardedSink calls for each failed call of the sink.

    Attributes:
        live: as in Sink.
        takes: the kinds of actions that may name the sink. "edits" means requests with edits. "some
            features" means features with `indices` or `threshold`.
        log: the operator's log of this sink.
    """

    def __init__(
        self, name: str, sink: Sink, patience_s: float, count_error: Callable[[], None]
    ) -> None:
        self.log, self._sink, self._name = Log(name), sink, name
        self._patience_s, self._count_error = patience_s, count_error
        self.live = bool(getattr(sink, "live", False))
        scores = bool(getattr(sink, "takes_scores", True))
        takes = {
            "reads": bool(getattr(sink, "takes_rows", True)), "probes": scores,
            "features": bool(getattr(sink, "takes_features", scores)),
            "edits": bool(getattr(sink, "takes_edited", True)),
            "some features": bool(getattr(sink, "takes_some_features", True)),
        }  # fmt: skip
        self.takes = [kind for kind, taken in takes.items() if taken]
        #: The time at which the current call began. None between calls.
        self._called_at: float | None = None

    @property
    def stalled(self) -> bool:
        """True while a call takes longer than `patience_s` seconds."""
        called_at = self._called_at
        return called_at is not None and time.monotonic() - called_at > self._patience_s

    @property
    def stall_reason(self) -> str:
        return f"sink {self._name!r} did not return from a call within {self._patience_s:g} s"

    def write(self, block: Block) -> str | None:
        """Call the sink. Returns None, or the reason if the call failed."""
        return self._call(self._sink.write, block)

    def flush(self) -> str | None:
        return self._call(self._sink.flush)

    def close(self) -> str | None:
        return self._call(self._sink.close)

    def finish(self, ending: Ending) -> tuple[Report, str | None]:
        """Returns the sink's checked report, and the reason why the call failed. The reason is None
        if the call did not fail."""
        reports: list[Report] = []
        error = self._call(lambda: reports.append(checked(self._sink.finish(ending))))
        return reports[0] if reports else Report(), error

    def _call(self, call: Callable[..., object], *args: object) -> str | None:
        self._called_at = time.monotonic()
        try:
            call(*args)
        except BaseException as error:  # a plugin may call sys.exit
            return self.failure(error, counts=True)
        finally:
            self._called_at = None
        return None

    def failure(self, error: BaseException, counts: bool = False) -> str:
        """Log an exception with its traceback. Returns a shorter reason, for callers."""
        if counts:
            self._count_error()
        self.log.failure(error)
        return plain(f"sink {self._name!r} failed: {failure(error)}")
