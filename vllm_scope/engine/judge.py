"""Counts the findings of monitors in requests, and sends them to webhooks and the controller.

Owns:  Judge, and `tallied`.
Runs:  in the front-end. The front-end calls `Judge.told` with each snapshot of a completion's rows.
       The thread of the backlog (control.backlog) later counts the findings.
From:  monitors.   To: control.backlog, control.activity, sinks.metrics, webhook, controller,
       server.peers.

Promise: an answer does not wait for the counts of its completions. `tallied` returns counts that
contain all ended completions of this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_scope.control.activity import OUTCOMES, Found
from vllm_scope.control.backlog import Backlog
from vllm_scope.control.controller import Observation
from vllm_scope.engine.vllm_types import CompletionOutput, RequestOutput
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.request.sites import MODEL_SITES
from vllm_scope.sinks.metrics import count_verdict

if TYPE_CHECKING:
    from vllm_scope.engine.monitors import Monitor
    from vllm_scope.server.peers import Peers

#: The only Backlog in this process.
backlog = Backlog()


def tallied(monitors: Sequence[Monitor]) -> dict[str, Found]:
    """The findings of monitors in this process, by the name of the monitor."""
    backlog.work_off()
    none = dict.fromkeys(OUTCOMES, 0)
    found = {}
    for monitor in monitors:
        probe, webhook = monitor.probe, monitor.webhook
        layers = () if probe.site in MODEL_SITES else probe.layer_numbers or ()
        after = None if probe.after is None else probe.after.removeprefix(MONITOR)
        found[monitor.name] = monitor.tally.found(
            probe.site, monitor.action, layers, after,
            none if webhook is None else webhook.outcomes,
        )  # fmt: skip
    return found


class Judge:
    """Counts the verdicts of one request, and sends them to webhooks and the controller."""

    def __init__(
        self, monitors: tuple[Monitor, ...], tell: Callable[[Observation], None] | None,
        peers: Peers | None,
    ) -> None:  # fmt: skip
        self._monitors, self._tell, self._peers = monitors, tell, peers
        #: The indices of the completions that were added to the backlog.
        self._counted: set[int] = set()

    def told(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """If a completion has ended, add the completion to the backlog. The front-end calls this
        method with each snapshot of the completion's rows.

        Scores are read only after the completion has ended. If the scores were read in each step,
        each step would take longer than the step before.
        """
        reason = completion.finish_reason
        if reason is None or completion.index in self._counted:
            return
        self._counted.add(completion.index)
        cut = reason in ("abort", "error")
        ended = output.request_id, completion.index, cut, time.time()
        result: Any = completion.scope
        backlog.add(partial(self._count, result.monitored(), *ended))

    def _count(
        self, result: Any, request_id: str, completion: int, cut: bool, time_s: float
    ) -> None:
        verdicts = result.verdicts
        for monitor in self._monitors:
            name, called = monitor.name, monitor.probe.name
            if monitor.probe.after is not None and called not in result.begun:
                continue  # a later stage counts only the requests in which it began
            found = result.scores if monitor.probe.aggregate is None else result.aggregates
            values, verdict = found[called].numpy(), verdicts.get(called)
            largest = float(values.max()) if len(values) else None
            # If a request was aborted or ended with an error, its last tokens can lack scores. Such
            # scores do not count as lost.
            num_lost = 0 if cut else result.num_lost(called)
            count_verdict(name, largest, verdict is not None, num_lost)
            monitor.tally.add(
                largest, request_id, completion,
                None if verdict is None else (verdict.position, verdict.value), time_s,
            )  # fmt: skip
            if self._tell is not None and len(values):
                at = int(values.argmax()) if monitor.probe.aggregate is None else -1
                self._tell(
                    Observation(
                        request_id, name, float(values[at]),
                        int(result.scores.positions(called)[at]), verdict is not None,
                        completion, time_s,
                    )
                )  # fmt: skip
            if verdict is not None and monitor.webhook is not None:
                # JSON has no infinity. As in an answer's verdicts, null stands for such a value.
                value = verdict.value if math.isfinite(verdict.value) else None
                monitor.webhook.tell(
                    {
                        "monitor": name, "request_id": request_id, "completion": completion,
                        "position": verdict.position, "value": value,
                    },
                    None if self._peers is None else self._peers.changed,
                )  # fmt: skip
        if self._peers is not None:
            self._peers.changed()
