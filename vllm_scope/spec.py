"""Everything one request asks for, its JSON, and what it means on one engine.

Owns:  Spec, `scope`, Resolved.
Runs:  in the caller's process, in the front-end (validation), in EngineCore (the keys
       of edited KV blocks) and in workers. numpy, no torch, no vLLM.
From:  actions.   To: program (what to do with a token), result (what to expect).

Promise: a `Spec` that exists is well formed. What only the engine knows (its layers,
its hidden size, its steering modules) is checked by `Spec.resolve`, with the same
kind of sentence.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_scope.actions import (
    KINDS,
    MEMORY,
    Action,
    Add,
    Edit,
    Module,
    Probe,
    Read,
    Replace,
    action_from_json,
    tokens_of,
)
from vllm_scope.arrays import Array
from vllm_scope.encoding import Encoding
from vllm_scope.errors import SpecError, shown
from vllm_scope.selectors import Except, Selector, Word
from vllm_scope.sites import SiteLayer, Sites
from vllm_scope.vectors.module import TIERS, Place

MAX_SPEC_BYTES = 64 << 20
MAX_READS = 32
MAX_PROBES = 256
MAX_EDITS = 256

#: Vectors of a steering module: by stream for every token, by (site, layer, tier) for the
#: tier's tokens alone.
Vectors = Mapping[Place, Array]


@dataclass(frozen=True)
class ResolvedRead:
    """One read as the streams it means on this engine."""

    streams: tuple[SiteLayer, ...]
    tokens: Selector
    when: str = "after"
    to: str = MEMORY
    #: Tag and name of the request at its destination.
    called: tuple[str | None, str | None] = (None, None)
    #: How its rows are encoded; None for rows as they are.
    encoding: Encoding | None = None


@dataclass(frozen=True)
class ResolvedProbe:
    """One probe: where, and what it is called."""

    stream: SiteLayer
    tokens: Selector
    name: str
    weight: Array
    bias: float
    to: str = MEMORY


@dataclass(frozen=True)
class ResolvedEdit:
    """One edit of one stream.

    Attributes:
        kind: add, ablate, clamp or replace.
        values: [hidden_size], or [num_positions, hidden_size] for replace.
        numbers: scale of an add; lo, hi and strength of a clamp.
        positions: of the rows of a replace, as given.
        norm_match: of an add.
    """

    kind: str
    stream: SiteLayer
    tokens: Selector
    values: Array
    numbers: tuple[float, ...] = ()
    positions: tuple[int, ...] = ()
    norm_match: bool = False

    @cached_property
    def digest(self) -> bytes:
        """Of what it does to a token that it edits; which tokens is left out."""
        head = repr((self.kind, self.stream, self.numbers, self.norm_match)).encode()
        return hashlib.blake2b(head + self.values.digest, digest_size=16).digest()


@dataclass(frozen=True)
class Resolved:
    """A spec as it is on one engine."""

    reads: tuple[ResolvedRead, ...] = ()
    probes: tuple[ResolvedProbe, ...] = ()
    edits: tuple[ResolvedEdit, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Without what program.py and `joined` remember on it.
        return {"reads": self.reads, "probes": self.probes, "edits": self.edits}

    def joined(
        self, edits: tuple[ResolvedEdit, ...] = (), reads: tuple[ResolvedRead, ...] = ()
    ) -> Resolved:
        """With the server's edits before its own, and global sinks' reads after its own.

        The same for as long as these are: what is compiled is remembered on it.
        """
        if not (edits or reads):
            return self
        last = self.__dict__.get("_joined")
        if last is None or last[0] is not edits or last[1] is not reads:
            whole = Resolved((*self.reads, *reads), self.probes, (*edits, *self.edits))
            last = self.__dict__["_joined"] = (edits, reads, whole)
        found: Resolved = last[2]
        return found

    @property
    def actions(self) -> tuple[ResolvedRead | ResolvedProbe | ResolvedEdit, ...]:
        return (*self.reads, *self.probes, *self.edits)

    @property
    def selectors(self) -> tuple[Selector, ...]:
        return tuple(x.tokens for x in self.actions)

    @property
    def destinations(self) -> tuple[str, ...]:
        """Where rows and scores go, each once."""
        delivering: tuple[ResolvedRead | ResolvedProbe, ...] = (*self.reads, *self.probes)
        return tuple(dict.fromkeys(x.to for x in delivering))

    def going_to(self, to: str) -> Resolved:
        """The reads and probes of one destination, without the edits."""
        reads = tuple(read for read in self.reads if read.to == to)
        return Resolved(reads, tuple(probe for probe in self.probes if probe.to == to))


#: Of a request that asks for nothing itself.
NOTHING = Resolved()


@dataclass(frozen=True)
class Spec:
    """Everything one request asks for. Edits apply in their order."""

    reads: tuple[Read, ...] = ()
    probes: tuple[Probe, ...] = ()
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not (self.reads or self.probes or self.edits):
            raise SpecError("the spec asks for nothing; give at least one Read, Probe or edit.")
        for name, most in (("reads", MAX_READS), ("probes", MAX_PROBES), ("edits", MAX_EDITS)):
            if len(getattr(self, name)) > most:
                raise SpecError(f"the spec has {len(getattr(self, name))} {name}; at most {most}.")
        names = [probe.name for probe in self.probes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SpecError(f"two probes are called {shown(twice)}; their scores share a dict.")
        called: dict[str, tuple[str | None, str | None]] = {}
        for read in self.reads:
            if called.setdefault(read.to, (read.tag, read.name)) != (read.tag, read.name):
                raise SpecError(
                    f"the reads to {shown(read.to)} differ in tag or name; a request has one of "
                    "each at a sink."
                )

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the steering modules that the spec refers to."""
        found = [getattr(edit, edit.fields[0]) for edit in self.edits]
        found += [probe.weight for probe in self.probes]
        return tuple(dict.fromkeys(x.name for x in found if isinstance(x, Module)))

    def to_json(self) -> str:
        body: dict[str, Any] = {}
        if self.reads:
            body["reads"] = [read.to_json() for read in self.reads]
        if self.probes:
            body["probes"] = [probe.to_json() for probe in self.probes]
        if self.edits:
            body["edits"] = [{"kind": edit.kind, **edit.to_json()} for edit in self.edits]
        return json.dumps(body)

    @staticmethod
    def from_json(text: object) -> Spec:
        """Parse what travelled in `extra_args["scope"]`.

        Remembers what was parsed last: a request is parsed where it enters, where it is
        scheduled and where it runs, and many requests ask for the same.

        Raises:
            SpecError: not a string, too long, not JSON, or not a spec.
        """
        if not isinstance(text, str):
            raise SpecError(
                f"extra_args['scope'] is a {type(text).__name__}; it is a JSON string, "
                "which vllm_scope.scope(...) makes."
            )
        if len(text) > MAX_SPEC_BYTES:
            raise SpecError(
                f"extra_args['scope'] is {len(text):,} characters; at most {MAX_SPEC_BYTES:,}. "
                "Register large vectors as a steering module and name it."
            )
        found = _parsed.get(text)
        if found is None:
            found = Spec._parse(text)
            _parsed.put(text, found)
        return found

    @staticmethod
    def _parse(text: str) -> Spec:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"extra_args['scope'] is not JSON: {error}.") from None
        if not isinstance(body, dict) or not set(body) <= {"reads", "probes", "edits"}:
            raise SpecError(
                "extra_args['scope'] must be an object with the fields reads, probes and edits."
            )
        return Spec(
            tuple(_parse_list(Read, body, "reads")),
            tuple(_parse_list(Probe, body, "probes")),
            tuple(_parse_list(None, body, "edits")),
        )

    def resolve(self, sites: Sites, modules: Mapping[str, Vectors] | None = None) -> Resolved:
        """The spec as streams and vectors of this engine.

        Args:
            sites: what the engine taps.
            modules: the steering modules that it holds, by name. What was made with a
                mapping is remembered for it: give another where one has changed.

        Raises:
            SpecError: a layer that the model does not have, a site or layer that this
                engine does not tap, a vector of another size, an unknown module.
        """
        given = modules if self.modules else None
        known: tuple[tuple[Sites, Any, Resolved], ...] = self.__dict__.get("_resolved", ())
        for known_sites, known_modules, found in known:
            if known_modules is given and known_sites == sites:
                return found
        found = self._resolve(sites, given or {})
        # The front-end's, EngineCore's and the worker's, where all are one process.
        self.__dict__["_resolved"] = (*known[-7:], (sites, given, found))
        return found

    def _resolve(self, sites: Sites, modules: Mapping[str, Vectors]) -> Resolved:
        reads = tuple(
            ResolvedRead(
                sites.find(read.site, read.layer_numbers, f"reads[{i}]"),
                tokens_of(read), read.when, read.to, (read.tag, read.name),
                _encoding(read, sites, f"reads[{i}].codec"),
            )
            for i, read in enumerate(self.reads)
        )  # fmt: skip
        _check_encodings(reads)
        probes = []
        for i, probe in enumerate(self.probes):
            (stream,) = sites.find(probe.site, probe.layer_numbers, f"probes[{i}]")
            weight = probe.weight
            if isinstance(weight, Module):
                ((_, weight, _),) = _module_rows(probe, weight, sites, modules, f"probes[{i}]")
            _check_size(weight, sites, f"probes[{i}].weight")
            probes.append(
                ResolvedProbe(stream, tokens_of(probe), probe.name, weight, probe.bias, probe.to)
            )
        edits = [
            one
            for i, edit in enumerate(self.edits)
            for one in _resolve_edit(edit, sites, modules, f"edits[{i}]")
        ]
        return Resolved(reads, tuple(probes), tuple(edits))


