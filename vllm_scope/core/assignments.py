"""What EngineCore has made of a spec for its workers, and how it travels to them.

Owns:  RankKind, Assignment, Parcel.
Runs:  made and packed in EngineCore, on the thread on which requests enter; loaded in workers in
       other processes, on the thread that launches the model.
From:  engine.core.entry.   To: news, engine.worker.worker.

Promise: a worker compiles no edits; what it loads instead, pickle's C code makes. Vectors are kept
apart, so that a worker gets a vector only if it does not hold it (news).
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from vllm_scope.program.held import Held
from vllm_scope.request.arrays import Array
from vllm_scope.request.resolved import Resolved


class RankKind(NamedTuple):
    """What programs differ by from worker to worker.

    Attributes:
        stage: of the pipeline.
        drains: False on a rank that edits like the others and delivers nothing.
    """

    stage: int
    drains: bool

    def of(self, asked: Resolved) -> RankKind:
        """The same for a request. If it delivers nothing, all ranks of a stage are alike."""
        return self if asked.taking else self._replace(drains=False)


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """An Assignment, pickled.

    Attributes:
        data: the spec, without its edits if their programs are there; and the rest.
        arrays: digests of the Arrays that the data names.
    """

    data: bytes
    arrays: tuple[bytes, ...]


class Assignment:
    """A spec, and the programs of one request if it edits. Requests of a spec with the same
    programs share it.

    Attributes:
        asked: reads, probes and edits. In a worker in another process it has the edits only if a
            policy sets their scales, or if no programs came.
        held: the programs that the request holds, for each kind of worker; empty without edits.
        columns: as `RequestProgram.columns` returns them; empty without `held`, and in a worker in
            another process without a policy.
        parcel: None if the worker is in this process.
        arrays: the Arrays that the parcel names, by digest.
    """

    def __init__(
        self, asked: Resolved, held: Mapping[RankKind, Held], columns: tuple[bytes, ...] = ()
    ) -> None:
        self.asked, self.held, self.columns = asked, held, columns
        self.parcel: Parcel | None = None
        self.arrays: dict[bytes, Array] = {}

    @property
    def num_bytes(self) -> int:
        """Estimated memory in a worker."""
        return self.asked.num_bytes + (0 if self.parcel is None else 2 * len(self.parcel.data))

    def pack(self) -> Assignment:
        """Make the parcel."""
        asked, file = self.asked, io.BytesIO()
        if self.held and asked.policy is None:
            asked = replace(asked, edits=())
        columns = () if asked.policy is None else self.columns
        _Pickler(file, self.arrays).dump((asked, self.held, columns))
        self.parcel = Parcel(file.getvalue(), tuple(self.arrays))
        return self

    @staticmethod
    def of(parcel: Parcel, arrays: Mapping[bytes, Array]) -> Assignment:
        """What was packed.

        Raises:
            KeyError: an Array is not among `arrays`.
        """
        _loading.arrays = arrays
        return Assignment(*pickle.loads(parcel.data))


class _Pickler(pickle.Pickler):
    """Pickles Arrays as their digests."""

    def __init__(self, file: io.BytesIO, arrays: dict[bytes, Array]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        # Faster than a persistent_id, which is called for every object.
        self.dispatch_table = {Array: self._named}
        self._arrays = arrays

    def _named(self, array: Array) -> tuple[Callable[[bytes], Array], tuple[bytes]]:
        self._arrays[array.digest] = array
        return _arrived, (array.digest,)


class _Loading(threading.local):
    """The Arrays of what this thread loads."""

    arrays: Mapping[bytes, Array] = MappingProxyType({})


_loading = _Loading()


def _arrived(digest: bytes) -> Array:
    return _loading.arrays[digest]
