"""An operator's callback changes server-wide edits after findings of monitors, within bounds.

    def calmer(observations, scales):
        mean = sum(one.value for one in observations) / len(observations)
        return Change({"calm": scales["calm"] + 0.1 * mean}, f"the mean is {mean:.2f}")

    controller = Controller(
        calmer, {"calm": Add(direction, layer=2, scale=0.0, tokens="generated")},
        bounds={"calm": (0.0, 2.0)}, max_step={"calm": 0.25}, rate=1.0,
    )
    with controller.on(llm): ...              # async with, for an AsyncLLM

Owns:  Controller, Observation, Change, the protocol ServerEdits, and `find_edits_by`.
Runs:  in the process of the front-end, on its own thread. No vLLM.
From:  engine.monitors (observations).   To: engine.control (server-wide edits).

Promise: a callback never delays a request, and never sets a scale outside of its bounds. If a
callback raises an error, hangs or returns an impossible change, the last edits stay in force.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_scope.control.background import Uncopied
from vllm_scope.control.bounded_edits import BoundedEdits
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Edit
from vllm_scope.request.spec import scope

logger = logging.getLogger("vllm.vllm_scope")
#: The largest number of waiting observations. If more observations wait, the oldest observations
#: are dropped and counted.
MOST_WAITING = 4096


@dataclass(frozen=True)
class Observation:
    """A monitor's finding in one completion that has ended.

    Attributes:
        request_id, completion: the id of the request, and the index of its completion.
        name: the monitor's name, without its prefix.
        value: the monitor's aggregate of all scores. If the monitor has no aggregate, the largest
            score.
        position: the token position of `value`.
        verdict: True if the value was above the monitor's threshold at some position.
        time_s: the time at which the completion ended, in seconds of `time.time()`.
    """

    request_id: str
    name: str
    value: float
    position: int
    verdict: bool = False
    completion: int = 0
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Change:
    """The change of server-wide edits that a callback wants.

    Attributes:
        to: maps names of edits to new values. If the edit has bounds, the value is the new scale.
            If the edit has no bounds, the value is the new edit.
        reason: a text for the log.
    """

    to: Mapping[str, float | Edit]
    reason: str = ""


#: A function that gets the observations since the last call, and the scales in force by the name of
#: the edit. The function returns a Change, or None for no change.
Callback = Callable[[Sequence[Observation], Mapping[str, float]], Change | None]


class ServerEdits(Protocol):
    """The server-wide edits of an engine, as a spec in JSON. The controller's thread calls `set`.
    The threads that start or close the controller call all three methods. Each method can raise
    errors."""

    def get(self) -> str | None: ...

    def set(self, text: str | None) -> None: ...

    def listen(self, tell: Callable[[Observation], None] | None) -> None:
        """Make the engine's monitors call `tell` with each observation. If `tell` is None, the
        monitors do not make these calls any more."""


#: Functions that find the ServerEdits of a vllm.LLM or an AsyncLLM. Only the last function is used.
#: The list is empty until the plugin is loaded.
_finders: list[Callable[[Any], ServerEdits]] = []


def find_edits_by(finder: Callable[[Any], ServerEdits]) -> None:
    """Set the function by which `Controller.on` finds the ServerEdits of an engine. The folder
    `engine` calls this function, because `engine` can import this folder, and this folder cannot
    import `engine`."""
    _finders.append(finder)


class Controller(Uncopied):
    """Server-wide edits by name, which a callback changes. While the controller runs, the engine
    has no other server-wide edits.

    Args:
        callback: a function that the controller's thread calls with one or more observations.
        edits: maps a name to the edit with which the controller starts. The edits apply in the
            order of the mapping.
        bounds: maps the name of an Add to the lowest and the highest scale.
        max_step: maps the name of an Add to the largest change of the Add's scale by one call of
            the callback.
        rate: the largest number of calls of the callback per second, from 0.0001 to 1000.
        patience_s: the number of seconds after which a call of the callback counts as hanging,
            above 0 and at most 3600. The result of a call that hangs is dropped.
        clock: a function that returns the time in seconds. Tests use another clock.

    Attributes:
        counts: `calls` (of the callback), `changes`, `failures`, `hangs`, and `dropped`
            observations. Each is a number since the controller was made.

    Raises:
        SpecError: `bounds` or `max_step` does not fit `edits` (as in BoundedEdits), or `rate` or
            `patience_s` is out of its range.
    """

    def __init__(
        self,
        callback: Callback,
        edits: Mapping[str, Edit],
        *,
        bounds: Mapping[str, tuple[float, float]],
        max_step: Mapping[str, float] | None = None,
        rate: float = 1.0,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._callback, self._clock = callback, clock
        if not 1e-4 <= rate <= 1000 or not 0 < patience_s <= 3600:
            raise SpecError(
                f"rate is {rate} and patience_s {patience_s}; rate is from 0.0001 to 1000, and "
                "patience_s above 0 and at most 3600."
            )
        self._period_s, self._patience_s = 1 / rate, patience_s
        self._edits = BoundedEdits(dict(edits), dict(bounds), dict(max_step or {}))
        self.counts: Counter[str] = Counter()
        self._seen: deque[Observation] = deque(maxlen=MOST_WAITING)
        self._due, self._began, self._hung, self._quiet = -math.inf, math.inf, False, False
        self._closed, self._thread = threading.Event(), threading.Thread()
        self._news = threading.Event()  # set by an observation, and when the controller is closed
        self._server: ServerEdits | None = None
        #: A thread holds this lock while it sets edits. Therefore no change can follow after
        #: `close` has restored the earlier edits.
        self._setting = threading.Lock()
        self._before: str | None = None

    @property
    def scales(self) -> dict[str, float]:
        """The scales in force, by the names of the edits with bounds."""
        return self._edits.scales

    def tell(self, observation: Observation) -> None:
        """Add an observation. The method can be called on any thread, and never blocks."""
        if len(self._seen) == MOST_WAITING:
            self.counts["dropped"] += 1
        self._seen.append(observation)
        self._news.set()
        if not self._hung and self._clock() - self._began > self._patience_s:
            self._hung = True
            self._failed("hangs", f"has run for more than {self._patience_s:g} s")

    def turn(self) -> float | None:
        """If the callback is due and there are observations, call the callback. The controller's
        thread calls this method.

        Returns:
            The number of seconds to wait before the next call of this method. None if the next call
            must wait for an observation.
        """
        self._news.clear()  # before `_seen` is read, so that no observation is missed
        if not self._seen:
            return None
        now = self._clock()
        if now < self._due:
            return self._due - now
        seen = [self._seen.popleft() for _ in range(len(self._seen))]
        self._due, self._began, self._hung = now + self._period_s, now, False
        self.counts["calls"] += 1
        try:
            change = self._callback(seen, self.scales)
            if self._clock() - self._began > self._patience_s:
                if not self._hung:
                    self._failed("hangs", f"has run for more than {self._patience_s:g} s")
            elif change is not None and not self._closed.is_set():
                self._apply(change)
                self._quiet = False
        except BaseException as error:  # a callback may call sys.exit
            self._failed("failures", f"failed: {type(error).__name__}: {error}")
        finally:
            self._began = math.inf
        return max(self._due - self._clock(), 0.0)

    def _failed(self, kind: str, what: str) -> None:
        """Count a failure. If this is the first failure after the last change, log the failure."""
        self.counts[kind] += 1
        if not self._quiet:
            logger.warning("vllm-scope: a controller's callback %s; the edits stay.", what)
        self._quiet = True

    def _apply(self, change: Change) -> None:
        edits = self._edits.moved(change.to)
        before, after = self._edits.edits, edits.edits
        changed = [name for name in change.to if after[name] != before[name]]
        if not changed:
            return
        with self._setting:
            if self._closed.is_set():
                return
            self._set(edits)
            self._edits = edits
        self.counts["changes"] += 1
        for name in changed:
            old, new = (getattr(one[name], "scale", one[name].kind) for one in (before, after))
            logger.info(
                "vllm-scope: the edit %r went from %s to %s: %s", name, old, new, change.reason
            )

    def _set(self, edits: BoundedEdits) -> None:
        if self._server is not None:
            self._server.set(scope(*edits.edits.values())["scope"])

    # The methods that start and end the controller

    def on(self, engine: Any) -> Controller:
        """Set the engine, and return the controller. A `with` block starts the thread.

        Args:
            engine: a vllm.LLM, an AsyncLLM or a ServerEdits. With an AsyncLLM, use `async with` on
                the engine's event loop.
        """
        if not hasattr(engine, "listen"):
            if not _finders:
                raise SpecError(
                    f"{shown(engine)} is no engine with vllm-scope; give a vllm.LLM, an AsyncLLM "
                    "or a ServerEdits."
                )
            engine = _finders[-1](engine)
        self._server = engine
        return self

    def __enter__(self) -> Controller:
        assert self._server is not None, "call on(engine) first"
        self._check_thread()
        if self._closed.is_set() or self._thread.ident is not None:
            raise SpecError("a controller can be used only one time; make a new controller.")
        self._before = self._server.get()
        self._server.listen(self.tell)
        try:
            self._set(self._edits)
        except BaseException:
            self._server.listen(None)
            raise
        self._thread = threading.Thread(target=self._run, name="vllm-scope-controller", daemon=True)
        self._thread.start()
        return self

    def _check_thread(self) -> None:
        if getattr(self._server, "on_its_loop", False):
            raise SpecError(
                "this is the event loop of the controller's engine, which must not wait for the "
                "controller; use 'async with', or await asyncio.to_thread(controller.close)."
            )

    def _run(self) -> None:
        while not self._closed.is_set():
            wait_s = self.turn()
            if wait_s is not None:
                self._closed.wait(wait_s)
            elif not self._closed.is_set():  # `turn` can have cleared the event that `close` set
                self._news.wait()

    def close(self, keep: bool = False) -> None:
        """End the controller. The callback is not called any more. If `keep` is False, restore the
        server-wide edits from before the controller. If `keep` is True, the controller's last edits
        stay in force. If the callback still runs, wait at most `patience_s` seconds for its end,
        and drop the callback's result. If the controller is setting a change now, wait until the
        change is set. The callback may call this method. If the controller's thread was never
        started, do nothing."""
        if self._server is None or self._closed.is_set() or self._thread.ident is None:
            return
        self._check_thread()
        self._closed.set()
        self._news.set()
        self._server.listen(None)
        if threading.current_thread() is not self._thread:  # the callback may call `close`
            self._thread.join(self._patience_s)
        if not keep:
            with self._setting:
                self._server.set(self._before)

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Controller:
        begun = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, and no other code would close the controller.
            await asyncio.wait({begun})
            if begun.exception() is None:
                await asyncio.to_thread(self.close)
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
