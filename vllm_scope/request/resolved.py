"""A resolved spec: the streams, vectors and encodings of a spec on one engine.

Owns:  Resolved, and the classes of its parts.
Runs:  in the front-end and in EngineCore, which make a Resolved (resolve), and in workers, which
       receive a Resolved. numpy, no torch, no vLLM.
From:  resolve.   To: program.compiler (makes programs), results (the rows that must arrive).

A stream is the rows of one site at one layer (a `Place`). A net is the function by which a probe
computes numbers from a row. A bank is all nets of a request at one `Place`, which are computed
together. If probes wait for the verdicts of other probes (a cascade), each stage of the cascade has
banks of its own. A selector is uniform if it selects either all or none of the tokens of a phase
(prompt or generated).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from vllm_scope.request.actions import MEMORY, Policy
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.request.actions.states import State
from vllm_scope.request.arrays import Array
from vllm_scope.request.cascade import begins
from vllm_scope.request.heads import Bank, Encoding, Scored, Strongest, Told
from vllm_scope.request.nets import Aggregate, Net
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.request.selectors import ITEM_BYTES, Ids, Selector, Word, items_of
from vllm_scope.request.sites import Phase, Place
from vllm_scope.vectors.module import VectorKey

#: The measured memory of one action at one stream, and of each further stream of a read, in bytes.
#: The numbers include compiled and cached data of the action.
_ACTION_BYTES, _STREAM_BYTES = 1536, 128
#: The largest number of layers of all edits of one request together. The operations of the request
#: have the same limit (program.compiled).
MAX_EDITED = 1 << 13
#: The vectors of a steering module. A vector with the key (site, layer) applies to every token. A
#: vector with the key (site, layer, tier) applies only to tokens of the tier, "prompt" or
#: "generated".
Vectors = Mapping[VectorKey, Array]


def lens_label(name: str, layer: int) -> str:
    """The name of the tokens of a lens at one layer. No probe or features action of the request can
    have this name."""
    return f"{name}.{layer}"


def _fields_alone(self: ResolvedEdit | Resolved) -> dict[str, object]:
    """The state that pickle stores: the fields, without cached properties."""
    return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class ResolvedRead:
    """A read on one engine, with the streams whose rows the read returns."""

    streams: tuple[Place, ...]
    tokens: Selector
    when: Phase = "after"
    to: str = MEMORY
    #: The tag and the name of the request at the destination `to`.
    called: tuple[str | None, str | None] = (None, None)
    #: The encoding of the rows, or None if the rows are not encoded.
    encoding: Encoding | None = None


@dataclass(frozen=True)
class Cell:
    """A probe, or a features action, at one layer.

    Attributes:
        bank: the head that computes the cell's numbers. A bank of nets has the nets of all cells of
            the request at this `Place` and in the same stage of a cascade.
        net: the function by which the probe computes numbers from a row. None for a gate's value,
            an edit's dose, features of a held SAE, and a lens.
        first: index of this cell's first number among the bank's numbers.
    """

    place: Place
    net: Net | None
    bank: Bank
    first: int


@dataclass(frozen=True)
class ResolvedProbe:
    """A probe on one engine. The numbers of the probe's cells are added, and the score is computed
    from the sums.

    Attributes:
        cells: one cell for each layer.
        pools: True if the probe's weight is an AttentionPool.
        bias, activation, aggregate, to, threshold, after: the same as in Probe.
        stops: True if a verdict ends the request.
        step_tokens: the largest number of positions of a request in a decode step
            (Sites.step_tokens).
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
    after: str | None = None
    step_tokens: int = 1

    def begins(self, verdict: int, num_prompt: int) -> int:
        """The first position that a probe with `after` scores (see request.cascade).

        Args:
            verdict: the position of the verdict of the probe that `after` names.
        """
        return begins(verdict, num_prompt, self.step_tokens)

    @property
    def judges(self) -> bool:
        """True if the probe gives a verdict."""
        return self.threshold is not None

    @property
    def num_values(self) -> int:
        """How many numbers each cell makes from a row."""
        net = self.cells[0].net
        return 1 if net is None else net.num_values


