"""The host's time for a cell of a sweep, from the front-end to the worker, without a model.

    python -m benchmarks.sweep_entry            # the worker is in EngineCore's process
    python -m benchmarks.sweep_entry --apart    # the worker is in another process: pickled news

The shape is 8B's: rows of 4096 numbers, 32 layers. The prompt has 24 tokens, a step 64 cells. The
stages are vllm-scope's own functions and vLLM's encoder and decoder of messages, as in
benchmarks.entry. All stages run on one thread. A figure is microseconds of CPU for a cell: the
median and the mean. The mean includes Python's garbage collections, but these skip all objects that
existed before the measurement.
"""

from __future__ import annotations

import cProfile
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from itertools import count
from pathlib import Path
from pickle import dumps, loads
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.entry import Road
from vllm_scope.engine.frontend.sweeping import CELLS_TOGETHER
from vllm_scope.engine.heap import frozen_heap

NUM_PROMPT, AT_ONCE = 24, 64


class Timed:
    """Microseconds of each stage."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, stage: str, call: Callable[..., Any], *args: Any, num: int = 1) -> Any:
        """Call a function, and return its result. The call's time is the time of `num` cells."""
        started = time.thread_time()
        found = call(*args)
        self.times[stage] += [1e6 * (time.thread_time() - started) / num] * num
        return found


class Numbers:
    """A tokenizer for prompts of token ids. It encodes no text, and decodes all ids as ""."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        return ""


class Cells:
    """The cells of one sweep, and the engine without a model that gets them, in this process."""

    def __init__(self, road: Road, timed: Timed, apart: bool) -> None:
        from vllm_scope import LogitDifference, Sweep
        from vllm_scope.core.news import Told
        from vllm_scope.engine.frontend.alike import Alike
        from vllm_scope.engine.frontend.sweeping import params_of
        from vllm_scope.sweeps.plan import Plan

        self.road, self.timed, self.numbers, self.apart = road, timed, count(), apart
        if not apart:
            road.core.widths, road.told = road.worker._tables.widths, Told(here=True)
        random = np.random.default_rng(0)
        ids = random.integers(5, 1000, NUM_PROMPT).tolist()
        rows = random.normal(size=(road.sites.num_layers, NUM_PROMPT, road.sites.hidden_size))
        swept = Sweep(rows.astype(np.float32), metric=LogitDifference(5, 50))
        self.plan = Plan(swept, [{"prompt_token_ids": ids}], road.sites, Numbers())
        self.jobs = self.plan.jobs()
        read = next(self.jobs)
        assert read is not None
        self.plan.take(read, np.zeros(2), None, None)
        self.alike = Alike(road.connection)
        self.params = params_of((5, 50))

    def opened(self, num: int) -> Any:
        """The message of some cells."""
        from vllm.v1.engine import EngineCoreRequest

        from vllm_scope.engine.frontend.alike import asking
        from vllm_scope.engine.frontend.sweeping import cells_of

        timed, name = self.timed, str(next(self.numbers))
        jobs = [timed("front-end: edits", next, self.jobs) for _ in range(num)]
        args = self.alike, jobs, self.params
        prepared = timed("front-end: prepared", cells_of, *args, num=num)
        params, ids = asking(self.params), jobs[0].ids
        request: Any = EngineCoreRequest(name, ids, None, params, None, 0.0, None, None, None)
        timed("front-end: buffer and ticket", self.road.open, (request, prepared), num=num)
        return timed("message: encoded", self.road.encode, (request,), num=num)

    def entered(self, message: Any) -> list[Any]:
        """The requests of a message in EngineCore."""
        from vllm_scope.engine.params import ticket_of, without_ticket

        def parts(request: Any) -> Any:
            ticket = ticket_of(request.sampling_params)
            assert ticket is not None
            return ticket.of_variants()

        def enter(ticket: Any) -> Any:
            one = copy(request)
            one.request_id = str(next(self.numbers))
            return one, self.road.core.enter(one, ticket)

        timed, num = self.timed, CELLS_TOGETHER
        request = timed("message: decoded", self.road.decode, message, num=num)
        tickets = timed("EngineCore: tickets", parts, request, num=num)
        request.sampling_params = without_ticket(request.sampling_params)
        return [timed("EngineCore: entered", enter, ticket) for ticket in tickets]

    def step(self, num: int) -> int:
        """Send `num` cells through one step. Returns the number of bytes of the last message."""
        timed, road, each = self.timed, self.road, CELLS_TOGETHER
        messages = [self.opened(each) for _ in range(num // each)]
        entered = [one for message in messages for one in self.entered(message)]
        admitted = [timed("EngineCore: admitted, news", road.admit, one) for one in entered]
        names = [one.request_id for one, _ in entered]
        requests = [
            SimpleNamespace(req_id=one.request_id, prompt_token_ids=one.prompt_token_ids,
                            sampling_params=one.sampling_params)
            for one, _ in entered
        ]  # fmt: skip
        for request, (_, news) in zip(requests, admitted, strict=True):
            if self.apart:
                news = timed("news: pickled and back", lambda one: loads(dumps(one)), news)
            timed("worker: added", road.worker.add_requests, [request], news)
        before, after = road.step(names, 0, NUM_PROMPT)
        timed.times["worker: a part of the step"].append(1e6 * (before + after) / num)
        for name in names:
            timed("worker and EngineCore: ended", road.finish, name)
        return sum(map(len, messages[-1]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        road, timed = Road(Path(folder), 1), Timed()
        cells = Cells(road, timed, "--apart" in sys.argv)
        cells.step(AT_ONCE)
        timed.times.clear()
        profile = cProfile.Profile() if "--profile" in sys.argv else None
        with frozen_heap(), profile or nullcontext():
            steps = [cells.step(AT_ONCE) for _ in range(cells.plan.num_cells // AT_ONCE - 1)]
        if profile is not None:
            profile.dump_stats("sweep_entry.prof")
        for stage, times in timed.times.items():
            print(f"{stage:44} {statistics.median(times):9.1f} {statistics.mean(times):9.1f}")
        print(f"{'bytes of a message':44} {steps[-1]:9}")
        road.worker.close()


if __name__ == "__main__":
    main()
