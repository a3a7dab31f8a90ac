"""What EngineCore tells its workers with a step.

Owns:  StepNews and Entrant (what travels), Told (what EngineCore remembers of it), Heard (what a
       worker keeps of it).
Runs:  Told in EngineCore, on the scheduler's thread; Heard in every worker, on its main thread.
From:  engine.core.entry (resolved requests).   To: engine.worker.worker.

Promise: EngineCore knows what every worker holds, because all workers hear the same in the same
order. So a spec that many requests share travels once, and so does a vector. Both are bounded in
bytes: EngineCore says what a worker may forget.
"""

from __future__ import annotations

import itertools

import msgspec

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed, pack, unpack
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks.request import Ended

#: Memory of a worker for specs, and for vectors that no spec of these has.
SPEC_BYTES, ARRAY_BYTES = 64 << 20, 64 << 20


class Entrant(msgspec.Struct, frozen=True):
    """A request that the workers see for the first time.

    Attributes:
        recipient: None if only the server's edits or global sinks concern it.
        spec: number of what it asks for, in StepNews.specs of this or an earlier step.
        columns: of a request with vectors, or an unchecked one, `RequestProgram.columns`.
        unchecked: it may deliver more at once than its front-end checked: with the server's
            edits, modules, global sinks or codecs.
    """

    recipient: Recipient | None
    spec: int
    columns: tuple[bytes, ...] = ()
    unchecked: bool = False


class StepNews(msgspec.Struct):
    """What changed since the last step. Applied before the step's forward.

    Attributes:
        entrants: by request.
        specs: number -> reads, probes and edits, with the server's and those of global sinks.
        arrays: digest -> shape and data of vectors that workers do not hold.
        forgotten_specs, forgotten_arrays: what workers drop once the entrants have entered.
        ended: requests with sinks that are over -> what the scheduler accepted.
        zeroed: KV blocks that are zeroed before they are used again.
    """

    entrants: dict[str, Entrant] = {}
    specs: dict[int, Packed] = {}
    arrays: dict[bytes, tuple[tuple[int, ...], bytes]] = {}
    forgotten_specs: set[int] = set()
    forgotten_arrays: set[bytes] = set()
    ended: dict[str, Ended] = {}
    zeroed: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.entrants or self.ended or self.zeroed)


class Told:
    """What the workers hold, as EngineCore knows it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        #: Has the Resolved too, so that its id is not used again.
        self._specs: Remembered[int, tuple[Resolved, int]] = Remembered(SPEC_BYTES)
        self._arrays: Remembered[bytes, bool] = Remembered(ARRAY_BYTES)

    def number_of(self, asked: Resolved, news: StepNews) -> int:
        """The number of a spec; `news` gets what the workers need for it."""
        known = self._specs.get(id(asked))
        if known is not None:
            return known[1]
        packed, arrays = pack((asked.reads, asked.probes, asked.edits))
        for digest, array in arrays.items():
            if self._arrays.get(digest) is None:
                news.arrays[digest] = array.shape, array.data
                news.forgotten_arrays.discard(digest)
                gone = self._arrays.put(digest, True, len(array.data))
                news.forgotten_arrays.update(old for old, _ in gone)
        number = next(self._numbers)
        news.specs[number] = packed
        size = asked.num_bytes + len(packed.body)
        for _, (_, old) in self._specs.put(id(asked), (asked, number), size):
            news.forgotten_specs.add(old)
        return number


class Heard:
    """What a worker holds of what it was told."""

    def __init__(self) -> None:
        self._specs: dict[int, Resolved] = {}
        self._arrays: dict[bytes, Array] = {}

    def __getitem__(self, number: int) -> Resolved:
        return self._specs[number]

    def take(self, news: StepNews) -> None:
        for digest, (shape, data) in news.arrays.items():
            self._arrays[digest] = Array.known(shape, data, digest)
        for number, packed in news.specs.items():
            self._specs[number] = Resolved(*unpack(packed, self._arrays))

    def forget(self, news: StepNews) -> None:
        """Call it when the requests of the news have entered."""
        for number in news.forgotten_specs:
            del self._specs[number]
        for digest in news.forgotten_arrays:
            del self._arrays[digest]