@dataclass(frozen=True)
class ResolvedFeatures:
    """Features of an SAE, or tokens of a lens, at one place.

    Attributes:
        cells: one cell. If the cell has no net, its bank is a Strongest (for a lens, a Likeliest).
            If the cell has a net, the net computes the pre-activations of `indices`.
        num_features: number of features of the SAE, or None if the number is not known.
        indices: the features that the caller wants. If `indices` is None, the caller wants all
            features of the bank.
        thresholds: if the cell has a net, the SAE's own thresholds, [num_indices].
        threshold: values below this number are left out. If None, no active feature is left out.
        lens: (name, index in the spec) of the LensTopK. For features of an SAE, `lens` is None.
        top_k: for a lens, the caller's number of tokens. The bank can compute more than `top_k`
            tokens.
    """

    name: str
    tokens: Selector
    cells: tuple[Cell, ...]
    num_features: int | None = None
    indices: tuple[int, ...] | None = None
    thresholds: Array | None = None
    threshold: float | None = None
    to: str = MEMORY
    lens: tuple[str, int] | None = None
    top_k: int | None = None
    #: Always None, because features are never in a later stage of a cascade.
    after: ClassVar[None] = None

    @property
    def read(self) -> ReadFeatures:
        return ReadFeatures(self.num_features, self.indices)

    @property
    def num_values(self) -> int:
        """The number of 4-byte numbers that are delivered for one token."""
        (cell,) = self.cells
        return cell.bank.row_bytes // 4 if cell.net is None else cell.net.num_values

    @property
    def whole_sae(self) -> str | None:
        """The name of the SAE, if the strongest of all its features are delivered. None if
        `indices` or a `threshold` leaves features out. For a lens, an empty string."""
        (cell,) = self.cells
        chosen = self.indices is not None or self.threshold is not None
        return cell.bank.sae if isinstance(cell.bank, Strongest) and not chosen else None


@dataclass(frozen=True)
class ResolvedMoments:
    """The sums to which a Moments adds rows. The attributes have the same meaning as in Moments."""

    name: str
    streams: tuple[Place, ...]
    tokens: Selector
    by: str
    target: float | None = None
    covariance: bool = True


@dataclass(frozen=True)
class ResolvedGate:
    """The condition of an edit. Attributes without a text below have the same meaning as in Gate.

    Attributes:
        place: the `Place` whose row the gate gets.
        told: where a tap writes the gate's value, as (`Place`, bank, index in the bank). If the
            value is not delivered, `told` is None.
    """

    place: Place
    vector: Array
    kind: str
    threshold: float
    sharpness: float
    bias: float
    above: bool
    told: ToldAt | None = None
    state: State | None = None

    __getstate__ = _fields_alone

    @cached_property
    def digest(self) -> bytes:
        """A digest of the gate's computation."""
        told: tuple[object, ...]
        told = self.kind, self.threshold, self.sharpness, self.bias, self.above, self.place
        told += () if self.state is None else (self.state,)
        return hashlib.blake2b(repr(told).encode() + self.vector.digest, digest_size=16).digest()


#: Where a tap writes a number: (`Place`, bank, index of the number in the bank).
ToldAt = tuple[Place, Told, int]


