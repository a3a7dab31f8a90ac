"""The road to an inbox, which tests of results share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tests.unit.roads import Road
from vllm_scope.results.inbox import Inbox
from vllm_scope.transport.ring import HostRing
from vllm_scope.transport.senders import SharedSender


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other cost more than small tensors gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """`caplog` sees what the package logs, also once vLLM has set its loggers up."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    logging.getLogger("vllm.vllm_scope").setLevel(logging.INFO)


@pytest.fixture(scope="module")
def road() -> Iterator[Road]:
    inbox = Inbox()
    ring = HostRing(1 << 15, cuda=False)
    sender = SharedSender(inbox.address, ring)
    ring.reclaim = sender.reclaim
    yield Road(inbox, sender, ring)
    sender.close()
    inbox.close()
    ring.close()
