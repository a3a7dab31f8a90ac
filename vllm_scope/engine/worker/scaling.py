"""Applies, in one worker, the scales that policies set for the edits of requests.

Owns:  Scaling.
Runs:  in every worker, on its main thread.
From:  attach (the step's news, which is the same on all ranks).   To: worker.plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_scope.control.policy import Changes
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request.resolved import Resolved
from vllm_scope.worker.plan import Planner

#: A function of a request's resolved spec, its prompt ids, and a bool that is True if this rank
#: delivers rows. The function returns the request's program at this worker's boundaries.
Compile = Callable[[Resolved, Sequence[int], bool], RequestProgram]


@dataclass
class _Scaled:
    """One request whose policy can set scales.

    Attributes:
        asked: the request's resolved spec, with the newest scales.
        columns: the request's columns (engine.core.entered.Entered.columns).
        drains: True if this rank delivers the request's rows.
    """

    asked: Resolved
    prompt_ids: Sequence[int]
    columns: tuple[bytes, ...]
    drains: bool


class Scaling:
    """Requests whose scales can change."""

    def __init__(self, planner: Planner, compile_: Compile) -> None:
        self._planner, self._compile = planner, compile_
        self._requests: dict[str, _Scaled] = {}

    def add_request(
        self,
        req_id: str,
        asked: Resolved,
        prompt_ids: Sequence[int],
        columns: tuple[bytes, ...],
        drains: bool,
    ) -> None:
        if asked.scaled:
            self._requests[req_id] = _Scaled(asked, prompt_ids, columns, drains)

    def finish_request(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def begin_step(self, scales: Mapping[str, Changes]) -> list[tuple[str, Exception]]:
        """Apply new scales before the step's forward.

        Returns:
            The id and the error of each request whose scales could not be changed.
        """
        failed: list[tuple[str, Exception]] = []
        for req_id, changes in scales.items():
            known = self._requests.get(req_id)
            if known is None or req_id not in self._planner:
                continue
            try:
                for first, new in changes:
                    self._change(req_id, known, first, new)
            except Exception as error:
                failed.append((req_id, error))
        return failed

    def _change(self, req_id: str, known: _Scaled, first: int, new: Mapping[str, float]) -> None:
        known.asked = known.asked.rescaled(new)
        program = self._compile(known.asked, known.prompt_ids, known.drains)
        held = None
        if program.has_vectors and not program.generated_is_uniform:
            held = program.held(known.columns)
        self._planner.change_request(req_id, first, program, held)
