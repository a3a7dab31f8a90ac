"""Reads and drops the sums of Moments in an engine.

Owns:  `moments_of`, `drop_moments_of`, and the same functions for an AsyncLLM.
Runs:  in the front-end.
From:  the package's public functions, http.calls.   To: engine.worker.sums (remote calls).

Each data-parallel replica has the sums of its own requests. Each pipeline stage has the sums of its
own layers. This module adds the sums of all replicas for each place and label, in float64.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from vllm_scope.batch.sums import Packed, Sums
from vllm_scope.engine.frontend.connection import NO_TAPS, ask_replicas
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import AsyncLLM, LLMEngine
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import checked_name

#: (site, layer, label)
Key = tuple[str, int, str]
Found = dict[Key, Sums]
#: The name and the arguments of a remote call.
_Call = tuple[str, tuple[object, ...]]
T = TypeVar("T")
#: A generator that yields remote calls, and returns a T. The caller makes each call, and sends the
#: answers to the generator. There is a list for each replica, with the answers of its workers.
_Asking = Generator[_Call, list[list[Any]], T]


def _keys(name: str) -> _Asking[list[Key]]:
    replies = yield "scope_names_of_moments", (checked_name(name, "the name of the sums"),)
    each = ((str(s), int(k), str(x)) for some in replies for one in some for s, k, x in one)
    return sorted(dict.fromkeys(each))


def _one(name: str, key: Key) -> _Asking[Sums]:
    replies = yield "scope_moments", (name, *key)
    some = [one for replica in replies for one in replica if one is not None]
    if not some:
        raise SpecError(f"there are no sums called {shown(name)} at {key}.")
    try:
        return Sums.total([Sums.of_packed(msgspec.convert(one, Packed)) for one in some])
    except ValueError as error:
        raise SpecError(
            f"the replicas disagree on the sums called {shown(name)} at {key}: {error} Drop them, "
            "and give all requests of a name the same covariance, and a target to all or to none."
        ) from None


def _every(name: str) -> _Asking[Found]:
    found = {}
    for key in (yield from _keys(name)):
        found[key] = yield from _one(name, key)
    if not found:
        replies = yield "scope_held_moments", ()
        known = sorted({str(held) for some in replies for one in some for held in one})
        raise SpecError(
            f"there are no sums called {shown(name)}; this engine has: "
            f"{', '.join(map(shown, known[:8])) or 'none'}. A name has sums after a row was added."
        )
    return found


def _dropped(name: str) -> _Asking[bool]:
    replies = yield "scope_drop_moments", (checked_name(name, "the name of the sums"),)
    return any(any(some) for some in replies)


def _check(engine: LLMEngine | AsyncLLM) -> None:
    if config_of(engine.vllm_config) is None:
        raise SpecError(NO_TAPS)


def _run(engine: LLMEngine, asking: _Asking[T]) -> T:
    _check(engine)
    try:
        call, args = next(asking)
        while True:
            call, args = asking.send([engine.collective_rpc(call, args=args)])
    except StopIteration as end:
        found: T = end.value
        return found


async def _run_async(engine: AsyncLLM, asking: _Asking[T]) -> T:
    _check(engine)
    try:
        call, args = next(asking)
        while True:
            call, args = asking.send(await ask_replicas(engine, call, *args))
    except StopIteration as end:
        found: T = end.value
        return found


def moments_of(engine: LLMEngine, name: str) -> Found:
    """The sums that requests have named `name`, by place and label. The row of a generated token is
    added to the sums after the request's next token is accepted.

    Raises:
        SpecError: there are no sums with this name, or the sums of the replicas cannot be added. In
            the first case, the message lists names that have sums.
    """
    return _run(engine, _every(name))


def drop_moments_of(engine: LLMEngine, name: str) -> bool:
    """Drop the sums of a name, and free their memory for other sums. Requests that still run add no
    more rows to sums of this name. Returns False if the name had no sums."""
    return _run(engine, _dropped(name))


async def moments_of_async(engine: AsyncLLM, name: str) -> Found:
    return await _run_async(engine, _every(name))


async def drop_moments_of_async(engine: AsyncLLM, name: str) -> bool:
    return await _run_async(engine, _dropped(name))


async def keys_of_async(engine: AsyncLLM, name: str) -> list[Key]:
    """The keys of all sums of a name. Each key has the site, the layer and the label of one of the
    sums."""
    return await _run_async(engine, _keys(name))


async def one_of_async(engine: AsyncLLM, name: str, key: Key) -> Sums:
    """The sums of a name at one place and with one label. Raises SpecError if there are no such
    sums, or if the sums of the replicas cannot be added."""
    return await _run_async(engine, _one(name, key))
