"""The message that EngineCore sends to all workers with a step.

Owns:  StepNews and Entrant (the message), `Told` (EngineCore's record of the specs and vectors that
       the workers store), `Heard` (the specs and vectors that one worker stores).
Runs:  `Told` runs in EngineCore, on the scheduler's thread. `Heard` runs in every worker, on the
       main thread.
From:  engine.core.entry (resolved requests).   To: engine.worker.worker.

A spec is all actions of a request. In this file, specs are resolved: their names are replaced by
what the names mean on this engine. Many requests can share a spec, and many specs can share a
vector.

Promise: all workers get the same news in the same order. Therefore EngineCore knows the specs and
vectors that every worker stores, and does not send a stored spec or vector again. The memory for
specs and vectors is bounded. If the memory is full, EngineCore chooses the specs and vectors that
all workers drop, and names them in the StepNews.
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

#: Limits in bytes. A worker stores at most SPEC_BYTES of specs with their vectors, and at most
#: ARRAY_BYTES of vectors that later specs can share.
SPEC_BYTES, ARRAY_BYTES = 64 << 20, 64 << 20


class Entrant(msgspec.Struct, frozen=True):
    """A request that is new for the workers.

    Attributes:
        recipient: the request's Recipient. None if the request has no spec of its own. Only
            server-wide edits or global sinks then apply to the request.
        spec: the number of the request's spec. The StepNews of this step or of an earlier step has
            the spec under this number.
        columns: the result of `RequestProgram.columns`, from which a worker makes the request's
            programs. Empty if the request has no edits, probes, features or lenses, and is not
            `unchecked`.
        unchecked: True if the request can deliver more bytes in one step than its front-end has
            checked. A worker then checks the size. Server-wide edits, steering modules, global
            sinks and codecs can be the cause.
        logged: the request's part of the log, in which workers store the states of gates.
        scores: if workers store the request's scores together with its KV blocks, the digest of the
            request's probes. Otherwise empty.
        cached: hashes of the request's first blocks, whose KV comes from the cache. The workers
            already store the scores of these blocks.
        block_size: number of tokens of a block; 0 if `scores` is empty.
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
    """The changes since the last step. Workers apply the changes before the step's forward.

    Attributes:
        entrants: the requests that enter, by request id.
        specs: the new specs in packed form, by the number of the spec. A spec also contains the
            server-wide edits and the reads of global sinks.
        arrays: (shape, data) of each vector that the workers do not have, by digest.
        forgotten_specs, forgotten_arrays: the numbers of the specs and the digests of the vectors
            that workers drop after the entrants have entered.
        ended: for each ended request with sinks, the tokens that the scheduler has accepted, by
            request id.
        zeroed: KV blocks that the workers must zero before the step's forward.
        filled: by request id, the filled KV blocks whose scores the workers must store now:
            (number of the first of these blocks, hashes of all these blocks). The last of these
            blocks is filled in this step or in an earlier step.
        filled_at_end: the same for requests that have ended.
        forgotten_scores: the keys of scores that workers drop.
        resumed: by request id, the number of tokens of a request that begins now, or begins again
            after preemption. Only requests with states of gates are in this dict.
        begun: by request id, the names of probes that got a verdict since the last step. Other
            probes of the request wait for these verdicts (request.cascade).
        scales: by request id, the new scales of edits that the request's policy has set.
        accepted: by request id, the number of tokens that the scheduler has accepted. Only running
            and ended requests with Moments are in this dict.
        resolved: the new specs before packing, by the number of the spec.
        held: the programs of the entrants, by request id. A worker in EngineCore's process uses
            `resolved` and `held`. A pickled StepNews, for workers in other processes, contains
            neither.
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
    """A spec in packed form, and its vectors by digest. The result is cached in `asked`."""
    known: tuple[Packed, dict[bytes, Array]] | None = asked.__dict__.get("_packed")
    if known is None:
        whole = tuple(getattr(asked, each.name) for each in fields(asked))
        known = asked.__dict__["_packed"] = pack(whole)
    return known


def digest_of(asked: Resolved) -> bytes:
    """The digest of a spec. If `know_digest` has set a digest, this function returns that digest,
    and otherwise the digest of the packed spec. Equal specs have equal digests."""
    known: bytes | None = asked.__dict__.get("_digest")
    return packed_of(asked)[0].digest if known is None else known


def know_digest(asked: Resolved, digest: bytes) -> None:
    """Set the digest that `digest_of` returns, so that `digest_of` does not pack the spec."""
    asked.__dict__["_digest"] = digest


class Told:
    """EngineCore's record of the specs and vectors that the workers store.

    Args:
        here: True if the only worker is in this process. If True, specs are not packed.
    """

    def __init__(self, here: bool = False) -> None:
        self._here = here
        self._numbers = itertools.count()
        #: Each spec (Resolved) with its number, by the `id()` of the Resolved. The value contains
        #: the Resolved itself, because Python can give the `id()` of a freed object to another
        #: object.
        self._specs: Remembered[int, tuple[Resolved, int]] = Remembered(SPEC_BYTES)
        self._arrays: Remembered[bytes, bool] = Remembered(ARRAY_BYTES)

    def number_of(self, asked: Resolved, news: StepNews) -> int:
        """The number of a spec. If the workers do not have the spec, adds the spec to `news`. Also
        adds the vectors of the spec that the workers do not have."""
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
    """The specs and vectors that a worker stores."""

    def __init__(self) -> None:
        #: Each spec with its digest, by the number of the spec.
        self._specs: dict[int, tuple[Resolved, bytes]] = {}
        self._arrays: dict[bytes, Array] = {}

    def __getitem__(self, number: int) -> Resolved:
        return self._specs[number][0]

    def digest_of(self, number: int) -> bytes:
        """The digest of a spec, by the spec's number."""
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
        """Drop the specs and vectors that the news names as forgotten. Call this method after the
        requests of the news have entered."""
        for number in news.forgotten_specs:
            del self._specs[number]
        for digest in news.forgotten_arrays:
            del self._arrays[digest]
