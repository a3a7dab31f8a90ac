"""Everything one request asks for, and its JSON.

Owns:  Spec, `scope`.
Runs:  in the caller's process, in the front-end (validation), in EngineCore (the keys
       of edited KV blocks) and in workers. numpy, no torch, no vLLM.
From:  actions.   To: resolve (what it means on one engine).

Promise: a `Spec` that exists is well formed. What only the engine knows (its layers,
its hidden size, its steering modules) is checked by `Spec.resolve`, with the same
kind of sentence.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import (
    KINDS,
    Action,
    Edit,
    Module,
    Probe,
    Read,
    action_from_json,
)
from vllm_scope.request.bounded_json import decode, num_items
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolve import Resolved, Vectors, resolve
from vllm_scope.request.selectors import check_sizes
from vllm_scope.request.sites import Sites

#: To parse it takes EngineCore, and the thread that runs the model, 5 ms for each MiB. A vector for
#: each of 80 layers of 8192 numbers takes 3.5 MB, 383 replaced rows of 4096 numbers 8 MiB.
MAX_SPEC_BYTES = 8 << 20
MAX_READS = 32
MAX_PROBES = 256
MAX_EDITS = 256
MOST = {"reads": MAX_READS, "probes": MAX_PROBES, "edits": MAX_EDITS}
#: What the specs that were parsed last may hold, and the longest that is among them. To look up a
#: text takes a pass over it.
REMEMBERED_BYTES, LONGEST_REMEMBERED = 64 << 20, 1 << 20
#: What a parsed spec takes beside its text: at all, and for each item of its lists, which may be
#: a position, as Python's number, as a selector's and in the arrays made of it.
_SPEC_BYTES, _ITEM_BYTES = 4096, 96


@dataclass(frozen=True)
class Spec:
    """Everything one request asks for. Edits apply in their order."""

    reads: tuple[Read, ...] = ()
    probes: tuple[Probe, ...] = ()
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not (self.reads or self.probes or self.edits):
            raise SpecError("the spec asks for nothing; give at least one Read, Probe or edit.")
        for name in MOST:
            _check_count(name, len(getattr(self, name)))
        check_sizes(one.tokens for one in (*self.reads, *self.probes, *self.edits))
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
                "Register large vectors as a steering module and name it, or replace fewer rows."
            )
        if len(text) > LONGEST_REMEMBERED:
            return Spec._parse(text)
        found = _parsed.get(text)
        if found is None:
            found = Spec._parse(text)
            size = _SPEC_BYTES + 2 * len(text) + _ITEM_BYTES * num_items(text)
            found.__dict__["_remembered"] = text, size
            _parsed.put(text, found, size)
        return found

    @property
    def remembered(self) -> tuple[str, int] | None:
        """The text that it is found by, and what it takes in bytes; None if it is parsed anew
        each time."""
        found: tuple[str, int] | None = self.__dict__.get("_remembered")
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
            modules: the steering modules that it holds, by name. What they make of the spec is
                not remembered here: that is for who holds them.

        Raises:
            SpecError: a layer that the model does not have, a site or layer that this
                engine does not tap, a vector of another size, an unknown module.
        """
        if self.modules:
            return resolve(self.reads, self.probes, self.edits, sites, modules or {})
        known: tuple[tuple[Sites, Resolved], ...] = self.__dict__.get("_resolved", ())
        for known_sites, found in known:
            if known_sites == sites:
                return found
        found = resolve(self.reads, self.probes, self.edits, sites, {})
        # The front-end's and the worker's, where both are one process.
        self.__dict__["_resolved"] = (*known[-1:], (sites, found))
        if self.remembered is not None:
            _parsed.grow(self.remembered[0], self, found.num_bytes)
        return found


_parsed: Remembered[str, Spec] = Remembered(REMEMBERED_BYTES)


class Meanings:
    """What specs with module names mean on one engine. Bounded in bytes.

    Whoever holds the modules forgets all of it where a name changes, so that no vectors of an
    old version stay.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        #: With its spec, so that no other gets its id.
        self._known: Remembered[Any, tuple[Spec, Resolved]] = Remembered(REMEMBERED_BYTES)
        self.forget = self._known.clear

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes

    def of(self, spec: Spec, modules: Mapping[str, Vectors], version: Hashable = None) -> Resolved:
        """`Spec.resolve`; the same object for the same version, if the spec is remembered.

        Args:
            version: tells apart what the modules' names stand for.
        """
        if not spec.modules:
            return spec.resolve(self._sites)
        known = self._known.get((id(spec), version))
        if known is not None:
            return known[1]
        found = spec.resolve(self._sites, modules)
        if spec.remembered is not None:
            size = spec.remembered[1] + found.num_bytes
            self._known.put((id(spec), version), (spec, found), size)
        return found


def _check_count(name: str, count: int) -> None:
    if count > MOST[name]:
        raise SpecError(f"the spec has {count:,} {name}; at most {MOST[name]}.")


def _parse_list(cls: type[Any] | None, body: dict[str, Any], name: str) -> list[Any]:
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
        edits = {kind: c for kind, c in KINDS.items() if issubclass(c, Edit)}
        kind = item.get("kind") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in edits:
            raise SpecError(f"{where}.kind is {shown(kind)}; it is one of {', '.join(edits)}.")
        fields = {key: value for key, value in item.items() if key != "kind"}
        found.append(action_from_json(edits[kind], fields, where))
    return found


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
