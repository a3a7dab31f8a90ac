"""The engine's side of a feed, which writes rows of documents to the shared memory.

    python -m vllm_scope.feeds.feeder CHANNEL MEMORY TRAINER < order

CHANNEL and MEMORY are file descriptors. TRAINER is the trainer's process id.

Owns:  `feed`, and `main` of the engine's process.
Runs:  in a separate process, or on a thread of the trainer's process if the caller gave an LLM.
From:  start.   To: row_feed (through memory and messages).

Promise: each row is written one time, in the order of the documents. If no slot is free, the feeder
waits, and sends no further prompts to the engine. No row is lost.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_scope.errors import ScopeError, reason_of
from vllm_scope.feeds.memory import POSITIONS, TOKENS, Field, SharedRows
from vllm_scope.feeds.messages import Begun, Channel, Ended, Failed, Order, Settings
from vllm_scope.feeds.mix import Mix
from vllm_scope.harvests.computing import context_size, contexts_ahead, rows_of
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.documents import Documents, find_documents
from vllm_scope.harvests.engines import Engine, Rows
from vllm_scope.harvests.skipped import Skipped
from vllm_scope.request.actions import Read
from vllm_scope.request.spec import Spec
from vllm_scope.sinks.reports import plain

#: Seconds between two reads of the trainer's counter, while no slot is free.
_LOOK_S = 0.001
#: Seconds within which this process must end after the trainer has closed the feed or is gone.
_PATIENCE_S = 30.0
#: Largest number of characters of an error's text. The text must fit into one message.
_MOST_LETTERS = 4000


def feed(
    documents: Documents,
    reads: Sequence[Read],
    engine: Engine,
    settings: Settings,
    channel: Channel,
    memory: int,
) -> None:
    """Write the rows of all documents to the shared memory.

    Args:
        memory: the file descriptor of the memfd with the shared memory.

    Raises:
        ScopeError: a setting is wrong, no document can be read, rows are missing, or the engine has
            died.
        EOFError: the trainer has closed the feed or is gone.
    """
    engine.settings(reads)  # raises an exception if a layer has no tap
    size, skipped = context_size(engine, settings.context), Skipped(reads)
    order: deque[bytes] = deque()

    def wanted(context: Context) -> bool:
        order.append(context.key)
        return True

    contexts = contexts_ahead(documents, engine, size, settings.long, skipped, wanted)
    writer: _Writer | None = None
    with closing(contexts) as ahead, closing(rows_of(ahead, engine, reads)) as computed:
        for context, found in _in_order(computed, order):
            columns = found.columns()
            positions = torch.from_numpy(columns[0].positions)
            tokens = torch.tensor(list(context.token_ids))[positions]
            values = [tokens, positions, *(column.values for column in columns)]
            if writer is None:
                names = [_name(column.label) for column in columns]
                fields = (TOKENS, POSITIONS, *map(_field, names, values[2:]))
                writer = _Writer(SharedRows(memory, settings.num_slots, fields), settings, channel)
                channel.send(Begun(fields))
            writer.put(values)
    if writer is None and skipped.count:
        raise skipped.error(documents.source)
    channel.send(Ended(0 if writer is None else writer.num_written, skipped.count))


def _in_order(
    computed: Iterator[tuple[Context, Rows]], order: deque[bytes]
) -> Iterator[tuple[Context, Rows]]:
    """Yield each context with its rows, in the order of the documents.

    Args:
        order: the keys of the contexts, in the order of the documents.
    """
    early: dict[bytes, tuple[Context, Rows]] = {}
    for context, rows in computed:
        early[context.key] = context, rows
        while order and order[0] in early:
            yield early.pop(order.popleft())


def _name(label: tuple[str, int, str] | str) -> str:
    assert isinstance(label, tuple)  # a read's label
    site, layer, when = label
    return f"{site}.before.{layer}" if when == "before" else f"{site}.{layer}"


def _field(name: str, rows: Tensor) -> Field:
    return Field(name, str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


class _Writer:
    """Writes rows into free slots."""

    def __init__(self, memory: SharedRows, settings: Settings, channel: Channel) -> None:
        self._memory, self._channel = memory, channel
        self._mix = Mix(settings.num_slots, settings.batch_size, settings.seed)
        self.num_written = 0

    def put(self, values: Sequence[Tensor]) -> None:
        """Write n rows. Waits for free slots. Raises EOFError if the other end of the channel is
        closed. `values` has a tensor [n, *shape] for each field."""
        begin, count = self.num_written, len(values[0])
        wait_s = 0.0
        while (done := self.num_written - begin) < count:
            self._channel.receive(wait_s)
            while self._mix.num_drawn < self._memory.num_taken:
                self._mix.draw()
            some = min(count - done, self._mix.num_writable - self.num_written)
            if some:
                slots = self._mix.slots(self.num_written, self.num_written + some)
                self._memory.write(slots, [rows[done : done + some] for rows in values])
                self.num_written += some
                self._memory.num_written = self.num_written
            wait_s = _LOOK_S


def run(
    dataset: object,
    reads: Sequence[Read],
    model: object,
    options: Mapping[str, Any],
    settings: Settings,
    channel: Channel,
    memory: int,
    started: threading.Event,
) -> None:
    """Start an engine, or use the caller's LLM, then run `feed`. Errors are sent to the trainer.

    Args:
        started: an event that this function sets when the engine has started, or cannot start.

    Raises:
        EOFError: the trainer has closed the feed or is gone.
    """
    try:
        try:
            documents = find_documents(
                dataset, settings.column, None, settings.split, settings.config
            )
            # Import here, because `engine.offline` imports vLLM, which takes seconds.
            from vllm_scope.engine.offline import OfflineEngine

            engine = OfflineEngine(model, options, reads)
        finally:
            # Set the event before an error is sent. After the error, the trainer closes its feed.
            # If the event were not set by then, `_watch` would interrupt this process, although
            # this process already ends.
            started.set()
        with closing(engine):
            feed(documents, reads, engine, settings, channel, memory)
    except EOFError:
        raise
    except ScopeError as error:
        channel.send(Failed(type(error).__name__, plain(str(error), _MOST_LETTERS)))
    except Exception as error:
        sentence = plain(f"the feed failed: {reason_of(error)}", _MOST_LETTERS)
        channel.send(Failed("ScopeError", sentence))


def _watch(channel: Channel, started: threading.Event) -> None:
    """Wait until the trainer has closed its feed or is gone, then end this process.

    If the engine is still starting, interrupt the start. If the engine runs, `feed` raises EOFError
    and `run` closes the engine. If this process does not end within _PATIENCE_S seconds, kill this
    process and its child processes.
    """
    channel.wait_for_end()
    if not started.is_set():
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
    time.sleep(_PATIENCE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process and its child processes


def main() -> None:
    # A trainer that ignores SIGINT passes this setting on to its child processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end, memory, trainer = map(int, sys.argv[1:])
    for fd in (end, memory):
        os.set_inheritable(fd, False)
    channel, started = Channel(socket.socket(fileno=end), trainer), threading.Event()
    try:
        order = msgspec.convert(json.loads(sys.stdin.buffer.read()), Order)
        threading.Thread(target=_watch, args=(channel, started), daemon=True).start()
        reads = Spec.from_json(order.scope).reads
        run(
            order.dataset,
            reads,
            order.model,
            order.engine,
            order.settings,
            channel,
            memory,
            started,
        )
    except (EOFError, KeyboardInterrupt):
        print(
            "vllm-scope: the trainer has closed its feed or is gone; the engine ends.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
