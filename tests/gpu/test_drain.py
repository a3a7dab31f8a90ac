"""What the drain hands on from a GPU is there by then, whatever stream it was written on."""

from __future__ import annotations

import time

import pytest
import torch

from tests.unit.delivered import ROW_BYTES, labels_of
from tests.unit.worker.test_drain import PATIENCE_S, RecordingSink, of_pairs, pairs_of
from vllm_scope.program.layout import Widths
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.drain import Drain

pytestmark = pytest.mark.gpu
#: Cycles that a row comes behind: tens of milliseconds.
LATE = 50_000_000


def test_rows_that_taps_wrote_are_awaited_on_the_stream_of_their_step():
    device = torch.device("cuda")
    ring, sink = HostRing(64, cuda=True), RecordingSink()
    drain = Drain(Arena(64, torch.float32, device), ring, sink, Widths((ROW_BYTES,)))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    until = time.monotonic() + PATIENCE_S
    try:
        for step in range(9):
            # Two steps on each stream, so that one is found again and one is not.
            with torch.cuda.stream(streams[step // 2 % 3]):
                lease = ring.acquire(1)
                torch.cuda._sleep(LATE)
                row = torch.full((1, 4), 100.0 + step, device=device)
                lease.slots.copy_(row.view(torch.uint8), non_blocking=True)
                drain.submit_written(lease, labels_of([1], [step]), None)
            while len(sink.events) <= step:
                assert time.monotonic() < until
                time.sleep(0.001)
    finally:
        drain.close()
    assert sink.events == [(1, step, 0, 100.0 + step) for step in range(9)]


@pytest.mark.parametrize("num_slots", [9, 64, 4096])
def test_heads_work_on_several_steps_at_once_and_no_region_is_written_before(num_slots):
    device = torch.device("cuda")
    with of_pairs(device, num_slots) as (submit, drain, _, found, pairs):
        for step in range(1000):
            if step % 100 == 0:
                torch.cuda._sleep(LATE)
            submit(step % 3, step, 2)
            if step % 50 == 49:
                drain.finish_request(0)
    assert found == [one for step in range(1000) for one in pairs_of(step % 3, [step], 2)]
    assert sum(pairs.counts) == 2000
    if num_slots == 4096:
        assert max(pairs.counts) > 2
