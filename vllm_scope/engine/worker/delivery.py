"""A worker's delivery side: ring, drain and sinks, and which request goes where.

Owns:  Delivery.
Runs:  in workers that drain, on the worker's thread; behind it are the drain's thread and
       the sinks'.
From:  worker.   To: drain, sinks.router.

How the end of a request is known: the scheduler, in EngineCore, is what accepts tokens.
It sends the accepted tokens of a request that has sinks along with the news that it is
over (scheduler.ended_in): the same for both runners, for every pipeline stage, for aborts,
and after preemptions. Rows of tokens that were never accepted are then left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.worker.sizes import Sizes
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import RequestInfo
from vllm_scope.sinks.memory import MemorySink
from vllm_scope.sinks.request import Ended
from vllm_scope.sinks.router import GLOBAL, Router
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.drain import Drain

#: The key of a request for whose rows nobody waits.
NOBODY = -1
IDLE_COUNTERS: dict[str, Any] = {"requests_routed": 0, "roads": [], "sinks": {}}


def global_reads(config: ScopeConfig, sites: Sites) -> Resolved:
    """What the global sinks are given of every request.

    Raises:
        SpecError: this engine does not tap it.
    """
    reads = [
        replace(read, to=GLOBAL + name)
        for name, sink in config.global_sink_configs().items()
        if sink.reads is not None
        for read in Spec.from_json(sink.reads).resolve(sites).reads
    ]
    return Resolved(tuple(reads))


@dataclass
class Delivery:
    """Verbs: `add_request`, `finish_request`, `close`; steps go to `drain`.

    Attributes:
        info: of every request: stage, model.
        everywhere: what global sinks read.
    """

    ring: HostRing
    memory: MemorySink
    router: Router
    drain: Drain
    info: RequestInfo
    everywhere: Resolved = field(default_factory=Resolved)
    #: Of requests that have no key of a front-end's.
    _own_keys: Any = field(default_factory=lambda: itertools.count(NOBODY - 1, -1))

    @staticmethod
    def open(
        config: ScopeConfig,
        arena: Arena,
        sizes: Sizes,
        sites: Sites,
        here: Sequence[int],
        stage: tuple[int, int],
        model: str,
    ) -> Delivery:
        """Args:
        here: boundaries with a tap on this worker.
        stage: its number, and how many there are.

        Raises:
            ScopeError: a sink cannot be made; the engine does not start.
        """
        ring = HostRing(sizes.host_slots(arena.num_slots), sizes.cuda)
        ring.patience_s = config.deliver_timeout_s
        memory = MemorySink(stage[0], ring, config.road)
        configs = config.sink_configs(), config.global_sink_configs()
        router = Router(memory, *configs, sites, here)
        drain = Drain(arena, ring, router, sizes.widths)
        info = RequestInfo(NOBODY, "", "", (), stage=stage[0], num_stages=stage[1], model=model)
        return Delivery(ring, memory, router, drain, info, global_reads(config, sites))

    def expect(self, handle: dict[str, Any]) -> None:
        """A request has come: whatever becomes of it, its front-end is told.

        Raises:
            CapacityError: the front-end is not connected.
        """
        if "key" in handle:
            self.memory.add_request(handle["key"], handle["frontend"])

    def add_request(
        self, req_id: str, prompt_ids: Sequence[int], handle: dict[str, Any], asked: Resolved
    ) -> tuple[Resolved, int]:
        """Take a request in, before its rows come.

        Returns:
            What to read and edit, with what global sinks read; and the key of its rows.

        Raises:
            CapacityError: its codecs need more than there is room for.
        """
        key = handle.get("key", NOBODY)
        if key >= 0 and MEMORY not in asked.destinations:
            self.memory.leave_out_rows(key)
        if self.everywhere.reads:
            asked = asked.joined(reads=self.everywhere.reads)
            key = next(self._own_keys) if key < 0 else key
        encodings = [read.encoding for read in asked.reads if read.encoding is not None]
        if encodings:
            self.drain.add_request(key, encodings)
        elsewhere = any(to != MEMORY for to in asked.destinations)
        if key != NOBODY and (elsewhere or handle.get("follows", True)):
            self.drain.follow(key)
        if elsewhere:
            name = str(handle.get("request_id", req_id))
            self.router.add_request(
                replace(
                    self.info, key=key, request_id=name, uid=str(handle.get("uid", req_id)),
                    child=int(handle.get("child", 0)), prompt_ids=tuple(prompt_ids),
                    owner=str(handle.get("owner", "")),
                ),
                asked,
            )  # fmt: skip
        return asked, key

    def finish_request(self, key: int, error: str | None, ended: Ended | None) -> None:
        """The last of a request, after all of its rows."""
        if ended is not None:
            self.router.expect_end(key, ended)
        self.drain.finish_request(key, error)

    def describe(self) -> dict[str, Any]:
        """The sinks that requests may name: name -> whether they take scores."""
        return self.router.takes_scores

    def counters(self) -> dict[str, Any]:
        return {
            "requests_routed": self.memory.num_requests,
            "roads": self.memory.roads,
            "sinks": self.router.counters(),
        }

    def flush(self) -> dict[str, str | None]:
        return self.router.flush()

    def close(self) -> None:
        self.drain.close()
