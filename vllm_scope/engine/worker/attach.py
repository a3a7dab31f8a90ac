"""Attaches a ScopeWorker to each of vLLM's workers.

Owns:  the wrappers of the worker's and the model runner's methods; the names of remote calls.
Runs:  in every worker process. `_attach` runs when vLLM makes the worker object, and the wrappers
       run at load and in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_scope.config import ScopeConfig
from vllm_scope.engine import wrapping
from vllm_scope.engine.core import clearing
from vllm_scope.engine.core.scheduler import news_in
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import ModelRunner, SchedulerOutput, VllmConfig, Worker
from vllm_scope.engine.worker.sums import SumsCalls
from vllm_scope.engine.worker.worker import ScopeWorker
from vllm_scope.errors import reason_of
from vllm_scope.graph.tap import graphs

#: The methods by which vLLM changes or frees the weights. vLLM calls each method on all workers.
#: When a method of _OLD_WEIGHTS starts, the model still has its old weights. (A lens reads the
#: weights, and `sleep` frees their device memory.) When a method of _NEW_WEIGHTS ends without an
#: error, the model has new weights.
_OLD_WEIGHTS = ("reload_weights", "start_weight_update", "sleep")
_NEW_WEIGHTS = ("reload_weights", "finish_weight_update")


def _remote_calls(scope: ScopeWorker) -> dict[str, Callable[..., object]]:
    """Maps the name of each remote call to its function. vLLM sends the errors of these functions
    as text."""
    return {
        "scope_connect": scope.connect,
        "scope_describe": scope.describe,
        "scope_counters": scope.counters,
        "scope_flush": scope.flush,
        **SumsCalls(scope).by_name(),
    }


def _attach(worker: Worker, config: ScopeConfig) -> None:
    """Wrap the methods of one worker object. The worker's class is not changed, because a user can
    have written the class."""
    scope = ScopeWorker(worker, config)
    load_model = worker.load_model
    warm_up, shutdown = worker.compile_or_warm_up_model, worker.shutdown

    def load(*args: object, **kwargs: object) -> object:
        out = load_model(*args, **kwargs)
        with _closed_if_failed(scope):
            scope.load()
            _attach_steps(worker.model_runner, scope)
        return out

    def warm(*args: object, **kwargs: object) -> object:
        with graphs.captured():
            out = warm_up(*args, **kwargs)
        with _closed_if_failed(scope):
            scope.check_canary()
            if scope.steps is not None:
                clearing.warm_up(worker.model_runner)
        return out

    def close(*args: object, **kwargs: object) -> object:
        scope.close()
        return shutdown(*args, **kwargs)

    for names, wrapped in ((_OLD_WEIGHTS, _settling), (_NEW_WEIGHTS, _renewing)):
        for name in names:
            if hasattr(worker, name):  # workers of some platforms do not have all methods
                setattr(worker, name, wrapped(getattr(worker, name), scope))
    worker.load_model = load
    worker.compile_or_warm_up_model, worker.shutdown = warm, close
    for name, call in _remote_calls(scope).items():
        setattr(worker, name, call)


@contextmanager
def _closed_if_failed(scope: ScopeWorker) -> Iterator[None]:
    """If the `with` block fails, end the worker's threads and free its memory. The engine then does
    not start, and vLLM does not call the worker's `shutdown`."""
    try:
        yield
    except BaseException:
        scope.close()
        raise


def _settling(change: Callable[..., object], scope: ScopeWorker) -> Callable[..., object]:
    def settled(*args: object, **kwargs: object) -> object:
        scope.settle()
        return change(*args, **kwargs)

    return settled


def _renewing(change: Callable[..., object], scope: ScopeWorker) -> Callable[..., object]:
    def changed(*args: object, **kwargs: object) -> object:
        try:
            out = change(*args, **kwargs)
        except Exception as error:
            scope.renew(reason_of(error))
            raise
        scope.renew()
        return out

    return changed


def _attach_steps(runner: ModelRunner, scope: ScopeWorker) -> None:
    """Wrap `execute_model` and `sample_tokens` of the model runner. The worker's `execute_model` is
    not wrapped, because Ray's compiled graph does not call it.
    vllm 0.32, v1/executor/ray_utils.py, RayWorkerWrapper.execute_model_ray
    """
    execute_model = runner.execute_model

    def execute(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
        if kwargs.get("dummy_run"):  # Model Runner V2 also calls `execute_model` for dummy steps
            return execute_model(scheduler_output, *args, **kwargs)
        news = news_in(scheduler_output)
        if news is None and scope.rests():
            return execute_model(scheduler_output, *args, **kwargs)
        scope.resting = False
        if news is not None and news.zeroed:
            clearing.zero(runner, news.zeroed)
        if news is not None and news.accepted:
            scope.accept(news.accepted)
        # The scheduler has already given the table entries of ended requests to new requests.
        # Therefore ended requests are removed before new requests are added.
        if scheduler_output.finished_req_ids:
            if news is not None and news.filled_at_end:
                # The scores are stored before `finish_requests` drops the request that has the
                # scores, because a new request can need these scores.
                scope.keep_blocks(news.filled_at_end)
            ended = {} if news is None else news.ended
            scope.finish_requests(scheduler_output.finished_req_ids, ended)
        if news is not None and (news.entrants or news.resumed):
            scope.add_requests(scheduler_output.scheduled_new_reqs, news)
        if news is not None and news.begun:
            scope.begin_stages(news.begun)
        if news is not None and news.scales:
            scope.change_scales(news.scales)
        if scope.steps is None:
            return execute_model(scheduler_output, *args, **kwargs)
        if scope.has_requests():
            scope.begin_launch()
        else:
            scope.steps.clear()
        try:
            output = execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            scope.end_launch()
            scope.steps.fail()
            raise
        if output is not None:  # if None, `sample_tokens` launches the rest of the step
            scope.end_launch()
        scope.steps.end()
        if news is not None and news.entrants:
            scope.deliver_soon()
        if news is not None and news.filled:
            scope.keep_blocks(news.filled)
        if news is not None and news.forgotten_scores:
            scope.forget_scores(news.forgotten_scores)
        return None if output is None else scope.with_endings(output)

    sample_tokens = runner.sample_tokens

    def sample(*args: object, **kwargs: object) -> object:
        if scope.resting:
            return sample_tokens(*args, **kwargs)
        try:
            output = sample_tokens(*args, **kwargs)
        finally:
            scope.end_launch()
        return scope.with_endings(output)

    runner.execute_model, runner.sample_tokens = execute, sample


def wrap() -> None:
    def init(
        original: Callable[..., object],
        self: Worker,
        vllm_config: VllmConfig,
        *args: object,
        **kwargs: object,
    ) -> None:
        original(self, vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        if config is not None:
            _attach(self, config)

    wrapping.wrap("WorkerBase.__init__", init)
    wrapping.require(
        "WorkerBase.load_model", "WorkerBase.compile_or_warm_up_model", "WorkerBase.shutdown"
    )
