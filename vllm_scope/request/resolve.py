"""The actions of a spec on one engine: streams, vectors, encodings.

Owns:  Resolved, and `resolve`, which makes it.
Runs:  `resolve` in the front-end (to check a request) and in EngineCore; workers get what it
       returns. numpy, no torch, no vLLM.
From:  spec.   To: program.compiler (what to do with each token), results (which rows to expect).

Promise: checks that need an engine (its layers, its sizes, its steering modules) are made here. The
error names the action.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import (
    MEMORY,
    Add,
    Clamp,
    Edit,
    Module,
    Probe,
    Read,
    Replace,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank, Encoding
from vllm_scope.request.nets import Aggregate, Net, net_of
from vllm_scope.request.selectors import ITEM_BYTES, Except, Ids, Selector, Word, items_of
from vllm_scope.request.sites import Phase, Place, Sites
from vllm_scope.vectors.module import TIERS, VectorKey

#: Measured bytes of one action at one stream, and of each further stream of a read. What is
#: compiled and cached for the action is included.
_ACTION_BYTES, _STREAM_BYTES = 1024, 128
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
        first: the first of the bank's numbers that are this probe's.
    """

    place: Place
    net: Net
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
        return self.cells[0].net.num_values


@dataclass(frozen=True)
class ResolvedEdit:
    """One edit of one stream.

    Attributes:
        kind: add, ablate, clamp or replace.
        values: [hidden_size], or [num_positions, hidden_size] for replace.
        numbers: (scale,) for add; (lo, hi, strength) for clamp, infinite for no bound.
        positions: for replace, one for each row, as given.
        norm_match: for add.
        number: index of the edit in its spec, for error messages.
    """

    kind: str
    stream: Place
    tokens: Selector
    values: Array
    numbers: tuple[float, ...] = ()
    positions: tuple[int, ...] = ()
    norm_match: bool = False
    number: int = field(default=0, compare=False)

    __getstate__ = _fields_alone

    @cached_property
    def digest(self) -> bytes:
        """Digest of everything but the tokens."""
        head = repr((self.kind, self.stream, self.numbers, self.norm_match)).encode()
        return hashlib.blake2b(head + self.values.digest, digest_size=16).digest()


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
        vectors = {id(edit.values): len(edit.values.data) for edit in self.edits}
        nets = {id(cell.net): cell.net for probe in self.probes for cell in probe.cells}
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
                if boundaries is None or cell.place.boundary in boundaries:
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


def resolve(
    reads: tuple[Read, ...],
    probes: tuple[Probe, ...],
    edits: tuple[Edit, ...],
    sites: Sites,
    modules: Mapping[str, Vectors],
) -> Resolved:
    """The actions on this engine. `Spec.resolve` caches the result and says what is raised."""
    found = tuple(
        ResolvedRead(
            sites.find(read.site, read.layer_numbers, f"reads[{i}]"),
            read.tokens, read.when, read.to, (read.tag, read.name),
            _encoding(read, sites, f"reads[{i}].codec"),
        )
        for i, read in enumerate(reads)
    )  # fmt: skip
    _check_encodings(found)
    scored = _resolve_probes(probes, sites, modules)
    edited: list[ResolvedEdit] = []
    for i, edit in enumerate(edits):
        edited += (
            replace(one, number=i) for one in _resolve_edit(edit, sites, modules, f"edits[{i}]")
        )
        if len(edited) > MAX_EDITED:
            raise SpecError(
                f"the edits change more than {MAX_EDITED:,} places, each layer counted for each "
                "edit; name fewer layers, or send several requests."
            )
    return Resolved(found, scored, tuple(edited))


def _resolve_probes(
    probes: tuple[Probe, ...], sites: Sites, modules: Mapping[str, Vectors]
) -> tuple[ResolvedProbe, ...]:
    nets = [
        _nets_of(probe, sites, modules, f"probes[{i}]") for i, probe in enumerate(probes)
    ]  # fmt: skip
    at_place: dict[Place, list[Net]] = {}
    for some in nets:
        for place, net in some:
            at_place.setdefault(place, []).append(net)
    banks = {
        place: Bank.of(
            (net.digest for net in some), sum(net.num_values for net in some), place.group
        )
        for place, some in at_place.items()
    }
    firsts = dict.fromkeys(banks, 0)
    found = []
    for probe, some in zip(probes, nets, strict=True):
        cells = []
        for place, net in some:
            cells.append(Cell(place, net, banks[place], firsts[place]))
            firsts[place] += net.num_values
        found.append(
            ResolvedProbe(
                probe.name, probe.tokens, tuple(cells), probe.bias, probe.activation, probe.pools,
                probe.aggregate, probe.to, probe.threshold, probe.action == "stop",
            )
        )  # fmt: skip
    return tuple(found)


