"""One of several engines, each in a separate process. Each engine writes its own shards.

Owns:  Member, Setup (the arguments of `Member.start`), Facts and News (the answers of a Member).
Runs:  in a process that a pool has started. Calls arrive on several threads. The engine runs on one
       thread of the member.
From:  several (the calls).   To: storing.

Promise: if the process is killed, each file that a News has named is complete. Each visible file in
the member's folder is complete too.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_scope.errors import FileError
from vllm_scope.files.options import FileOptions
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.engines import Engine
from vllm_scope.harvests.guard import guard
from vllm_scope.harvests.storing import Storing
from vllm_scope.request.actions import Read

#: `give` waits while at least this many contexts are queued for the engine.
MOST_WAITING = 64


@dataclass(frozen=True)
class Setup:
    """The arguments of a member's start.

    Attributes:
        make: the function that starts the engine. The function must belong to a Python module,
            because the pool pickles the function.
        files: the options of the shards' files. The root of `files` is the member's own folder.
        folder: the folder that becomes the member's working directory, if the member's host has
            this folder.
    """

    make: Callable[[], Engine]
    reads: tuple[Read, ...]
    files: FileOptions
    folder: str


@dataclass(frozen=True)
class Facts:
    """A member's description of its engine. All engines of a harvest must have equal `settings`."""

    host: str
    model: str
    most_tokens: int
    vocabulary: int
    end: int | None
    settings: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class News:
    """The work that a member has finished since its last News.

    Attributes:
        computed: the keys of the contexts that the engine computed.
        files: the complete files in the member's folder. Maps the name of each file to (SHA-256,
            size).
    """

    computed: list[bytes]
    files: dict[str, tuple[str, int]]


class Member:
    """One engine and the shards of its rows. The caller calls `start` first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Context] = deque()
        #: Number of contexts that the member has received and has not computed yet.
        self._num_open = 0
        self._computed: list[bytes] = []
        self._told: set[str] = set()
        self._error: BaseException | None = None

    def start(self, setup: Setup) -> Facts:
        """Start the engine.

        Raises:
            FileError: the member's folder (the root of `setup.files`) does not exist on this host.
            ScopeError: the engine cannot start, or has no tap for one of the reads.
        """
        host, root = socket.gethostname(), setup.files.root
        if "://" not in root and not os.path.isdir(root):
            raise FileError(
                f"host {host} does not see {root}, which the harvest made; name a folder that all "
                "hosts share, or a URL."
            )
        with suppress(OSError):
            os.chdir(setup.folder)
        guard()  # must be before `make`, which starts the engine's processes
        self._engine = engine = setup.make()
        self._storing = Storing(engine, setup.reads, setup.files)
        threading.Thread(target=self._run, name="vllm-scope-engine", daemon=True).start()
        return Facts(
            host, engine.model, engine.most_tokens, engine.vocabulary, engine.end,
            engine.settings(setup.reads), dict(self._storing.versions),
        )  # fmt: skip

    def stay(self) -> None:
        """Wait until this process ends. The caller's future of this call then raises
        EngineLostError."""
        threading.Event().wait()

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The token ids of each text, by the engine's tokenizer."""
        return self._engine.encode(texts)

    def give(self, contexts: Sequence[Context]) -> News:
        """Wait until fewer than MOST_WAITING contexts are queued, then queue `contexts`.

        Raises the engine's error if the engine has failed.
        """
        with self._changed:
            self._wait_for(lambda: len(self._waiting) < MOST_WAITING)
            self._waiting.extend(contexts)
            self._num_open += len(contexts)
            self._changed.notify_all()
            return self._news()

    def finish(self, drop: bool = False) -> News:
        """Wait until all received contexts are computed and their rows are visible.

        Args:
            drop: True if the contexts that still wait for the engine are left out.

        Raises FileError if this process cannot write a shard, and the engine's error if the engine
        has failed.
        """
        with self._changed:
            if drop:
                self._num_open -= len(self._waiting)
                self._waiting.clear()
            self._wait_for(lambda: not self._num_open)
            self._storing.flush()  # safe, because the engine's thread writes no rows now
            return self._news()

    def close(self) -> None:
        """End the engine. The caller calls no method after `close`."""
        self._engine.close()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    def _news(self) -> News:
        files: Mapping[str, tuple[str, int]] = dict(self._storing.found)
        new = {name: one for name, one in files.items() if name not in self._told}
        computed = self._computed[:]
        self._computed.clear()
        self._told |= new.keys()
        return News(computed, new)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                for context in self._storing.compute(self._given()):
                    with self._changed:
                        self._computed.append(context.key)
                        self._num_open -= 1
                        self._changed.notify_all()
        except BaseException as error:
            with suppress(Exception):
                # Finish the shards, so that no other engine computes these contexts again.
                self._storing.flush()
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _given(self) -> Iterator[Context]:
        """Yield the queued contexts, and end when the queue is empty.

        At the end, the engine finishes the contexts that it has, so that the rows of these contexts
        do not wait for later contexts.
        """
        while True:
            with self._changed:
                if not self._waiting:
                    return
                context = self._waiting.popleft()
                self._changed.notify_all()
            yield context
