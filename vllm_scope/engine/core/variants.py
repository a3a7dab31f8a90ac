"""One request of the front-end that stands for several: variants of it, each with edits of its own.

Owns:  the requests that EngineCore makes of such a request, their answers, and their end.
Runs:  in EngineCore: `expand` when the request enters (input thread), the rest on the scheduler's
       thread.
From:  request.ticket (Ticket.variants), entry.   To: the request's only output, which
       `engine.frontend.sweeping` reads.

The request itself is never scheduled. Its variants are requests as any other: they have its prompt
and its parameters, share KV blocks, and yield to other requests. Each samples one token. When the
last one has ended, the front-end gets one output with the log-probabilities of all of them, in the
field kv_transfer_params, which vLLM passes on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.refusals import sentence_in
from vllm_scope.engine.vllm_types import EngineCoreOutput, Request, Scheduler
from vllm_scope.engine.vllm_types import EngineCoreOutputs as Outputs
from vllm_scope.errors import ScopeError
from vllm_scope.request.answers import Answers


class _Group:
    """The variants of one request.

    Args:
        requests: number -> the variant.
        errors: number -> why a variant was refused.
        asked: the tokens whose log-probabilities are asked for; None for all.
    """

    def __init__(
        self, requests: dict[int, Request], errors: dict[int, str], asked: list[int] | None
    ) -> None:
        self.requests, self._errors, self._asked = requests, errors, asked
        self._found: dict[int, NDArray[np.float32]] = {}
        self._num = len(requests) + len(errors)
        self.numbers = {one.request_id: number for number, one in requests.items()}

    def take(self, output: EngineCoreOutput) -> bool:
        """Take the last output of a variant. True if it was the last variant."""
        number = self.numbers.pop(output.request_id)
        if output.new_logprobs is None:
            self._errors[number] = sentence_in(output.stop_reason)
        else:
            self._found[number] = self._logprobs(output.new_logprobs)
        return not self.numbers

    def _logprobs(self, found: Any) -> NDArray[np.float32]:
        """Of the asked tokens, or of all.

        Args:
            found: vLLM's LogprobsLists. It has the sampled token too.
        """
        ids, values = found.logprob_token_ids[0], found.logprobs[0]
        if self._asked is not None:
            known = dict(zip(ids.tolist(), values.tolist(), strict=True))
            return np.array([known[token] for token in self._asked], np.float32)
        every = np.empty(ids.max() + 1, np.float32)
        every[ids] = values
        return every

    def answers(self) -> Answers:
        size = max(map(len, self._found.values()), default=0)
        logprobs = np.full((self._num, size), np.nan, np.float32)
        for number, row in self._found.items():
            logprobs[number] = row
        return Answers(logprobs, self._errors)


#: vLLM's Request that stands for others -> those, until it comes to the scheduler.
_entered: Beside[_Group] = Beside()


class _Running:
    """The requests of one scheduler that stand for others."""

    def __init__(self) -> None:
        #: By id: the request, and its variants.
        self.groups: dict[str, tuple[Request, _Group]] = {}
        #: Id of a variant -> id of the request that stands for it.
        self.name_of: dict[str, str] = {}

    def begin(self, request: Request, group: _Group) -> None:
        self.groups[request.request_id] = request, group
        self.name_of |= dict.fromkeys(group.numbers, request.request_id)

    def end(self, request_id: str) -> tuple[Request, _Group]:
        request, group = self.groups.pop(request_id)
        for one in group.requests.values():
            del self.name_of[one.request_id]
        return request, group

    def take(self, outputs: Outputs) -> None:
        """Replace the outputs of variants by those of requests whose variants have all ended."""
        mine = [one for one in outputs.outputs if one.request_id in self.name_of]
        if not mine:
            return
        outputs.outputs = [one for one in outputs.outputs if one.request_id not in self.name_of]
        for one in mine:
            name = self.name_of[one.request_id]
            if one.finish_reason is not None and self.groups[name][1].take(one):
                _, group = self.end(name)
                outputs.outputs.append(_last(name, group.answers()))
                outputs.finished_requests = (outputs.finished_requests or set()) | {name}


_running: Beside[_Running] = Beside()


def expand(standing: object, request: Any, num: int, make: Callable[[int], Any]) -> None:
    """Make the variants of a request.

    Args:
        standing: vLLM's Request that stands for them.
        request: vLLM's EngineCoreRequest, without its ticket. It has a variant's id while that is
            made.
        num: of its variants.
        make: makes the Request of the variant of this number.

    Raises:
        ScopeError: no variant is possible here; the error of the first.
    """
    name, made = request.request_id, {}
    errors: dict[int, ScopeError] = {}
    for number in range(num):
        request.request_id = f"{name}.{number}"
        try:
            made[number] = make(number)
        except ScopeError as error:
            errors[number] = error
    request.request_id = name
    if not made:
        raise errors[0]
    asked = request.sampling_params.logprob_token_ids
    sentences = {number: str(error) for number, error in errors.items()}
    _entered.put(standing, _Group(made, sentences, asked))


def variants_of(scheduler: Scheduler, request: Request) -> list[Request]:
    """The requests to schedule in place of one that stands for them; empty for any other."""
    group = _entered.pop(request)
    if group is None:
        return []
    running = _running.of(scheduler) or _running.put(scheduler, _Running())
    running.begin(request, group)
    return list(group.requests.values())


def with_variants(
    scheduler: Scheduler, request_ids: str | Iterable[str] | None
) -> str | Iterable[str] | None:
    """Ids of requests that are to end; those that stand for others are replaced by the others."""
    running = _running.of(scheduler)
    if running is None or request_ids is None or not running.groups:
        return request_ids
    some = [request_ids] if isinstance(request_ids, str) else request_ids
    return [each for name in some for each in _ids(running, name)]


def _ids(running: _Running, name: str) -> Iterable[str]:
    known = running.groups.get(name)
    return (name,) if known is None else known[1].numbers


def aborted(scheduler: Scheduler, ended: list[Request]) -> list[Request]:
    """Requests that were aborted, as their front-ends know them: of variants, the request that
    stands for them."""
    running = _running.of(scheduler)
    if running is None or not running.groups:
        return ended
    names = [running.name_of.get(one.request_id) for one in ended]
    others = [one for one, name in zip(ended, names, strict=True) if name is None]
    return others + [running.end(name)[0] for name in dict.fromkeys(names) if name is not None]


def _last(request_id: str, answers: Answers) -> EngineCoreOutput:
    from vllm.v1.engine import EngineCoreOutput as Output
    from vllm.v1.engine import FinishReason

    last: EngineCoreOutput = Output(
        request_id, [], finish_reason=FinishReason.LENGTH, kv_transfer_params=answers.encode()
    )
    return last


def _take(
    original: Callable[..., dict[int, Outputs]],
    self: Scheduler,
    scheduler_output: object,
    model_runner_output: object,
) -> dict[int, Outputs]:
    """Scheduler.update_from_output: the last wrapper, which sees what the others added."""
    outputs = original(self, scheduler_output, model_runner_output)
    running = _running.of(self)
    if running is not None and running.groups:
        for each in outputs.values():
            running.take(each)
    return outputs


def wrap() -> None:
    """Call it after the other wrappers of Scheduler.update_from_output."""
    wrapping.wrap("Scheduler.update_from_output", _take)
