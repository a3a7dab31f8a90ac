"""Checks a request with a spec before it enters. AsyncLLM checks a large one on another thread.

Owns:  Prepared, `prepare`, `streamed`, and `aside`.
Runs:  in the front-end, on the calling thread. For a large request of AsyncLLM, on another thread.
From:  connection.   To: requests.

Promise: an API server's other requests do not wait for the check of a large request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from vllm_scope.engine.frontend.connection import Connection
from vllm_scope.engine.frontend.translators import Uncounted
from vllm_scope.engine.vllm_types import EngineCoreRequest
from vllm_scope.errors import SpecError
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.actions.probing import MONITOR, is_monitor
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.spec import Spec
from vllm_scope.results.budget import bytes_of_prompt

#: The largest size of a small request, which takes about 1 ms to prepare. The size is the number of
#: characters of the spec plus the number of tokens of the prompt. With AsyncLLM, another thread
#: prepares a larger request.
SMALL = 4096
_NUMBERS = {int, float, bool, type(None)}
Result = TypeVar("Result")


class Prepared(msgspec.Struct, frozen=True):
    """A request that has passed the check.

    Attributes:
        asked: the whole spec, resolved for this engine.
        own: the part of `asked` whose results go to the sink `memory`.
        first_position: a lower bound of the positions whose rows are needed; None if no row is
            needed.
        num_bytes: the number of bytes that the request delivers to this process for its prompt.
        variants: the specs of the request's variants; empty if the request has no variants. If
            there are variants, `spec` is the spec of the first variant. Variants deliver no rows or
            scores to this process.
    """

    spec: Spec
    asked: Resolved
    own: Resolved
    prompt_ids: list[int]
    max_tokens: int
    first_position: int | None
    num_bytes: int
    variants: tuple[Spec, ...] = ()

    @property
    def answered(self) -> bool:
        """True if workers send rows, scores or a policy's decisions for the request."""
        return bool(self.asked.taking) or self.asked.policy is not None


def prepare(connection: Connection, request: EngineCoreRequest) -> Prepared:
    """Check vLLM's request, and return the checked request. Any thread can call this function.

    Raises:
        SpecError: the engine cannot run the request.
    """
    connection.require_taps()
    params = request.sampling_params
    spec = Spec.from_json(params.extra_args["scope"])
    if request.resumable:
        raise streamed(spec)
    if request.prompt_token_ids is None:
        why = _monitors_in(spec)
        raise SpecError(f"prompt embeddings cannot be tapped{why}; send text or token ids.")
    spec = spec.of_engine(connection.saes, connection.lenses)
    asked = connection.resolve(spec)
    prompt_ids = list(request.prompt_token_ids)
    max_tokens = params.max_tokens or 1
    ids = asked.ids_of(prompt_ids)
    connection.check(asked, ids, max_tokens)
    if asked.uniform:
        spec.__dict__["_prepared"] = True
    own = asked.going_to(MEMORY)
    firsts = (x.first_position(len(ids), ids) for x in asked.read_selectors)
    return Prepared(
        spec, asked, own, prompt_ids, max_tokens, min(firsts, default=None),
        bytes_of_prompt(own, asked, connection.sites, prompt_ids),
    )  # fmt: skip


def streamed(spec: Spec) -> SpecError:
    """The error for a request that has this spec and streamed input."""
    why = _monitors_in(spec)
    return SpecError(f"streamed input cannot be tapped{why}; send the prompt in one piece.")


def _monitors_in(spec: Spec) -> str:
    """The part of an error text that names the monitors in a spec; empty if there are none."""
    names = [one.name.removeprefix(MONITOR) for one in spec.probes if is_monitor(one.name)]
    found = f"monitor{'s' if names[1:] else ''} {', '.join(map(repr, names))}"
    return f", and this engine taps every request for its {found}" if names else ""


def is_small(values: object) -> bool:
    """True if `values` has at most SMALL characters and items. For such small values, another
    thread would cost more time than it saves.

    Args:
        values: a text, or lists and mappings of texts and numbers.
    """
    left, open_ones = SMALL, [values]
    while open_ones:
        one = Uncounted.value_of(open_ones.pop())
        if not isinstance(one, str | bytes | list | tuple | Mapping):
            continue
        left -= len(one)
        if left < 0:
            return False
        if isinstance(one, Mapping):
            open_ones += [*one.keys(), *one.values()]
        elif not isinstance(one, str | bytes) and not set(map(type, one)) <= _NUMBERS:
            open_ones += one
    return True


#: Finds the fields by which a spec names features of an SAE. A few characters in these fields stand
#: for large vectors. The pattern also finds escape sequences such as \u0069, because JSON text can
#: contain a field's name in this form.
_ROWS = re.compile(r'"ind(?:ex|ices)"|\\u')


def is_known(text: object) -> bool:
    """True for a uniform spec (Resolved.uniform) that was prepared before. The text of such a spec
    is not parsed again, because monitors add the same long text to every request."""
    spec = Spec.remembered(text)
    return spec is not None and "_prepared" in spec.__dict__


def is_quick(text: object, prompt_ids: object) -> bool:
    """True if the calling thread can prepare the request. The prompt must be small. The spec must
    be known (`is_known`), or must be small and name no features of an SAE."""
    if is_known(text):
        return is_small(prompt_ids)
    return is_small((text, prompt_ids)) and not (isinstance(text, str) and _ROWS.search(text))


async def aside(call: Callable[..., Result], *args: object, if_large: object) -> Result:
    """The result of `call(*args)`. If the value `if_large` is large, the call runs on another
    thread."""
    if is_small(if_large):
        return call(*args)
    return await asyncio.to_thread(call, *args)
