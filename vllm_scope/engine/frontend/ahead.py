"""Sends the vectors of monitors to EngineCore once, before the requests that use these vectors.

Owns:  the record of the vectors that each engine holds for this process; the calls that send
       vectors.
Runs:  in the front-end, on its main thread or event loop.
From:  monitors.   To: core.sent_ahead (the remote call `scope_hold`), requests (makes tickets
       without these vectors).

Promise: a ticket leaves a vector out only if every EngineCore of the engine has confirmed that it
holds the vector. Until all EngineCores have answered, and if a call fails, each ticket contains the
vectors. If EngineCore has dropped a vector (core.sent_ahead), EngineCore refuses the request, and
the front-end sends the vectors again.
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
    """The vectors that the front-end sent to one engine.

    Attributes:
        monitors: the monitors whose vectors were sent; None if the vectors must be sent again.
        client: vLLM's client of the EngineCores. When EngineCores are added or removed, vLLM
            changes the client's attribute `core_engines`.
        engines: the EngineCores to which the vectors were sent.
        digests: digests of the vectors that all of `engines` hold.
        called: True from the start to the end of the call that sends the vectors.
    """

    monitors: tuple[Monitor, ...] | None
    client: weakref.ref[object]
    engines: tuple[object, ...]
    digests: frozenset[bytes] = frozenset()
    called: bool = True

    @property
    def holds(self) -> bool:
        """True if the client still has the same EngineCores to which the vectors were sent."""
        return self.engines == _engines_of(self.client())


#: Maps vLLM's OutputProcessor to the vectors that were sent last to the same engine.
_aheads: Beside[_Ahead] = Beside()
#: The tasks of running calls. The event loop itself has only weak references to its tasks.
_calls: set[asyncio.Task[None]] = set()


def _engines_of(client: object) -> tuple[object, ...]:
    """The EngineCores in other processes with which a client works. The result is empty if the
    client's only EngineCore is in this process."""
    return tuple(getattr(client, "core_engines", ()))


def held_by(processor: object) -> frozenset[bytes]:
    """Digests of the vectors that a new ticket can leave out."""
    known = _aheads.of(processor)
    return known.digests if known is not None and known.holds else frozenset()


def doubt(processor: object) -> None:
    """Record that EngineCore refused a request because EngineCore did not have all of its vectors.
    Tickets then contain the vectors, until a call has sent the vectors ahead again."""
    known = _aheads.of(processor)
    if known is not None:
        known.digests = frozenset()
        if not known.called:
            known.monitors = None


def _begin(engine: Engine, monitors: tuple[Monitor, ...]) -> tuple[_Ahead, bytes] | None:
    """Begin a call. Returns the _Ahead that `_end` fills, and the data to send; None if nothing
    must be sent now. After this function, tickets leave out only vectors that this call sends."""
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
    """Store the answers of all EngineCores. Do nothing if the vectors must be sent again."""
    if ahead.monitors is not None and ahead.holds:
        held = (frozenset(map(bytes, digests)) for (digests,) in replies)
        ahead.digests = frozenset.intersection(*held)


def send(engine: LLMEngine, monitors: tuple[Monitor, ...]) -> None:
    """Send the monitors' vectors, if the engine does not have all of these vectors yet."""
    begun = _begin(engine, monitors)
    if begun is None:
        return
    args = inbox().address.frontend, begun[1]
    with _logged(begun[0]):
        _end(begun[0], [engine.collective_rpc("scope_hold", args=args)])


def send_soon(engine: AsyncLLM, monitors: tuple[Monitor, ...]) -> None:
    """Like `send`, but without waiting for the answers. Only the event loop's thread calls this."""
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
    """Log the error of a failed call. Requests still run, because their tickets contain the
    vectors."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: the weights of monitors travel with each request")
    finally:
        ahead.called = False
