"""The engine's steering modules by name, server-wide edits, and vectors that were sent ahead.

Owns:  Registry.
Runs:  in EngineCore, because EngineCore gets every request and every change. On any thread.
From:  vectors (modules as bytes), request.ticket.   To: engine.core.entry.

Promise: EngineCore looks up the modules and server-wide edits of a request one time, when the
request enters. Later changes do not affect the request. The keys of KV blocks depend on the content
of modules, and not on their names.
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
#: The values that `tokens` of a server-wide edit can have.
TIERS = ("all", "prompt", "generated")


class Registry:
    """Modules and server-wide edits.

    Attributes:
        names: the digest of each module, by the module's name.
        server: digest of the server-wide edits, or None if there are no server-wide edits.
        server_text: the spec of the server-wide edits, as the caller sent it.
        ahead: vectors that front-ends have sent before the requests that use them. Tickets name
            these vectors by digest.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._meanings = Meanings(sites)
        #: Requests enter on one thread. Modules change on another thread.
        self._lock = threading.Lock()
        self.names: dict[str, str] = {}
        self.server: str | None = None
        self.server_text: str | None = None
        self._vectors: dict[str, Vectors] = {}
        #: The number of calls that have registered or unregistered a name.
        self._num_changes = 0
        self._edits: tuple[ResolvedEdit, ...] = ()
        self.ahead = SentAhead()

    def know(self, sites: Sites) -> None:
        """Replace the engine's sites, for which specs are resolved."""
        with self._lock:
            self._sites, self._meanings = sites, Meanings(sites)

    def register(self, name: str, data: bytes) -> str:
        """Register a module under a name. Returns the module's digest.

        Args:
            name: a string of 1 to 200 characters.
            data: the module as bytes, made by `vllm_scope.vectors.to_bytes`.

        Raises:
            SpecError: a wrong name, malformed content, a vector whose size differs from the model's
                rows, a vector of zeros, a place that the engine does not tap, or too many names.
        """
        if not isinstance(data, bytes):
            raise SpecError(f"the module {shown(name)} came as {type(data).__name__}, not bytes.")
        return self.register_module(name, from_bytes(data))

    def register_module(self, name: str, module: SteeringModule) -> str:
        sane = isinstance(name, str) and 0 < len(name) <= MAX_NAME
        if not sane or name.encode("utf-8", "ignore").decode() != name:
            raise SpecError(
                f"a module's name is 1 to {MAX_NAME} characters that UTF-8 can encode, not "
                f"{shown(name)}."
            )
        if name not in self.names and len(self.names) >= MAX_MODULES:
            raise SpecError(f"{MAX_MODULES} modules are registered; remove some modules first.")
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
        """Remove a name and its module. Returns False if the name was not registered."""
        with self._lock:
            self._change_names()
            self._vectors.pop(name, None)
            return self.names.pop(name, None) is not None

    def _change_names(self) -> None:
        self._num_changes += 1
        self._meanings.forget()

    def modules(self) -> dict[str, dict[str, Any]]:
        """For each module, by name: {"digest": ..., "streams": ...}. `streams` has [site, layer]
        for each vector. A vector that applies only to "prompt" or only to "generated" tokens has
        [site, layer, tier]; the tier is one of these two words."""
        return {
            name: {"digest": digest, "streams": [list(s) for s in self._vectors[name]]}
            for name, digest in self.names.items()
        }

    def set_edits(self, text: str | None) -> str | None:
        """Set the edits that apply to all requests that enter from now on. If `text` is None,
        removes the edits.

        Args:
            text: a spec of edits, in the form of `scope(...)["scope"]`. `tokens` must be in TIERS.

        Returns:
            The digest of the edits. If `text` is None, returns None.

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
        """Parse a text for `set_edits`. Returns the edits, and does not set the edits.

        Raises:
            SpecError: the same errors as in `set_edits`.
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
                    f"edits[{i}] has a name for its gate or its dose; server-wide edits do not "
                    "deliver such values. Leave the name out."
                )
            if isinstance(edit, Add) and edit.name is not None:
                raise SpecError(
                    f"edits[{i}].name is {shown(edit.name)}; a name is for the policy of a "
                    "request, which sets the scales of its own edits. Leave it out."
                )
            if edit.gate is not None and edit.gate.state is not None:
                raise SpecError(
                    f"edits[{i}].gate has a state; server-wide edits take only gates without a "
                    "state. Send the edit in a request."
                )
            tokens = edit.tokens.to_json()
            if tokens not in TIERS:
                raise SpecError(
                    f"edits[{i}].tokens is {shown(tokens)}; server-wide edits take "
                    f"{', '.join(TIERS)}."
                )
        return spec.resolve(self._sites, self._vectors).edits

    def hold(self, frontend: str, data: bytes) -> list[bytes]:
        """Store vectors of a front-end, in place of the vectors that the front-end sent before.

        Args:
            data: the vectors as bytes, made by `request.ticket.encode_arrays`.

        Returns:
            The digests of the stored vectors. Tickets can leave these vectors out.
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
        """Resolve the spec of a request that enters now. The server's edits apply before the
        request's edits.

        Args:
            ticket: the request's ticket, or None for a request without a spec.

        Returns:
            The resolved spec without the server's edits, and the resolved spec with the server's
            edits. If there are no server-wide edits, both are the same object.

        Raises:
            SpecError: the spec cannot be resolved any more, because modules have changed.
            UnheldError: the spec names vectors by digests that EngineCore does not have.
        """
        own = NOTHING
        with self._lock:
            if ticket is not None:
                own = self._own(ticket)
            return own, own.joined(edits=self._edits)

    def _own(self, ticket: Ticket) -> Resolved:
        arrays = _Held(ticket.own_arrays(), self.ahead.arrays)
        # Resolved specs are cached by the spec and this version. The version is the number of
        # changes of modules. To compare the digests of modules would take longer, because a spec
        # can name a thousand modules.
        version = (self._num_changes,) if ticket.modules else ()
        return self._meanings.of(ticket.spec, arrays, self._vectors, version)


class _Held(ChainMap[bytes, Array]):
    """The vectors that a ticket can name by digest: its own vectors and the vectors sent ahead."""

    def __missing__(self, digest: bytes) -> Array:
        raise UnheldError(
            "the engine does not hold vectors that the request names by their digests; send the "
            "request again. The vectors are then sent with the request."
        )
