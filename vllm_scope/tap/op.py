"""`torch.ops.vllm_scope.tap`, the op that is traced into the model's graph.

Owns:  the registration, and the route from an arena to the worker's live state.
Runs:  traced at load; on the GPU mostly replayed inside CUDA graphs, where this
       Python does not run at all. Where it does run (eager pieces, the CPU) it
       may skip the launch of an idle step and drain tap by tap.

The op mutates the arena that it is given. As a custom op with `mutates_args` it
passes the arena straight through; traced tensor code (index_copy_) made three
arena-sized temporaries a step (measured, torch 2.13).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_scope.tap import definition


class StepRoute(Protocol):
    """The worker's state of the current step, asked by taps that run in Python."""

    #: A step with reads is being computed.
    active: bool

    def begin_tap(self, tap: int) -> tuple[int, int]:
        """(slot_base, read_stride) for this tap of this step."""

    def end_tap(self, tap: int) -> None:
        """The tap's rows are written (enqueued, on a GPU)."""


_routes: dict[int, StepRoute] = {}


def connect(arena: Tensor, route: StepRoute) -> None:
    """Let taps on `arena` find the worker's state. Arenas keep their address for life."""
    _routes[arena.data_ptr()] = route


def disconnect(arena: Tensor) -> None:
    _routes.pop(arena.data_ptr(), None)


def _tap(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    tap: int,
) -> None:
    route = _routes.get(arena.data_ptr())
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if route is None or capturing:
        # Inside a graph the launch is baked with the plain layout; which rows do
        # anything is decided by the tables at replay.
        _launch(hidden, residual, arena, tokens, programs, ops, tap, 0, 1)
    elif route.active:
        base, stride = route.begin_tap(tap)
        _launch(hidden, residual, arena, tokens, programs, ops, tap, base, stride)
        route.end_tap(tap)


def _launch(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    tap: int,
    slot_base: int,
    read_stride: int,
) -> None:
    # Some models carry a batch dimension of one (Transformers backend).
    hidden = hidden.view(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.view(-1, residual.shape[-1])
    if hidden.is_cuda:
        from vllm_scope.tap import kernel as impl
    else:
        impl = definition  # type: ignore[assignment]
    impl.tap_rows(
        hidden, residual, arena, tokens, programs, ops, tap, slot_base, read_stride
    )


def _tap_fake(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    tap: int,
) -> None:
    return None


_library = torch.library.Library("vllm_scope", "FRAGMENT")


def register() -> None:
    """Define the op, once per process."""
    if hasattr(torch.ops.vllm_scope, "tap"):
        return
    schema = torch.library.infer_schema(_tap, mutates_args=["arena"])
    _library.define("tap" + schema)
    for key in ("CPU", "CUDA"):
        _library.impl("tap", _tap, dispatch_key=key)
    _library._register_fake("tap", _tap_fake)
