"""What a worker does before and after vLLM changes its weights, and before and after each step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_scope.config import ScopeConfig
from vllm_scope.core.news import Entrant, StepNews
from vllm_scope.engine.worker import attach
from vllm_scope.engine.worker.worker import ScopeWorker
from vllm_scope.errors import ConfigError


@pytest.fixture
def happened(monkeypatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr(ScopeWorker, "settle", lambda self: found.append("settled"))
    monkeypatch.setattr(ScopeWorker, "renew", lambda self, failed=None: found.append(failed))
    return found


def _worker(happened: list[object], names: tuple[str, ...], error: Exception | None = None):
    def change() -> None:
        happened.append("changed")
        if error is not None:
            raise error

    names = ("load_model", "compile_or_warm_up_model", "shutdown", *names)
    worker = SimpleNamespace(vllm_config=None, **dict.fromkeys(names, change))
    attach._attach(worker, ScopeConfig())
    return worker


def test_rows_of_the_old_weights_are_worked_on_before_the_weights_change(happened):
    worker = _worker(happened, ("reload_weights", "start_weight_update", "finish_weight_update"))
    worker.reload_weights()
    assert happened == ["settled", "changed", None]
    happened.clear()
    worker.start_weight_update()
    worker.finish_weight_update()
    assert happened == ["settled", "changed", "changed", None]


def test_rows_are_worked_on_before_the_weights_leave_the_device(happened):
    """A lens on a GPU reads the model's own unembedding, and the drain thread can be late."""
    worker = _worker(happened, ("sleep", "wake_up"))
    worker.sleep()
    worker.wake_up()
    assert happened == ["settled", "changed", "changed"]


def test_weights_that_cannot_be_read_leave_the_lens_as_it_is(happened):
    worker = _worker(happened, ("reload_weights",), OSError("no such folder"))
    with pytest.raises(OSError, match="no such folder"):
        worker.reload_weights()
    assert happened == ["settled", "changed", "no such folder"]


def test_a_worker_of_another_platform_may_have_no_call_that_changes_weights(happened):
    worker = _worker(happened, ())
    assert not hasattr(worker, "reload_weights")


@pytest.mark.parametrize("step", ["load_model", "compile_or_warm_up_model"])
def test_an_engine_that_does_not_start_leaves_no_threads_and_no_memory(step, monkeypatch):
    """vLLM does not shut down the worker of an engine that does not start, and an engine in the
    caller's process leaves the process alive."""
    happened: list[object] = []

    def fail(self):
        raise ConfigError("no such monitor")

    monkeypatch.setattr(ScopeWorker, "load", fail)
    monkeypatch.setattr(ScopeWorker, "check_canary", fail)
    monkeypatch.setattr(ScopeWorker, "close", lambda self: happened.append("closed"))
    worker = _worker(happened, ())
    with pytest.raises(ConfigError, match="no such monitor"):
        getattr(worker, step)()
    assert happened == ["changed", "closed"]


class Scope:
    """Records what the steps of a worker call, in order.

    Attributes:
        reads: what `has_requests` returns, and the opposite of what `rests` returns.
    """

    resting = False

    def __init__(self, reads: bool = True) -> None:
        self.happened: list[str] = []
        self.reads, self.steps = reads, self

    def __getattr__(self, name: str):
        return lambda *args: self.happened.append(name)

    def has_requests(self) -> bool:
        return self.reads

    def rests(self) -> bool:
        self.resting = not self.reads
        return self.resting

    def with_endings(self, output: object) -> object:
        return output


def _steps(scope: Scope, output: object = None, error: Exception | None = None):
    """A runner with the worker's steps: its `execute_model` and `sample_tokens`."""

    def execute(scheduler_output: object) -> object:
        scope.happened.append("launch")
        if error is not None:
            raise error
        return output

    def sample() -> object:
        scope.happened.append("sample")
        if error is not None:
            raise error
        return "tokens"

    runner = SimpleNamespace(execute_model=execute, sample_tokens=sample)
    attach._attach_steps(runner, scope)
    return runner


def _scheduled(news: StepNews | None = None, finished: tuple[str, ...] = ()):
    return SimpleNamespace(scope_news=news, finished_req_ids=set(finished), scheduled_new_reqs=())


def test_the_launch_ends_with_the_sampling_if_it_comes_later():
    scope = Scope()
    runner = _steps(scope)
    assert runner.execute_model(_scheduled()) is None
    assert scope.happened == ["begin_launch", "launch", "end"]
    assert runner.sample_tokens() == "tokens"
    assert scope.happened[3:] == ["sample", "end_launch"]


def test_the_launch_ends_with_the_model_if_nothing_is_sampled_later():
    scope = Scope()
    assert _steps(scope, "tensors for the next stage").execute_model(_scheduled())
    assert scope.happened == ["begin_launch", "launch", "end_launch", "end"]


def test_the_launch_ends_with_an_error():
    scope = Scope()
    runner = _steps(scope, error=ValueError("no memory"))
    with pytest.raises(ValueError, match="no memory"):
        runner.execute_model(_scheduled())
    assert scope.happened == ["begin_launch", "launch", "end_launch", "fail"]
    scope.happened.clear()
    with pytest.raises(ValueError, match="no memory"):
        runner.sample_tokens()
    assert scope.happened == ["sample", "end_launch"]


def test_a_step_of_plain_requests_notes_no_launch():
    scope = Scope(reads=False)
    runner = _steps(scope)
    runner.execute_model(_scheduled())
    runner.sample_tokens()
    assert scope.happened == ["launch", "sample"]


def test_news_end_the_rest():
    scope = Scope(reads=False)
    runner = _steps(scope)
    runner.execute_model(_scheduled())
    scope.happened.clear()
    runner.execute_model(_scheduled(StepNews(entrants={"a": Entrant(None, 0)})))
    assert not scope.resting
    assert scope.happened == ["add_requests", "clear", "launch", "end", "deliver_soon"]


def test_the_last_blocks_of_ended_requests_are_kept_before_these_are_forgotten():
    """And before a new request takes their scores, or their id."""
    scope, news = Scope(), StepNews(entrants={"b": Entrant(None, 0)})
    news.filled_at_end, news.filled = {"a": (2, [b"c"])}, {"a": (0, [b"a", b"b"])}
    _steps(scope).execute_model(_scheduled(news, ("a",)))
    assert scope.happened == [
        "keep_blocks", "finish_requests", "add_requests", "begin_launch", "launch", "end",
        "deliver_soon", "keep_blocks",
    ]  # fmt: skip
