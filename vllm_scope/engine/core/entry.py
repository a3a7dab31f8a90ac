"""EngineCore: what a request that enters means, and the keys of its KV blocks.

Owns:  the resolution of module names and server-wide edits for a request that enters, the
       programs that it will hold in the workers' tables, and the keys of edited KV blocks.
Runs:  in EngineCore: when a request enters (input thread), and when vLLM hashes its blocks.
To:    scheduler.

From its first edited block on, a request's KV is keyed by the edits and by the tokens that they
apply to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from vllm_scope.core.registry import Registry
from vllm_scope.engine import wrapping
from vllm_scope.engine.model import CONNECTORS_BY_HASH, foreign_connector, sites_of
from vllm_scope.engine.params import handle_of, with_handle
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.worker.delivery import global_reads
from vllm_scope.errors import CapacityError, SpecError, shown
from vllm_scope.graph.tap.tables import capacity
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.operations import Cost, Program
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.spec import Spec
from vllm_scope.vectors import load_vectors
from vllm_scope.worker.plan import OVERSHOOT


@dataclass(frozen=True)
class Entry:
    """What a request with vectors gets when it enters, beside its handle.

    Attributes:
        keys: the keys of its KV blocks; None without edits.
        first: the first edited position; None without edits.
        programs: the programs that it holds in the workers' tables.
    """

    keys: BlockKeys | None
    first: int | None
    programs: tuple[Program, ...]


class CoreScope:
    """The registry, and the preparation of requests that enter."""

    def __init__(self, vllm_config: Any) -> None:
        config = config_of(vllm_config)
        assert config is not None
        self.connector = foreign_connector(vllm_config)
        self.sites = sites_of(vllm_config, config)
        self.registry = Registry(self.sites)
        for name, path in config.modules.items():
            self.registry.register_module(name, load_vectors(path))
        #: The reads that global sinks add to every request.
        self.everywhere = global_reads(config, self.sites)
        self.most = capacity(self.sites.hidden_size, config.vectors_mib)

    def stamp(self, request: Any) -> Entry | None:
        """Add the present meaning of names and the server's edits to a request's handle.

        Returns:
            None if it has no vectors.

        Raises:
            ScopeError: the front-end accepted the request, but modules or server-wide edits
                have changed since. vLLM ends the request with an error.
        """
        params, server = request.sampling_params, self.registry.server
        if request.prompt_token_ids is None:  # prompt embeddings
            if params is not None and server is not None:
                raise SpecError(
                    "this server edits every request, and prompt embeddings cannot be edited; "
                    "send text or token ids, or send it again when the server's edits are gone."
                )
            return None
        if params is not None and self.everywhere.reads:
            params = request.sampling_params = self._stamp_reads(request)
        handle = handle_of(params)
        if params is None or not (server is not None or (handle and handle["vectors"])):
            return None
        handle = {**(handle or {}), "server": server}
        spec = Spec.from_json(params.extra_args["scope"]) if "key" in handle else None
        names = self.registry.names
        modules = spec.modules if spec is not None else ()
        handle["modules"] = {name: names[name] for name in modules if name in names}
        asked = self.registry.resolve(spec, handle["modules"], server)
        asked = asked.joined(reads=self.everywhere.reads)
        if asked.edits:
            self._check_connector()
        prompt_ids = asked.ids_of(request.prompt_token_ids)
        program = RequestProgram.compile(
            asked, self.sites, frozenset(self.sites.boundaries), len(prompt_ids), prompt_ids
        )
        programs: tuple[Program, ...] = ()
        if program.has_vectors:
            most = len(prompt_ids) + (params.max_tokens or 1) + OVERSHOOT
            programs = tuple(program.with_drafts(most))
            cost = Cost.of(programs)
            if not cost.fits(self.most):
                raise CapacityError(
                    f"with the server's edits the request takes {cost}; this engine has "
                    f"{self.most}. Edit fewer places, or send it again when they are gone."
                )
        keys = BlockKeys(asked.edits, len(prompt_ids), prompt_ids) if asked.edits else None
        selectors = {edit.tokens for edit in asked.edits}
        firsts = (one.first_position(len(prompt_ids), prompt_ids) for one in selectors)
        request.sampling_params = with_handle(params, handle)
        return Entry(keys, min(firsts, default=None), programs)

    def check_edits(self, text: str | None) -> None:
        """Raises SpecError if the tables have no room for these server-wide edits."""
        if text is None:
            return
        self._check_connector()
        asked = Resolved(edits=self.registry.parse_edits(text))
        # One prompt token and some generated ones: these edits pick phases (registry.TIERS).
        program = RequestProgram.compile(
            asked, self.sites, frozenset(self.sites.boundaries), 1, [0]
        )
        cost = program.cost(2 + OVERSHOOT)
        if not cost.fits(self.most):
            raise SpecError(
                f"these edits take {cost}; this engine has {self.most} for "
                "all requests. Edit fewer places, or raise "
                "additional_config['scope'].vectors_mib."
            )

    def _check_connector(self) -> None:
        """Raises SpecError if a KV connector could mix edited KV with plain KV."""
        if self.connector is not None:
            raise SpecError(
                f"this engine shares KV through {shown(self.connector)}, which may give KV of "
                "edited tokens to plain requests, or theirs to edited ones; edits need an engine "
                f"without it, or with {' or '.join(CONNECTORS_BY_HASH)}. Reads and probes stay."
            )

    def _stamp_reads(self, request: Any) -> Any:
        """The request's sampling parameters, with the global sinks' reads in the handle."""
        ids = self.everywhere.ids_of(request.prompt_token_ids)
        firsts = [read.tokens.first_position(len(ids), ids) for read in self.everywhere.reads]
        handle = dict(handle_of(request.sampling_params) or {})
        if handle.get("first_position") is not None:
            firsts.append(handle["first_position"])
        handle |= {"first_position": min(firsts), "sinks": True, "vectors": handle.get("vectors")}
        return with_handle(request.sampling_params, handle)


# Requests in

#: Request -> its keys, while vLLM constructs it and already hashes its blocks.
_entering: dict[str, BlockKeys | None] = {}
_making = threading.Lock()


def _preprocess(original: Any, self: Any, request: Any) -> Any:
    nothing_asked = "scope" not in self.__dict__ and handle_of(request.sampling_params) is None
    if nothing_asked and not _has_global_sinks(self):
        return original(self, request)
    entry = _scope_of(self).stamp(request)
    if entry is None:
        return original(self, request)
    _entering[request.request_id] = entry.keys
    try:
        made = original(self, request)
        made[0].scope_keys, made[0].scope_first = entry.keys, entry.first
        made[0].scope_programs = entry.programs
        return made
    finally:
        del _entering[request.request_id]


def _scope_of(engine: Any) -> CoreScope:
    """EngineCore's CoreScope, made at first use: by a request, on the input thread, or by a
    remote call, on another."""
    with _making:
        if "scope" not in engine.__dict__:
            engine.scope = CoreScope(engine.vllm_config)
    scope: CoreScope = engine.scope
    return scope


def _has_global_sinks(engine: Any) -> bool:
    if "scope_global" not in engine.__dict__:
        config = config_of(engine.vllm_config)
        engine.scope_global = config is not None and bool(config.global_sinks)
    return bool(engine.scope_global)


def _extra_keys(original: Any, request: Any, start: int, stop: int, *rest: Any) -> Any:
    found, following = original(request, start, stop, *rest)
    keys = getattr(request, "scope_keys", None) or _entering.get(request.request_id)
    key = keys.key(start, stop) if keys is not None else None
    return (found if key is None else (*(found or ()), ("scope", key))), following


def _collective_rpc(
    original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    """EngineCore.collective_rpc: changes of the registry are made here first. If EngineCore
    refuses a change, no worker gets it; if a worker does, EngineCore takes it back."""
    telling = {"scope_register": "register", "scope_unregister": "unregister",
               "scope_set_edits": "set_edits"}  # fmt: skip
    if method not in telling:
        return original(self, method, timeout, args, kwargs)
    if method == "scope_set_edits":
        _scope_of(self).check_edits(*args, **(kwargs or {}))
    registry = _scope_of(self).registry
    before = registry.meant()
    getattr(registry, telling[method])(*args, **(kwargs or {}))
    try:
        return original(self, method, timeout, args, kwargs)
    except Exception:
        registry.restore(before)
        raise


def wrap() -> None:
    wrapping.wrap("EngineCore.preprocess_add_request", _preprocess)
    wrapping.wrap("EngineCore.collective_rpc", _collective_rpc)
    wrapping.wrap("generate_block_hash_extra_keys", _extra_keys)