class _Parsed:
    """The specs that were parsed last, by their text: so many characters of them."""

    MOST_CHARACTERS = 64 << 20

    def __init__(self) -> None:
        self._specs: OrderedDict[str, Spec] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> Spec | None:
        return self._specs.get(text)

    def put(self, text: str, spec: Spec) -> None:
        with self._lock:
            if text not in self._specs:
                self._specs[text] = spec
                self._characters += len(text)
            while self._characters > self.MOST_CHARACTERS and len(self._specs) > 1:
                self._characters -= len(self._specs.popitem(last=False)[0])


_parsed = _Parsed()


def _parse_list(cls: type[Any] | None, body: dict[str, Any], name: str) -> list[Any]:
    items = body.get(name, [])
    if not isinstance(items, list):
        raise SpecError(f"{name} is {shown(items)}; it is a list.")
    found = []
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if cls is not None:
            found.append(action_from_json(cls, item, where))
            continue
        edits = {kind: c for kind, c in KINDS.items() if issubclass(c, Edit)}
        kind = item.get("kind") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in edits:
            raise SpecError(f"{where}.kind is {shown(kind)}; it is one of {', '.join(edits)}.")
        fields = {key: value for key, value in item.items() if key != "kind"}
        found.append(action_from_json(edits[kind], fields, where))
    return found


