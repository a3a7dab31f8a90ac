"""Several engines that share the contexts of one harvest.

    contexts -> chunks -> engines (each writes shards to a hidden folder) -> root

Owns:  SeveralEngines.
Runs:  in the harvesting process, on the job's thread. Another thread makes the next contexts.
From:  job (contexts).   To: members, in processes that a pool starts.

Promise: each context is in exactly one visible shard, even if engines are lost. A shard is visible
only after this process has moved the shard to the root folder. If an engine is lost, this process
moves the engine's finished shards to the root. Other engines compute the contexts that are in no
finished shard. An unfinished shard is never visible.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from vllm_scope.errors import ConfigError, ScopeError, SpecError, reason_of, shown
from vllm_scope.files.staged import make_staged
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.member import Facts, News, Setup
from vllm_scope.harvests.pools import EngineLostError, Handle, Pool
from vllm_scope.harvests.shards import move_shards
from vllm_scope.request.actions import Read

logger = logging.getLogger("vllm.vllm_scope")

#: One call of `Member.give` has at most CHUNK contexts. At most MOST_CALLS calls of `give` to one
#: member wait for their answers at the same time.
CHUNK, MOST_CALLS = 32, 2
#: The harvest ends if more than this number of engines are lost one after another, and no shard
#: becomes visible between the losses.
MOST_LOST = 3
#: The most seconds that a harvest waits for engines that close. A harvest that ends early also
#: waits at most this long for engines that write their computed rows.
END_S = 60.0


@dataclass(eq=False)
class _Seat:
    """One engine of the harvest. If the engine is lost, a new engine gets the same number.

    Attributes:
        place: the hidden folder or URL of the engine's shards, until the shards become visible.
        stay: the future of the call of `Member.stay`, which ends only when the engine's process
            ends.
        calls: the futures of the calls of `start`, `give` and `finish` that have no answer yet.
        given: maps keys to contexts that the engine has received and that are in no visible shard.
        facts: the Facts of the engine, or None while the engine starts.
    """

    number: int
    member: Handle
    place: str
    stay: Future[Any]
    calls: set[Future[Any]]
    given: dict[bytes, Context] = field(default_factory=dict)
    facts: Facts | None = None


class SeveralEngines:
    """Several engines that together implement Store and EngineFacts.

    Args:
        count: the number of engines.
        setup: the Setup of every engine. The root of `setup.files` is the harvest's root folder or
            URL. Each engine gets a separate hidden folder below the root.

    Raises:
        ConfigError: the engines do not have the same settings.
        SpecError: the setup cannot be pickled for another process.
        ScopeError: a hidden folder cannot be made, or an engine cannot start.
    """

    def __init__(self, pool: Pool, count: int, setup: Setup) -> None:
        self._pool, self._setup = pool, setup
        files = setup.files
        self._staged = make_staged(files.root, files.fsync, files.file_mode)
        self.found: dict[str, tuple[str, int]] = {}
        #: Contexts of lost engines, which other engines compute again.
        self._again: list[Context] = []
        #: Maps keys to contexts that `compute` has received and has not yielded.
        self._untold: dict[bytes, Context] = {}
        self._num_lost = self._next = 0
        self._closed = False
        self._seats: list[_Seat] = []
        self._facts: Facts | None = None
        try:
            for number in range(count):
                self._seats.append(self._started(number))
            for seat in self._seats:
                (future,) = seat.calls
                self._begin(seat, future.result())
        except BaseException:
            self.close()
            raise

    def _started(self, number: int) -> _Seat:
        place = self._staged.make()
        files = self._setup.files.model_copy(update={"root": place})
        try:
            member = self._pool.start(number)
        except BaseException:
            self._staged.remove(place)
            raise
        try:
            start = member.call("start", replace(self._setup, files=files))
            return _Seat(number, member, place, member.call("stay"), {start})
        except BaseException as error:
            member.kill()
            self._staged.remove(place)
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                raise SpecError(
                    "the options of the engines cannot be sent to another process "
                    f"({reason_of(error)}); give numbers, strings, and functions of a module."
                ) from error
            raise

    def _begin(self, seat: _Seat, facts: Facts) -> None:
        """Store the Facts of a started engine. Raises ConfigError if the engine's settings differ
        from the settings of the first engine."""
        seat.calls.clear()
        first = self._facts = self._facts or facts
        for name, value in first.settings.items():
            if facts.settings.get(name) != value:
                raise ConfigError(
                    f"the engine on host {first.host} has {name} {shown(value)}, and the engine on "
                    f"host {facts.host} has {shown(facts.settings.get(name))}; these must be equal."
                )
        seat.facts = facts

    @property
    def _first(self) -> Facts:
        assert self._facts is not None
        return self._facts

    @property
    def model(self) -> str:
        return self._first.model

    @property
    def most_tokens(self) -> int:
        return self._first.most_tokens

    @property
    def vocabulary(self) -> int:
        return self._first.vocabulary

    @property
    def end(self) -> int | None:
        return self._first.end

    @property
    def versions(self) -> Mapping[str, str]:
        return self._first.versions

    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        assert tuple(reads) == self._setup.reads
        return self._first.settings

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The token ids of each text.

        Successive calls ask the engines in turn. The thread that makes contexts calls this method.
        """
        while not self._closed:
            ready = [seat for seat in self._seats if seat.facts is not None]
            if ready:
                self._next += 1
                member = ready[self._next % len(ready)].member
                try:
                    found: Sequence[Sequence[int]] = member.call("encode", texts).result()
                    return found
                except EngineLostError:
                    pass  # the job's thread also notices the loss, and replaces the engine
            time.sleep(0.05)
        raise ScopeError("the engines of this harvest have ended.")

    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """Compute contexts. See Store.compute."""
        chunks = _Chunks(contexts)
        try:
            while True:
                for seat in self._seats:
                    self._feed(seat, chunks)
                if chunks.ended and not self._again and not any(s.given for s in self._seats):
                    return
                of = {future: seat for seat in self._seats for future in (*seat.calls, seat.stay)}
                done, _ = wait([*of, *chunks.waiting], return_when=FIRST_COMPLETED)
                for future in done:
                    if future in chunks.waiting:
                        self._untold |= {one.key: one for one in chunks.take()}
                        continue
                    seat = of[future]
                    # An earlier answer in this loop may have shown that the engine is lost.
                    if seat in self._seats and future in (*seat.calls, seat.stay):
                        for key in self._answered(seat, future):
                            if (context := self._untold.pop(key, None)) is not None:
                                yield context
        except BaseException:
            self._save()
            raise
        finally:
            self._closed = True  # `encode` then raises an error, and the thread of the chunks ends
            chunks.close()

    def _feed(self, seat: _Seat, chunks: _Chunks) -> None:
        """Send contexts to an engine while contexts are ready and fewer than MOST_CALLS calls wait.

        If no context is left and no call waits, ask the engine to finish its contexts.
        """
        while seat.facts is not None and len(seat.calls) < MOST_CALLS:
            if some := self._again[:CHUNK] or chunks.pop():
                del self._again[:CHUNK]
                seat.given |= {context.key: context for context in some}
                seat.calls.add(seat.member.call("give", some))
                continue
            if chunks.ended and seat.given and not seat.calls:
                seat.calls.add(seat.member.call("finish"))
            return

    def _answered(self, seat: _Seat, future: Future[Any]) -> Iterable[bytes]:
        """Take an engine's answer. If the answer shows that the engine is lost, start a new engine.

        Returns:
            The keys of computed contexts, from the answer and from the shards that became visible.
            Different calls can return the same key, because answers come in any order and engines
            can be lost.
        """
        seat.calls.discard(future)
        try:
            found = future.result()
        except ScopeError as error:
            if type(error) not in (ScopeError, EngineLostError):
                raise
            return self._replace(seat, error)
        if isinstance(found, Facts):
            self._begin(seat, found)
            return ()
        assert isinstance(found, News)
        self.found |= found.files
        names = [name for name in found.files if name.endswith(".safetensors")]
        return [*found.computed, *self._show(seat, names)]

    def _show(self, seat: _Seat, names: Iterable[str] | None = None) -> Set[bytes]:
        """Make shards of an engine visible.

        Args:
            names: the names of the shards, or None for all shards in the engine's folder.

        Returns:
            The keys of the shards' contexts.
        """
        moved = move_shards(self._staged, seat.place, lambda keys: keys <= seat.given.keys(), names)
        for key in moved:
            del seat.given[key]
            self._num_lost = 0
        return moved

    def _replace(self, seat: _Seat, error: ScopeError) -> Set[bytes]:
        """Replace a lost engine by a new engine. Raises ScopeError if too many engines were lost.

        Returns:
            The keys of the contexts in the shards that the lost engine had finished. These shards
            are now visible.
        """
        host = "a host" if seat.facts is None else f"host {seat.facts.host}"
        finished = self._take_over(seat)
        self._num_lost += 1
        if self._num_lost > MOST_LOST:
            raise ScopeError(
                f"{self._num_lost} engines were lost one after another, and no shard was finished "
                f"meanwhile. The last loss: {error}. Remove the cause, and run the command again."
            )
        logger.warning(
            "vllm-scope: the engine on %s was lost (%s); %d contexts are computed again.",
            host, error, len(seat.given),
        )  # fmt: skip
        self._again += seat.given.values()
        self._seats[self._seats.index(seat)] = self._started(seat.number)
        return finished

    def _take_over(self, seat: _Seat) -> Set[bytes]:
        """End an engine, show its finished shards, and return the keys of the shards' contexts."""
        seat.member.kill()
        seat.calls.clear()
        finished = self._show(seat)
        self._staged.remove(seat.place)
        return finished

    def _save(self) -> None:
        """Let the engines write their computed rows, show the shards, and end the engines."""
        ready = [seat for seat in self._seats if seat.facts is not None]
        wait([seat.member.call("finish", True) for seat in ready], END_S)
        # If one engine's shards raise an error, or the user presses Ctrl-C again, the shards of the
        # other engines are still moved.
        with ExitStack() as taking:
            for seat in reversed(ready):
                taking.callback(self._take_over, seat)

    def flush(self) -> None:
        """Do nothing, because `compute` ends only after all rows are visible."""

    def close(self) -> None:
        """End the engines."""
        self._closed = True
        ready = [seat for seat in self._seats if seat.facts is not None]
        with ExitStack() as ending:  # a second Ctrl-C interrupts one of these calls, not all
            ending.callback(self._pool.close)
            for seat in self._seats:
                ending.callback(self._staged.remove, seat.place)
                ending.callback(seat.member.kill)
            wait([seat.member.call("close") for seat in ready], END_S)


class _Chunks:
    """Divides contexts into chunks. A thread makes the next chunk.

    Attributes:
        waiting: a list with the future of the chunk that the thread makes or has made. After `take`
            has stored this chunk, the list is [] until the next `pop`.
        ended: True after `take` has found that no context is left.
    """

    def __init__(self, contexts: Iterable[Context]) -> None:
        self._contexts = iter(contexts)
        self._thread = ThreadPoolExecutor(1, "vllm-scope-chunks")
        self._next: list[Context] = []
        self.ended = False
        self.waiting = [self._thread.submit(self._make)]

    def _make(self) -> list[Context]:
        return list(islice(self._contexts, CHUNK))

    def take(self) -> list[Context]:
        """Store the chunk that the thread has made, and return it. `pop` returns it again. Raises
        the thread's error."""
        self._next = self.waiting.pop().result()
        self.ended = not self._next
        return self._next

    def pop(self) -> list[Context]:
        """Return the stored chunk, which is empty if `take` stored none since the last `pop`."""
        found, self._next = self._next, []
        if found:
            self.waiting.append(self._thread.submit(self._make))
        return found

    def close(self) -> None:
        """Wait until the thread of the chunks has ended."""
        self._thread.shutdown()
