"""Handles the outputs of each step in the scheduler: applies the workers' reports, and joins the
answers of variants.

Owns:  the wrapper of Scheduler.update_from_output.
Runs:  in EngineCore, on the scheduler's thread.
From:  engine.worker.faults, verdicts, variants (the functions that handle an output).

Promise: if the workers added no values to an output (worker.carrying), and no variants run, the
wrapper only checks these two conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_scope.engine import wrapping
from vllm_scope.engine.core.variants import stands_for_some, take_variants
from vllm_scope.engine.core.verdicts import stop_judged
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.engine.vllm_types import Scheduler
from vllm_scope.engine.worker.carrying import carries
from vllm_scope.engine.worker.faults import end_faulty


def _update(
    original: Callable[..., dict[int, Outputs]],
    self: Scheduler,
    scheduler_output: object,
    model_runner_output: object,
) -> dict[int, Outputs]:
    if not (carries(model_runner_output) or stands_for_some(self)):
        return original(self, scheduler_output, model_runner_output)
    faulty = partial(end_faulty, original)
    judged = partial(stop_judged, faulty)
    # `take_variants` is the outermost wrapper, because `take_variants` needs the outputs that the
    # other wrappers return.
    return take_variants(judged, self, scheduler_output, model_runner_output)


def wrap() -> None:
    wrapping.wrap("Scheduler.update_from_output", _update)
