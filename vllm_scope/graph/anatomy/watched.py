"""Records one forward of a model without taps, by hooks.

Owns:  Watch, and the records NormCall and LayerCall.
Runs:  one or two times, after the model is loaded. Not inside a compiled graph.
From:  layers.   To: proof, supposed.

Usually random rows replace the rows that enter the first layer. The record then depends neither on
a dummy token's embedding nor on another pipeline stage. With `noise=False`, the model's own rows
enter the first layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.source import is_norm
from vllm_scope.graph.anatomy.tapped import parameters

_Args = tuple[object, ...]
_Kwargs = dict[str, object]


@dataclass
class NormCall:
    """Copies of a norm's arguments, and of the second value that the norm returned.

    Attributes:
        hidden, residual, second: [num_tokens, hidden_size].
    """

    hidden: Tensor
    residual: Tensor | None
    second: Tensor | None = None


@dataclass
class LayerCall:
    """Copies of a layer's arguments, and of the values that the layer returned.

    Attributes:
        calls: the number of times that the layer ran. The other attributes describe the last call.
        given: the arguments (hidden, residual).
        handed: one bool for each value that the previous layer returned. True if this layer got the
            same tensor object. None for the first layer.
        first: the first child that the layer called.
        returned: the layer's return value.
    """

    calls: int = 0
    handed: tuple[bool, ...] | None = None
    given: tuple[Tensor, Tensor | None] | None = None
    first: nn.Module | None = None
    returned: tuple[object, ...] | object = None


class Watch:
    """Records the forward that runs inside the `with` block.

    Args:
        noise: True if random rows enter the first layer instead of the model's own rows.

    Attributes:
        layers: the record of each layer by the layer's number, in the order of the layers.
        norms: the calls of each norm, for norms in the layers and for the norm after the layers.
        routed: for each layer in `Anatomy.routers`, the values that the layer's router returned.
        attended: for each layer number in `Anatomy.attention`, by site, the rows that the layer's
            attention gets or returns.
    """

    def __init__(self, anatomy: Anatomy, noise: bool = True) -> None:
        self._anatomy, self._noise, self._hooks = anatomy, noise, ExitStack()
        self.layers = {number: LayerCall() for number in sorted(anatomy.layers)}
        self.norms: dict[nn.Module, list[NormCall]] = defaultdict(list)
        self.routed: dict[int, list[object]] = {number: [] for number in sorted(anatomy.routers)}
        self.attended: dict[int, dict[str, object]] = {n: {} for n in sorted(anatomy.attention)}

    def __enter__(self) -> Self:
        anatomy, hooks, left = self._anatomy, self._hooks, _Left()
        norms = [] if anatomy.norm_here is None else [anatomy.norm_here]
        for number, layer in anatomy.layers.items():
            noise = self._noise and number == min(self.layers)
            _LayerRecorder(self.layers[number], noise, left).hook(layer, hooks)
            norms += [child for name, child in layer.named_children() if is_norm(name)]
        for norm in dict.fromkeys(norms):
            _NormRecorder(self.norms, norm).hook(hooks)
        for number, router in anatomy.routers.items():
            _after(router, partial(_record_router, self.routed[number]), hooks)
        for number, module in anatomy.attention.items():
            _record_attention(module, self.attended[number], hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._hooks.close()


def _before(module: nn.Module, hook: Callable[..., Any], hooks: ExitStack) -> None:
    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _after(module: nn.Module, hook: Callable[..., Any], hooks: ExitStack) -> None:
    hooks.callback(module.register_forward_hook(hook).remove)


@dataclass
class _Left:
    """The values that the most recent layer returned. The tensors are not copies."""

    values: tuple[object, ...] | None = None


@dataclass
class _LayerRecorder:
    """Records one layer. If `noise` is True, random rows replace the rows that the layer gets."""

    call: LayerCall
    noise: bool
    left: _Left

    def hook(self, layer: nn.Module, hooks: ExitStack) -> None:
        _before(layer, partial(self._enter, parameters(type(layer))), hooks)
        _after(layer, self._leave, hooks)
        for child in layer.children():
            _before(child, self._enter_child, hooks)

    def _enter(
        self, names: list[str], module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        self.call.calls += 1
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden, residual = given.get("hidden_states"), given.get("residual")
        if hidden is None:  # the parameter does not have the name `hidden_states`
            hidden = next(iter(_floats(given.values())), None)
        if self.left.values is not None:
            every = (*args, *kwargs.values())
            self.call.handed = tuple(
                isinstance(x, Tensor) and any(x is y for y in every) for x in self.left.values
            )
        changed = _noise(hidden, residual) if self.noise else {}
        hidden, residual = (changed.get(id(x), x) for x in (hidden, residual))
        if isinstance(hidden, Tensor):
            other = residual.clone() if isinstance(residual, Tensor) else None
            self.call.given = hidden.clone(), other
        return (
            tuple(changed.get(id(x), x) for x in args),
            {name: changed.get(id(x), x) for name, x in kwargs.items()},
        )

    def _enter_child(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        if self.call.first is None:
            self.call.first = module

    def _leave(self, module: nn.Module, args: _Args, out: object) -> None:
        parts = tuple(out) if isinstance(out, tuple | list) else (out,)
        self.left.values = parts
        # The returned tensors are copied, because the next norm can write to these tensors.
        self.call.returned = (
            tuple(map(_copied, parts)) if isinstance(out, tuple | list) else _copied(out)
        )


@dataclass
class _NormRecorder:
    """Records one norm. A norm that does not run has no entry in `norms`."""

    norms: dict[nn.Module, list[NormCall]]
    norm: nn.Module

    def hook(self, hooks: ExitStack) -> None:
        _before(self.norm, self._enter, hooks)
        _after(self.norm, self._leave, hooks)

    def _enter(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        hidden, residual = (*map(_copied, _floats((*args, *kwargs.values()))), None, None)[:2]
        if isinstance(hidden, Tensor):
            other = residual if isinstance(residual, Tensor) else None
            self.norms[self.norm].append(NormCall(hidden, other))

    def _leave(self, module: nn.Module, args: _Args, out: object) -> None:
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Tensor):
            self.norms[self.norm][-1].second = out[1].clone()


def _record_router(found: list[object], module: nn.Module, args: _Args, out: object) -> None:
    found.append(out[0] if isinstance(out, tuple) else out)


def _record_attention(module: nn.Module, found: dict[str, object], hooks: ExitStack) -> None:
    # vLLM's Transformers backend calls `forward` directly. Hooks do not run in such a call.
    original = module.forward

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.update(q=query, k=key, v=value)
        out = found["z"] = original(query, key, value, *args, **kwargs)
        return out

    module.forward = forward
    hooks.callback(lambda: module.__dict__.pop("forward", None))


def _floats(values: Iterable[object]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _noise(*tensors: object) -> dict[int, Tensor]:
    """Maps the `id` of each tensor to the random rows that replace the tensor. The rows are equal
    on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return {
        id(x): torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        for x in tensors if isinstance(x, Tensor)
    }  # fmt: skip
