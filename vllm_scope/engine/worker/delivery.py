"""Delivers a worker's rows through its ring, drain and sinks, to the destinations of each request.

Owns:  WorkerDelivery.
Runs:  in workers that deliver rows, on the worker's thread. The drain and the sinks have their own
       threads.
From:  worker.   To: worker.drain, sinks.router.

The scheduler, in EngineCore, decides which tokens are accepted. When a request with sinks ends, the
scheduler sends the accepted tokens with the step's news (engine.core.scheduler). The news has the
same form after aborts and preemptions, for both model runners and for all pipeline stages. Sinks
then leave out the rows of tokens that were not accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from vllm_scope.batch.labels import Labels
from vllm_scope.config import ScopeConfig
from vllm_scope.control.running import Policies
from vllm_scope.core.news import Entrant
from vllm_scope.engine.worker.sizes import Sizes
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks import RequestInfo
from vllm_scope.sinks.memory import MemorySink
from vllm_scope.sinks.request import Ended
from vllm_scope.sinks.router import Router
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.drain import Drain
from vllm_scope.worker.held_saes import NONE, PairMakers
from vllm_scope.worker.score_store import ScoreStore
from vllm_scope.worker.watch import Watch

#: The key of each request that has no rows and no scores to deliver.
NOBODY = -1
IDLE_COUNTERS: dict[str, object] = {
    "requests_routed": 0, "roads": [], "sinks": {}, "ring": None
}  # fmt: skip


@dataclass
class WorkerDelivery:
    """The ring, the drain and the sinks of one worker.

    The worker submits steps to `drain`.

    Attributes:
        widths: the widths of raw rows.
        info: a RequestInfo with the values that are the same for all requests, such as stage and
            model.
        here: boundaries with a tap on this worker.
    """

    ring: HostRing
    memory: MemorySink
    router: Router
    drain: Drain
    watch: Watch
    store: ScoreStore
    widths: Widths
    info: RequestInfo
    here: frozenset[int]
    policies: Policies
    #: The keys, all below NOBODY, for requests whose rows or scores no front-end awaits.
    _own_keys: Iterator[int] = field(default_factory=lambda: itertools.count(NOBODY - 1, -1))

    @staticmethod
    def open(
        config: ScopeConfig,
        arena: Arena,
        sizes: Sizes,
        sites: Sites,
        here: Sequence[int],
        stage: tuple[int, int],
        model: str,
        drafts: bool,
        lag: int,
        saes: PairMakers = NONE,
    ) -> WorkerDelivery:
        """Start the drain and the sinks.

        Args:
            here: boundaries with a tap on this worker.
            stage: the number of this pipeline stage, and the number of stages.
            drafts: True if a computed token can be rejected (speculative decoding).
            lag: the number of steps by which the scheduler is ahead when a policy gets a step's
                scores: 1 with async scheduling, otherwise 0.
            saes: the held SAEs, by name. The worker later adds lenses to this mapping.

        Raises:
            ScopeError: a sink or a policy cannot be created. In this case, the engine does not
                start.
        """
        ring = HostRing(sizes.host_slots(arena.num_slots), sizes.cuda)
        ring.patience_s = config.deliver_timeout_s
        memory = MemorySink(stage[0], ring, config.road)
        configs = config.sink_configs(), config.global_sink_configs()
        router = Router(memory, *configs, sites, here)
        watch = Watch(sizes.widths, drafts, memory.tell)
        store = ScoreStore(sizes.widths, sites.step_tokens)
        loaded = {name: one.load() for name, one in config.policy_configs().items()}
        drain = Drain(
            arena, ring, router, sizes.widths, watch, store, saes, int(config.moments_mib * 2**20),
            drafts=drafts,
        )  # fmt: skip

        def reclaim() -> None:
            drain.hurry()
            memory.reclaim()
            watch.settle()

        ring.reclaim = reclaim
        info = RequestInfo(
            NOBODY, "", "", (), stage=stage[0], num_stages=stage[1], model=model,
            num_layers=sites.num_layers,
        )  # fmt: skip
        return WorkerDelivery(
            ring, memory, router, drain, watch, store, sizes.widths, info, frozenset(here),
            Policies(loaded, lag),
        )  # fmt: skip

    def expect(self, recipient: Recipient) -> None:
        """Announce a request, so that its front-end gets an answer even if the request fails.

        Raises:
            CapacityError: the front-end is not connected.
        """
        self.memory.add_request(recipient.key, recipient.frontend)

    def add_request(
        self,
        req_id: str,
        prompt_ids: Sequence[int],
        recipient: Recipient | None,
        asked: Resolved,
    ) -> int:
        """Prepare the delivery of a request's rows, and return the key that the rows will have. If
        the recipient awaits rows, this key is the recipient's key.

        Raises:
            CapacityError: there is no room for the request's codecs and probes.
        """
        if recipient is not None and recipient.awaits:
            key = recipient.key
        else:
            # No front-end waits for rows of this request.
            key = next(self._own_keys) if asked.delivering else NOBODY
            recipient = recipient or Recipient(key, "", req_id, req_id)
        if key >= 0 and MEMORY not in asked.destinations:
            self.memory.leave_out_rows(key)
        encodings = [read.encoding for read in asked.reads if read.encoding is not None]
        banks = asked.banks_on_rows(self.here)
        if encodings or banks:
            self.drain.add_request(key, encodings, banks)
        if asked.moments:
            self.drain.add_moments(key, len(prompt_ids), asked.moments)
        if asked.watched:
            steering = self.policies.begin(
                asked, recipient.request_id, recipient.child, len(prompt_ids)
            )
            self.watch.add_request(key, req_id, len(prompt_ids), asked, steering)
        elsewhere = any(to != MEMORY for to in asked.destinations)
        follows = recipient.follows and not asked.is_monitored_alone
        if key != NOBODY and (elsewhere or follows):
            self.drain.follow(key)
        if elsewhere:
            self.router.add_request(
                replace(
                    self.info, key=key, request_id=recipient.request_id, uid=recipient.uid,
                    child=recipient.child, prompt_ids=tuple(prompt_ids), owner=recipient.owner,
                ),
                asked,
            )  # fmt: skip
        return key

    def keep_scores(self, key: int, entrant: Entrant, layout: Layout) -> None:
        """From now on, store a request's scores for its KV blocks. Deliver the stored scores of the
        request's cached tokens.

        Args:
            layout: the layout that all tokens of the request have at this pipeline stage.
        """
        self.drain.collect(key, layout, entrant.block_size)
        if not entrant.cached:
            return
        block_slots = layout.slots(self.widths) * entrant.block_size
        # A batch takes at most a quarter of the ring, because the rows of the step also need room.
        # But a batch has at least one block.
        at_once = max(1, len(self.ring.slots) // 4 // block_slots)
        for first in range(0, len(entrant.cached), at_once):
            some = entrant.cached[first : first + at_once]
            rows = np.arange(len(some) * entrant.block_size, dtype=np.int64)
            labels = Labels(
                np.full(len(rows), key, np.int64), first * entrant.block_size + rows,
                np.zeros(len(rows), np.int32), (layout,), rows,
            )  # fmt: skip
            self.drain.submit_stored(labels, partial(self.store.fill, some, entrant.scores))

    def finish_request(self, key: int, error: str | None, ended: Ended | None) -> None:
        """Send the message that a request has ended, after the request's rows."""
        self.watch.finish_request(key)
        if ended is not None:
            self.router.expect_end(key, ended)
        self.drain.finish_request(key, error)  # also ends the request in `store`

    def counters(self) -> dict[str, object]:
        self.memory.reclaim()
        return {
            "requests_routed": self.memory.num_requests,
            "roads": self.memory.roads,
            "sinks": self.router.counters(),
            "ring": {
                "num_bytes": self.ring.num_slots * SLOT_BYTES,
                "used_bytes": self.ring.num_used() * SLOT_BYTES,
                "wait_ms": self.ring.wait_ms,
            },
        }

    def close(self) -> None:
        self.drain.close()
