"""`torch.ops.vllm_scope.tap`: the op that is traced into the model's graph.

Owns:  the registration of the op, and the table that maps each tap to the worker's state of the
       step.
Runs:  in the model's forward. When a CUDA graph is replayed, this Python code does not run. This
       code runs in eager pieces of the model, and on a CPU. There, a tap that does nothing launches
       no kernel, and a step can be drained tap by tap.

The op writes to the arena and the rows. The op's schema declares these writes, so that the compiler
copies neither the arena nor the rows. Traced tensor code (index_copy_) in place of the op would be
worse: the compiled graph made three temporary tensors of the arena's size in each step (measured
with torch 2.13). The op gets the tap's number as a tensor. If the number were a constant, the
compiler would compile the graph of each layer separately. For 32 layers, this took 26 s instead of
4 s (measured on an H200).
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_scope.graph.tap import definition, graphs


class StepRoute(graphs.Route, Protocol):
    """The worker's state of the current step, for taps that run in Python."""

    #: True during a step in which a tap does something for at least one row.
    active: bool

    def begin_tap(self, tap: int) -> tuple[int, int] | None:
        """The arguments (slot_base, slots_per_token) of `definition.tap_rows` for this tap in this
        step. None if the tap does nothing in this step."""

    def end_tap(self, tap: int) -> None:
        """The op calls this when the tap has written its rows (or, on a GPU, enqueued the
        write)."""


#: Maps the address of a tap's row in Tables.taps to the worker's state and the tap's number. The
#: references are weak, because a worker's state keeps its model alive. If an engine does not start,
#: vLLM does not shut down the worker, and nothing would remove the references.
_routes: dict[int, tuple[weakref.ref[StepRoute], int]] = {}


def connect(taps: Tensor, route: StepRoute) -> None:
    """Store, for each tap of a table, the worker's state that the tap must use.

    Args:
        taps: Tables.taps. The tensor must keep its address until `disconnect`.
        route: the worker's state. The caller keeps this object alive.
    """
    for tap in range(taps.shape[0]):
        _routes[taps[tap].data_ptr()] = (weakref.ref(route), tap)


def disconnect(taps: Tensor) -> None:
    for tap in range(taps.shape[0]):
        _routes.pop(taps[tap].data_ptr(), None)


# `definition.tap_rows` documents these arguments of the op.
_TABLES = (
    "Tensor tokens, Tensor programs, Tensor ops, Tensor vectors, Tensor tap, Tensor host) -> ()"
)


def _tap(hidden: Tensor, residual: Tensor | None, arena: Tensor, *tables: Tensor) -> None:
    tap = tables[-2]
    known, number = _routes.get(tap.data_ptr(), (None, 0))
    route = None if known is None else known()
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if route is None or capturing:
        # A captured graph is never drained tap by tap. When the graph is replayed, the tables say
        # which program each row runs.
        with graphs.noted(route, number) if route is not None and capturing else nullcontext():
            _launch(hidden, residual, arena, *tables, 0, 0)
        return
    if route.active and (place := route.begin_tap(number)) is not None:
        _launch(hidden, residual, arena, *tables, *place)
        route.end_tap(number)


def _launch(hidden: Tensor, residual: Tensor | None, *arguments: Any) -> None:
    # In vLLM's Transformers backend, rows have a batch dimension of size 1.
    hidden = hidden.view(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.view(-1, residual.shape[-1])
    if hidden.is_cuda:
        from vllm_scope.graph.tap import kernel  # needs Triton

        kernel.tap_rows(hidden, residual, *arguments)
    else:
        definition.tap_rows(hidden, residual, *arguments)


def _fake(*_: object) -> None:
    """Replaces the op while a graph is traced. Like the op, this function returns nothing."""


_library = torch.library.Library("vllm_scope", "FRAGMENT")


def register() -> None:
    """Define the op. Later calls in the same process do nothing."""
    if hasattr(torch.ops.vllm_scope, "tap"):
        return
    stream = "Tensor(a0!) hidden, Tensor(a1!)? residual, Tensor(a2!) arena, "
    _library.define(f"tap({stream}{_TABLES}")
    for key in ("CPU", "CUDA"):
        _library.impl("tap", _tap, dispatch_key=key)
    _library._register_fake("tap", _fake)
