"""`torch.ops.vllm_scope.tap`: the op that is traced into the model's graph.

Owns:  the registration of the op, and the route from a tap to the worker's state of the step.
Runs:  in the model's forward. Inside a replayed CUDA graph this Python code does not run. Where it
       runs (eager pieces, the CPU), idle taps skip the launch, and steps can drain tap by tap.

`tap` mutates the arena and the rows. The schema declares these mutations. Therefore the compiler
makes no copies. Traced tensor code (index_copy_) instead of the op made three temporaries of the
arena's size in each step (measured, torch 2.13). The tap's number is a tensor. With a constant,
each layer's graph would be compiled separately: 26 s instead of 4 s for 32 layers (measured on an
H200).
"""

from __future__ import annotations

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
        """(slot_base, slots_per_token) of this tap in this step. None if the tap does nothing."""

    def end_tap(self, tap: int) -> None:
        """The op calls this after it has written the tap's rows (on a GPU: enqueued the write)."""


#: Address of a tap's row in Tables.taps -> (the worker's state, the tap's number).
_routes: dict[int, tuple[StepRoute, int]] = {}


def connect(taps: Tensor, route: StepRoute) -> None:
    """Route the taps of a table to the worker's state.

    Args:
        taps: Tables.taps. The tensor must keep its address until `disconnect`.
    """
    for tap in range(taps.shape[0]):
        _routes[taps[tap].data_ptr()] = (route, tap)


def disconnect(taps: Tensor) -> None:
    for tap in range(taps.shape[0]):
        _routes.pop(taps[tap].data_ptr(), None)


# definition.tap_rows documents the arguments.
_TABLES = (
    "Tensor tokens, Tensor programs, Tensor ops, Tensor vectors, Tensor tap, Tensor host) -> ()"
)


def _tap(hidden: Tensor, residual: Tensor | None, arena: Tensor, *tables: Tensor) -> None:
    tap = tables[-2]
    found = _routes.get(tap.data_ptr())
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if found is None or capturing:
        # A captured graph is never drained tap by tap. At replay the tables say what each row does.
        with graphs.noted(*found) if found is not None and capturing else nullcontext():
            _launch(hidden, residual, arena, *tables, 0, 0)
        return
    route, number = found
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
    """Replaces the op while a graph is traced. Like the op, it returns nothing."""


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
