from __future__ import annotations

import pytest

from vllm_scope.sweeps import yielding


class Clock:
    """Stands for the module time in `sweeps.yielding`."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(yielding, "time", clock)
    return clock
