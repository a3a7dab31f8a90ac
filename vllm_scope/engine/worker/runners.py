"""Reads from the model runner, just before a forward, which tokens the forward will compute.

Owns:  one wrapper for each version of the model runner. `attach` sets the wrapper on the runner.
Runs:  in the worker, just before the forward. With Model Runner V1, the wrapper runs only for real
       steps. With V2, the wrapper also runs for dummy steps, whose requests the worker does not
       know.
To:    steps (`begin` with a StepBatch).

Both model runners change the order of requests in a batch. Therefore the scheduler's order does not
say to which request a row belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.labels import StepBatch
from vllm_scope.engine.vllm_types import InputBatchV1, InputBatchV2, ModelRunner, ModelState
from vllm_scope.engine.worker import sampling
from vllm_scope.errors import CompatError

#: A function that gets the batch, and the position of each row as a tensor on the device. The
#: tensor can have padding at its end.
BeginStep = Callable[[StepBatch, Tensor], None]


def version_of(runner: object) -> str:
    """ "V1" or "V2".

    Raises:
        CompatError: the runner has no `_dummy_run`, or has neither the method of V1 nor the method
            of V2 that must be wrapped.
    """
    if not hasattr(runner, "_dummy_run"):
        raise CompatError(f"{type(runner).__name__} has no `_dummy_run`")
    if hasattr(getattr(runner, "model_state", None), "prepare_inputs"):
        return "V2"
    if hasattr(runner, "_model_forward"):
        return "V1"
    raise CompatError(
        f"{type(runner).__name__} has neither `_model_forward` (V1) nor "
        "`model_state.prepare_inputs` (V2)"
    )


def attach(
    runner: ModelRunner,
    has_requests: Callable[[], bool],
    begin_step: BeginStep,
    before_dummy: Callable[[], None],
) -> None:
    """Call `begin_step` before each forward of `runner` for which `has_requests()` is True.

    Also call `before_dummy` before each dummy forward that vLLM runs: a dummy forward must not use
    the plan of the last step.
    """
    dummy_run = runner._dummy_run

    def guarded_dummy_run(*args: object, **kwargs: object) -> object:
        before_dummy()
        return dummy_run(*args, **kwargs)

    runner._dummy_run = guarded_dummy_run
    runner.scope_dummy_run = dummy_run
    if version_of(runner) == "V2":
        _attach_v2(runner, runner.model_state, has_requests, begin_step)
    else:
        _attach_v1(runner, has_requests, begin_step)
        sampling.wrap()


def dummy_forward(runner: ModelRunner, plan: Callable[[], None], num_tokens: int = 1) -> object:
    """Call `plan`, then run one forward of dummy tokens, without attention, KV cache or CUDA
    graph.

    Returns:
        On the last pipeline stage, the model's output, [num_tokens, hidden_size].
    """
    plan()
    run = getattr(runner, "scope_dummy_run", runner._dummy_run)  # `attach` sets scope_dummy_run
    skips = {"skip_attn": True} if version_of(runner) == "V2" else {}
    with _zero_attention(runner):
        out = run(num_tokens, **skips, skip_eplb=True, is_profile=True)
    return out[0] if isinstance(out, tuple) else None


@contextmanager
def _zero_attention(runner: ModelRunner) -> Iterator[None]:
    """In the `with` block, attention without metadata returns 0, as on a GPU. vLLM's attention on a
    CPU would write no output, and the model would compute with uninitialized memory.
    vllm 0.32, v1/attention/backends/cpu_attn.py, CPUAttentionBackendImpl.forward
    """
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found = (getattr(layer, "impl", None) for layer in layers)
    impls: list[Any] = [one for one in found if hasattr(one, "forward")]
    changed = impls if runner.device.type == "cpu" else []
    for impl in changed:

        def forward(*args: object, of: Any = impl.forward, **kwargs: object) -> object:
            return of(*args, **kwargs).zero_()

        impl.forward = forward
    try:
        yield
    finally:
        for impl in changed:
            del impl.forward


def is_optimistic(runner: ModelRunner, version: str) -> bool:
    """True if the positions on the host can count draft tokens that are not verified yet.
    vllm 0.32, v1/worker/gpu_model_runner.py, _prepare_inputs"""
    if version == "V2":
        return bool(runner.num_speculative_steps > 0)
    return bool(runner.use_async_spec_decode)


def _attach_v1(
    runner: ModelRunner, has_requests: Callable[[], bool], begin_step: BeginStep
) -> None:
    forward = runner._model_forward

    def model_forward(*args: object, **kwargs: object) -> object:
        if has_requests():
            batch = runner.input_batch
            step = _step(
                batch, runner.query_start_loc.np, batch.num_computed_tokens_cpu,
                is_optimistic(runner, "V1"),
            )  # fmt: skip
            begin_step(step, runner.positions)
        return forward(*args, **kwargs)

    runner._model_forward = model_forward


def _attach_v2(
    runner: ModelRunner,
    model_state: ModelState,
    has_requests: Callable[[], bool],
    begin_step: BeginStep,
) -> None:
    prepare = model_state.prepare_inputs

    def prepare_inputs(input_batch: InputBatchV2, req_states: object) -> object:
        if has_requests():
            step = _step(
                input_batch, input_batch.query_start_loc_np, input_batch.num_computed_tokens_np,
                is_optimistic(runner, "V2"),
            )  # fmt: skip
            begin_step(step, input_batch.positions)
        return prepare(input_batch, req_states)

    model_state.prepare_inputs = prepare_inputs


def _step(
    batch: InputBatchV1 | InputBatchV2,
    query_start: NDArray[np.int32],
    num_computed: NDArray[np.int32],
    optimistic: bool,
) -> StepBatch:
    num_reqs = batch.num_reqs
    return StepBatch(
        batch.req_ids[:num_reqs],
        query_start[: num_reqs + 1].astype(np.int64),
        num_computed[:num_reqs].astype(np.int64),
        optimistic,
    )
