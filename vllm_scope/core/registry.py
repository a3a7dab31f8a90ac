"""What an engine holds for its requests: steering modules by name, server-wide edits.

Owns:  Registry.
Runs:  in EngineCore, which resolves names when a request enters, and in every worker, which
       holds the content. The same remote calls change both.
From:  vectors (modules as bytes), request.spec.   To: program.compiler.

Promise: a request keeps the modules and the server's edits of the moment when it entered.
EngineCore resolves each name to a digest once; after that, content is found by digest. So a
name that is registered again never changes a running request, and KV blocks are keyed by content.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import MAX_NAME
from vllm_scope.request.arrays import Array
from vllm_scope.request.resolve import NOTHING, Resolved, ResolvedEdit, Vectors
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Meanings, Spec
from vllm_scope.vectors import SteeringModule, from_bytes
from vllm_scope.vectors.module import Place

MAX_MODULES = 4096
#: Modules without a name are kept up to this, for queued requests that still use them.
MAX_KEPT_BYTES = 1 << 30
#: The same for server-wide edits that were replaced: number of sets, and their bytes.
MAX_KEPT_EDITS = 4096
MAX_KEPT_EDIT_BYTES = 1 << 28
#: Sets of names whose modules are remembered.
MAX_KEPT_NAMES = 256
#: The selectors that server-wide edits may have.
TIERS = ("all", "prompt", "generated")


class Registry:
    """Modules and server-wide edits, by content.

    Attributes:
        names: name -> digest of its module.
        server: digest of the current server-wide edits; None for none.
        server_text: their spec, as it was sent.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._meanings = Meanings(sites)
        self.names: dict[str, str] = {}
        self.server: str | None = None
        self.server_text: str | None = None
        self._modules: OrderedDict[str, Vectors] = OrderedDict()
        self._edits: OrderedDict[str, tuple[ResolvedEdit, ...]] = OrderedDict()
        self._edit_bytes = 0
        #: (name, digest) pairs -> their modules: the same object for requests of the same names.
        self._held: dict[tuple[tuple[str, str], ...], dict[str, Vectors]] = {}

    def register(self, name: str, data: bytes) -> str:
        """Give a module a name, and return its digest.

        Args:
            name: 1 to 200 characters.
            data: the module as `vllm_scope.vectors.to_bytes` makes it.

        Raises:
            SpecError: a bad name, malformed content, a vector of another size or of
                zeros, or too many names.
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
        vectors: dict[Place, Array] = {}
        for place, values in module.placed():
            if not values.any():
                raise SpecError(f"the vector of {shown(name)} at {place} is zero.")
            self._sites.find(place[0], (place[1],), f"the module {shown(name)}")
            vectors[place] = Array((len(values),), values.astype("<f4").tobytes())
        self._modules[module.digest] = vectors
        self._modules.move_to_end(module.digest)
        self.names[name] = module.digest
        self._trim()
        return module.digest

    def unregister(self, name: str) -> bool:
        """Forget a name; False if it was not known."""
        known = self.names.pop(name, None) is not None
        self._trim()
        return known

    def modules(self) -> dict[str, dict[str, Any]]:
        """name -> `digest`, and `streams`: [site, layer] or [site, layer, tier] of each vector."""
        return {
            name: {"digest": digest, "streams": [list(s) for s in self._modules[digest]]}
            for name, digest in self.names.items()
        }

    def set_edits(self, text: str | None) -> str | None:
        """Edit every request that enters from now on; None ends it.

        Args:
            text: a spec with edits only, as `scope(...)["scope"]`, whose tokens are in TIERS.

        Returns:
            The edits' digest; None for none.

        Raises:
            SpecError: not a spec of edits, or one that this engine cannot do.
        """
        if text is None:
            self.server = self.server_text = None
            return None
        edits = self.parse_edits(text)
        digest = hashlib.sha256(b"".join(e.digest + repr(e.tokens).encode() for e in edits))
        self.server, self.server_text = digest.hexdigest(), text
        if self.server not in self._edits:
            self._edits[self.server] = edits
            self._edit_bytes += _num_bytes(edits)
        self._edits.move_to_end(self.server)
        while len(self._edits) > MAX_KEPT_EDITS or (
            self._edit_bytes > MAX_KEPT_EDIT_BYTES and len(self._edits) > 1
        ):
            self._edit_bytes -= _num_bytes(self._edits.popitem(last=False)[1])
        return self.server

    def meant(self) -> tuple[dict[str, str], str | None, str | None]:
        """The present names and server-wide edits, for `restore`."""
        return dict(self.names), self.server, self.server_text

    def restore(self, meant: tuple[dict[str, str], str | None, str | None]) -> None:
        """Undo a change that the workers have refused."""
        names, self.server, self.server_text = meant
        self.names = {name: digest for name, digest in names.items() if digest in self._modules}
        self._trim()

    def parse_edits(self, text: str) -> tuple[ResolvedEdit, ...]:
        """The edits of a text as `set_edits` takes it; they are not set.

        Raises:
            SpecError: as `set_edits`.
        """
        spec = Spec.from_json(text)
        if spec.reads or spec.probes:
            raise SpecError("server-wide scopes hold edits; reads and probes belong to requests.")
        for i, edit in enumerate(spec.edits):
            tokens = edit.tokens.to_json()
            if tokens not in TIERS:
                raise SpecError(
                    f"edits[{i}].tokens is {shown(tokens)}; server-wide edits take "
                    f"{', '.join(TIERS)}."
                )
        return spec.resolve(self._sites, self._named(self.names)).edits

    def resolve(self, spec: Spec | None, names: Mapping[str, str], server: str | None) -> Resolved:
        """What a spec means, with the server's edits first.

        Args:
            spec: None for a request that asks for nothing itself.
            names: name -> digest, when the request entered.
            server: digest of the server-wide edits, when the request entered.

        Raises:
            SpecError: the spec is not possible here, or the content is not held any more.
        """
        own = NOTHING
        if spec is not None:
            own = self._meanings.of(spec, self._named(names), tuple(names.items()))
        if server is None:
            return own
        if server not in self._edits:
            raise SpecError("the server-wide edits of this request are gone; send it again.")
        return own.joined(edits=self._edits[server])

    def _named(self, names: Mapping[str, str]) -> dict[str, Vectors]:
        key = tuple(names.items())
        found = self._held.get(key)
        if found is None:
            if len(self._held) >= MAX_KEPT_NAMES:
                self._held.clear()
            found = {n: self._modules[d] for n, d in key if d in self._modules}
            self._held[key] = found
        return found

    def _trim(self) -> None:
        self._held.clear()
        self._meanings.forget()
        named = set(self.names.values())
        size = sum(len(a.data) for vectors in self._modules.values() for a in vectors.values())
        for digest in [d for d in self._modules if d not in named]:
            if size <= MAX_KEPT_BYTES:
                return
            size -= sum(len(a.data) for a in self._modules.pop(digest).values())


def _num_bytes(edits: tuple[ResolvedEdit, ...]) -> int:
    """Bytes of their vectors; edits of several layers may share one."""
    return sum(len(data) for data in {id(e.values): e.values.data for e in edits}.values())
