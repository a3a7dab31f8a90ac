"""Gives decoder layers a subclass whose forward carries the taps.

Owns:  the traced code around the op.
Runs:  `install_taps` once, after load and before the first compiled call; the
       forwards below are then traced into the model's graph. The structure never
       changes afterwards: vLLM drops torch.compile's guards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.anatomy.convention import Convention
from vllm_scope.anatomy.layers import Anatomy
from vllm_scope.errors import CompatError
from vllm_scope.tap.tables import Tables

#: Names of the (non-persistent) buffers that a tapped layer holds.
_BUFFERS = ("scope_arena", "scope_tokens", "scope_programs", "scope_ops")


def install_taps(
    anatomy: Anatomy, tap_of: Mapping[int, int], arena: Tensor, tables: Tables
) -> tuple[int, ...]:
    """Tap the boundaries that this worker's layers touch.

    Args:
        anatomy: the layers.
        tap_of: boundary -> column in the program table, of the whole model.
        arena: [num_slots, hidden_size], the arena's rows.
        tables: the device tables.

    Returns:
        The boundaries that carry a tap here.

    Raises:
        CompatError: a layer's forward does not take `hidden_states`.
    """
    tapped = []
    for number, layer in sorted(anatomy.layers.items()):
        entry = tap_of.get(0) if number == 0 else None
        exit_ = tap_of.get(number + 1)
        if entry is None and exit_ is None:
            continue
        for name, tensor in zip(
            _BUFFERS, (arena, tables.tokens, tables.programs, tables.ops), strict=True
        ):
            layer.register_buffer(name, tensor, persistent=False)
        for name, tap in (("scope_entry", entry), ("scope_exit", exit_)):
            if tap is not None:
                layer.register_buffer(name, tables.numbers[tap], persistent=False)
        layer.__class__ = _tapped_class(
            type(layer), anatomy.convention, entry is not None, exit_ is not None
        )
        tapped += ([0] if entry is not None else []) + ([number + 1] if exit_ is not None else [])
    return tuple(tapped)


def _tapped_class(base: type, convention: Convention, entry: bool, exit_: bool) -> type[nn.Module]:
    """A subclass of `base` with taps at its entry and exit."""
    names = list(inspect.signature(base.forward).parameters)[1:]  # type: ignore[attr-defined]
    if entry and "hidden_states" not in names:
        raise CompatError(f"{base.__name__}.forward has no hidden_states to read as the embedding")
    at = names.index("hidden_states") if "hidden_states" in names else -1
    sums = convention is Convention.SUM
    pair = convention is not Convention.TENSOR

    class Tapped(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if entry:
                # Layer 0 gets the embedding output, and no residual yet.
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[at]
                torch.ops.vllm_scope.tap(
                    hidden, None, self.scope_arena, self.scope_tokens,
                    self.scope_programs, self.scope_ops, self.scope_entry,
                )  # fmt: skip
            out = super().forward(*args, **kwargs)
            if exit_:
                torch.ops.vllm_scope.tap(
                    out[0] if pair else out, out[1] if sums else None, self.scope_arena,
                    self.scope_tokens, self.scope_programs, self.scope_ops, self.scope_exit,
                )  # fmt: skip
            return out

    Tapped.__name__ = f"Tapped{base.__name__}"
    Tapped.__qualname__ = Tapped.__name__
    return Tapped