@dataclass(frozen=True)
class ResolvedEdit:
    """An edit of one stream.

    Attributes:
        kind: add, ablate, clamp, replace, set_feature or scale_feature.
        values: the vector of the edit, [width of a row]. For replace, the given rows,
            [num_positions, width of a row]. For set_feature and scale_feature, the decoder's rows,
            [num_features, width of a row].
        numbers: for add, (scale,). For clamp, (lo, hi, strength). If there is no lower or upper
            bound, lo or hi is infinite. For set_feature and scale_feature, (bias, threshold, a, d,
            active) for each feature (`changes` in actions/features.py).
        reads: for set_feature and scale_feature, the encoder's rows. None for other kinds.
        name: the name by which a policy sets the scale of an add, or None.
        positions: for replace, one position for each row, in the caller's order.
        norm_match: for add, the same as in Add.
        limit: for add, the upper bound of `||change|| / ||x||`, or None for no bound.
        number: index of the edit in its spec, for error messages.
        gate: the edit's condition, or None.
        dose: where a tap writes the edit's dose, in the form of `ResolvedGate.told`. If the dose is
            not delivered, `dose` is None.
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
    name: str | None = None

    __getstate__ = _fields_alone

    @cached_property
    def digest(self) -> bytes:
        """A digest of the edit's effect on a row. The edit's tokens are not part of the digest."""
        gate = None if self.gate is None else self.gate.digest
        reads = None if self.reads is None else self.reads.digest
        head = repr(
            (self.kind, self.stream, self.numbers, self.norm_match, self.limit, gate, reads)
        )
        return hashlib.blake2b(head.encode() + self.values.digest, digest_size=16).digest()

    @cached_property
    def stateless(self) -> ResolvedEdit | None:
        """The edit for tokens of the prompt: the same edit with a gate that has no state. None if
        the edit is the same for all tokens."""
        # The result is None, and not `self`, if the edit is the same for all tokens. Otherwise the
        # edit would refer to itself, and would stay in memory until Python collects cycles.
        if self.gate is None or self.gate.state is None:
            return None
        return replace(self, gate=replace(self.gate, state=None))


@dataclass(frozen=True)
class Resolved:
    """A spec on one engine."""

    reads: tuple[ResolvedRead, ...] = ()
    probes: tuple[ResolvedProbe, ...] = ()
    edits: tuple[ResolvedEdit, ...] = ()
    features: tuple[ResolvedFeatures, ...] = ()
    policy: Policy | None = None
    moments: tuple[ResolvedMoments, ...] = ()

    __getstate__ = _fields_alone

    @cached_property
    def shared(self) -> dict[Hashable, Any]:
        """A cache for other modules. Specs that differ only in the layers, vectors and numbers of
        their edits share one dict (request.outline). Therefore the cached values must not depend on
        layers, vectors or numbers."""
        return {}

    @cached_property
    def banked(self) -> tuple[ResolvedProbe | ResolvedFeatures, ...]:
        """The probes and features, whose numbers banks compute."""
        return (*self.probes, *self.features)

    @cached_property
    def num_bytes(self) -> int:
        """Estimated memory in bytes, with all compiled and cached data of this spec."""
        given = [one for edit in self.edits for one in (edit.values, edit.reads) if one is not None]
        vectors = {id(one): len(one.data) for one in given}
        gates = [edit.gate for edit in self.edits if edit.gate is not None]
        vectors |= {id(gate.vector): len(gate.vector.data) for gate in gates}
        cells = (cell for one in self.banked for cell in one.cells)
        # If taps compute a net, its weight is in memory twice: as a matrix, and row by row as
        # vectors.
        nets = {
            id(cell.net): cell.net.num_bytes * (2 if isinstance(cell.bank, Scored) else 1)
            for cell in cells if cell.net is not None
        }  # fmt: skip
        num_streams = sum(len(read.streams) for read in self.reads)
        actions = (*self.taking, *self.edits)
        items = sum(map(items_of, {one.tokens for one in actions}))
        # A vector of an edit or a gate can be in memory twice: as it was given, and at length 1.
        return (
            2 * sum(vectors.values())
            + sum(nets.values())
            + _STREAM_BYTES * num_streams
            + _ACTION_BYTES * (len(actions) + len(nets) + len(set(map(id, gates))))
            + ITEM_BYTES * items
        )

    def joined(
        self, edits: tuple[ResolvedEdit, ...] = (), reads: tuple[ResolvedRead, ...] = ()
    ) -> Resolved:
        """This spec, with `edits` (the server's edits) before this spec's edits, and `reads` (the
        reads of global sinks) after this spec's reads.

        If the arguments are the same objects as in the last call, the result is also the same
        object. Its cached programs are then used again.
        """
        if not (edits or reads):
            return self
        last = self.__dict__.get("_joined")
        if last is None or last[0] is not edits or last[1] is not reads:
            whole = Resolved(
                (*self.reads, *reads), self.probes, (*edits, *self.edits), self.features,
                self.policy, self.moments,
            )  # fmt: skip
            last = self.__dict__["_joined"] = (edits, reads, whole)
        found: Resolved = last[2]
        return found

    def ids_of(self, prompt_ids: Sequence[int]) -> Ids:
        """The token ids of a prompt, as an array for `select`. If all selectors are uniform, no
        selector reads the ids, and the result is `prompt_ids` itself."""
        return prompt_ids if self.uniform else np.asarray(prompt_ids, np.int64)

    @cached_property
    def uniform(self) -> bool:
        """True if the phase (prompt or generated) alone decides which actions a token gets."""
        return all(one.tokens.uniform for one in (*self.taking, *self.edits))

    @cached_property
    def taking(
        self,
    ) -> tuple[ResolvedRead | ResolvedProbe | ResolvedFeatures | ResolvedMoments, ...]:
        """The actions that need rows: the actions that deliver, and the Moments."""
        return (*self.delivering, *self.moments)

    @cached_property
    def delivering(self) -> tuple[ResolvedRead | ResolvedProbe | ResolvedFeatures, ...]:
        return (*self.reads, *self.banked)

    @cached_property
    def read_selectors(self) -> tuple[Selector, ...]:
        """The distinct selectors of the actions that need rows."""
        return tuple(dict.fromkeys(x.tokens for x in self.taking))

    @cached_property
    def is_monitored_alone(self) -> bool:
        """True if the request delivers nothing, or only scores of the operator's monitors."""
        others = self.reads or self.features
        return not others and all(is_monitor(probe.name) for probe in self.probes)

    @cached_property
    def _always(self) -> tuple[ResolvedProbe | ResolvedFeatures, ...]:
        """The features, and the probes without `after`."""
        return tuple(one for one in self.banked if one.after is None)

    @cached_property
    def scores_alone(self) -> bytes | None:
        """If workers can store the request's scores together with KV blocks, a digest of its probes
        and features. Otherwise None. The scores can be stored only if the request has no read and
        no Moments, and if all its probes and features select all tokens and deliver to memory.
        Later stages of cascades are ignored, because they do not score prompt tokens."""
        always = self._always
        alike = all(p.tokens == Word("all") and p.to == MEMORY for p in always)
        if self.reads or self.moments or not always or not alike:
            return None
        cells = dict.fromkeys((c.place, c.bank.text) for p in always for c in p.cells)
        return hashlib.blake2b(repr(list(cells)).encode(), digest_size=16).digest()

    @cached_property
    def score_bytes(self) -> int:
        """The bytes of all scores of one token. The scores of each bank take whole slots of 16
        bytes. Later stages of cascades are not included."""
        cells = {(c.place, c.bank.text): c.bank for p in self._always for c in p.cells}
        # A slot of the arena has 16 bytes (program.layout).
        return sum(-(-bank.row_bytes // 16) * 16 for bank in cells.values())

    @cached_property
    def num_states(self) -> int:
        """The number of different gates that have a state."""
        gates = (edit.gate for edit in self.edits)
        return len({gate.digest for gate in gates if gate is not None and gate.state is not None})

    @cached_property
    def stopping(self) -> tuple[ResolvedProbe, ...]:
        """The probes that can end the request."""
        return tuple(probe for probe in self.probes if probe.stops)

    @cached_property
    def firsts(self) -> frozenset[str]:
        """The names of the probes that other probes name in `after` (first stages)."""
        return frozenset(probe.after for probe in self.probes if probe.after is not None)

    @cached_property
    def watched(self) -> tuple[ResolvedProbe, ...]:
        """The probes whose scores the worker needs while the request runs: the probes that can end
        the request, and the first stages. If there is a policy, also the probes with tokens "all",
        "prompt" or "generated"."""
        policy, firsts = self.policy is not None, self.firsts
        return tuple(
            one for one in self.probes
            if one.stops or one.name in firsts or (policy and one.tokens.uniform)
        )  # fmt: skip

    @cached_property
    def scaled(self) -> frozenset[str]:
        """The names of edits whose scale the policy can set. Without a policy, the set is empty."""
        names = (edit.name for edit in self.edits) if self.policy is not None else ()
        return frozenset(name for name in names if name is not None)

    def rescaled(self, scales: Mapping[str, float]) -> Resolved:
        """This spec with other scales of named edits. `scales` has the new scales by the names of
        the edits."""
        new = ((edit, None if edit.name is None else scales.get(edit.name)) for edit in self.edits)
        edits = (edit if x is None else replace(edit, numbers=(x,)) for edit, x in new)
        return replace(self, edits=tuple(edits))

    @cached_property
    def banks(self) -> dict[Bank, tuple[Net, ...]]:
        """The nets of each bank, in the order of the numbers that the bank computes."""
        found: dict[Bank, dict[int, Net]] = {}
        for cell in (cell for one in self.banked for cell in one.cells):
            if cell.net is not None:
                found.setdefault(cell.bank, {})[cell.first] = cell.net
        return {bank: tuple(nets[at] for at in sorted(nets)) for bank, nets in found.items()}

    def banks_on_rows(self, here: frozenset[int] | None = None) -> dict[Bank, tuple[Net, ...]]:
        """The `banks` that the worker computes from copied rows. Banks that taps compute are left
        out. Calls with equal arguments return the same object.

        Args:
            here: the boundaries whose banks the caller wants. None stands for all boundaries.
        """
        known: dict[object, dict[Bank, tuple[Net, ...]]] = self.__dict__.setdefault("_banks", {})
        if here not in known:
            cells = (cell for one in self.banked for cell in one.cells)
            some = {c.bank for c in cells if here is None or c.place.boundary in here}
            known[here] = {
                bank: nets for bank, nets in self.banks.items()
                if bank in some and not isinstance(bank, Scored)
            }  # fmt: skip
        return known[here]

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """The distinct destinations of rows and scores."""
        return tuple(dict.fromkeys(x.to for x in self.delivering))

    def going_to(self, to: str) -> Resolved:
        """The reads, probes and features that deliver to one destination. Calls with equal
        arguments return the same object."""
        known: dict[str, Resolved] = self.shared.setdefault("going_to", {})
        if to not in known:
            reads = tuple(read for read in self.reads if read.to == to)
            probes = tuple(probe for probe in self.probes if probe.to == to)
            features = tuple(one for one in self.features if one.to == to)
            known[to] = Resolved(reads, probes, (), features, self.policy)
        return known[to]


#: The Resolved of a request without a spec.
NOTHING = Resolved()
