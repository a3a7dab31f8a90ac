"""Requests that a probe stops: they end with the step that brought the verdict.

Owns:  the way of a verdict from a worker to the caller.
Runs:  `with_verdicts` in the worker, where a step's output is made; `stop_judged` in EngineCore.
From:  worker.watch (which requests).   To: the request's finish_reason and stop_reason.

The step that computes a token's row also samples the next token. That token is kept, because the
row's position then counts as processed; it is the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_scope.engine import wrapping
from vllm_scope.engine.core.scores import lose
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.engine.vllm_types import Scheduler
from vllm_scope.engine.worker.carrying import carried, carrying, is_output
from vllm_scope.worker.score_store import ScoreStore
from vllm_scope.worker.watch import Watch

_NAME, _LOST = "scope_verdicts", "scope_lost_scores"


def with_verdicts(output: Any, watch: Watch) -> Any:
    """A step's output, with the verdicts on the rows of that step and of earlier ones."""
    steps = watch.take() if is_output(output) else []
    return carrying(output, _NAME, partial(watch.judge, steps)) if steps else output


def with_lost(output: Any, store: ScoreStore) -> Any:
    """A step's output, with the kept scores that this worker did not find."""
    missing = store.take_missing() if is_output(output) else []
    return carrying(output, _LOST, lambda: {"keys": missing}) if missing else output


def stop_judged(
    original: Callable[..., dict[int, Outputs]],
    self: Scheduler,
    scheduler_output: object,
    model_runner_output: object,
) -> dict[int, Outputs]:
    """Scheduler.update_from_output: end requests with a verdict after their tokens are taken."""
    outputs = original(self, scheduler_output, model_runner_output)
    lose(self, carried(model_runner_output, _LOST).get("keys", ()))
    verdicts = carried(model_runner_output, _NAME)
    if not verdicts:
        return outputs
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    for request in self.finish_requests(set(verdicts), RequestStatus.FINISHED_STOPPED):
        mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        # An output of its own: in one with tokens, a stop takes the last token out of the text.
        end = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.STOP,
            stop_reason=verdicts[request.request_id],
        )  # fmt: skip
        mine.outputs.append(end)
    return outputs


def wrap() -> None:
    wrapping.wrap("Scheduler.update_from_output", stop_judged)
