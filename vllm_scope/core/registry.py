"""What an engine holds for its requests: steering modules by name, server-wide edits, and vectors
that front-ends have sent ahead.

Owns:  Registry.
Runs:  in EngineCore, which sees every request and every change. Any thread.
From:  vectors (modules as bytes), request.ticket.   To: engine.core.entry.

Promise: a request is resolved once, when it enters, and keeps the modules and the server's edits
of that moment. KV blocks are keyed by content, not by names.
"""

from __future__ import annotations

import hashlib
import threading
from collections import ChainMap
from typing import Any

from vllm_scope.core.sent_ahead import SentAhead
from vllm_scope.errors import SpecError, UnheldError, shown
from vllm_scope.request.actions import MAX_NAME, Add
from vllm_scope.request.arrays import Array
from vllm_scope.request.resolved import NOTHING, Resolved, ResolvedEdit, Vectors
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Meanings, Spec
from vllm_scope.request.ticket import Ticket, decode_arrays
from vllm_scope.vectors import SteeringModule, from_bytes
from vllm_scope.vectors.module import VectorKey

MAX_MODULES = 4096
#: The selectors that server-wide edits may have.
TIERS = ("all", "prompt", "generated")


class Registry:
    """Modules and server-wide edits.

    Attributes:
        names: name -> digest of its module.
        server: digest of the server-wide edits; None if there are none.
        server_text: the spec of the server-wide edits, as the caller sent it.
        ahead: vectors that tickets name by digest.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._meanings = Meanings(sites)
        #: Requests enter on one thread; modules change on another.
        self._lock = threading.Lock()
        self.names: dict[str, str] = {}
        self.server: str | None = None
        self.server_text: str | None = None
        self._vectors: dict[str, Vectors] = {}
        #: How many times a name got or lost a module.
        self._num_changes = 0
        self._edits: tuple[ResolvedEdit, ...] = ()
        self.ahead = SentAhead()

    def know(self, sites: Sites) -> None:
        """Resolve specs for these sites from now on."""
        with self._lock:
            self._sites, self._meanings = sites, Meanings(sites)

    def register(self, name: str, data: bytes) -> str:
        """Give a module a name, and return its digest.

        Args:
            name: 1 to 200 characters.
            data: the module as `vllm_scope.vectors.to_bytes` makes it.

        Raises:
            SpecError: a bad name, malformed content, a vector whose size differs from the model's
                rows, a vector of zeros, or too many names.
        """
        if not isinstance(data, bytes):
            raise SpecError(f"the module {shown(name)} came as {type(data).__name__}, not bytes.")
        return self.register_module(name, from_bytes(data))

    def register_module(self, name: str, module: SteeringModule) -> str:
        sane = isinstance(name, str) and 0 < len(name) <= MAX_NAME
        if not sane or name.encode("utf-8", "ignore").decode() != name:
            raise SpecError(
                f"a module's name is 1 to {MAX_NAME} characters that UTF-8 has, not {shown(name)}."
            )
        if name not in self.names and len(self.names) >= MAX_MODULES:
            raise SpecError(f"{MAX_MODULES} modules are registered; remove some first.")
        if module.hidden_size != self._sites.hidden_size:
            raise SpecError(
                f"the vectors of {shown(name)} have {module.hidden_size} numbers; this model's "
                f"rows have {self._sites.hidden_size}."
            )
        vectors: dict[VectorKey, Array] = {}
        for place, values in module.placed():
            if not values.any():
                raise SpecError(f"the vector of {shown(name)} at {place} is zero.")
            self._sites.find(place[0], (place[1],), f"the module {shown(name)}", embedding=None)
            vectors[place] = Array((len(values),), values.astype("<f4").tobytes())
        with self._lock:
            self._change_names()
            self.names[name], self._vectors[name] = module.digest, vectors
        return module.digest

    def unregister(self, name: str) -> bool:
        """Forget a name and its module. Returns False if the name was not known."""
        with self._lock:
            self._change_names()
            self._vectors.pop(name, None)
            return self.names.pop(name, None) is not None

    def _change_names(self) -> None:
        self._num_changes += 1
        self._meanings.forget()

    def modules(self) -> dict[str, dict[str, Any]]:
        """Name -> its module's `digest`, and `streams`: [site, layer] or [site, layer, tier] of
        each vector."""
        return {
            name: {"digest": digest, "streams": [list(s) for s in self._vectors[name]]}
            for name, digest in self.names.items()
        }

    def set_edits(self, text: str | None) -> str | None:
        """Set the edits of every request that enters from now on; None removes them.

        Args:
            text: a spec with edits only, in the form of `scope(...)["scope"]`. The tokens of each
                edit are one of TIERS.

        Returns:
            The edits' digest; None if `text` is None.

        Raises:
            SpecError: `text` is not a spec of edits, or this engine cannot apply the edits.
        """
        edits = () if text is None else self.parse_edits(text)
        digest = hashlib.sha256(b"".join(e.digest + repr(e.tokens).encode() for e in edits))
        with self._lock:
            self._edits, self.server_text = edits, text
            self.server = None if text is None else digest.hexdigest()
        return self.server

    def parse_edits(self, text: str) -> tuple[ResolvedEdit, ...]:
        """Parse a text as `set_edits` takes it, and return its edits without setting them.

        Raises:
            SpecError: as `set_edits`.
        """
        spec = Spec.from_json(text)
        if len(spec.actions) > len(spec.edits) or spec.policy is not None:
            raise SpecError(
                "server-wide scopes hold edits; reads, probes, features, lenses, moments and "
                "policies belong to requests."
            )
        for i, edit in enumerate(spec.edits):
            if edit.dose is not None or (edit.gate is not None and edit.gate.name is not None):
                raise SpecError(
                    f"edits[{i}] names the values of its gate or its dose; those of server-wide "
                    "edits are delivered to nobody. Leave the name out."
                )
            if isinstance(edit, Add) and edit.name is not None:
                raise SpecError(
                    f"edits[{i}].name is {shown(edit.name)}; a name is for the policy of a "
                    "request, which sets the scales of its own edits. Leave it out."
                )
            if edit.gate is not None and edit.gate.state is not None:
                raise SpecError(
                    f"edits[{i}].gate has a state; server-wide edits take gates without one, and "
                    "requests those with one."
                )
            tokens = edit.tokens.to_json()
            if tokens not in TIERS:
                raise SpecError(
                    f"edits[{i}].tokens is {shown(tokens)}; server-wide edits take "
                    f"{', '.join(TIERS)}."
                )
        return spec.resolve(self._sites, self._vectors).edits

    def hold(self, frontend: str, data: bytes) -> list[bytes]:
        """Hold vectors for a front-end, in place of the vectors that it sent before.

        Args:
            data: as `request.ticket.encode_arrays` makes it.

        Returns:
            The digests of the vectors that are held. The front-end's tickets may leave these
            vectors out.
        """
        arrays = decode_arrays(data)
        with self._lock:
            before = set(self.ahead.arrays)
            held = self.ahead.replace(frontend, arrays)
            gone = before - self.ahead.arrays.keys()
            if gone:
                self._meanings.forget_arrays(gone)
        return held

    def resolve(self, ticket: Ticket | None) -> tuple[Resolved, Resolved]:
        """The spec of a request that enters now, resolved: without the server's edits, and with
        them before the request's own edits.

        Args:
            ticket: None for a request without a spec.

        Returns:
            The same object twice if the server has no edits.

        Raises:
            SpecError: the spec is not possible here, because modules have changed.
            UnheldError: the spec names vectors by digests that EngineCore does not hold.
        """
        own = NOTHING
        with self._lock:
            if ticket is not None:
                own = self._own(ticket)
            return own, own.joined(edits=self._edits)

    def _own(self, ticket: Ticket) -> Resolved:
        arrays = _Held(ticket.own_arrays(), self.ahead.arrays)
        # The version is the number of changes, and not the modules themselves: a spec may name a
        # thousand modules.
        version = (self._num_changes,) if ticket.modules else ()
        return self._meanings.of(ticket.spec, arrays, self._vectors, version)


class _Held(ChainMap[bytes, Array]):
    """The vectors that a ticket may name."""

    def __missing__(self, digest: bytes) -> Array:
        raise UnheldError(
            "the engine does not hold vectors that the request names by their digests; send it "
            "again, and they travel with it."
        )
