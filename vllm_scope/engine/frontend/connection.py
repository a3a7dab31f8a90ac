"""What an engine can do, asked once; and the check of a request against it.

Owns:  Connection, how it is made (every worker gets the address of this process's inbox), and
       the checks of a spec against it.
Runs:  in the front-end: when the first request with a spec comes, and for each such request.
To:    prepared, requests.

Promise: a request that passes can run here, perhaps after a wait for room. Any other request is
refused before it enters, with the path that the caller typed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import AsyncLLM, Engine, LLMEngine
from vllm_scope.engine.worker.replies import Connected, Module
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.operations import Cost
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.arrays import Array
from vllm_scope.request.resolve_edits import check_stages
from vllm_scope.request.resolved import Resolved, ResolvedProbe, ResolvedRead, Vectors
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Meanings, Spec
from vllm_scope.results.inbox import inbox
from vllm_scope.sinks.metrics import count_sinks

if TYPE_CHECKING:
    from vllm_scope.saes.sae import Sae

logger = logging.getLogger("vllm.vllm_scope")

#: If an attempt to reconnect fails, the front-end waits this long before the next attempt.
RETRY_S = 10.0


@dataclass
class Connection:
    """What the workers of an engine can do, by their answers.

    Attributes:
        sinks: where reads may go beside memory -> whether probes may go there too.
        modules: name of a steering module -> stand-ins for its vectors, for the checks;
            EngineCore has the content.
        generation: the inbox's, when the workers were asked.
        retry_at: monotonic seconds, the earliest next attempt after a failed one.
        saes: name -> the SAE, of those that the configuration names.
        num_doubts: how many times the names of modules may have changed elsewhere.
        num_asked: `num_doubts` when `modules` were last asked for.
    """

    sites: Sites
    reason: str | None
    num_stages: int
    deliver_timeout_s: float
    limits: Limits
    sinks: dict[str, bool]
    modules: dict[str, Vectors]
    generation: int = 0
    retry_at: float = 0.0
    num_doubts: int = 0
    num_asked: int = 0
    saes: Mapping[str, Sae] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._meanings = Meanings(self.sites)

    @staticmethod
    def from_replies(replies: list[Connected], deliver_timeout_s: float) -> Connection:
        first = replies[0]
        kernels = {k: v for r in replies for k, v in r["sites"]["kernels"].items()}
        sites = Sites.from_body(
            {**first["sites"], "kernels": kernels}, {b for r in replies for b in r["taps_here"]}
        )
        reason = next((r["reason"] for r in replies if r["reason"]), None)
        limits = [msgspec.convert(r["limits"], Limits) for r in replies if r["drains"]]
        found = Connection(
            sites, reason, first["num_stages"], deliver_timeout_s, limits[0],
            next((r["sinks"] for r in replies if r["drains"]), {}), {},
        )  # fmt: skip
        found.learn_modules(first["modules"])
        return found

    def doubt_modules(self) -> None:
        """Have the next request that names a module ask for all modules."""
        self.num_doubts += 1

    def lacks(self, names: Iterable[str]) -> bool:
        """True if there are names and this front-end must ask the engine about them."""
        wanted = set(names)
        return bool(wanted) and (
            self.num_doubts != self.num_asked or not wanted <= self.modules.keys()
        )

    def learn_modules(self, modules: Mapping[str, Module], num_doubts: int = 0) -> None:
        """Replace what is known of modules.

        Args:
            num_doubts: the attribute, when the engine was asked.
        """
        self.num_asked = num_doubts
        self._meanings.forget()
        ones = Array.parse(np.ones(self.sites.hidden_size, np.float32), "")
        self.modules = {
            name: {tuple(place): ones for place in module["streams"]}
            for name, module in modules.items()
        }

    def resolve(self, spec: Spec) -> Resolved:
        """What a spec means here; stand-ins take the place of modules' vectors."""
        return self._meanings.of(spec.packed.digest, lambda: spec, self.modules, spec.modules)

    def check(self, asked: Resolved, ids: Ids, max_tokens: int) -> None:
        """Check a request before it enters.

        Args:
            ids: of the prompt.

        Raises:
            SpecError: a token that it cannot have, more than this engine could ever hold,
                or a destination that the operator did not set up.
        """
        _check_tokens(asked, ids, max(len(ids) + max_tokens - 2, len(ids) - 1), self.limits)
        _check_room(asked, ids, max_tokens, self)
        _check_sinks(asked, self)
        if asked.stopping and self.num_stages > 1:
            raise SpecError(
                f"the probe {asked.stopping[0].name!r} stops its request, and this engine has "
                f"{self.num_stages} pipeline stages, which cannot do that; take action 'flag', or "
                "start with pipeline_parallel_size 1."
            )
        check_stages(asked, self.num_stages)


