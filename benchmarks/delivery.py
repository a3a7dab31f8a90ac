"""How fast rows reach the caller, without an engine or a model.

    python -m benchmarks.delivery            # all layers of 8B's shape
    python -m benchmarks.delivery --small    # 64 requests x 1 layer x 128 tokens

A worker process has a ring, whose rows were written one time. The worker sends the messages that a
drain would send: headers that name spans of the ring. The worker sends a message as soon as the
ring has room. The front-end is this process: a receiver, an inbox, buffers, results. The time of a
batch is from the first opened buffer until the results are complete and dropped. As with
`LLM.generate`, all results of a batch are in memory together. With `--kept N`, the last N batches
of a line of the table are kept, and older batches are dropped.

In the same turns, numpy copies as many bytes within this process, to memory that was used before
and to new memory. numpy uses as many threads as the inbox has. A figure is the median of the turns
with its 95 % interval. The ratio is a line's speed divided by the first line's speed, turn by turn.
CPU time is the time of all threads of this process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from benchmarks.turns import order, ratio_of
from vllm_scope import Read
from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.results.allocator import CachingAllocator
from vllm_scope.results.copiers import Copiers
from vllm_scope.results.inbox import Inbox
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.messages import Address
from vllm_scope.transport.ring import HostRing
from vllm_scope.transport.senders import SharedSender

HIDDEN, RING_BYTES = 4096, 256 << 20
#: The most seconds that a batch can take.
PATIENCE_S = 120.0


class Shape(NamedTuple):
    """A batch of requests.

    Attributes:
        by_tap: True: the step is drained tap by tap, like a large prefill.
        step_tokens: number of tokens in one message.
    """

    requests: int
    layers: int
    tokens: int
    step_tokens: int
    by_tap: bool = False

    @property
    def sites(self) -> Sites:
        boundaries = tuple(2 * layer + 2 for layer in range(self.layers))
        return Sites(self.layers, HIDDEN, "bfloat16", boundaries)

    @property
    def num_bytes(self) -> int:
        return self.requests * self.layers * self.tokens * 2 * HIDDEN


#: Large batches: prompts, which are drained tap by tap, and decoding, with several steps in one
#: message.
LARGE = {
    "prefill, tap by tap": Shape(16, 32, 256, 2048, by_tap=True),
    "decode": Shape(64, 32, 64, 256),
}
SMALL = Shape(64, 1, 128, 2048)


def worker(pipe: Connection, address: Address) -> None:
    """For each (shape, keys) from the pipe, send the rows of the batch."""
    ring = HostRing(RING_BYTES // 16, cuda=False)
    ring.slots.random_(0, 256)
    sender = SharedSender(address, ring)
    ring.reclaim = sender.reclaim
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        shape, keys = asked
        for labels, boundary in messages(shape, np.array(keys)):
            widths = Widths((2 * HIDDEN,))
            one = labels.layouts[0] if boundary is None else labels.layouts[0].at(boundary)
            lease = ring.acquire(len(labels.keys) * one.slots(widths))
            sender.send_rows(RowBatch(labels, lease, widths, boundary))
            lease.release()
        for key in keys:
            sender.send_finish(key, 0, None)
    sender.close()
    ring.close()


def messages(shape: Shape, keys: np.ndarray) -> Iterator[tuple[Labels, int | None]]:
    """The messages of a batch. In a step of decoding, each request has one token. In a step of
    prompts, the tokens of one request are adjacent."""
    asked = Spec((Read("resid_post"),)).resolve(shape.sites)
    points = tuple(s.point(read.when) for read in asked.reads for s in read.streams)
    layout = Layout(tuple(sorted(points)))
    owner, position = np.repeat(keys, shape.tokens), np.tile(np.arange(shape.tokens), len(keys))
    if shape is not SMALL and not shape.by_tap:
        owner, position = np.tile(keys, shape.tokens), np.repeat(np.arange(shape.tokens), len(keys))
    for first in range(0, len(owner), shape.step_tokens):
        some = slice(first, first + shape.step_tokens)
        count = len(owner[some])
        labels = Labels(
            owner[some], position[some], np.zeros(count, np.int32), (layout,), np.arange(count)
        )
        for boundary in shape.sites.boundaries if shape.by_tap else (None,):
            yield labels, boundary


class FrontEnd:
    """An inbox of this process, and a worker that sends to it.

    Args:
        most_bytes: the most bytes that the allocator keeps.
    """

    def __init__(self, most_bytes: int, num_copiers: int) -> None:
        self.inbox = Inbox(num_copiers, CachingAllocator(most_bytes))
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=worker, args=(other, self.inbox.address))
        self._process.start()
        self._pipe.recv()

    def deliver(self, shape: Shape) -> list[ScopeResult]:
        """One batch of complete results."""
        asked = Spec((Read("resid_post"),)).resolve(shape.sites)
        prompt = list(range(shape.tokens))
        pending = [self.inbox.open(asked, shape.sites, prompt, 1, 1) for _ in range(shape.requests)]
        self._pipe.send((shape, [one.key for one in pending]))
        found = []
        for one in pending:
            one.done.result(PATIENCE_S)
            found.append(one.snapshot([5], "length"))
            self.inbox.forget(one)
        assert all(one.status == "complete" for one in found)
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
        self.inbox.close()


class Copying:
    """Copies as many bytes as a batch has."""

    def __init__(self, num_bytes: int, num_copiers: int) -> None:
        self._source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        self._touched = self._source.copy()
        self._copiers = Copiers(num_copiers)

    def to_touched(self) -> None:
        self._copiers.run([(self._touched, self._source)])

    def to_new(self) -> None:
        self._copiers.run([(np.empty_like(self._source), self._source)])


def compare(shape: Shape, turns: int, kept: int, num_copiers: int) -> None:
    """Print a line for each mode."""
    copying = Copying(shape.num_bytes, num_copiers)
    ends = [FrontEnd(most_bytes, num_copiers) for most_bytes in (1 << 40, 0)]
    held: deque[object] = deque(maxlen=2 * kept)
    modes: dict[str, Callable[[], object]] = {
        "numpy, touched memory": copying.to_touched,
        "numpy, new memory": copying.to_new,
        "results, memory used again": lambda: held.append(ends[0].deliver(shape)),
        "results, new memory": lambda: held.append(ends[1].deliver(shape)),
    }
    wall: dict[str, list[float]] = {name: [] for name in modes}
    cpu: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(turns + 1):
        for name in order(modes, turn):
            started, busy = time.perf_counter(), time.process_time()
            modes[name]()
            if turn:  # the first turn warms up
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - busy)
    for end in ends:
        end.close()
    ones, first = [1.0] * turns, next(iter(modes))
    for name in modes:
        speeds = ratio_of([shape.num_bytes / 1e9 / s for s in wall[name]], ones)
        times = ratio_of([1e6 * s / shape.requests for s in cpu[name]], ones)
        ratio = ratio_of(wall[first], wall[name])
        print(
            f"{name:28} {speeds.median:6.2f} ({speeds.low:.2f} to {speeds.high:.2f}) {ratio}"
            f" {times.median:9.0f} ({times.low:.0f} to {times.high:.0f})", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kept", type=int, default=0)
    parser.add_argument("--copiers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    args = parser.parse_args()
    for name, shape in ({"small results": SMALL} if args.small else LARGE).items():
        print(f"{name}, {shape.num_bytes >> 20} MiB, {args.copiers} copiers")
        print(f"{'':28} GB/s                   ratio                    CPU us of a request")
        compare(shape, args.turns, args.kept, args.copiers)


if __name__ == "__main__":
    main()
