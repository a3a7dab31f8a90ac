"""`torch.ops.vllm_scope.tap`, and `tap_read`: the ops that are traced into the model's graph.

Owns:  the registration, and the route from an arena to the worker's live state.
Runs:  traced at load; on the GPU mostly replayed inside CUDA graphs, where this
       Python does not run at all. Where it does run (eager pieces, the CPU) it
       may skip the launch of an idle step and drain tap by tap.

The op mutates the arena, and the stream where a row is edited; `tap_read`, for places that
can be read alone, the arena. As custom ops with `mutates_args` they pass them straight
through; traced tensor code (index_copy_) made three arena-sized temporaries a step
(measured, torch 2.13). The tap's number is a tensor too: as a constant it would make every
layer's graph another one to compile (26 s instead of 4 for 32 layers, measured on an H200).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from vllm_scope.graph.tap import definition


class StepRoute(Protocol):
    """The worker's state of the current step, asked by taps that run in Python."""

    #: A step with reads is being computed.
    active: bool

    def begin_tap(self, tap: int) -> tuple[int, int] | None:
        """(slot_base, slots_per_token) for this tap of this step; None where no row does
        anything at it."""

    def end_tap(self, tap: int) -> None:
        """The tap's rows are written (enqueued, on a GPU)."""


#: Address of a tap's number on the device -> (the worker's state, the number).
_routes: dict[int, tuple[StepRoute, int]] = {}


def connect(numbers: Tensor, route: StepRoute) -> None:
    """Let the taps whose numbers are in `numbers` find the worker's state.

    Args:
        numbers: [num_taps] int32, device: 0, 1, ... Keeps its address for life.
    """
    for tap in range(numbers.shape[0]):
        _routes[numbers[tap].data_ptr()] = (route, tap)


def disconnect(numbers: Tensor) -> None:
    for tap in range(numbers.shape[0]):
        _routes.pop(numbers[tap].data_ptr(), None)


def _tap(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    vectors: Tensor,
    tap: Tensor,
    host: Tensor,
) -> None:
    found = _routes.get(tap.data_ptr())
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if found is None or capturing:
        # Inside a graph the launch is baked with the plain layout; which rows do
        # anything is decided by the tables at replay.
        _launch(hidden, residual, arena, tokens, programs, ops, vectors, tap, host, 0, 0)
        return
    route, number = found
    if route.active and (place := route.begin_tap(number)) is not None:
        _launch(hidden, residual, arena, tokens, programs, ops, vectors, tap, host, *place)
        route.end_tap(number)


def _launch(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    vectors: Tensor,
    tap: Tensor,
    host: Tensor,
    slot_base: int,
    slots_per_token: int,
) -> None:
    # Some models carry a batch dimension of one (Transformers backend).
    hidden = hidden.view(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.view(-1, residual.shape[-1])
    tap_rows = definition.tap_rows
    if hidden.is_cuda:
        from vllm_scope.graph.tap.kernel import tap_rows
    tap_rows(
        hidden, residual, arena, tokens, programs, ops, vectors, tap, host,
        slot_base, slots_per_token,
    )  # fmt: skip


def _tap_read(
    hidden: Tensor,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    vectors: Tensor,
    tap: Tensor,
    host: Tensor,
) -> None:
    """Where no program edits: `hidden` is not written, and the compiler knows."""
    _tap(hidden, None, arena, tokens, programs, ops, vectors, tap, host)


def _fake(*_: object) -> None:
    """While a graph is traced: the ops return nothing."""


_library = torch.library.Library("vllm_scope", "FRAGMENT")


def register() -> None:
    """Define the ops, once per process."""
    if hasattr(torch.ops.vllm_scope, "tap"):
        return
    _define("tap", _tap, ["hidden", "residual", "arena"])
    _define("tap_read", _tap_read, ["arena"])


def _define(name: str, function: Callable[..., None], mutates: list[str]) -> None:
    _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, dispatch_key=key)
    _library._register_fake(name, _fake)
