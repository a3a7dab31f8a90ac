"""Asks the workers once what they support, and uses the answers to check requests.

Owns:  Connection, and the code that makes a connection by sending every worker the inbox's address.
Runs:  in the front-end, when the first request with a spec arrives, and for each such request.
To:    prepared, requests.

Promise: a request that does not pass the check is refused before it enters. A request that passes
the check can run on this engine, perhaps after a wait for room. However, only EngineCore checks the
server-wide edits, the room for sums, and whether the names of steering modules have changed. For
these three reasons, EngineCore can still refuse a request that passed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_scope.config import ScopeConfig
from vllm_scope.control.policy_options import Loaded, checked
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.checks import (
    actions_of,
    check_lenses,
    check_room,
    check_sinks,
    check_tokens,
)
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import AsyncLLM, Engine, LLMEngine
from vllm_scope.engine.worker.replies import Connected, Module
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Strongest
from vllm_scope.request.resolve_edits import check_stages
from vllm_scope.request.resolved import Resolved, Vectors
from vllm_scope.request.selectors import Ids
from vllm_scope.request.sites import Place, Sites
from vllm_scope.request.spec import Meanings, Spec
from vllm_scope.results.inbox import inbox, share_memory
from vllm_scope.sinks.metrics import count_sinks

if TYPE_CHECKING:
    from vllm_scope.saes.sae import Sae

logger = logging.getLogger("vllm.vllm_scope")

#: The time in seconds between a failed attempt to connect again and the next attempt.
RETRY_S = 10.0
NO_TAPS = "this engine was started without vllm-scope; it has no taps."


@dataclass
class Connection:
    """The sites, limits, sinks and lenses of an engine, from the answers of its workers.

    Attributes:
        reason: why the model has no taps; None if it has taps.
        sinks: maps the name of each sink other than `memory` to the kinds of actions whose results
            the sink takes (checks.check_sinks).
        modules: maps the name of each steering module to placeholders for the module's vectors, for
            the checks. Only EngineCore has the vectors.
        generation: the value of the inbox's `generation` when the front-end asked the workers.
        retry_at: after a failed attempt to connect again, the time.monotonic() of the next attempt.
        saes: the SAEs that the configuration names, by name.
        encodes: True if the workers hold the encoders of `saes`.
        policies: the policies that the configuration names, by name.
        lens_rows: the largest number of rows to which the lenses of one request are applied.
        no_lens: maps a boundary to the reason why the model's lens cannot be applied there.
        lenses: maps the name of each configured lens to the places at which it can be applied.
        num_doubts: the number of times that the names of steering modules have possibly changed.
        num_asked: the value of `num_doubts` when the engine was last asked for `modules`.
        offline: True if the engine is an LLMEngine, as in a vllm.LLM.
    """

    sites: Sites
    reason: str | None
    num_stages: int
    deliver_timeout_s: float
    limits: Limits
    sinks: dict[str, list[str]]
    modules: dict[str, Vectors]
    generation: int = 0
    retry_at: float = 0.0
    num_doubts: int = 0
    num_asked: int = 0
    saes: Mapping[str, Sae] = field(default_factory=dict)
    encodes: bool = True
    policies: Mapping[str, Loaded] = field(default_factory=dict)
    no_lens: Mapping[int, str] = field(default_factory=dict)
    lenses: Mapping[str, frozenset[Place]] = field(default_factory=dict)
    lens_rows: int = 0
    offline: bool = False

    def __post_init__(self) -> None:
        self._meanings = Meanings(self.sites)
        #: The names of the steering modules of the last request whose modules were all known.
        #: `lacks` compares this collection by identity, because many requests share one collection.
        self._known: Collection[str] | None = None

    @staticmethod
    def from_replies(replies: list[Connected], deliver_timeout_s: float) -> Connection:
        first = replies[0]
        kernels = {k: v for r in replies for k, v in r["sites"]["kernels"].items()}
        moved = sorted({layer for r in replies for layer in r["sites"]["moved"]})
        sites = Sites.from_body(
            {**first["sites"], "kernels": kernels, "moved": moved},
            {b for r in replies for b in r["taps_here"]},
        )
        reason = next((r["reason"] for r in replies if r["reason"]), None)
        limits = [msgspec.convert(r["limits"], Limits) for r in replies if r["drains"]]
        found = Connection(
            sites, reason, first["num_stages"], deliver_timeout_s, limits[0],
            next((r["sinks"] for r in replies if r["drains"]), {}), {},
        )  # fmt: skip
        found.no_lens = {
            b: r["lens"] for r in replies if r["drains"] and r["lens"] for b in r["taps_here"]
        }
        maps = [(name, b) for r in replies for name, some in r["lenses"].items() for b in some]
        found.lenses = {
            name: frozenset(place for place in sites.of_lenses if (name, place.boundary) in maps)
            for name in dict.fromkeys(name for r in replies for name in r["lenses"])
        }
        found.learn_modules(first["modules"])
        return found

    def require_taps(self) -> None:
        """Raises SpecError if the model has no taps."""
        if self.reason is not None:
            raise SpecError(f"this model cannot be tapped: {self.reason}.")

    @property
    def always_answers(self) -> bool:
        """True if workers send this process a message about each request. The message says how the
        request ended at a sink, or whether an earlier pipeline stage had an error."""
        return bool(self.sinks) or self.num_stages > 1

    def doubt_modules(self) -> None:
        """Record that the names of steering modules have possibly changed. Before the next request
        that names a steering module, the front-end then asks the engine for the names."""
        self.num_doubts += 1

    def lacks(self, names: Collection[str]) -> bool:
        """True if the front-end must ask the engine whether it has modules with these names."""
        if self.num_doubts == self.num_asked and names is self._known:
            return False
        wanted = set(names)
        lacking = bool(wanted) and (
            self.num_doubts != self.num_asked or not wanted <= self.modules.keys()
        )
        self._known = None if lacking else names
        return lacking

    def learn_modules(self, modules: Mapping[str, Module], num_doubts: int = 0) -> None:
        """Replace `modules` by the steering modules that the engine has now.

        Args:
            num_doubts: the value of the attribute `num_doubts` before the engine was asked.
        """
        self.num_asked, self._known = num_doubts, None
        places = {
            name: [tuple(place) for place in module["streams"]] for name, module in modules.items()
        }
        if places == {name: list(module) for name, module in self.modules.items()}:
            return
        self._meanings.forget()
        ones = Array.parse(np.ones(self.sites.hidden_size, np.float32), "")
        self.modules = {name: dict.fromkeys(some, ones) for name, some in places.items()}

    def resolve(self, spec: Spec) -> Resolved:
        """A spec, resolved for this engine. The vectors of steering modules are placeholders."""
        # `learn_modules` drops the resolved specs that name steering modules.
        version = ("modules",) if spec.modules else ()
        return self._meanings.of(spec.packed, spec.arrays, self.modules, version, spec)

    def check(self, asked: Resolved, ids: Ids, max_tokens: int) -> None:
        """Check a request before it enters.

        Args:
            ids: token ids of the prompt.

        Raises:
            SpecError: the engine can never run the request. For example, the request names a sink
                that the operator did not set up, or needs more room than this engine has in total.
        """
        # The room that uniform actions (Resolved.uniform) need does not depend on the prompt. A
        # spec can have a thousand probes. To save time, a uniform spec without edits is checked
        # only once.
        alike = asked.uniform and not asked.num_states and len(ids) > 0
        here = self.limits, self.sinks, self.policies, self.no_lens, self.encodes, self.num_stages
        passed = asked.__dict__.get("_passed") if alike and not asked.edits else None
        if passed is None or not all(map(is_, passed, here)):
            self._check_actions(asked, ids, max_tokens, alike)
            asked.__dict__["_passed"] = here
        check_lenses(asked, ids, max_tokens, self.lens_rows)

    def _check_actions(self, asked: Resolved, ids: Ids, max_tokens: int, alike: bool) -> None:
        """Make all checks of `check`, except the check of the number of rows for lenses.

        Args:
            alike: True if the needed room is the same for every prompt.
        """
        check_tokens(asked, ids, max(len(ids) + max_tokens - 2, len(ids) - 1), self.limits)
        most_changes = 0
        if asked.policy is not None:
            most_changes = checked(asked.policy, self.policies).most_changes
        # If no request with the same outline needs more room than this one, one check is enough for
        # all of them.
        known = asked.shared.get("_has_room"), asked.__dict__.get("_has_room")
        if not alike or all(limits is not self.limits for limits in known):
            most = most_changes if asked.scaled else 0
            for_all = check_room(asked, ids, max_tokens, self.sites, self.limits, most)
            if alike:
                (asked.shared if for_all else asked.__dict__)["_has_room"] = self.limits
        check_sinks(asked, self.sinks)
        if asked.watched and self.num_stages > 1:
            one = asked.watched[0]
            does = "stops its request" if one.stops else "is the first stage of another probe"
            raise SpecError(
                f"the probe {one.name!r} {does}, and this engine has {self.num_stages} pipeline "
                "stages, which cannot do that; take action 'flag' and no 'after', or start with "
                "pipeline_parallel_size 1."
            )
        check_stages(asked, self.num_stages)
        for where, one in actions_of(asked, "features"):
            place = one.cells[0].place
            if one.lens is not None and place.boundary in self.no_lens:
                raise SpecError(
                    f"{where}.layers has {place.layer}, where this engine cannot apply its model's "
                    f"lens: {self.no_lens[place.boundary]}."
                )
        if not self.encodes and any(
            type(cell.bank) is Strongest for one in asked.features for cell in one.cells
        ):
            raise SpecError(
                "features with top_k, and all features of a TopK SAE, need SAEs on the device, and "
                "this engine was started with additional_config['scope'].saes_mib 0; give indices "
                "of another SAE, or start the engine with a larger saes_mib."
            )


#: Maps vLLM's OutputProcessor to the Connection of the same engine.
connections: Beside[Connection] = Beside()
#: Maps an AsyncLLM to the task that connects the AsyncLLM to its workers.
_connecting: Beside[asyncio.Task[None]] = Beside()


def connection_of(processor: object) -> Connection:
    """The Connection of the engine with this OutputProcessor. Raises SpecError if the engine was
    started without vllm-scope."""
    found = connections.of(processor)
    if found is None:
        raise SpecError(NO_TAPS)
    return found


# How a connection is made


def _address() -> dict[str, object]:
    body = msgspec.to_builtins(inbox().address)
    assert isinstance(body, dict)
    return body


def _may_listen(engine: Engine, replies: list[Connected]) -> bool:
    """Listen on TCP if a worker needs it. Returns True if the workers must be asked again."""
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


def _connect(engine: Engine, replies: list[Connected], generation: int, *, offline: bool) -> None:
    config = config_of(engine.vllm_config)
    assert config is not None
    inbox().on_counters = count_sinks
    share_memory(engine.vllm_config.parallel_config._api_process_count)
    found = Connection.from_replies(replies, config.deliver_timeout_s)
    known = connections.of(engine.output_processor)
    if known is not None and known.reason is None and found.reason is not None:
        # The connection to the workers worked before. A later attempt can succeed.
        logger.warning(
            "vllm-scope: %s. The front-end connects again in %g s.", found.reason, RETRY_S
        )
        known.retry_at = time.monotonic() + RETRY_S
        return
    found.generation, found.offline = generation, offline
    found.encodes, found.lens_rows = config.saes_mib > 0, config.lens_rows
    if known is not None:  # connected again
        found.policies, found.saes = known.policies, known.saes
    else:
        found.policies = {name: one.load() for name, one in config.policy_configs().items()}
        found.saes = _load_saes(config)
    connections.put(engine.output_processor, found)


def _load_saes(config: ScopeConfig) -> Mapping[str, Sae]:
    """The configured SAEs, by name. If this process cannot read the SAEs, the result is empty, and
    requests that name an SAE are refused. Other requests continue."""
    if not config.saes:
        return {}
    from vllm_scope.saes.load import load_saes  # this import takes time, because it loads torch

    try:
        return load_saes(config.saes)
    except (ScopeError, OSError) as error:
        logger.warning("vllm-scope: this front-end has no SAEs: %s", error)
        return {}


def connect_sync(engine: LLMEngine) -> None:
    generation = inbox().generation
    replies = engine.collective_rpc("scope_connect", args=(_address(),))
    if _may_listen(engine, replies):
        replies = engine.collective_rpc("scope_connect", args=(_address(),))
    _connect(engine, replies, generation, offline=True)


async def connect_async(engine: AsyncLLM) -> None:
    """Connect to the workers, one time for all waiting requests. If one waiting request is
    cancelled, the attempt to connect continues for the other requests."""
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
    _connect(engine, replies, generation, offline=False)


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


@contextmanager
def refusing() -> Iterator[None]:
    """If EngineCore refuses a remote call in the `with` block (engine.core.entry), raise a
    SpecError with the text of the refusal. If EngineCore runs in another process, vLLM returns only
    the text of EngineCore's error."""
    try:
        yield
    except Exception as error:
        # vllm 0.32, v1/engine/core.py, EngineCoreProc._handle_client_request
        told = re.fullmatch(r"Call to \w+ method failed: (.*)", str(error), re.DOTALL)
        if told is None:
            raise
        raise SpecError(told[1]) from None


def needs_connection(engine: Engine) -> bool:
    known = connections.of(engine.output_processor)
    if known is not None:
        late = known.generation != inbox().generation
        return bool(late and time.monotonic() >= known.retry_at)
    return config_of(engine.vllm_config) is not None
