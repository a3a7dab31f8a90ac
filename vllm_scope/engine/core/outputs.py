"""Handles the scheduler's step outputs: reports of workers, and joined answers of variants.

Owns:  the seam on Scheduler.update_from_output.
Runs:  in EngineCore, on the scheduler's thread.
From:  engine.worker.faults, verdicts, variants, whose functions handle an output.

Promise: if a step has only requests without taps, the seam makes three checks and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_scope.engine import wrapping
from vllm_scope.engine.core.entered import any_entered
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
    plain = not any_entered() and not stands_for_some(self)
    if plain and not carries(model_runner_output):
        return original(self, scheduler_output, model_runner_output)
    faulty = partial(end_faulty, original)
    judged = partial(stop_judged, faulty)
    # `take_variants` is the outermost wrapper, because it needs the outputs of the other wrappers.
    return take_variants(judged, self, scheduler_output, model_runner_output)


def wrap() -> None:
    wrapping.wrap("Scheduler.update_from_output", _update)
