"""Handles the results of scores: a probe or a policy stops a request, a later stage begins, or a
policy sets new scales.

Owns:  the code that carries verdicts and new scales from a worker to the caller or to all workers.
Runs:  `with_verdicts` and `with_lost` in the worker; the other functions in EngineCore.
From:  worker.watch (verdicts, new scales).   To: the caller (the request's finish_reason and
       stop_reason), scheduler (the news of the next step).

A stage is a probe of a cascade (request.cascade). A later stage begins to score when another probe,
its first stage, has a verdict.

The step that computes a token's row also samples the next token. If the score of the row stops the
request, the answer still contains the sampled token, as its last token.

New scales act from the first position that no step has begun to compute. Without async scheduling,
this first position is one after the scored row. With async scheduling, the new scales act one
position later, because one more step has already begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_scope.control.policy import Changes
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.scores import freeze, lose
from vllm_scope.engine.refusals import refused
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.engine.vllm_types import Scheduler
from vllm_scope.engine.worker.carrying import carried, carrying, is_output
from vllm_scope.errors import ScopeError
from vllm_scope.worker.score_store import ScoreStore
from vllm_scope.worker.watch import Judged, Watch

_TOO_LATE = (
    "the request was ended, because its policy's decision came after the first tokens to which the "
    "decision applies; start the engine without async scheduling."
)
_NAME, _LOST = "scope_verdicts", "scope_lost_scores"


@dataclass
class Due:
    """The entries that verdicts and policies add to the next step's news.

    Attributes:
        begun: the names of the first stages that now have a verdict, by request.
        scales: the new scales that a request's policy has set, by request.
    """

    begun: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scales: dict[str, Changes] = field(default_factory=dict)


_due: Beside[Due] = Beside()


def with_verdicts(output: Any, watch: Watch) -> Any:
    """Adds to a step's output the verdicts and new scales that are due after this step. They are
    computed from the rows of this step and of earlier steps."""
    if not watch.has_steps or not is_output(output):
        return output
    return carrying(output, _NAME, partial(watch.judge, watch.take()))


def with_lost(output: Any, store: ScoreStore) -> Any:
    """Adds to a step's output the keys of the stored scores that this worker did not find."""
    if not store.has_missing or not is_output(output):
        return output
    missing = store.take_missing()
    return carrying(output, _LOST, lambda: {"keys": missing})


def stop_judged(
    original: Callable[..., dict[int, Outputs]],
    self: Scheduler,
    scheduler_output: object,
    model_runner_output: object,
) -> dict[int, Outputs]:
    """Let vLLM process the tokens of a step. Afterwards end the requests that a verdict stops, and
    the requests whose new scales are too late."""
    outputs = original(self, scheduler_output, model_runner_output)
    lose(self, carried(model_runner_output, _LOST).get("keys", ()))
    judged: Mapping[str, Judged] = carried(model_runner_output, _NAME)
    late = tell_workers(self, judged) if judged else set()
    verdicts = {req_id: one.stops for req_id, one in judged.items() if one.stops is not None}
    if not (verdicts or late):
        return outputs
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    for request in self.finish_requests(late, RequestStatus.FINISHED_ERROR):
        mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        mine.outputs.append(refused(request.request_id, ScopeError(_TOO_LATE)))
    for request in self.finish_requests(set(verdicts), RequestStatus.FINISHED_STOPPED):
        mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        # The request ends with a separate output without tokens. If an output with tokens had this
        # finish_reason, vLLM would remove the last token from the text.
        end = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.STOP,
            stop_reason=verdicts[request.request_id],
        )  # fmt: skip
        mine.outputs.append(end)
    return outputs


def tell_workers(scheduler: Scheduler, judged: Mapping[str, Judged]) -> set[str]:
    """Store the names of the first stages that now have a verdict, and the new scales of edits. The
    next step's news sends both to all workers.

    Returns:
        The ids of requests whose new scales are too late: a step has already begun to compute a
        token to which the new scales should apply.
    """
    due, late = _due.of(scheduler) or _due.put(scheduler, Due()), set()
    for req_id, (_, firsts, scales) in judged.items():
        request = scheduler.requests.get(req_id)
        if request is None:
            continue
        if firsts:
            due.begun[req_id] = due.begun.get(req_id, ()) + firsts
            freeze(scheduler, request)
        if scales and request.num_computed_tokens > scales[0][0]:
            late.add(req_id)
        elif scales:
            due.scales[req_id] = due.scales.get(req_id, ()) + scales
    return late


def has_due(scheduler: Scheduler) -> bool:
    return _due.of(scheduler) is not None


def take_due(scheduler: Scheduler) -> Due:
    """The first stages with a verdict, and the new scales, that were stored since the last call.
    Requests that have ended are left out."""
    due, running = _due.pop(scheduler), scheduler.requests
    if due is None:
        return Due()
    return Due(
        {req_id: firsts for req_id, firsts in due.begun.items() if req_id in running},
        {req_id: scales for req_id, scales in due.scales.items() if req_id in running},
    )
