"""Rows back to the caller: to the front-end that made the request.

Owns:  which request belongs to which front-end, as seen by one worker.
Runs:  registration on the worker's thread, everything else on the drain thread.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import torch

from vllm_scope.errors import CapacityError
from vllm_scope.road import Address, Sender
from vllm_scope.sinks import RowBatch


class MemorySink:
    """Routes labelled batches to front-ends by the request's key."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._lock = threading.Lock()
        self._addresses: dict[str, Address] = {}
        self._senders: dict[str, Sender] = {}
        self._frontend_of: dict[int, str] = {}

    def connect(self, address: Address) -> None:
        """Learn of a front-end. Idempotent."""
        with self._lock:
            self._addresses[address.frontend] = address

    def add_request(self, key: int, frontend: str) -> None:
        """Raises CapacityError for a front-end that never connected."""
        with self._lock:
            if frontend not in self._addresses:
                raise CapacityError(f"front-end {frontend} is not connected to this worker")
            self._frontend_of[key] = frontend

    def write(self, batch: RowBatch) -> None:
        keys = np.unique(batch.labels.keys)
        with self._lock:
            routes = {int(k): self._frontend_of.get(int(k)) for k in keys}
        frontends = {f for f in routes.values() if f is not None}
        if len(frontends) == 1 and None not in routes.values():
            part = batch
            self._send(frontends.pop(), part)
            return
        for frontend in frontends:
            mine = [k for k, f in routes.items() if f == frontend]
            self._send(frontend, _only(batch, np.isin(batch.labels.keys, mine)))

    def finish(self, key: int, error: str | None) -> None:
        with self._lock:
            frontend = self._frontend_of.pop(key, None)
        if frontend is not None:
            self._sender(frontend).send_finish(key, self._stage, error)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _send(self, frontend: str, batch: RowBatch) -> None:
        self._sender(frontend).send_rows(batch.labels, batch.rows, batch.boundary)

    def _sender(self, frontend: str) -> Sender:
        # Sockets belong to the drain thread, so they are opened here.
        if frontend not in self._senders:
            self._senders[frontend] = Sender(self._addresses[frontend])
        return self._senders[frontend]


def _only(batch: RowBatch, tokens: np.ndarray) -> RowBatch:
    """The part of a batch that belongs to some of its tokens."""
    labels = batch.labels
    per_token = np.ones(len(labels.keys), np.int64)
    if batch.boundary is None:
        per_token = np.array([p.num_reads for p in labels.programs], np.int64)[labels.program_of]
    rows = batch.rows[torch.from_numpy(np.repeat(tokens, per_token))]
    kept = replace(
        labels,
        keys=labels.keys[tokens],
        positions=labels.positions[tokens],
        program_of=labels.program_of[tokens],
        rows=labels.rows[tokens],
    )
    return RowBatch(kept, rows, batch.boundary)
