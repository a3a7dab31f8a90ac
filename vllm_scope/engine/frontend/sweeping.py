"""Makes the requests of one sweep, and turns their answers into cells.

Owns:  Sweeping.
Runs:  in the front-end process, on the caller's thread or event loop.
From:  sweeps.plan (the jobs), sweep_bounds.   To: sweep_runs (sends the requests).

If a sweep has no steering module and no receivers, the cells of a prompt differ only in the place
and the numbers of their edits. Therefore one check is enough for all cells of the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace

from vllm_scope.engine.frontend.alike import Alike, asking
from vllm_scope.engine.frontend.connection import connection_of
from vllm_scope.engine.frontend.prepared import Prepared
from vllm_scope.engine.frontend.sweep_bounds import (
    Bounded,
    NoTokenizer,
    cells_at_once,
    check_logprobs,
    check_tokens,
)
from vllm_scope.engine.vllm_types import Engine, RequestOutput
from vllm_scope.errors import CapacityError, ScopeError, SpecError, naming, shown
from vllm_scope.request.actions import Read
from vllm_scope.request.actions.base import number
from vllm_scope.request.answers import NO_LOGPROBS, Answers
from vllm_scope.request.spec import scope
from vllm_scope.results.budget import LABEL_BYTES
from vllm_scope.results.inbox import inbox
from vllm_scope.sweeps import yielding
from vllm_scope.sweeps.metrics import Logprobs
from vllm_scope.sweeps.plan import Cell, Job, Plan, Tokenizer
from vllm_scope.sweeps.source import ReadRows
from vllm_scope.sweeps.sweep import Sweep
from vllm_scope.sweeps.yielding import SWEPT, Yielding

#: The largest number of cells in one request, and the largest number of bytes of the rows and
#: vectors in the edits of these cells. Both numbers are small, because EngineCore makes the
#: variants for all cells of a request without a pause.
CELLS_TOGETHER: Final = 16
BYTES_TOGETHER: Final = 1 << 20
#: The prefix of the request ids of this process's sweeps, which no client can guess.
PREFIX: Final = f"{SWEPT}{secrets.token_hex(8)}-"


@dataclass(frozen=True)
class Request:
    """One request to vLLM, for one job or for several cells. If there are several cells, EngineCore
    makes one variant for each cell.

    Attributes:
        prepared: the checked request; None if the front-end must check the request as usual.
    """

    jobs: tuple[Job, ...]
    prompt: Mapping[str, object]
    params: Any
    prepared: Prepared | None

    @property
    def has_variants(self) -> bool:
        """True if the answer is an `Answers`, because EngineCore makes variants of the request."""
        return self.prepared is not None and bool(self.prepared.variants)


class Sweeping:
    """One sweep on a connected engine.

    Args:
        share: the part of a step's sequences and tokens that cells use. If the engine has other
            requests, cells run for only `share / 5` of the time (sweeps.yielding).
        alone: True if the engine has no other requests. In this case, the sweep does not look for
            other requests, and keeps the cells of two steps in the engine. The engine can then
            compute a step while this process takes the answers of the last step.
        tokenizer: None for the engine's tokenizer, which only the event loop's thread can use.
        most_cells: the largest number of cells that the sweep can have; None for any number.
    """

    def __init__(
        self, engine: Engine, prompts: object, sweep: Sweep, share: float, alone: bool = False,
        tokenizer: Tokenizer | None = None, most_cells: int | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(sweep, Sweep):
            raise SpecError(
                f"after the prompts comes {shown(sweep)}; give the engine, the prompts and a "
                "Sweep, in this order."
            )
        share = number(share, "share")
        if not 0 < share <= 1:
            raise SpecError(f"share is {shown(share)}; it must be above 0 and at most 1.")
        self._connection = connection_of(engine.output_processor)
        self._connection.require_taps()
        config = engine.vllm_config
        model = config.model_config
        bounded = Bounded(tokenizer or engine.tokenizer or NoTokenizer(), model)
        check = partial(check_tokens, model)
        self.plan = Plan(sweep, prompts, self._connection.sites, bounded, most_cells, check)
        check_logprobs(model, self.plan.token_ids)
        self._alone, self._config, self._processor = alone, config, engine.output_processor
        self._yielding = Yielding(share)
        self.take_share(share)
        # If a sweep has a steering module, one check is not enough, because only EngineCore has the
        # module's vectors. If a sweep has receivers, one check is not enough, because the requests
        # differ in their reads.
        alike = sweep.module is None and sweep.receivers is None
        self._alike = Alike.of_engine(engine) if alike else None
        self._jobs = _Peekable(self.plan.jobs())
        self._params = {ids: params_of(ids) for ids in set(self.plan.token_ids)}

    @property
    def over(self) -> bool:
        """True after all jobs were taken."""
        return self._jobs.over

    def take_share(self, share: float) -> None:
        """Set the share of a step that cells use from now on."""
        scheduler, longest = self._config.scheduler_config, max(map(len, self.plan.ids))
        batch = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // longest)
        most = max(1, int(share * batch)) * (2 if self._alone else 1)
        self._most = cells_at_once(most, self._num_logprobs())
        self._most_beside = max(1, min(self._most, CELLS_TOGETHER, yielding.TOKENS // longest))
        self._yielding.share = share

    def _others(self) -> bool:
        """True if this process has requests in the engine that belong to no sweep. The answers to
        cells say whether other front-ends have such requests (Yielding.elsewhere)."""
        names = () if self._alone else self._processor.request_states
        return not all(name.startswith(PREFIX) for name in names)

    @property
    def pause(self) -> float:
        """The time in seconds after which `due` can yield requests again, if the engine has no
        cells of this sweep."""
        return self._yielding.pause

    @property
    def _num_tokens(self) -> int:
        """Size of the vocabulary."""
        num: int = self._config.model_config.get_vocab_size()
        return num

    def _num_logprobs(self) -> int:
        """The largest number of log-probabilities in a cell's answer."""
        each = self.plan.token_ids
        return max(map(len, each)) if all(each) else self._num_tokens

    def due(self, num_running: int, tell: Callable[[Cell | None], object]) -> Iterator[Request]:
        """Yields the requests to send now. The engine already has `num_running` jobs of the sweep.

        Args:
            tell: called with each cell whose edit cannot be applied.
        """
        waits: bool | None = None
        while (job := self._sendable(tell)) is not None:
            others = self._others()
            if waits is None:
                waits = self._yielding.waits(num_running, others)
            yields = self._yielding.look(others)
            most = self._most_beside if yields else self._most
            if waits or num_running >= most:
                return
            num = self._num_together(job, most - num_running if yields else most // 4)
            if num_running and num > most - num_running:
                return  # wait until other cells have ended, and then send more cells in one request
            with naming(job.name):
                request = self._request(self._first(num))
            num_running += len(request.jobs)
            if yields:
                self._yielding.send()
            yield request

    def _sendable(self, tell: Callable[[Cell | None], object]) -> Job | None:
        """The next job that can be sent now, or None. If jobs before this job have an error, they
        are taken but not sent, and `tell` gets their cells."""
        while (job := self._jobs.peek()) is not None and job.error is not None:
            tell(self.plan.take(self._jobs.next(), None, None, job.error))
        return job

    def _num_together(self, job: Job, most: int) -> int:
        """The largest number of jobs in one request that begins with this job, at least 1. The
        number is at most `most` and at most CELLS_TOGETHER."""
        if self._alike is None or job.place is None or self._connection.always_answers:
            return 1
        return max(1, min(CELLS_TOGETHER, most))

    def _first(self, num: int) -> tuple[Job, ...]:
        """Take the next job, and the jobs after it that fit into the same request. In total, take
        at most `num` jobs."""
        jobs = [self._jobs.next()]
        num_bytes = jobs[0].num_bytes
        while len(jobs) < num:
            job = self._jobs.peek()
            if job is None or job.error is not None or job.prompt != jobs[0].prompt:
                break
            num_bytes += job.num_bytes
            if num_bytes > BYTES_TOGETHER:
                break
            jobs.append(self._jobs.next())
        return tuple(jobs)

    def _request(self, jobs: tuple[Job, ...]) -> Request:
        job = jobs[0]
        prompt = {"type": "token", "prompt_token_ids": job.ids}
        params = self._params[self.plan.token_ids[job.prompt]]
        if not job.actions:
            return Request(jobs, prompt, params, None)
        if job.place is None or self._alike is None:
            return Request(jobs, prompt, asking(params, scope(*job.actions)["scope"]), None)
        prepared = cells_of(self._alike, jobs, params)
        if self._yielding.elsewhere:
            # A single cell is sent as the only variant of its request, because only the answer to a
            # request with variants says whether EngineCore still has requests outside of sweeps.
            prepared = replace(prepared, variants=prepared.variants or (prepared.spec,))
        return Request(jobs, prompt, asking(params), prepared)

    def take(self, request: Request, output: RequestOutput | ScopeError) -> Iterator[Cell | None]:
        """Take the answer to a request. For each job of the request, yields the job's cell, or None
        if the answer completes no cell (Plan.take)."""
        job = request.jobs[0]
        if isinstance(output, CapacityError) and job.place is None:
            with naming(job.name):
                raise output  # the cells of the prompt need this job's rows
        if isinstance(output, ScopeError):
            yield from self._failed(request, str(output))
            return
        (completion,) = output.outputs
        if completion.finish_reason in ("error", "abort"):
            yield from self._failed(request, str(completion.stop_reason))
        elif request.has_variants:
            yield from self._of_cells(request.jobs, Answers.decode(output.kv_transfer_params))
        else:
            try:
                asked = self.plan.token_ids[job.prompt] or range(self._num_tokens)
                found = _logprobs(completion.logprobs, asked)
                rows = self._rows(completion.scope, job) if job.reads else None
            except ScopeError as error:
                yield from self.take(request, error)
                return
            yield self.plan.take(job, found, rows, None)

    def _failed(self, request: Request, error: str) -> Iterator[Cell | None]:
        return (self.plan.take(job, None, None, error) for job in request.jobs)

    def _of_cells(self, jobs: tuple[Job, ...], answers: Answers) -> Iterator[Cell | None]:
        self._yielding.elsewhere = answers.others
        logprobs = answers.logprobs.astype(np.float64)
        for i, job in enumerate(jobs):
            error = answers.errors.get(i)
            yield self.plan.take(job, None if error else logprobs[i], None, error)

    def _rows(self, result: Any, job: Job) -> ReadRows:
        """The rows that a job has read. The rows use a part of the budget until all cells of the
        prompt have been sent. Raises CapacityError if the budget has no room."""
        sites = self._connection.sites
        size = max(sites.row_size(read.site) for read in job.actions if isinstance(read, Read))
        row_bytes = size * getattr(torch, sites.dtype).itemsize
        return ReadRows(result, inbox().hold(result.delivered * (row_bytes + LABEL_BYTES)))


def cells_of(alike: Alike, jobs: Sequence[Job], params: Any) -> Prepared:
    """The checked request of some cells of a prompt. The check of the prompt's first cell is enough
    for all cells of the prompt.

    Raises:
        SpecError: the engine cannot run the first cell of the prompt.
    """
    first = alike.checked(jobs[0].prompt, jobs[0].actions, params, jobs[0].ids)
    return alike.with_edits(first, *(job.actions for job in jobs))  # type: ignore[arg-type]


class _Peekable:
    """An iterator of jobs, which can return the next job without taking the job."""

    def __init__(self, jobs: Iterator[Job | None]) -> None:
        self._jobs = jobs
        self._next: Job | None = None
        #: True after all jobs were taken.
        self.over = False

    def peek(self) -> Job | None:
        """The next job. None if the job must wait for an answer, or if there are no more jobs."""
        if self._next is None and not self.over:
            try:
                self._next = next(self._jobs)
            except StopIteration:
                self.over = True
        return self._next

    def next(self) -> Job:
        """Take the job that `peek` returned."""
        job, self._next = self._next, None
        assert job is not None
        return job


def _logprobs(found: Any, asked: Sequence[int]) -> Logprobs:
    """The log-probabilities of the asked tokens, float64 [n].

    Args:
        found: CompletionOutput.logprobs.

    Raises:
        ScopeError: vLLM did not return these log-probabilities.
    """
    try:
        return np.array([found[0][token].logprob for token in asked], np.float64)
    except LookupError:  # vLLM returned no log-probabilities, or those of other tokens
        raise ScopeError(NO_LOGPROBS) from None


def params_of(token_ids: tuple[int, ...]) -> Any:
    """SamplingParams that ask for one token, and for the log-probabilities of `token_ids`. If
    `token_ids` is empty, the answer has the log-probabilities of all tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked: dict[str, Any] = {"logprob_token_ids": list(dict.fromkeys(token_ids))}
    return SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True, **(asked if token_ids else {"logprobs": -1}),
    )  # fmt: skip