#: vLLM's OutputProcessor -> its engine's Connection.
connections: Beside[Connection] = Beside()
#: AsyncLLM -> the task that connects it.
_connecting: Beside[asyncio.Task[None]] = Beside()


# How it is made


def _address() -> dict[str, object]:
    body = msgspec.to_builtins(inbox().address)
    assert isinstance(body, dict)
    return body


def _may_listen(engine: Engine, replies: list[Connected]) -> bool:
    """Listen on TCP if a worker needs it; True if the workers must be asked again."""
    if not any(reply["needs_tcp"] for reply in replies):
        return False
    config = config_of(engine.vllm_config)
    assert config is not None
    from vllm.utils.network_utils import get_ip

    try:
        inbox().listen(config.road_host or get_ip())
    except ScopeError as error:
        for reply in replies:
            reply["reason"] = reply["reason"] or str(error)
        return False
    return True


def _connect(engine: Engine, replies: list[Connected], generation: int) -> None:
    config = config_of(engine.vllm_config)
    assert config is not None
    inbox().on_counters = count_sinks
    found = Connection.from_replies(replies, config.deliver_timeout_s)
    known = connections.of(engine.output_processor)
    if known is not None and known.reason is None and found.reason is not None:
        # The transport worked before and may work again.
        logger.warning("vllm-scope: %s. It is tried again in %g s.", found.reason, RETRY_S)
        known.retry_at = time.monotonic() + RETRY_S
        return
    found.generation = generation
    if config.saes:
        from vllm_scope.saes.load import load_saes  # torch, and formats

        found.saes = load_saes(config.saes)
    connections.put(engine.output_processor, found)


def connect_sync(engine: LLMEngine) -> None:
    generation = inbox().generation
    replies = engine.collective_rpc("scope_connect", args=(_address(),))
    if _may_listen(engine, replies):
        replies = engine.collective_rpc("scope_connect", args=(_address(),))
    _connect(engine, replies, generation)


async def connect_async(engine: AsyncLLM) -> None:
    """Connect once for all requests that wait; the cancellation of one does not stop it."""
    task = _connecting.of(engine)
    if task is None or task.done():
        task = _connecting.put(engine, asyncio.ensure_future(_connect_async(engine)))
        task.add_done_callback(lambda _: _connecting.pop(engine))
    await asyncio.shield(task)


async def _connect_async(engine: AsyncLLM) -> None:
    generation = inbox().generation
    replies = await _ask_all(engine)
    if _may_listen(engine, replies):
        replies = await _ask_all(engine)
    _connect(engine, replies, generation)


async def _ask_all(engine: AsyncLLM) -> list[Connected]:
    replicas = await ask_replicas(engine, "scope_connect", _address())
    return [reply for replies in replicas for reply in replies]


async def ask_replicas(engine: Engine, name: str, *args: object) -> list[list[Any]]:
    """The answers to a remote call, by data-parallel replica and worker.

    AsyncLLM.collective_rpc returns the answers of the first replica only.
    vllm 0.32, v1/engine/core_client.py, DPLBAsyncMPClient.call_utility_async
    """
    core, call = engine.engine_core, ("collective_rpc", name, None, args, None)
    if hasattr(core, "call_utility_all_async"):  # since vLLM 0.32
        return list(await core.call_utility_all_async(*call))
    calls = (core._call_utility_async(*call, engine=one) for one in core.core_engines)
    return list(await asyncio.gather(*calls))


