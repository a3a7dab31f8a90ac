"""Makes several variants from one request of the front-end. Each variant has its own edits.

Owns:  the code that makes the variants of a request, ends the variants, and joins their answers.
Runs:  in EngineCore. `expand` runs on the input thread when the request enters. The other functions
       run on the scheduler's thread.
From:  request.ticket (Ticket.variants), entry.   To: engine.frontend.sweeping (reads the only
       output of the request).

The front-end's request stands for its variants, and is never scheduled itself. The variants are
ordinary requests with the prompt and the parameters of this request. The variants share KV blocks.
Each variant samples one token. After the last variant has ended, the front-end gets one output. The
log-probabilities of all variants are in the output's field kv_transfer_params, which vLLM does not
change.

With async scheduling, EngineCore prepares one step while the device computes another step. If one
step computed all waiting variants, no variant would be ready for the next step, and the device
would be idle. Therefore each step gets only a part of the waiting variants (`most_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.entered import entered
from vllm_scope.engine.refusals import sentence_in
from vllm_scope.engine.vllm_types import EngineCoreOutput, Request, Scheduler
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.errors import ScopeError
from vllm_scope.request.answers import NO_LOGPROBS, Answers
from vllm_scope.sweeps.yielding import SWEPT

#: The tokens of all variants are divided among this number of steps. The device computes one step,
#: EngineCore prepares the second step, and the variants of the third step wait.
_PARTS: Final = 3
#: The bound of a step (`most_tokens`) is never below this number of tokens. A smaller step would
#: take longer to launch than to compute.
_LEAST_TOKENS: Final = 1024


class _Group:
    """The variants of one request.

    Args:
        requests: maps the number of a variant to the variant.
        errors: maps the number of a variant to the reason why EngineCore refused the variant.
        asked: the tokens whose log-probabilities the request wants; None for all tokens.
        num_tokens: size of the vocabulary.
    """

    #: The approximate number of tokens of one variant that are not in the prefix cache.
    num_tokens_each = 0

    def __init__(
        self, requests: dict[int, Request], errors: dict[int, str], asked: list[int] | None,
        num_tokens: int,
    ) -> None:  # fmt: skip
        self.requests, self._errors, self._asked = requests, errors, asked
        self._num_tokens = num_tokens
        self._found: dict[int, NDArray[np.float32]] = {}
        self._num = len(requests) + len(errors)
        #: Maps the id of each variant that has not ended to the variant's number.
        self.numbers = {one.request_id: number for number, one in requests.items()}
        self._outputs: list[EngineCoreOutput] = []

    def take(self, output: EngineCoreOutput) -> bool:
        """Take the only output of a variant. Returns True if all variants have now ended."""
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
        """The output of the request that stands for the variants. The output has the tokens of all
        variants, and the times of the last variant. vLLM makes its metrics from these times.

        Args:
            others: True if EngineCore had requests outside of sweeps at the last step with
                variants.
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
    """The log-probabilities of the asked tokens, or of all tokens, as float32 [n]. None if vLLM did
    not return these log-probabilities.

    Args:
        found: vLLM's LogprobsLists, or None. Each row has first the sampled token, and then the
            asked tokens. If the rows of a step have different lengths, vLLM pads the shorter rows
            with token 0.
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
    """The sum of vLLM's PrefillStats; None if all items are None. `num_cached_tokens` is taken from
    the last item only, because vLLM subtracts this number from the length of one prompt."""
    some = [one for one in each if one is not None]
    if not some:
        return None
    names = [field.name for field in fields(some[0]) if field.name != "num_cached_tokens"]
    return replace(some[-1], **{name: sum(getattr(one, name) for one in some) for name in names})


#: Maps vLLM's Request that stands for variants to these variants. The entry stays until the
#: scheduler gets the Request.
_entered: Beside[_Group] = Beside()


class _Running:
    """All requests of one scheduler that stand for variants."""

    def __init__(self) -> None:
        #: Maps the id of a request that stands for variants to a pair: the request and its
        #: variants.
        self.groups: dict[str, tuple[Request, _Group]] = {}
        #: Maps the id of a variant to the id of the request that stands for the variant.
        self.name_of: dict[str, str] = {}
        #: True if the scheduler had requests outside of sweeps when the last step with variants was
        #: made.
        self.others = False

    def begin(self, request: Request, group: _Group) -> None:
        self.groups[request.request_id] = request, group
        self.name_of |= dict.fromkeys(group.numbers, request.request_id)

    def end(self, request_id: str) -> tuple[Request, _Group]:
        request, group = self.groups.pop(request_id)
        for one in group.requests.values():
            del self.name_of[one.request_id]
        return request, group

    def take(self, outputs: Outputs) -> None:
        """Remove the outputs of variants. If all variants of a request have ended, add one output
        for this request."""
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
        request: vLLM's EngineCoreRequest without its ticket. While `make` runs, the request has
            the id of the variant.
        num: number of variants.
        make: a function that makes the Request of the variant with a given number.
        num_tokens: size of the vocabulary.

    Raises:
        ScopeError: the error of the first variant, if the engine refuses all variants.
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
    """The variants that the scheduler gets in place of the request that stands for them. The list
    is empty for a request without variants."""
    group = _entered.pop(request)
    if group is None:
        return []
    running = _running.of(scheduler) or _running.put(scheduler, _Running())
    some = list(group.requests.values())
    group.num_tokens_each = sum(_num_tokens(scheduler, one) for one in some) // len(some)
    running.begin(request, group)
    return some


def _num_tokens(scheduler: Scheduler, request: Request) -> int:
    """The number of prompt tokens that a variant must compute after another variant of the same
    request was computed. The KV blocks before the first edit are then in the prefix cache."""
    known, size = entered(request), scheduler.block_size
    if known is None or known.first_edited is None or not scheduler.kv_cache_manager.enable_caching:
        return request.num_prompt_tokens
    return request.num_prompt_tokens - known.first_edited // size * size


def most_tokens(scheduler: Scheduler) -> int | None:
    """The largest number of tokens that the next step can have; None if only vLLM's bound applies.

    The result is None in three cases: there are no variants; async scheduling is off; or the number
    of other requests is more than an eighth of the number of variants. Otherwise the bound has room
    for the longest request, and also for one token and the draft tokens of each other request.
    Therefore vLLM can schedule every request in spite of the bound.
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
    """The ids of requests that must end. In place of the id of a request that stands for variants,
    the result has the ids of the request's running variants."""
    running = _running.of(scheduler)
    if running is None or request_ids is None or not running.groups:
        return request_ids
    some = [request_ids] if isinstance(request_ids, str) else request_ids
    return [each for name in some for each in _ids(running, name)]


