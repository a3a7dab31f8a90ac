"""Vectors of monitors, which travel to EngineCore once, before the requests that use them.

Owns:  the record of the vectors that each engine holds for this process, and the calls that send
       them.
Runs:  in the front-end, on its main thread or event loop.
From:  monitors.   To: the remote call `scope_hold` (core.sent_ahead); requests (whose tickets leave
       these vectors out).

Promise: a ticket leaves a vector out only if every EngineCore of the engine has answered that it
holds the vector. Until then, and if a call fails, vectors travel with each ticket. If EngineCore
has dropped a vector since (core.sent_ahead), it refuses the request, and the front-end sends the
vectors again.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.connection import ask_replicas, connections
from vllm_scope.engine.vllm_types import AsyncLLM, Engine, LLMEngine
from vllm_scope.request.packed import pack
from vllm_scope.request.ticket import encode_arrays
from vllm_scope.results.inbox import inbox

if TYPE_CHECKING:
    from vllm_scope.engine.monitors import Monitor

logger = logging.getLogger("vllm.vllm_scope")


@dataclass
class _Ahead:
    """The vectors that an engine was sent.

    Attributes:
        monitors: the monitors whose vectors were sent; None if the vectors must be sent again.
        client: vLLM's client of the EngineCores. Its `core_engines` change if EngineCores are added
            or removed.
        engines: the EngineCores that the vectors were sent to.
        digests: digests of the vectors that all of `engines` hold.
        called: True from the call that sends the vectors until it has ended.
    """

    monitors: tuple[Monitor, ...] | None
    client: weakref.ref[object]
    engines: tuple[object, ...]
    digests: frozenset[bytes] = frozenset()
    called: bool = True

    @property
    def holds(self) -> bool:
        """True if the client's EngineCores are still those that the vectors were sent to."""
        return self.engines == _engines_of(self.client())


#: vLLM's OutputProcessor -> what its engine was sent last.
_aheads: Beside[_Ahead] = Beside()
#: Calls under way. The event loop keeps only weak references to them.
_calls: set[asyncio.Task[None]] = set()


def _engines_of(client: object) -> tuple[object, ...]:
    """The EngineCores that a client reaches in other processes; none if its only EngineCore is in
    this process."""
    return tuple(getattr(client, "core_engines", ()))


def held_by(processor: object) -> frozenset[bytes]:
    """Digests of the vectors that a ticket made now may leave out."""
    known = _aheads.of(processor)
    return known.digests if known is not None and known.holds else frozenset()


def doubt(processor: object) -> None:
    """Note that EngineCore refused a request because EngineCore lacks vectors. From now on vectors
    travel with tickets, until a call has sent them ahead again: a call under way, or a new one."""
    known = _aheads.of(processor)
    if known is not None:
        known.digests = frozenset()
        if not known.called:
            known.monitors = None


def _begin(engine: Engine, monitors: tuple[Monitor, ...]) -> tuple[_Ahead, bytes] | None:
    """Begin a call: returns the entry for its answers, and the data to send; None if there is
    nothing new to send. From now on tickets leave out only vectors that this call sends."""
    processor = engine.output_processor
    known = _aheads.of(processor)
    if known is None:
        if not monitors or connections.of(processor) is None:
            return None
    elif known.monitors is monitors and known.holds:
        return None
    _, arrays = pack(tuple(monitor.probe for monitor in monitors))
    client = engine.engine_core
    new = _Ahead(monitors, weakref.ref(client), _engines_of(client))
    if known is not None and known.engines == new.engines:
        new.digests = known.digests & arrays.keys()
    _aheads.put(processor, new)
    return new, encode_arrays(arrays.values())


def _end(ahead: _Ahead, replies: Iterable[list[list[bytes]]]) -> None:
    """Note the answers of all EngineCores. If other vectors were sent meanwhile, `ahead` is no
    longer used, and the answers have no effect."""
    if ahead.monitors is not None and ahead.holds:
        held = (frozenset(map(bytes, digests)) for (digests,) in replies)
        ahead.digests = frozenset.intersection(*held)


def send(engine: LLMEngine, monitors: tuple[Monitor, ...]) -> None:
    """Send the monitors' vectors, if the engine was not sent them yet."""
    begun = _begin(engine, monitors)
    if begun is None:
        return
    args = inbox().address.frontend, begun[1]
    with _logged(begun[0]):
        _end(begun[0], [engine.collective_rpc("scope_hold", args=args)])


def send_soon(engine: AsyncLLM, monitors: tuple[Monitor, ...]) -> None:
    """As `send`, but without a wait for the answers. Call it on the event loop."""
    begun = _begin(engine, monitors)
    if begun is not None:
        call = asyncio.get_running_loop().create_task(_send(engine, *begun))
        _calls.add(call)
        call.add_done_callback(_calls.discard)


async def _send(engine: AsyncLLM, ahead: _Ahead, data: bytes) -> None:
    with _logged(ahead):
        _end(ahead, await ask_replicas(engine, "scope_hold", inbox().address.frontend, data))


@contextmanager
def _logged(ahead: _Ahead) -> Iterator[None]:
    """Log the error of a failed call. No request fails: vectors travel with each ticket."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: the weights of monitors travel with each request")
    finally:
        ahead.called = False
