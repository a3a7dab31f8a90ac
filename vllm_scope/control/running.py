"""Calls a request's running policy with the request's scores, and checks its decisions.

Owns:  Policies (a worker's policies), Steering (the running policy of one completion).
Runs:  in the worker whose output EngineCore reads, on the thread that makes the step's output.
From:  worker.watch (the scores).   To: core.news (sends new scales to every rank), the request's
       result (decisions).

Promise: a running policy fails if it raises an error, makes an impossible decision, takes too long
or changes scales too often. A running policy that failed is not called again. Its last decision has
no effect, and the request keeps its scales. Other requests are not affected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from vllm_scope.control.policy import Decided, Decision, RunningPolicy, Start
from vllm_scope.control.policy_options import Loaded
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import checked_name, number
from vllm_scope.request.resolved import Resolved

logger = logging.getLogger("vllm.vllm_scope")


class Policies:
    """The policies of a worker.

    Args:
        lag: when the policy gets a step's scores, the scheduler has already begun this number of
            later steps. 1 with async scheduling, otherwise 0.
    """

    def __init__(self, loaded: Mapping[str, Loaded], lag: int) -> None:
        self._loaded, self._lag = loaded, lag
        #: Names of policies whose failure is in the log.
        self._logged: set[str] = set()

    def begin(
        self, asked: Resolved, request_id: str, completion: int, num_prompt: int
    ) -> Steering | None:
        """The Steering of a completion that begins. Returns None if the request has no policy."""
        if asked.policy is None:
            return None
        policy, options = self._loaded[asked.policy.name], asked.policy.options
        start = Start(request_id, completion, num_prompt, options)
        return Steering(policy, start, asked.scaled, self._lag, self._logged)


class Steering:
    """The running policy of one completion.

    Args:
        names: the names of the edits whose scale the policy is allowed to set.
        lag: as in Policies.
        logged: names of policies whose failure is in the log.

    Attributes:
        name: the policy's name.
        over: True if the running policy is not called any more.
    """

    def __init__(
        self, policy: Loaded, start: Start, names: frozenset[str], lag: int, logged: set[str]
    ) -> None:
        self.name = policy.name
        self._policy, self._start, self._names, self._lag = policy, start, names, lag
        self._logged = logged
        self._running: RunningPolicy | None = None
        self._scales: dict[str, float] = {}
        self._num_changes, self._last_from = 0, -1
        self._spent_s = 0.0
        self.over = False

    def begin_step(self) -> None:
        """Begin a new step. The time of the policy's calls in this step counts from 0. The step's
        output waits for all calls of the policy."""
        self._spent_s = 0.0

    def observe(self, position: int, scores: Mapping[str, float]) -> Decided | None:
        """The decision at a position, or None. Positions must increase from call to call."""
        if self.over:
            return None
        began = time.monotonic()
        try:
            if self._running is None:
                self._running = self._policy.plugin.start(self._start)
            decision = self._running.observe(position, scores)
        except BaseException as error:  # sys.exit, or a panic in Rust code, is no Exception
            if _may_be_a_signal(error):
                raise
            return self._end(position, f"it raised {type(error).__name__}", error)
        self._spent_s += time.monotonic() - began
        if self._spent_s > (most := self._policy.options.timeout_s):
            return self._end(
                position, f"it took {self._spent_s:.3g} s in one step; at most {most:g} (timeout_s)"
            )
        try:
            return None if decision is None else self._checked(position, decision)
        except SpecError as error:
            return self._end(position, str(error))

    def _checked(self, position: int, decision: object) -> Decided | None:
        """Convert a decision to Decided. Returns None if the decision changes nothing. Raises
        SpecError if the decision is not possible."""
        if not isinstance(decision, Decision):
            raise SpecError(f"it returned {shown(decision)}; it must return a Decision or None")
        if not isinstance(decision.stop, bool):
            raise SpecError(f"Decision.stop is {shown(decision.stop)}; it must be true or false")
        if decision.flag is not None:
            checked_name(decision.flag, "Decision.flag")
        new = self._new_scales(decision.scale)
        acts_from = None
        if new:
            acts_from = max(position, self._start.num_prompt_tokens - 1) + 1 + self._lag
            # All changes that are decided at positions of the prompt apply from the same position
            # on. They count as one change.
            self._num_changes += acts_from != self._last_from
            most = self._policy.options.most_changes
            if self._num_changes > most:
                raise SpecError(
                    f"it changed scales more than {most} times (most_changes of the policy)"
                )
            self._scales |= new
            self._last_from = acts_from
        if not (new or decision.stop or decision.flag):
            return None
        return Decided(position, acts_from, new, decision.stop, decision.flag)

    def _new_scales(self, scales: object) -> dict[str, float]:
        """The items of `scales` that differ from the scales that the policy has already set."""
        if not isinstance(scales, Mapping):
            raise SpecError(f"Decision.scale is {shown(scales)}; it must map names to numbers")
        unknown = [name for name in scales if name not in self._names]
        if unknown:
            raise SpecError(
                f"Decision.scale names {shown(unknown[0])}; the named edits of the request are "
                f"{', '.join(sorted(self._names)) or 'none'}"
            )
        found = {name: number(x, f"Decision.scale[{name!r}]") for name, x in scales.items()}
        return {name: x for name, x in found.items() if self._scales.get(name) != x}

    def _end(self, position: int, why: str, error: BaseException | None = None) -> Decided:
        self.over = True
        name = self._policy.name
        if name not in self._logged:
            self._logged.add(name)
            logger.error(
                "vllm-scope: the policy %r fails: %s. Its further failures are counted.",
                name, why.rstrip("."), exc_info=error,
            )  # fmt: skip
        reason = (
            f"the policy {name!r} does not control this request any more, because "
            f"{why.rstrip('.')}; its scales stay as they are."
        )
        return Decided(position, error=reason)


def _may_be_a_signal(error: BaseException) -> bool:
    """True if a signal's handler may have raised the error. Python calls the handlers on the main
    thread. vLLM's handlers raise SystemExit, which must end the process."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and isinstance(error, SystemExit | KeyboardInterrupt)
