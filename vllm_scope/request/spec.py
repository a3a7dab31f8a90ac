"""Everything that one request asks for, and its JSON.

Owns:  Spec, `scope`, Meanings (a cache of resolved specs).
Runs:  in the caller's process, in the front-end (which parses it) and in EngineCore (which
       unpacks it). numpy, no torch, no vLLM.
From:  actions.   To: resolve (the spec on one engine), packed (the spec as it travels).

Promise: a `Spec` that exists is well formed. `Spec.resolve` checks the rest, which needs an
engine: its layers, its hidden size, its steering modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import (
    EDITS,
    Action,
    Edit,
    Module,
    Probe,
    Read,
    action_from_json,
)
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.request.arrays import Array
from vllm_scope.request.bounded_json import decode, num_items
from vllm_scope.request.packed import Packed, pack, unpack
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolve import resolve
from vllm_scope.request.resolved import Resolved, Vectors
from vllm_scope.request.selectors import ITEM_BYTES, check_sizes
from vllm_scope.request.sites import Sites

#: A front-end takes 5 ms to parse 1 MiB. In base64, 80 vectors of 8192 numbers take 3.5 MB, and
#: 383 replaced rows of 4096 numbers take 8 MiB.
MAX_SPEC_BYTES = 8 << 20
MAX_READS = 32
MAX_PROBES = 1024
MAX_EDITS = 256
MAX_STOPPING = 8
MOST = {"reads": MAX_READS, "probes": MAX_PROBES, "edits": MAX_EDITS}
#: Size of the cache of parsed specs, and the longest text in it. A lookup hashes the whole text.
REMEMBERED_BYTES, LONGEST_REMEMBERED = 64 << 20, 1 << 20
#: The largest resolved spec that is cached. A resolved spec that names a module may have a vector
#: for each layer.
LARGEST_REMEMBERED = 32 << 20
#: Memory of a parsed spec besides its text.
_SPEC_BYTES = 4096


@dataclass(frozen=True)
class Spec:
    """Everything that one request asks for. Edits apply in their order."""

    reads: tuple[Read, ...] = ()
    probes: tuple[Probe, ...] = ()
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not (self.reads or self.probes or self.edits):
            raise SpecError("the spec asks for nothing; give at least one Read, Probe or edit.")
        for name in MOST:
            _check_count(name, len(getattr(self, name)))
        check_sizes(one.tokens for one in (*self.reads, *self.probes, *self.edits))
        check_stopping(probe for probe in self.probes if not probe.name.startswith(MONITOR))
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
        body: dict[str, object] = {}
        if self.reads:
            body["reads"] = [read.to_json() for read in self.reads]
        if self.probes:
            body["probes"] = [probe.to_json() for probe in self.probes]
        if self.edits:
            body["edits"] = [{"kind": edit.kind, **edit.to_json()} for edit in self.edits]
        return json.dumps(body)

    @staticmethod
    def from_json(text: object) -> Spec:
        """The spec of the text in `extra_args["scope"]`.

        Cached, because many requests have the same text.

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
                "Register large vectors as a steering module and name it, or replace fewer rows."
            )
        if len(text) > LONGEST_REMEMBERED:
            return Spec._parse(text)
        found = _parsed.get(text)
        if found is None:
            found = Spec._parse(text)
            # Three times the text: for the text, the vectors, and the packed form without vectors.
            size = _SPEC_BYTES + 3 * len(text) + ITEM_BYTES * num_items(text)
            _parsed.put(text, found, size)
        return found

    def of_engine(self, saes: Mapping[str, Any]) -> Spec:
        """The spec with the rows of the SAEs that it names; itself if it names none.

        Raises:
            SpecError: as SetFeature.
        """
        named = [i for i, one in enumerate(self.edits) if isinstance(getattr(one, "sae", 0), str)]
        if not named:
            return self
        # Many requests have the same text.
        last = self.__dict__.get("_of_engine")
        if last is not None and last[0] is saes:
            again: Spec = last[1]
            return again
        edits = list(self.edits)
        for i in named:
            try:
                edits[i] = edits[i].of_engine(saes)  # type: ignore[attr-defined]
            except SpecError as error:
                name = type(edits[i]).__name__
                raise SpecError(str(error).replace(f"{name}.", f"edits[{i}].", 1)) from None
        found = replace(self, edits=tuple(edits))
        self.__dict__["_of_engine"] = (saes, found)
        return found

    @cached_property
    def packed(self) -> Packed:
        """The spec as it travels to EngineCore; `arrays` has its vectors."""
        return self._packed[0]

    @property
    def arrays(self) -> dict[bytes, Array]:
        """The spec's vectors and rows, by digest."""
        return self._packed[1]

    @cached_property
    def _packed(self) -> tuple[Packed, dict[bytes, Array]]:
        return pack((self.reads, self.probes, self.edits))

    @staticmethod
    def unpack(packed: Packed, arrays: Mapping[bytes, Array]) -> Spec:
        """The spec that a front-end packed. It was checked there and is not checked again."""
        found = object.__new__(Spec)
        found.__dict__.update(
            zip(("reads", "probes", "edits"), unpack(packed, arrays), strict=True)
        )
        return found

    @staticmethod
    def _parse(text: str) -> Spec:
        body = decode(text, "extra_args['scope']")
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
            modules: the steering modules that it holds, by name.

        Raises:
            SpecError: a layer that the model does not have, a site or layer that this
                engine does not tap, a vector of another size, an unknown module.
        """
        return resolve(self.reads, self.probes, self.edits, sites, modules or {})


_parsed: Remembered[str, Spec] = Remembered(REMEMBERED_BYTES)


class Meanings:
    """A cache of resolved specs, for one engine. Bounded in bytes.

    The owner of the modules calls `forget` when a name changes, which frees the old vectors.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._known: Remembered[tuple[bytes, tuple[Hashable, ...]], Resolved]
        self._known = Remembered(REMEMBERED_BYTES)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes

    def forget(self) -> None:
        """Drop the specs that name modules."""
        self._known.drop(lambda key: bool(key[1]))

    def of(
        self, digest: bytes, spec_of: Callable[[], Spec], modules: Mapping[str, Vectors],
        version: tuple[Hashable, ...] = (),
    ) -> Resolved:  # fmt: skip
        """The resolved spec, from the cache if the cache has it.

        Args:
            digest: the spec's (`Spec.packed`).
            spec_of: returns the spec; called only if the cache does not have it resolved.
            version: changes when a module name in the spec gets another module.
        """
        key = (digest, version)
        known = self._known.get(key)
        if known is None:
            known = spec_of().resolve(self._sites, modules)
            if known.num_bytes <= LARGEST_REMEMBERED:
                self._known.put(key, known, known.num_bytes)
        return known