def needs_connection(engine: Engine) -> bool:
    known = connections.of(engine.output_processor)
    if known is not None:
        late = known.generation != inbox().generation
        return bool(late and time.monotonic() >= known.retry_at)
    return config_of(engine.vllm_config) is not None


# What a request may ask


def _check_sinks(asked: Resolved, connection: Connection) -> None:
    """Raises SpecError for a destination that the operator did not set up."""
    for name in ("reads", "probes"):
        actions: tuple[ResolvedRead | ResolvedProbe, ...] = getattr(asked, name)
        for i, action in enumerate(actions):
            if action.to == MEMORY:
                continue
            if action.to not in connection.sinks:
                there = ", ".join([MEMORY, *connection.sinks])
                raise SpecError(
                    f"{name}[{i}].to is {shown(action.to)}; this engine has {there}. Its "
                    "operator sets up others in additional_config['scope'].sinks."
                )
            if name == "probes" and not connection.sinks[action.to]:
                raise SpecError(
                    f"probes[{i}].to is {shown(action.to)}, which takes rows, not scores; let "
                    "them go to memory, or to a plugin that takes them."
                )


def _check_tokens(asked: Resolved, ids: Ids, last: int, limits: Limits) -> None:
    """Raises SpecError if a selector cannot mean a token of this request."""
    for name in ("reads", "probes", "edits"):
        actions: tuple[Any, ...] = getattr(asked, name)
        checked: set[Selector] = set()
        for i, action in enumerate(actions):
            if action.tokens in checked:
                continue
            checked.add(action.tokens)
            # An edit of several layers is resolved to one edit per layer.
            i = action.number if name == "edits" else i
            where = f"{name}[{i}].tokens"
            action.tokens.check(len(ids), last, where)
            if name != "edits":
                continue
            action.tokens.check_decided(len(ids), ids, last, where)
            positions = {p + len(ids) if p < 0 else p for p in action.positions}
            if len(positions) < len(action.positions):
                raise SpecError(f"edits[{i}].positions names a position twice.")
            if limits.optimistic and sum(p >= len(ids) for p in positions) > 1:
                raise SpecError(
                    f"edits[{i}].positions has several generated tokens, and this engine decodes "
                    "speculatively: which position a row has is not known when it is replaced. "
                    "Replace tokens of the prompt, or start without speculation."
                )
            if limits.optimistic and not action.tokens.uniform:
                tokens = Tokens.running(np.arange(len(ids), last + 1), len(ids), ids)
                chosen = action.tokens.select(tokens).certain
                if chosen.any() and not chosen.all():
                    raise SpecError(
                        f"{where} picks some of the generated tokens, and this engine decodes "
                        "speculatively: which position a row has is not known when it is "
                        "edited. Take all of them, or start without speculation."
                    )


def _check_room(asked: Resolved, ids: Ids, max_tokens: int, connection: Connection) -> None:
    """Raises SpecError for a request that this engine could never hold."""
    sites, limits = connection.sites, connection.limits
    encodes = any(read.encoding for read in asked.reads)
    if asked.edits or asked.probes or len(asked.reads) > 1 or encodes:
        program = RequestProgram.compile(asked, sites, frozenset(sites.boundaries), len(ids), ids)
        programs = program.all_programs(len(ids) + max_tokens + OVERSHOOT)
        superset = program.generated_superset()
        every = [*programs, *([] if superset is None else [superset])]
        delivered = every if limits.optimistic else programs
        excess = limits.excess(*(one.layout for one in delivered))
        if excess is not None:
            raise SpecError(
                f"the request delivers too much at once ({excess}); read fewer layers, or "
                "start the engine with a larger additional_config['scope'].arena_mib."
            )
        cost = Cost.of(set(every))
        if (program.has_vectors or asked.probes) and not cost.fits(limits.capacity):
            raise SpecError(
                f"the request takes {cost}; this engine has {limits.capacity}. Edit or probe fewer "
                "places, or raise additional_config['scope'].vectors_mib."
            )
