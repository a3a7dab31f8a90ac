"""What EngineCore tells its workers with a step.

Owns:  StepNews and Entrant (what travels), Told (which specs and vectors EngineCore has sent),
       Heard (which specs and vectors a worker holds).
Runs:  Told in EngineCore, on the scheduler's thread; Heard in every worker, on its main thread.
From:  engine.core.entry (resolved requests).   To: engine.worker.worker.

Promise: EngineCore knows what every worker holds, because all workers get the same news in the
same order. While workers hold a resolved spec or a vector, EngineCore does not send it again.
The memory for both is bounded: EngineCore tells the workers which specs and vectors to forget.
"""

from __future__ import annotations

import itertools
from dataclasses import fields

import msgspec

from vllm_scope.control.policy import Changes
from vllm_scope.core.score_index import ScoreKey
from vllm_scope.program.held import Held
from vllm_scope.program.operations import NO_LOG, LogRange
from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed, pack, unpack
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks.request import Ended

#: Bounds on a worker's memory: for specs with their vectors, and for vectors by digest.
SPEC_BYTES, ARRAY_BYTES = 64 << 20, 64 << 20


class Entrant(msgspec.Struct, frozen=True):
    """A request that the workers see for the first time.

    Attributes:
        recipient: None if only the server's edits or global sinks concern the request.
        spec: the number of its spec in the StepNews of this step or of an earlier one.
        columns: `RequestProgram.columns` if the request edits or probes, or is unchecked; else
            empty.
        unchecked: True if the request may deliver more at once than its front-end checked
            (server-wide edits, modules, global sinks, codecs).
        logged: its range of the log of states.
        scores: the digest of its probes, if its scores are kept with KV blocks; else empty.
        cached: hashes of its first blocks, whose KV comes from the cache and whose scores the
            workers hold.
        block_size: tokens of a block.
    """

    recipient: Recipient | None
    spec: int
    columns: tuple[bytes, ...] = ()
    unchecked: bool = False
    logged: LogRange = NO_LOG
    scores: bytes = b""
    cached: tuple[bytes, ...] = ()
    block_size: int = 0


class StepNews(msgspec.Struct):
    """What changed since the last step. Applied before the step's forward.

    Attributes:
        entrants: request id -> a request that enters.
        specs: number -> a packed spec. The spec includes the server's edits and the reads of global
            sinks.
        arrays: digest -> shape and data of vectors that workers do not hold.
        forgotten_specs, forgotten_arrays: numbers of specs and digests of vectors that workers
            drop once the entrants have entered.
        ended: id of an ended request that has sinks -> the tokens that the scheduler accepted.
        zeroed: KV blocks that the workers must zero before the step's forward.
        filled: request id -> the number of a block that the request has filled, or fills with this
            step, and the hashes of this block and of the other full blocks after it. Workers keep
            the scores of these blocks.
        filled_at_end: the same for requests that have ended.
        forgotten_scores: the keys of scores that workers drop.
        resumed: id of a request that begins, or begins again after preemption, and whose gates have
            states -> its number of tokens.
        begun: request id -> names of its probes that now have a verdict, and for which later stages
            wait.
        scales: request id -> the new scales that its policy decided.
        accepted: id of a request with Moments, running or ended -> its number of accepted tokens.
        resolved: number -> a new spec that is not packed.
        held: request id -> the programs that an entrant holds. `resolved` and `held` are for a
            worker in EngineCore's own process, and are left out when a StepNews is pickled.
    """

    entrants: dict[str, Entrant] = {}
    specs: dict[int, Packed] = {}
    arrays: dict[bytes, tuple[tuple[int, ...], bytes]] = {}
    forgotten_specs: set[int] = set()
    forgotten_arrays: set[bytes] = set()
    ended: dict[str, Ended] = {}
    zeroed: list[int] = []
    filled: dict[str, tuple[int, list[bytes]]] = {}
    filled_at_end: dict[str, tuple[int, list[bytes]]] = {}
    forgotten_scores: list[ScoreKey] = []
    resumed: dict[str, int] = {}
    begun: dict[str, tuple[str, ...]] = {}
    scales: dict[str, Changes] = {}
    accepted: dict[str, int] = {}
    resolved: dict[int, Resolved] = {}
    held: dict[str, Held] = {}

    def __reduce__(self) -> tuple[type[StepNews], tuple[object, ...]]:
        return StepNews, msgspec.structs.astuple(self)[:-2]

    def __bool__(self) -> bool:
        changed = self.entrants or self.ended or self.zeroed or self.begun or self.resumed
        kept = self.filled or self.filled_at_end or self.forgotten_scores
        return bool(changed or kept or self.scales or self.accepted)


