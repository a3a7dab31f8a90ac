"""A server of several processes ends on SIGTERM and leaves nothing of ours behind."""

from __future__ import annotations

import time

import pytest

from tests.server.conftest import API_KEY, serving
from vllm_scope import Read
from vllm_scope.client import ScopeClient


@pytest.mark.long
def test_two_api_servers_leave_no_folder(tmp_path):
    place = tmp_path / "t"
    place.mkdir()

    def ours():
        return [path.name for path in place.iterdir() if path.name.startswith("vllm-scope")]

    several = ["--api-server-count", "2", "--data-parallel-size", "2"]
    with serving(tmp_path, *several, TMPDIR=str(place), VLLM_CPU_OMP_THREADS_BIND="nobind") as one:
        limit = time.monotonic() + 60
        while len(ours()) < 2:  # a process makes its folder when it is asked to read
            assert time.monotonic() < limit
            with ScopeClient(one.url, API_KEY, timeout=60) as client:
                assert client.complete("x", Read("embed"), max_tokens=2).scope.status == "complete"
        assert list(one.results.iterdir())
    assert ours() == []
    assert list(one.results.iterdir()) == []
