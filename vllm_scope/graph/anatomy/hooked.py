"""Decoder layers that call Python functions before and after the layer's forward.

Runs:  in models that are not compiled. Functions can be installed at any time.

A layer's exit tap runs after the functions, on the rows that the functions have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor, nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import parameters, rebuilt

#: The arguments are the layer's number, a bool, and the tensors `hidden` and `residual`. The bool
#: is True before the layer runs, and False after the layer ran. The stream is `hidden`, or hidden +
#: residual if there is a residual. `hidden` and `residual` are [num_tokens, hidden_size]. A
#: function may edit the tensors in place.
Call = Callable[[int, bool, Tensor, Tensor | None], None]


def install_calls(anatomy: Anatomy, call: Call) -> None:
    """Make each layer call `call` before and after the layer's forward. Raises CompatError if a
    forward has no parameter `hidden_states`."""
    for number, layer in anatomy.layers.items():
        untapped = getattr(layer, "scope_base", type(layer))
        hooked = _hooked_layer(untapped, anatomy.convention, number, call)
        layer.__class__ = rebuilt(type(layer), hooked, anatomy.convention)


def _hooked_layer(base: type, convention: Convention, number: int, call: Call) -> type[nn.Module]:
    names = parameters(base)
    if "hidden_states" not in names:
        raise CompatError(f"{base.__name__}.forward has no hidden_states to give to functions")
    sums = convention is Convention.SUM
    pair = convention is not Convention.TENSOR

    class Hooked(base):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> object:
            given = dict(zip(names, args, strict=False)) | kwargs
            residual = given.get("residual") if sums else None
            _call(call, number, True, given["hidden_states"], residual)
            out = super().forward(*args, **kwargs)
            hidden, residual = (out[0], out[1]) if pair else (out, None)
            _call(call, number, False, hidden, residual if sums else None)
            return out

    # The code that installs taps looks for `hidden_states` in the signature.
    Hooked.forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    Hooked.__name__ = Hooked.__qualname__ = f"Hooked{base.__name__}"
    return Hooked


def _call(call: Call, number: int, before: bool, hidden: Tensor, residual: Tensor | None) -> None:
    # In vLLM's Transformers backend, rows have a batch dimension of size 1.
    hidden = hidden.view(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.view(-1, residual.shape[-1])
    call(number, before, hidden, residual)