def packed_of(asked: Resolved) -> tuple[Packed, dict[bytes, Array]]:
    """The spec as it travels, and its vectors by digest; made once."""
    known: tuple[Packed, dict[bytes, Array]] | None = asked.__dict__.get("_packed")
    if known is None:
        whole = tuple(getattr(asked, each.name) for each in fields(asked))
        known = asked.__dict__["_packed"] = pack(whole)
    return known


def digest_of(asked: Resolved) -> bytes:
    """A digest that is equal for equal specs: the one that `know_digest` has set, or else the
    packed spec's."""
    known: bytes | None = asked.__dict__.get("_digest")
    return packed_of(asked)[0].digest if known is None else known


def know_digest(asked: Resolved, digest: bytes) -> None:
    """Set the digest that `digest_of` returns for a spec. The spec need not be packed then."""
    asked.__dict__["_digest"] = digest


class Told:
    """What the workers hold, as EngineCore knows it.

    Args:
        here: True if there is one worker, in this process. The worker then takes specs that are not
            packed.
    """

    def __init__(self, here: bool = False) -> None:
        self._here = here
        self._numbers = itertools.count()
        #: Id of a Resolved -> the Resolved, and its number. The entry keeps the Resolved alive:
        #: Python could otherwise give its id to another object.
        self._specs: Remembered[int, tuple[Resolved, int]] = Remembered(SPEC_BYTES)
        self._arrays: Remembered[bytes, bool] = Remembered(ARRAY_BYTES)

    def number_of(self, asked: Resolved, news: StepNews) -> int:
        """The number of a spec. If the workers do not hold the spec, `news` gets the spec and those
        of its vectors that the workers do not hold."""
        known = self._specs.get(id(asked))
        if known is not None:
            return known[1]
        number, size = next(self._numbers), asked.num_bytes
        news.resolved[number] = asked
        if not self._here:
            size += self._pack(asked, number, news)
        for _, (_, old) in self._specs.put(id(asked), (asked, number), size):
            news.forgotten_specs.add(old)
        return number

    def _pack(self, asked: Resolved, number: int, news: StepNews) -> int:
        """Add the packed spec and its missing vectors to the news, for workers in other processes.
        Returns the size of the packed spec in bytes."""
        packed, arrays = packed_of(asked)
        for digest, array in arrays.items():
            if self._arrays.get(digest) is None:
                news.arrays[digest] = array.shape, array.data
                news.forgotten_arrays.discard(digest)
                gone = self._arrays.put(digest, True, len(array.data))
                news.forgotten_arrays.update(old for old, _ in gone)
        news.specs[number] = packed
        return len(packed.body)


class Heard:
    """The specs and vectors that a worker holds."""

    def __init__(self) -> None:
        #: Number of a spec -> the spec, and its digest.
        self._specs: dict[int, tuple[Resolved, bytes]] = {}
        self._arrays: dict[bytes, Array] = {}

    def __getitem__(self, number: int) -> Resolved:
        return self._specs[number][0]

    def digest_of(self, number: int) -> bytes:
        """Digest of a spec's content."""
        return self._specs[number][1]

    def take(self, news: StepNews) -> None:
        for digest, (shape, data) in news.arrays.items():
            self._arrays[digest] = Array.known(shape, data, digest)
        for number, asked in news.resolved.items():
            self._specs[number] = asked, digest_of(asked)
        for number, packed in news.specs.items():
            if number not in news.resolved:
                asked = Resolved(*unpack(packed, self._arrays))
                self._specs[number] = asked, packed.digest

    def forget(self, news: StepNews) -> None:
        """Drop the specs and vectors that the news names as forgotten. Call it after the requests
        of the news have entered."""
        for number in news.forgotten_specs:
            del self._specs[number]
        for digest in news.forgotten_arrays:
            del self._arrays[digest]
