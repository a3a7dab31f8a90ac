"""A spec on one engine, as data: streams, vectors, encodings.

Owns:  Resolved, and what it is made of.
Runs:  in the front-end and in EngineCore, which make it (resolve); in workers, which get it. numpy,
       no torch, no vLLM.
From:  resolve.   To: program.compiler (what to do with each token), results (which rows to expect).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from vllm_scope.request.actions import MEMORY
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank, Encoding, Told
from vllm_scope.request.nets import Aggregate, Net
from vllm_scope.request.selectors import ITEM_BYTES, Ids, Selector, Word, items_of
from vllm_scope.request.sites import Phase, Place
from vllm_scope.vectors.module import VectorKey

#: Measured bytes of one action at one stream, and of each further stream of a read. What is
#: compiled and cached for the action is included.
_ACTION_BYTES, _STREAM_BYTES = 1536, 128
#: Edits of one request, each layer counted. As many operations may a request with edits have.
MAX_EDITED = 1 << 13
#: Vectors of a steering module. A key (site, layer) is for every token, a key (site, layer, tier)
#: for the tier's tokens.
Vectors = Mapping[VectorKey, Array]


def _fields_alone(self: ResolvedEdit | Resolved) -> dict[str, object]:
    """The state to pickle: without cached properties."""
    return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class ResolvedRead:
    """One read, at its streams."""

    streams: tuple[Place, ...]
    tokens: Selector
    when: Phase = "after"
    to: str = MEMORY
    #: The request's tag and name at its destination.
    called: tuple[str | None, str | None] = (None, None)
    #: None for rows that are not encoded.
    encoding: Encoding | None = None


@dataclass(frozen=True)
class Cell:
    """A probe at one layer.

    Attributes:
        bank: all probes of the request at this place.
        net: None for a number that taps tell.
        first: the first of the bank's numbers that are this probe's.
    """

    place: Place
    net: Net | None
    bank: Bank
    first: int


@dataclass(frozen=True)
class ResolvedProbe:
    """One probe. The numbers of its cells are added, and then become its score.

    Attributes:
        cells: one for each layer.
        pools: True for an AttentionPool.
        bias, activation, aggregate, threshold: as in Probe.
        stops: True if a verdict ends the request.
    """

    name: str
    tokens: Selector
    cells: tuple[Cell, ...]
    bias: float = 0.0
    activation: str | None = None
    pools: bool = False
    aggregate: Aggregate | None = None
    to: str = MEMORY
    threshold: float | None = None
    stops: bool = False

    @property
    def judges(self) -> bool:
        """True if it has verdicts."""
        return self.threshold is not None

    @property
    def num_values(self) -> int:
        """How many numbers of a row the score is made of."""
        net = self.cells[0].net
        return 1 if net is None else net.num_values


@dataclass(frozen=True)
class ResolvedGate:
    """The condition of an edit. All but the place as in Gate.

    Attributes:
        told: the place, the bank and the index of its value among what taps tell; None if it is
            not delivered.
    """

    place: Place
    vector: Array
    kind: str
    threshold: float
    sharpness: float
    bias: float
    above: bool
    told: ToldAt | None = None

    __getstate__ = _fields_alone

    @cached_property
    def digest(self) -> bytes:
        """Digest of what it computes."""
        told = self.kind, self.threshold, self.sharpness, self.bias, self.above, self.place
        return hashlib.blake2b(repr(told).encode() + self.vector.digest, digest_size=16).digest()


#: (place, bank, index of the number in the bank)
ToldAt = tuple[Place, Told, int]


@dataclass(frozen=True)
class ResolvedEdit:
    """One edit of one stream.

    Attributes:
        kind: add, ablate, clamp or replace.
        values: [width of a row], or [num_positions, width] for replace, or the decoder's rows,
            [num_features, width], for set_feature and scale_feature.
        numbers: (scale,) for add; (lo, hi, strength) for clamp, infinite for no bound; for features
            (bias, threshold, a, d) of each, as in actions.features.
        reads: for features, the encoder's rows.
        positions: for replace, one for each row, as given.
        norm_match: for add.
        limit: for add, the most that `||change|| / ||x||` may be; None for no bound.
        number: index of the edit in its spec, for error messages.
        gate: its condition, or None.
        dose: where its `||change|| / ||x||` is among what taps tell; None if it is not delivered.
    """

    kind: str
    stream: Place
    tokens: Selector
    values: Array
    numbers: tuple[float, ...] = ()
    positions: tuple[int, ...] = ()
    norm_match: bool = False
    limit: float | None = None
    number: int = field(default=0, compare=False)
    gate: ResolvedGate | None = None
    dose: ToldAt | None = None
    reads: Array | None = None

    __getstate__ = _fields_alone

    @cached_property
    def digest(self) -> bytes:
        """Digest of what it does to a row; not of the tokens."""
        gate = None if self.gate is None else self.gate.digest
        reads = None if self.reads is None else self.reads.digest
        head = repr(
            (self.kind, self.stream, self.numbers, self.norm_match, self.limit, gate, reads)
        )
        return hashlib.blake2b(head.encode() + self.values.digest, digest_size=16).digest()


@dataclass(frozen=True)
class Resolved:
    """A spec on one engine."""

    reads: tuple[ResolvedRead, ...] = ()
    probes: tuple[ResolvedProbe, ...] = ()
    edits: tuple[ResolvedEdit, ...] = ()

    __getstate__ = _fields_alone

    @property
    def num_bytes(self) -> int:
        """Estimated memory, with everything that is compiled and cached for it."""
        given = [one for edit in self.edits for one in (edit.values, edit.reads) if one is not None]
        vectors = {id(one): len(one.data) for one in given}
        gates = [edit.gate for edit in self.edits if edit.gate is not None]
        vectors |= {id(gate.vector): len(gate.vector.data) for gate in gates}
        cells = (cell for probe in self.probes for cell in probe.cells)
        nets = {id(cell.net): cell.net for cell in cells if cell.net is not None}
        vectors |= {key: net.num_bytes for key, net in nets.items()}
        num_streams = sum(len(read.streams) for read in self.reads)
        actions = (*self.delivering, *self.edits)
        items = sum(map(items_of, {one.tokens for one in actions}))
        # A direction is kept twice: as given, and at length 1.
        return (
            2 * sum(vectors.values())
            + _STREAM_BYTES * num_streams
            + _ACTION_BYTES * (len(actions) + len(nets))
            + ITEM_BYTES * items
        )

    def joined(
        self, edits: tuple[ResolvedEdit, ...] = (), reads: tuple[ResolvedRead, ...] = ()
    ) -> Resolved:
        """With the server's edits before its own, and the reads of global sinks after its own.

        Returns the same object while the arguments are the same objects, because compiled programs
        are cached on it.
        """
        if not (edits or reads):
            return self
        last = self.__dict__.get("_joined")
        if last is None or last[0] is not edits or last[1] is not reads:
            whole = Resolved((*self.reads, *reads), self.probes, (*edits, *self.edits))
            last = self.__dict__["_joined"] = (edits, reads, whole)
        found: Resolved = last[2]
        return found

    def ids_of(self, prompt_ids: Sequence[int]) -> Ids:
        """A prompt's ids for `select`: as an array, unless no selector looks at them."""
        return prompt_ids if self.uniform else np.asarray(prompt_ids, np.int64)

    @cached_property
    def uniform(self) -> bool:
        """Each token's actions depend on its phase (prompt or generated) alone."""
        return all(one.tokens.uniform for one in (*self.delivering, *self.edits))

    @property
    def delivering(self) -> tuple[ResolvedRead | ResolvedProbe, ...]:
        return (*self.reads, *self.probes)

    @cached_property
    def read_selectors(self) -> tuple[Selector, ...]:
        """The distinct selectors of reads and probes."""
        return tuple(dict.fromkeys(x.tokens for x in self.delivering))

    @cached_property
    def scores_alone(self) -> bytes | None:
        """A digest of the probes, if all tokens get the same scores and nothing else is asked for:
        such scores can be kept with KV blocks. None otherwise."""
        alike = all(p.tokens == Word("all") and p.to == MEMORY for p in self.probes)
        if self.reads or not self.probes or not alike:
            return None
        cells = dict.fromkeys((c.place, c.bank.text) for p in self.probes for c in p.cells)
        return hashlib.blake2b(repr(list(cells)).encode(), digest_size=16).digest()

    @cached_property
    def score_bytes(self) -> int:
        """Bytes of the scores of one token that gets them all, in whole slots."""
        cells = {(c.place, c.bank.text): c.bank for p in self.probes for c in p.cells}
        # A slot of the arena has 16 bytes (program.layout).
        return sum(-(-bank.row_bytes // 16) * 16 for bank in cells.values())

    @cached_property
    def stopping(self) -> tuple[ResolvedProbe, ...]:
        """The probes that may end the request."""
        return tuple(probe for probe in self.probes if probe.stops)

    @cached_property
    def banks(self) -> dict[Bank, tuple[Net, ...]]:
        """The nets of each bank, in the order of their numbers."""
        return self.banks_at(None)

    def banks_at(self, boundaries: frozenset[int] | None) -> dict[Bank, tuple[Net, ...]]:
        """The same of the banks at some boundaries."""
        found: dict[Bank, dict[int, Net]] = {}
        for probe in self.probes:
            for cell in probe.cells:
                here = boundaries is None or cell.place.boundary in boundaries
                if cell.net is not None and here:
                    found.setdefault(cell.bank, {})[cell.first] = cell.net
        return {bank: tuple(nets[at] for at in sorted(nets)) for bank, nets in found.items()}

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """The distinct destinations of rows and scores."""
        return tuple(dict.fromkeys(x.to for x in self.delivering))

    def going_to(self, to: str) -> Resolved:
        """The reads and probes of one destination; the same object at each call."""
        known: dict[str, Resolved] = self.__dict__.setdefault("_going_to", {})
        if to not in known:
            reads = tuple(read for read in self.reads if read.to == to)
            probes = tuple(probe for probe in self.probes if probe.to == to)
            known[to] = Resolved(reads, probes)
        return known[to]


#: For a request without a spec.
NOTHING = Resolved()