def _ids(running: _Running, name: str) -> Iterable[str]:
    known = running.groups.get(name)
    return (name,) if known is None else known[1].numbers


def aborted(scheduler: Scheduler, ended: list[Request]) -> list[Request]:
    """The aborted requests. In place of variants, the result has the request that stands for them.
    Front-ends know the id of this request, but not the ids of variants."""
    running = _running.of(scheduler)
    if running is None or not running.groups:
        return ended
    names = [running.name_of.get(one.request_id) for one in ended]
    others = [one for one, name in zip(ended, names, strict=True) if name is None]
    standing = [running.end(name)[0] for name in dict.fromkeys(names) if name is not None]
    # vLLM's data-parallel clients count the ended requests by the ids in this dict.
    if scheduler.finished_req_ids_dict is not None:
        for request in standing:
            scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)
    return others + standing


def stands_for_some(scheduler: Scheduler) -> bool:
    """True if a request stands for variants, and not all of these variants have ended."""
    running = _running.of(scheduler)
    return running is not None and bool(running.groups)


def take_variants(
    original: Callable[..., dict[int, Outputs]], self: Scheduler, *args: object, **kwargs: object
) -> dict[int, Outputs]:
    """Scheduler.update_from_output. After the last variant of a request has ended, the wrapper
    joins the answers of all its variants into one answer of the request."""
    outputs = original(self, *args, **kwargs)
    running = _running.of(self)
    if running is not None and running.groups:
        for each in outputs.values():
            running.take(each)
    return outputs