def _nets_of(
    probe: Probe, sites: Sites, modules: Mapping[str, Vectors], where: str
) -> list[tuple[Place, Net]]:
    """What a probe computes at each of its layers."""
    places = sites.find(probe.site, probe.layer_numbers, where)
    if isinstance(probe.weight, Module):
        named = {p: row for p, row, _ in _module_rows(probe, probe.weight, sites, modules, where)}
        nets = [net_of(named[place]) for place in places]
    else:
        nets = [net_of(weight) for weight in probe.weights()]
    width = sites.row_size(probe.site)
    for net in nets:
        if net.width != width:
            raise SpecError(
                f"{where}.weight has {net.width} numbers; rows of {probe.site!r} have {width}."
            )
    return list(zip(places, nets, strict=True))


def _encoding(read: Read, sites: Sites, where: str) -> Encoding | None:
    if read.codec is None:
        return None
    from vllm_scope.codecs.packed import encoding_of  # torch, which a caller may not have

    return encoding_of(read.codec, sites.row_size(read.site), sites.dtype, where)


def _check_encodings(reads: tuple[ResolvedRead, ...]) -> None:
    known: dict[tuple[str, Place, Phase], Encoding | None] = {}
    for i, read in enumerate(reads):
        for stream in read.streams:
            one = known.setdefault((read.to, stream, read.when), read.encoding)
            if one != read.encoding:
                names = [e.metadata["codec"] if e else "none" for e in (one, read.encoding)]
                raise SpecError(
                    f"reads[{i}].codec makes {stream[0]!r} {stream[1]} come to {shown(read.to)} "
                    f"as {names[0]} and as {names[1]}; rows of one stream have one codec, and the "
                    "same options, at one destination."
                )


def _check_size(values: Array, sites: Sites, where: str) -> None:
    if values.shape[-1] != sites.hidden_size:
        raise SpecError(
            f"{where} has {values.shape[-1]} numbers; this model's rows have {sites.hidden_size}."
        )


def _resolve_edit(
    edit: Edit, sites: Sites, modules: Mapping[str, Vectors], where: str
) -> list[ResolvedEdit]:
    key = edit.fields[0]
    values = getattr(edit, key)
    rows: list[tuple[Place, Array, str | None]]
    if isinstance(values, Module):
        rows = _module_rows(edit, values, sites, modules, where)
    else:
        streams = sites.find(edit.site, edit.layer_numbers, where)
        own = len(values.shape) == (3 if isinstance(edit, Replace) else 2)
        rows = [(s, _row(values, i) if own else values, None) for i, s in enumerate(streams)]
    found = []
    for stream, row, tier in rows:
        _check_size(row, sites, f"{where}.{key}")
        tokens = _within(edit.tokens, tier)
        if tokens is not None:
            found.append(_one_edit(edit, stream, row, tokens))
    return found


def _within(tokens: Selector, tier: str | None) -> Selector | None:
    """The tokens that are also of the tier; None if there can be none."""
    if tier is None:
        return tokens
    word = Word(tier)
    if tokens in (Word("all"), word):
        return word
    if any(tokens == Word(other) for other in TIERS):
        return None
    (other,) = set(TIERS) - {tier}  # every token is of one tier
    return Except(tokens, Word(other))


def _row(values: Array, index: int) -> Array:
    size = len(values.data) // values.shape[0]
    return Array(values.shape[1:], values.data[index * size : (index + 1) * size])


def _module_rows(
    action: Edit | Probe,
    module: Module,
    sites: Sites,
    modules: Mapping[str, Vectors],
    where: str,
) -> list[tuple[Place, Array, str | None]]:
    if module.name not in modules:
        known = ", ".join(sorted(modules)[:8]) or "none"
        raise SpecError(
            f"{where} names the steering module {shown(module.name)}, which this engine does not "
            f"hold. It holds: {known}. Register it first."
        )
    vectors = modules[module.name]
    layers = action.layer_numbers
    places = [p for p in vectors if layers is None or (p[0] == action.site and p[1] in layers)]
    if isinstance(action, Probe):
        # A probe has one weight for all tokens.
        places = [place for place in places if len(place) == 2]
    if layers is not None and not {place[1] for place in places} >= set(layers):
        has = ", ".join(" ".join(map(str, place)) for place in sorted(vectors))
        raise SpecError(
            f"{where}.layers names a layer of {action.site!r} for which the steering module "
            f"{shown(module.name)} has no vector; it has {has}."
        )
    for place in places:
        sites.find(place[0], (place[1],) if place[0] != "embed" else (0,), where)
    needs_direction = isinstance(action, Edit) and action.needs_direction
    if needs_direction and not all(vectors[place].numpy.any() for place in places):
        raise SpecError(f"{where}: a vector of {shown(module.name)} is zero; it has no direction.")
    return [
        (Place(place[0], place[1]), vectors[place], place[2] if len(place) == 3 else None)
        for place in places
    ]


def _one_edit(edit: Edit, stream: Place, values: Array, tokens: Selector) -> ResolvedEdit:
    numbers: tuple[float, ...] = ()
    if isinstance(edit, Add):
        numbers = (edit.scale,)
    elif isinstance(edit, Clamp):
        lo = -math.inf if edit.lo is None else edit.lo
        numbers = (lo, math.inf if edit.hi is None else edit.hi, edit.strength)
    positions = edit.positions if isinstance(edit, Replace) else ()
    return ResolvedEdit(
        edit.kind, stream, tokens, values, numbers, positions, norm_match=edit.norm_match
    )
