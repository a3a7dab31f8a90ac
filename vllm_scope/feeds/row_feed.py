"""The trainer's side of a feed, which returns batches.

Owns:  RowFeed, Batch.
Runs:  in the trainer's process.
From:  feeder (through memory and messages).

Promise: the trainer's side copies each row only one time, from the shared memory into the batch,
without the GIL. If the engine dies, the feed still returns each batch for which enough rows are
written. After these batches, the feed raises ScopeError.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from vllm_scope import errors
from vllm_scope.errors import ScopeError
from vllm_scope.feeds.memory import SharedRows
from vllm_scope.feeds.messages import Begun, Channel, Ended, Failed, Message, Settings
from vllm_scope.feeds.mix import Ints, Mix
from vllm_scope.files.buffers import Buffers
from vllm_scope.files.index import parse_stream
from vllm_scope.request.sites import SiteLayer

#: The process or thread that runs the engine's side of the feed.
Feeder = subprocess.Popen[bytes] | threading.Thread
#: Seconds between two reads of the feeder's counter, while rows of the next batch are missing.
_LOOK_S = 0.001
#: Number of batches whose memory is kept for reuse.
_KEPT_BATCHES = 4
#: Time limits for the end of a feeder's process, in seconds. _DEATH_S counts from the time at which
#: the feeder has closed the channel. _END_S counts from the time at which the trainer has closed
#: the channel.
_DEATH_S, _END_S = 5.0, 40.0


@dataclass(frozen=True)
class Batch:
    """The rows of `batch_size` tokens. The last batch may have fewer tokens. The tensors belong to
    the caller, and the feed does not change the tensors later.

    Attributes:
        token_ids: int32 [batch_size].
        positions: int32 [batch_size]: the position of each token in its context.
        rows: the rows of each stream by (site, layer), [batch_size, hidden_size]. Row i belongs to
            token i.
    """

    token_ids: Tensor
    positions: Tensor
    rows: dict[SiteLayer, Tensor]

    def __getitem__(self, stream: SiteLayer) -> Tensor:
        """The rows of a stream on the CPU, [batch_size, hidden_size], in the stream's dtype.

        Raises:
            KeyError: the feed does not have this stream.
        """
        if stream not in self.rows:
            raise KeyError(f"{stream!r} is not in this feed; the feed has {list(self.rows)}")
        return self.rows[stream]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        streams = ", ".join(f"{site} {layer}" for site, layer in self.rows)
        return f"<Batch of {len(self)} tokens: {streams}>"


class RowFeed:
    """An iterator of batches. If you do not take all batches, call `close`, or use `with`.

    Attributes:
        num_rows: number of rows in the batches returned so far.
        num_skipped: number of texts and contexts that were skipped. The number is 0 until the feed
            has read the feeder's last message, at one of the last batches.
    """

    def __init__(self, channel: Channel, memory: int, settings: Settings, feeder: Feeder) -> None:
        self._channel, self._fd, self._settings, self._feeder = channel, memory, settings, feeder
        self._memory: SharedRows | None = None
        self._ended: Ended | None = None
        self._mix = Mix(settings.num_slots, settings.batch_size, settings.seed)
        self._rest: Iterator[Ints] | None = None
        self._buffers = Buffers(0)
        self.num_rows = self.num_skipped = 0
        self._finalizer = weakref.finalize(self, _end, channel, memory, feeder, os.getpid())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Wait for the next batch, and return it.

        Raises:
            StopIteration: all rows were taken, or the feed was closed.
            ScopeError: the feed has failed, for example because a setting is wrong, or the engine
                has died.
        """
        if not self._finalizer.alive:
            raise StopIteration
        try:
            slots = self._next_slots()
        except BaseException:
            self.close()
            raise
        assert self._memory is not None
        tokens, positions, *rows = self._memory.read(slots, self._buffers.empty)
        self._memory.num_taken = self._mix.num_drawn
        self.num_rows += len(slots)
        names = (parse_stream(field.name) for field in self._memory.fields[2:])
        return Batch(tokens, positions, dict(zip(names, rows, strict=True)))

    def _next_slots(self) -> Ints:
        if self._rest is None:
            if self._has(self._mix.num_needed):
                return self._mix.draw()
            assert self._ended is not None
            self._rest = self._mix.rest(self._ended.num_rows)
        return next(self._rest)

    def _has(self, num_rows: int) -> bool:
        """Wait until `num_rows` rows are written. Returns False if the feed has fewer rows."""
        while self._memory is None or self._memory.num_written < num_rows:
            if self._ended is not None:
                return False
            self._take(self._hear())
        return True

    def _hear(self) -> Message | None:
        """The next message. None if no message arrives within _LOOK_S seconds.

        Raises ScopeError if the feeder has died.
        """
        alive = _is_alive(self._feeder)
        message: Message | None = None
        try:
            message = self._channel.receive(_LOOK_S if alive else 0)
        except EOFError:
            alive = False
        if message is None and not alive:
            num_rows = 0 if self._memory is None else self._memory.num_written
            raise ScopeError(
                f"the process of the engine has died{_how(self._feeder)} after {num_rows} rows; "
                "the output of that process says why. Start the feed again."
            )
        return message

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Begun):
            self._memory = SharedRows(self._fd, self._settings.num_slots, message.fields)
            size = self._settings.batch_size * sum(field.num_bytes for field in message.fields)
            self._buffers = Buffers(_KEPT_BATCHES * size)
        elif isinstance(message, Ended):
            self._ended, self.num_skipped = message, message.num_skipped
        elif isinstance(message, Failed):
            raise getattr(errors, message.kind, ScopeError)(message.sentence)

    def close(self) -> None:
        """End the feed, and the engine if the feed has started it. The caller's LLM stays open.

        In a process that the trainer has forked, do nothing.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_alive(feeder: Feeder) -> bool:
    if isinstance(feeder, threading.Thread):
        return feeder.is_alive()
    return feeder.poll() is None


def _how(feeder: Feeder) -> str:
    if isinstance(feeder, threading.Thread):
        return ""
    with suppress(subprocess.TimeoutExpired):  # the feeder has closed the channel, and will exit
        feeder.wait(_DEATH_S)
    return f" (exit code {feeder.returncode})"


def _end(channel: Channel, memory: int, feeder: Feeder, trainer: int) -> None:
    if os.getpid() != trainer:  # a process that the trainer has forked must not end the feed
        return
    try:
        channel.close()
        if isinstance(feeder, threading.Thread):
            # The garbage collector may call `_end` on the feeder's thread.
            if feeder is not threading.current_thread():
                feeder.join()
        else:
            _end_process(feeder)
    finally:
        os.close(memory)


def _end_process(feeder: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        feeder.wait(_END_S)
    if feeder.poll() != 0:
        with suppress(ProcessLookupError):  # `killpg` also kills the child processes
            os.killpg(feeder.pid, signal.SIGKILL)
        feeder.wait()
