"""`torch.ops.vllm_scope.tap`: the op that is traced into the model's graph.

Owns:  the registration, and the route from a tap to the worker's state of the step.
Runs:  traced at load; on the GPU mostly replayed inside CUDA graphs, where this Python does
       not run (graphs.py leaves out the taps that do nothing). Where it runs (eager pieces, the
       CPU), it may skip the launch in an idle step and drain tap by tap.

`tap` mutates the arena and the rows. The schema says so, and the compiler therefore makes no
copies. Without the op, traced tensor code (index_copy_) made three arena-sized temporaries a step
(measured, torch 2.13). The tap's number is a tensor: with a constant, each layer's graph would be
compiled separately (26 s instead of 4 s for 32 layers, measured on an H200).
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
        """(slot_base, slots_per_token) of this tap in this step; None if this tap does nothing
        for any row."""

    def end_tap(self, tap: int) -> None:
        """Called once the tap's rows are written (on a GPU: enqueued)."""


#: Address of a tap's row of Tables.taps -> (the worker's state, the tap's number).
_routes: dict[int, tuple[StepRoute, int]] = {}


def connect(taps: Tensor, route: StepRoute) -> None:
    """Route the taps with these rows of Tables.taps to the worker's state.

    Args:
        taps: Tables.taps. It must keep its address until `disconnect`.
    """
    for tap in range(taps.shape[0]):
        _routes[taps[tap].data_ptr()] = (route, tap)


def disconnect(taps: Tensor) -> None:
    for tap in range(taps.shape[0]):
        _routes.pop(taps[tap].data_ptr(), None)


# The contract of the arguments: definition.tap_rows.
_TABLES = (
    "Tensor tokens, Tensor programs, Tensor ops, Tensor vectors, Tensor tap, Tensor host) -> ()"
)


def _tap(hidden: Tensor, residual: Tensor | None, arena: Tensor, *tables: Tensor) -> None:
    tap = tables[-2]
    found = _routes.get(tap.data_ptr())
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if found is None or capturing:
        # A captured graph has the plain layout. At replay the tables say which rows act.
        with graphs.noted(*found) if found is not None and capturing else nullcontext():
            _launch(hidden, residual, arena, *tables, 0, 0)
        return
    route, number = found
    if route.active and (place := route.begin_tap(number)) is not None:
        _launch(hidden, residual, arena, *tables, *place)
        route.end_tap(number)


def _launch(hidden: Tensor, residual: Tensor | None, *arguments: Any) -> None:
    # Some models carry a batch dimension of one (Transformers backend).
    hidden = hidden.view(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.view(-1, residual.shape[-1])
    if hidden.is_cuda:
        from vllm_scope.graph.tap import kernel  # needs Triton

        kernel.tap_rows(hidden, residual, *arguments)
    else:
        definition.tap_rows(hidden, residual, *arguments)


def _fake(*_: object) -> None:
    """Stands in for the op while a graph is traced. Returns nothing, as the op does."""


_library = torch.library.Library("vllm_scope", "FRAGMENT")


def register() -> None:
    """Define the op, once per process."""
    if hasattr(torch.ops.vllm_scope, "tap"):
        return
    stream = "Tensor(a0!) hidden, Tensor(a1!)? residual, Tensor(a2!) arena, "
    _library.define(f"tap({stream}{_TABLES}")
    for key in ("CPU", "CUDA"):
        _library.impl("tap", _tap, dispatch_key=key)
    _library._register_fake("tap", _fake)
