"""Ends requests whose edits make rows that are not finite, and requests that share KV with them.

Owns:  the code that carries a fault from a tap to the caller.
Runs:  the class `Faults` in every worker of the last pipeline stage; `end_faulty` in EngineCore,
       which reads the outputs of this stage.
From:  tap.tables (the faults by owner number), plan (the owner numbers).   To: clearing (the
       request's KV).

An edit can have a result that is not finite in the model's dtype. A tap of the last pipeline stage
then leaves the row unchanged and reports a fault. A tap of an earlier stage reports nothing, and
writes the result into the row. The last tap of the model then reports the fault, because this tap
checks every row of an edited request. The worker sends the faults with the step's output.
EngineCore ends the faulty requests before vLLM processes the tokens of the step. All other requests
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vllm_scope.engine.core import clearing
from vllm_scope.engine.refusals import refused
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.engine.vllm_types import Scheduler
from vllm_scope.engine.worker.carrying import carried, carrying
from vllm_scope.errors import SpecError
from vllm_scope.graph.tap.definition import fault_at
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.request.sites import Place, Sites, place_at
from vllm_scope.worker.plan import Planner


class Faults:
    """The faults that one worker's taps report, by request."""

    def __init__(self, tables: Tables, planner: Planner, sites: Sites) -> None:
        self._reported, self._planner, self._sites = tables.faults, planner, sites
        #: The reason for each request that must end because `fail` was called. An entry is removed
        #: when its reason is sent with an output.
        self._failed: dict[str, str] = {}

    def fail(self, req_id: str, reason: str) -> None:
        """With the next output, end a request whose edits, probes or policy cannot be applied. If
        the request continued without its edits, other requests could use its unedited KV as edited
        KV."""
        self._failed[req_id] = reason

    def __bool__(self) -> bool:
        """True if some request can have a fault, or if a fault must be sent with the next
        output."""
        return bool(self._planner.owners or self._failed)

    def with_faults(self, output: object) -> object:
        """Adds to a step's output the faults that were reported so far, as the attribute
        `scope_faults`.

        Args:
            output: the result of `execute_model` or `sample_tokens`. The faults are added to an
                asynchronous output when its `get_output` is called.
        """
        if not self:
            return output
        return carrying(output, "scope_faults", self._take)

    def _take(self) -> dict[str, str]:
        """The reason of each new fault, by request. A second call does not return the same fault.
        Only the thread that makes outputs calls this method."""
        owners = list(self._planner.owners)
        at = np.array(owners, np.int64)
        found: dict[str, str] = {}
        while self._failed:  # the main thread can add entries during the loop
            found |= [self._failed.popitem()]
        for i in np.flatnonzero(self._reported[at]):
            req_id = self._planner.owners.get(owners[i])
            fault, self._reported[owners[i]] = int(self._reported[owners[i]]), 0
            if req_id is not None:
                found[req_id] = self._sentence(fault)
        return found

    def _sentence(self, fault: int) -> str:
        tap, edited = fault_at(fault)
        boundary = self._sites.boundaries[tap]
        site, layer = place_at(boundary)
        where = f"{site!r}" if site == "embed" else f"{site!r} of layer {layer}"
        behind = Place("resid_pre", boundary // 2)
        if behind.boundary == boundary and behind.layer < self._sites.num_layers:
            where += f" ('resid_pre' of layer {behind.layer})"
        what = f"an edit at {where} makes" if edited else f"after the request's edits {where} has"
        return (
            f"{what} a row that is not finite in {self._sites.dtype}, so the request was ended. "
            "Use a smaller scale or vector."
        )


def _with_sharers(scheduler: Scheduler, faults: Mapping[str, str]) -> dict[str, str]:
    """The faults, and the same fault for each request that shares KV with a faulty request."""
    found, left = dict(faults), list(faults)
    while left:
        req_id = left.pop()
        if req_id in scheduler.requests:
            sharers = clearing.withdraw(scheduler, scheduler.requests[req_id]) - found.keys()
            found |= dict.fromkeys(sharers, found[req_id])
            left += sharers
    return found


def end_faulty(
    original: Callable[..., dict[int, Outputs]],
    self: Scheduler,
    scheduler_output: object,
    model_runner_output: object,
) -> dict[int, Outputs]:
    """End requests with a fault before vLLM processes their tokens."""
    faults = carried(model_runner_output, "scope_faults")
    if not faults:
        return original(self, scheduler_output, model_runner_output)
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    faults = _with_sharers(self, faults)
    ended = self.finish_requests(set(faults), RequestStatus.FINISHED_ERROR)
    outputs = original(self, scheduler_output, model_runner_output)
    for request in ended:
        mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        error = SpecError(faults[request.request_id])
        mine.outputs.append(refused(request.request_id, error))
    return outputs
