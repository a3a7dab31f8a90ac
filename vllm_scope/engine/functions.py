"""Runs Python functions of requests between layers, if the engine is one process and not compiled.

Owns:  the functions of each request, under a random name that is valid only in this process; the
       check whether an engine can run functions; the code that calls the functions in a step.
Runs:  in the front-end and the worker, which must be one process.
From:  frontend.translators.   To: graph.anatomy.hooked.

Promise: a function sees only the rows of its own request. If a function raises an error in a
completion, the completion's result is this error, and no function is called for the completion any
more. Other requests continue. If a request has functions, no other request uses its KV.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Set
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from vllm_scope.batch.labels import StepBatch
from vllm_scope.engine.vllm_types import Engine, EngineCoreRequest
from vllm_scope.errors import CompatError, SpecError
from vllm_scope.graph.anatomy.hooked import install_calls
from vllm_scope.graph.anatomy.layers import Anatomy

logger = logging.getLogger("vllm.vllm_scope")

#: The key of `extra_args` that holds the name of a request's functions (see `keep`).
FUNCTIONS = "scope_functions"


class Functions(Protocol):
    """The functions of one request, for all completions of the request.

    Attributes:
        places: a function runs at each of these places. (layer, True) is before the layer, and
            (layer, False) is after the layer.
    """

    @property
    def places(self) -> Set[tuple[int, bool]]: ...

    def call(
        self, child: int, place: tuple[int, bool], rows: Tensor, first: int, model: nn.Module
    ) -> Tensor | None:
        """Call the functions at a place with rows of the stream. Returns new rows of the same
        shape, or None to leave the rows unchanged.

        Args:
            child: index of the completion.
            rows: [num_rows, hidden_size], a copy of the rows at consecutive positions.
            first: position of the first row.
        """

    def fail(self, child: int, error: str) -> None:
        """Record that a function failed. No function is called for this completion any more."""


#: Maps each name that `keep` made to its functions. The references are weak: a request's
#: decorators (frontend.translators) keep its functions alive.
_kept: WeakValueDictionary[str, Functions] = WeakValueDictionary()


def keep(functions: Functions) -> str:
    """Give the functions a random name, and return the name. The name is valid as long as the
    caller has a reference to the functions."""
    token = uuid.uuid4().hex
    _kept[token] = functions
    return token


def _find(params: object) -> Functions | None:
    token = (getattr(params, "extra_args", None) or {}).get(FUNCTIONS)
    return _kept.get(token) if isinstance(token, str) else None


def has(params: object) -> bool:
    """True if a request has functions."""
    return _find(params) is not None


def check(params: object, engine: Engine) -> None:
    """Raises SpecError if a request has functions and this engine cannot run them."""
    if has(params):
        check_engine(engine)


def check_engine(engine: Engine) -> None:
    """Raises SpecError if an engine cannot run Python functions."""
    config, inner = engine.vllm_config, getattr(engine.engine_core, "engine_core", None)
    executor = type(inner.model_executor).__name__ if inner is not None else None
    reasons = {
        "runs in another process (VLLM_ENABLE_V1_MULTIPROCESSING=0 makes LLM run in this process; "
        "a server always uses another one)": inner is None,
        "has workers in other processes (distributed_executor_backend='uni')": executor
        != "UniProcExecutor",
        "compiles its model (set enforce_eager=True; then no request uses CUDA graphs)": (
            not config.model_config.enforce_eager
        ),
        "decodes speculatively, therefore rows can be discarded": config.speculative_config
        is not None,
    }
    for reason, present in reasons.items():
        if present:
            raise SpecError(
                "hooks are Python functions, which are arbitrary code, and this engine "
                f"{reason}. Read, Probe, Add, Ablate, Clamp and Replace of vllm_scope run "
                "everywhere: docs/faces.md names the action for each use."
            )


def salt(request: EngineCoreRequest, child: int) -> None:
    """Give a request with functions its own cache salt. The hashes of KV blocks depend on this
    salt. Therefore no other request uses this request's KV."""
    if _find(request.sampling_params) is not None:
        token = request.sampling_params.extra_args[FUNCTIONS]
        request.cache_salt = f"{request.cache_salt or ''}|{token}.{child}"


class StepFunctions:
    """The functions of a worker's requests, and the rows of these requests in the running step."""

    def __init__(self, anatomy: Anatomy, model: nn.Module) -> None:
        self._anatomy, self._model = anatomy, model
        self._installed = False
        self._requests: dict[str, tuple[Functions, int]] = {}
        self._errors: dict[str, str] = {}
        #: For each request: its id, its rows in the step, and the position of its first row.
        self._step: list[tuple[str, slice, int]] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add_request(self, req_id: str, params: object, child: int) -> None:
        functions = _find(params)
        if functions is None:
            return
        if not self._installed:
            try:
                install_calls(self._anatomy, self._call)
            except CompatError as error:
                raise SpecError(str(error)) from None
            self._installed = True
            logger.info("vllm-scope: layers call Python functions from now on.")
        self._requests[req_id] = (functions, child)

    def finish_request(self, req_id: str) -> str | None:
        """Remove a request. Returns the error of its functions, or None if no function failed."""
        self._requests.pop(req_id, None)
        return self._errors.pop(req_id, None)

    def begin_step(self, batch: StepBatch) -> None:
        self._step = [
            (req_id, slice(int(batch.query_start[i]), int(batch.query_start[i + 1])), int(first))
            for i, (req_id, first) in enumerate(zip(batch.req_ids, batch.num_computed, strict=True))
            if req_id in self._requests and req_id not in self._errors
        ]

    def end_step(self) -> None:
        self._step = []

    def _call(self, layer: int, before: bool, hidden: Tensor, residual: Tensor | None) -> None:
        for req_id, here, first in self._step:
            functions, child = self._requests[req_id]
            if (layer, before) not in functions.places or req_id in self._errors:
                continue
            rows = hidden[here].clone() if residual is None else hidden[here] + residual[here]
            try:
                found = functions.call(child, (layer, before), rows, first, self._model)
                if found is not None:
                    _check(found, rows)
                    _write(found, hidden[here], None if residual is None else residual[here])
            except Exception as error:
                where = f"{'before' if before else 'after'} layer {layer}"
                text = f"a function {where} failed: {type(error).__name__}: {error}"
                logger.warning("vllm-scope: request %s: %s", req_id, text, exc_info=True)
                self._errors[req_id] = text
                functions.fail(child, text)


def _check(found: object, rows: Tensor) -> None:
    if not isinstance(found, Tensor) or found.shape != rows.shape:
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(
            f"it returned {what}; it must return None or a tensor of {list(rows.shape)}."
        )


def _write(stream: Tensor, hidden: Tensor, residual: Tensor | None) -> None:
    with torch.no_grad():
        if residual is None:
            hidden.copy_(stream)
        else:
            # The next layer adds `hidden` to `residual`. Adding 0 is exact, so that the new row is
            # rounded only once, by this copy.
            residual.copy_(stream)
            hidden.zero_()
