"""The benchmark of the HTTP server divides its clients and requests among processes."""

from __future__ import annotations

import pytest

from benchmarks.http import Load, shares_of


@pytest.mark.parametrize(("clients", "requests"), [(1, 5), (3, 3), (64, 256), (66, 130)])
@pytest.mark.parametrize("count", [1, 4])
def test_each_process_has_a_client_and_nothing_is_lost(clients, requests, count):
    load = Load("work", clients=clients, requests=requests, prompt=8, generate=2)
    shares = shares_of(load, count)
    assert len(shares) == min(count, clients)
    assert sum(one.clients for one in shares) == clients
    assert sum(one.requests for one in shares) == requests
    assert all(one.clients and one.requests for one in shares)
    assert {(one.prompt, one.generate) for one in shares} == {(8, 2)}