def check_stopping(probes: Iterable[Probe]) -> None:
    """Raises SpecError for too many probes that may end a request."""
    count = sum(probe.action == "stop" for probe in probes)
    if count > MAX_STOPPING:
        raise SpecError(
            f"{count} probes have action 'stop'; at most {MAX_STOPPING}, because the output of "
            "each step waits for them."
        )


def _check_count(name: str, count: int) -> None:
    if count > MOST[name]:
        raise SpecError(f"the spec has {count:,} {name}; at most {MOST[name]}.")


def _parse_list(cls: type[Any] | None, body: dict[str, object], name: str) -> list[Any]:
    items = body.get(name, [])
    if not isinstance(items, list):
        raise SpecError(f"{name} is {shown(items)}; it is a list.")
    _check_count(name, len(items))
    found = []
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if cls is not None:
            found.append(action_from_json(cls, item, where))
            continue
        kind = item.get("kind") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in EDITS:
            raise SpecError(f"{where}.kind is {shown(kind)}; it is one of {', '.join(EDITS)}.")
        fields = {key: value for key, value in item.items() if key != "kind"}
        found.append(action_from_json(EDITS[kind], fields, where))
    return found


def scope(*actions: Action) -> dict[str, str]:
    """What to put in `SamplingParams(extra_args=...)`.

    Args:
        actions: one or more of Read, Probe, Add, Ablate, Clamp, Replace, SetFeature and
            ScaleFeature. Edits of one site apply in the order given.

    Returns:
        A dict with one key, "scope": the spec as a JSON string, which also goes into
        `vllm_xargs` over HTTP. It may be merged with other extra_args.

    Raises:
        SpecError: no action, or an argument that is not an action.
    """
    for i, action in enumerate(actions):
        if not isinstance(action, Action):
            raise SpecError(
                f"scope() argument {i} is {shown(action)}; it takes Read, Probe, Add, Ablate, "
                "Clamp, Replace, SetFeature or ScaleFeature."
            )
    return {
        "scope": Spec(
            tuple(a for a in actions if isinstance(a, Read)),
            tuple(a for a in actions if isinstance(a, Probe)),
            tuple(a for a in actions if isinstance(a, Edit)),
        ).to_json()
    }
