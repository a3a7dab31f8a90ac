"""What happens to a worker around vLLM's calls that change its weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.worker import attach
from vllm_scope.engine.worker.worker import ScopeWorker


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


def test_weights_that_cannot_be_read_leave_the_lens_as_it_is(happened):
    worker = _worker(happened, ("reload_weights",), OSError("no such folder"))
    with pytest.raises(OSError, match="no such folder"):
        worker.reload_weights()
    assert happened == ["settled", "changed", "no such folder"]


def test_a_worker_of_another_platform_may_have_no_call_that_changes_weights(happened):
    worker = _worker(happened, ())
    assert not hasattr(worker, "reload_weights")