def _encoding(read: Read, sites: Sites, where: str) -> Encoding | None:
    if read.codec is None:
        return None
    from vllm_scope.codecs.packed import encoding_of  # torch, which a caller may not have

    return encoding_of(read.codec, sites.row_size(read.site), sites.dtype, where)


def _check_encodings(reads: tuple[ResolvedRead, ...]) -> None:
    known: dict[tuple[str, SiteLayer, str], Encoding | None] = {}
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
    field = edit.fields[0]
    values = getattr(edit, field)
    rows: list[tuple[SiteLayer, Array, str | None]]
    if isinstance(values, Module):
        rows = _module_rows(edit, values, sites, modules, where)
    else:
        streams = sites.find(edit.site, edit.layer_numbers, where)
        own = len(values.shape) == (3 if isinstance(edit, Replace) else 2)
        rows = [(s, _row(values, i) if own else values, None) for i, s in enumerate(streams)]
    found = []
    for stream, row, tier in rows:
        _check_size(row, sites, f"{where}.{field}")
        tokens = _within(tokens_of(edit), tier)
        if tokens is not None:
            found.append(_one_edit(edit, stream, row, tokens))
    return found


def _within(tokens: Selector, tier: str | None) -> Selector | None:
    """Those of the tokens that are of a tier, too; None where that is known to be none."""
    if tier is None:
        return tokens
    word = Word(tier)
    if tokens in (Word("all"), word):
        return word
    if any(tokens == Word(other) for other in TIERS):
        return None
    return Except(tokens, Except(tokens, word))


def _row(values: Array, index: int) -> Array:
    size = len(values.data) // values.shape[0]
    return Array(values.shape[1:], values.data[index * size : (index + 1) * size])


def _module_rows(
    action: Edit | Probe,
    module: Module,
    sites: Sites,
    modules: Mapping[str, Vectors],
    where: str,
) -> list[tuple[SiteLayer, Array, str | None]]:
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
        # A probe has one weight, whatever the token.
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
        ((place[0], place[1]), vectors[place], place[2] if len(place) == 3 else None)
        for place in places
    ]


def _one_edit(edit: Edit, stream: SiteLayer, values: Array, tokens: Selector) -> ResolvedEdit:
    if isinstance(edit, Add):
        return ResolvedEdit(
            "add", stream, tokens, values, (edit.scale,), norm_match=edit.norm_match
        )
    if isinstance(edit, Replace):
        return ResolvedEdit("replace", stream, tokens, values, positions=edit.positions)
    numbers = tuple(float(getattr(edit, name)) for name in edit.fields[1:])
    return ResolvedEdit(edit.kind, stream, tokens, values, numbers)


def scope(*actions: Action) -> dict[str, str]:
    """What to put in `SamplingParams(extra_args=...)`.

    Args:
        actions: one or more of Read, Probe, Add, Ablate, Clamp, Replace. Edits of one
            site apply in the order given.

    Returns:
        A dict with one key, "scope": the spec as a JSON string (the same string
        goes into `vllm_xargs` over HTTP). Merge it with other extra_args freely.

    Raises:
        SpecError: nothing was asked for, or something that is not an action.
    """
    for i, action in enumerate(actions):
        if not isinstance(action, Action):
            raise SpecError(
                f"scope() argument {i} is {shown(action)}; it takes Read, Probe, Add, Ablate, "
                "Clamp or Replace."
            )
    return {
        "scope": Spec(
            tuple(a for a in actions if isinstance(a, Read)),
            tuple(a for a in actions if isinstance(a, Probe)),
            tuple(a for a in actions if isinstance(a, Edit)),
        ).to_json()
    }
