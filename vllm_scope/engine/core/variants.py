"""One request of the front-end that stands for several variants, each with edits of its own.

Owns:  the requests that EngineCore makes of such a request, their answers, and their end.
Runs:  in EngineCore: `expand` when the request enters (input thread), the rest on the scheduler's
       thread.
From:  request.ticket (Ticket.variants), entry.   To: the request's only output, which
       `engine.frontend.sweeping` reads.

The request itself is never scheduled. Its variants are ordinary requests: they have its prompt and
its parameters, share KV blocks, and yield to other requests. Each samples one token. When the last
variant has ended, the front-end gets one output with the log-probabilities of all variants, in the
field kv_transfer_params, which vLLM passes on as it is.

With async scheduling EngineCore prepares one step while the device computes another. If a step
takes all waiting variants, none is left for the next step, and the device waits until new variants
arrive. So a step gets only a part of the waiting variants (`most_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.entered import entered
from vllm_scope.engine.heap import seldom
from vllm_scope.engine.refusals import sentence_in
from vllm_scope.engine.vllm_types import EngineCoreOutput, Request, Scheduler
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.errors import ScopeError
from vllm_scope.request.answers import NO_LOGPROBS, Answers
from vllm_scope.sweeps.yielding import SWEPT

#: The tokens of all variants in the scheduler are divided among this many steps: one is on the
#: device, one is prepared, and one waits.
_PARTS: Final = 3
#: A step may always have this many tokens. A smaller step takes longer to launch than to compute.
_LEAST_TOKENS: Final = 1024


class _Group:
    """The variants of one request.

    Args:
        requests: number -> the variant.
        errors: number -> why a variant was refused.
        asked: the tokens whose log-probabilities are asked for; None for all.
        num_tokens: size of the vocabulary.
    """

    #: About how many tokens of one variant are computed. The prefix cache has the others.
    num_tokens_each = 0

    def __init__(
        self, requests: dict[int, Request], errors: dict[int, str], asked: list[int] | None,
        num_tokens: int,
    ) -> None:  # fmt: skip
        self.requests, self._errors, self._asked = requests, errors, asked
        self._num_tokens = num_tokens
        self._found: dict[int, NDArray[np.float32]] = {}
        self._num = len(requests) + len(errors)
        #: Id of a variant that has not ended -> its number.
        self.numbers = {one.request_id: number for number, one in requests.items()}
        self._outputs: list[EngineCoreOutput] = []

    def take(self, output: EngineCoreOutput) -> bool:
        """Take the only output of a variant. True if all variants have now ended."""
        number = self.numbers.pop(output.request_id)
        self._outputs.append(output)
        found = _logprobs(output.new_logprobs, self._asked, self._num_tokens)
        if found is not None:
            self._found[number] = found
        elif output.new_token_ids:
            self._errors[number] = NO_LOGPROBS
        else:
            self._errors[number] = sentence_in(output.stop_reason)
        return not self.numbers

    def last(self, request_id: str, others: bool) -> EngineCoreOutput:
        """The output of the request that stands for the variants. It has the tokens of all variants
        and the times of the last variant, from which vLLM makes its metrics.

        Args:
            others: as in Answers.
        """
        from vllm.v1.engine import EngineCoreOutput as Output
        from vllm.v1.engine import FinishReason

        last = self._outputs[-1]
        made: EngineCoreOutput = Output(
            request_id,
            [token for one in self._outputs for token in one.new_token_ids],
            finish_reason=FinishReason.LENGTH,
            events=last.events,
            kv_transfer_params=self.answers(others).encode(),
            trace_headers=last.trace_headers,
            prefill_stats=_total([one.prefill_stats for one in self._outputs]),
        )
        return made

    def answers(self, others: bool) -> Answers:
        size = max(map(len, self._found.values()), default=0)
        logprobs = np.full((self._num, size), np.nan, np.float32)
        for number, row in self._found.items():
            logprobs[number] = row
        return Answers(logprobs, self._errors, others)


def _logprobs(found: Any, asked: list[int] | None, num_tokens: int) -> NDArray[np.float32] | None:
    """float32 [n]: log-probabilities of the asked tokens, or of all tokens; None if vLLM did not
    return them.

    Args:
        found: vLLM's LogprobsLists, or None. A row has the sampled token, then the tokens that were
            asked for. If another row of the step is longer, the rest is filled with token 0.
        num_tokens: size of the vocabulary.
    """
    if found is None:
        return None
    ids, values = found.logprob_token_ids[0], found.logprobs[0]
    if asked is None:
        if len(ids) != num_tokens + 1:
            return None
        every = np.empty(num_tokens, np.float32)
        every[ids] = values
        return every
    num = len(asked) + 1
    known = dict(zip(ids[:num].tolist(), values[:num].tolist(), strict=True))
    if not known.keys() >= set(asked):
        return None
    return np.array([known[token] for token in asked], np.float32)


def _total(each: list[Any]) -> Any:
    """The sum of vLLM's PrefillStats, some of which may be None; None if all are. The sum has
    `num_cached_tokens` of the last one, because vLLM subtracts it from the length of one prompt."""
    some = [one for one in each if one is not None]
    if not some:
        return None
    names = [field.name for field in fields(some[0]) if field.name != "num_cached_tokens"]
    return replace(some[-1], **{name: sum(getattr(one, name) for one in some) for name in names})


#: vLLM's Request that stands for others -> its variants, until the Request comes to the scheduler.
_entered: Beside[_Group] = Beside()


class _Running:
    """The requests of one scheduler that stand for others."""

    def __init__(self) -> None:
        #: Id of a request that stands for others -> the request, and its variants.
        self.groups: dict[str, tuple[Request, _Group]] = {}
        #: Id of a variant -> id of the request that stands for it.
        self.name_of: dict[str, str] = {}
        #: True if the scheduler also had requests that belong to no sweep when it last made a step
        #: with variants.
        self.others = False

    def __del__(self) -> None:
        if self.groups:  # the scheduler is gone, and the groups will not end
            seldom.end()

    def begin(self, request: Request, group: _Group) -> None:
        if not self.groups:
            seldom.begin()
        self.groups[request.request_id] = request, group
        self.name_of |= dict.fromkeys(group.numbers, request.request_id)

    def end(self, request_id: str) -> tuple[Request, _Group]:
        request, group = self.groups.pop(request_id)
        for one in group.requests.values():
            del self.name_of[one.request_id]
        if not self.groups:
            seldom.end()
        return request, group

    def take(self, outputs: Outputs) -> None:
        """Remove the outputs of variants, and add one output for each request whose variants have
        all ended."""
        mine = [one for one in outputs.outputs if one.request_id in self.name_of]
        if not mine:
            return
        outputs.outputs = [one for one in outputs.outputs if one.request_id not in self.name_of]
        for one in mine:
            name = self.name_of[one.request_id]
            if one.finish_reason is not None and self.groups[name][1].take(one):
                _, group = self.end(name)
                outputs.outputs.append(group.last(name, self.others))
                outputs.finished_requests = (outputs.finished_requests or set()) | {name}


_running: Beside[_Running] = Beside()


def expand(
    standing: object, request: Any, num: int, make: Callable[[int], Any], num_tokens: int
) -> None:
    """Make the variants of a request.

    Args:
        standing: vLLM's Request that stands for the variants.
        request: vLLM's EngineCoreRequest, without its ticket. It has a variant's id while that
            variant is made.
        num: how many variants there are.
        make: called with the number of a variant; makes the variant's Request.
        num_tokens: size of the vocabulary.

    Raises:
        ScopeError: no variant is possible here. The error is that of the first variant.
    """
    name, made = request.request_id, {}
    errors: dict[int, ScopeError] = {}
    try:
        for number in range(num):
            request.request_id = f"{name}.{number}"
            try:
                made[number] = make(number)
            except ScopeError as error:
                errors[number] = error
    finally:
        request.request_id = name  # vLLM reports an error to the front-end under this id
    if not made:
        raise errors[0]
    asked = request.sampling_params.logprob_token_ids
    sentences = {number: str(error) for number, error in errors.items()}
    _entered.put(standing, _Group(made, sentences, asked, num_tokens))


def variants_of(scheduler: Scheduler, request: Request) -> list[Request]:
    """The requests to schedule in place of one that stands for them; empty for any other
    request."""
    group = _entered.pop(request)
    if group is None:
        return []
    running = _running.of(scheduler) or _running.put(scheduler, _Running())
    some = list(group.requests.values())
    group.num_tokens_each = sum(_num_tokens(scheduler, one) for one in some) // len(some)
    running.begin(request, group)
    return some


def _num_tokens(scheduler: Scheduler, request: Request) -> int:
    """How many tokens of a variant's prompt the prefix cache lacks after another variant has been
    computed."""
    known, size = entered(request), scheduler.block_size
    if known is None or known.first_edited is None or not scheduler.kv_cache_manager.enable_caching:
        return request.num_prompt_tokens
    return request.num_prompt_tokens - known.first_edited // size * size


def most_tokens(scheduler: Scheduler) -> int | None:
    """The most tokens that the next step may have; None if vLLM's own bound holds.

    Returns None if there are no variants, if scheduling is not async, or if there are more than a
    few other requests. Otherwise the bound leaves room for any prompt that waits, and for one token
    and the drafts of each other request, so that every request comes into a step.
    """
    running = _running.of(scheduler)
    if running is None or not running.groups:
        return None
    num_tokens, others = 0, []
    running.others = False
    for name, request in scheduler.requests.items():
        of = running.name_of.get(name)
        if of is not None:
            num_tokens += running.groups[of][1].num_tokens_each
            continue
        others.append(request.num_tokens)
        running.others = running.others or not name.startswith(SWEPT)
    few = len(others) <= (len(scheduler.requests) - len(others)) // 8
    config = scheduler.vllm_config
    if not (few and config.scheduler_config.async_scheduling):
        return None
    longest = [request.num_prompt_tokens for request, _ in running.groups.values()]
    each = 1 + config.num_speculative_tokens
    return max(_LEAST_TOKENS, *longest, *others, num_tokens // _PARTS) + each * len(others)


def with_variants(
    scheduler: Scheduler, request_ids: str | Iterable[str] | None
) -> str | Iterable[str] | None:
    """The ids of requests that are to end. The id of a request that stands for variants is replaced
    by the ids of those variants that have not ended."""
    running = _running.of(scheduler)
    if running is None or request_ids is None or not running.groups:
        return request_ids
    some = [request_ids] if isinstance(request_ids, str) else request_ids
    return [each for name in some for each in _ids(running, name)]


def _ids(running: _Running, name: str) -> Iterable[str]:
    known = running.groups.get(name)
    return (name,) if known is None else known[1].numbers


def aborted(scheduler: Scheduler, ended: list[Request]) -> list[Request]:
    """The requests that were aborted. Variants, which front-ends do not know, are replaced by the
    request that stands for them."""
    running = _running.of(scheduler)
    if running is None or not running.groups:
        return ended
    names = [running.name_of.get(one.request_id) for one in ended]
    others = [one for one, name in zip(ended, names, strict=True) if name is None]
    standing = [running.end(name)[0] for name in dict.fromkeys(names) if name is not None]
    if scheduler.finished_req_ids_dict is not None:  # data-parallel clients count these
        for request in standing:
            scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)
    return others + standing


def stands_for_some(scheduler: Scheduler) -> bool:
    """True if some request stands for variants that have not all ended."""
    running = _running.of(scheduler)
    return running is not None and bool(running.groups)


def take_variants(
    original: Callable[..., dict[int, Outputs]], self: Scheduler, *args: object, **kwargs: object
) -> dict[int, Outputs]:
    """Join the answers of variants into one answer of the request that stands for them."""
    outputs = original(self, *args, **kwargs)
    running = _running.of(self)
    if running is not None and running.groups:
        for each in outputs.values():
            running.take(each)
    return outputs
