"""One forward of a model without taps, recorded by hooks.

Owns:  Watch; NormCall and LayerCall, what it records.
Runs:  once, after the model is loaded. Not inside a compiled graph.
From:  layers.   To: proof.

The rows that enter the first layer are replaced by random ones. So the record does not depend on
the embedding of a dummy token, nor on what another pipeline stage would send.
"""

from __future__ import annotations

import inspect
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

_Args = tuple[object, ...]
_Kwargs = dict[str, object]


@dataclass
class NormCall:
    """Copies of what a norm was called with, and of the second thing that it returned.

    Attributes:
        hidden, residual: [num_tokens, hidden_size]; second, too.
    """

    hidden: Tensor
    residual: Tensor | None
    second: Tensor | None = None


@dataclass
class LayerCall:
    """Copies of what a layer was called with, and of what it returned.

    Attributes:
        calls: how often it ran; the rest is of the last time.
        given: hidden, residual.
        handed: of each thing that the layer before returned, whether this layer got that very
            tensor; None of the first layer.
        first: the first child that it called.
    """

    calls: int = 0
    handed: tuple[bool, ...] | None = None
    given: tuple[Tensor, Tensor | None] | None = None
    first: nn.Module | None = None
    returned: tuple[object, ...] | object = None


class Watch:
    """Records what a model's layers and norms get and return while it is entered.

    Args:
        noise: random rows enter the first layer. Otherwise the model's own do.

    Attributes:
        layers: layer number -> its call, in the order of layers.
        norms: norm -> its calls: the layers' own, and the one behind them.
        routed: layer number -> what its router returned, of `Anatomy.routers`.
    """

    def __init__(self, anatomy: Anatomy, noise: bool = True) -> None:
        self._anatomy, self._noise = anatomy, noise
        #: What the layer before returned, not copied.
        self._left: tuple[object, ...] | None = None
        self.layers = {number: LayerCall() for number in sorted(anatomy.layers)}
        self.norms: dict[nn.Module, list[NormCall]] = defaultdict(list)
        self.routed: dict[int, list[object]] = {number: [] for number in sorted(anatomy.routers)}
        self._handles = ExitStack()

    def __enter__(self) -> Self:
        norms = [] if self._anatomy.norm_here is None else [self._anatomy.norm_here]
        for number, layer in self._anatomy.layers.items():
            names = list(inspect.signature(type(layer).forward).parameters)[1:]
            self._before(layer, partial(self._enter, number, names))
            self._after(layer, partial(self._leave, number))
            for name, child in layer.named_children():
                self._before(child, partial(self._enter_child, number))
                norms += [child] if is_norm(name) else []
        for number, router in self._anatomy.routers.items():
            self._after(router, partial(self._leave_router, number))
        for norm in dict.fromkeys(norms):
            self._before(norm, self._enter_norm)
            self._after(norm, self._leave_norm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._handles.close()

    def _before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.callback(module.register_forward_hook(hook).remove)

    def _enter(
        self, number: int, names: list[str], module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        call = self.layers[number]
        call.calls += 1
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden, residual = given.get("hidden_states"), given.get("residual")
        if hidden is None:  # by another name
            hidden = next(iter(_floats(given.values())), None)
        if self._left is not None:
            every = (*args, *kwargs.values())
            call.handed = tuple(
                isinstance(x, Tensor) and any(x is y for y in every) for x in self._left
            )
        first = self._noise and number == min(self.layers)
        changed = _noise(hidden, residual) if first else {}
        hidden, residual = (changed.get(id(x), x) for x in (hidden, residual))
        if isinstance(hidden, Tensor):
            call.given = hidden.clone(), residual.clone() if isinstance(residual, Tensor) else None
        return (
            tuple(changed.get(id(x), x) for x in args),
            {name: changed.get(id(x), x) for name, x in kwargs.items()},
        )

    def _enter_child(self, number: int, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        call = self.layers[number]
        if call.first is None:
            call.first = module

    def _leave(self, number: int, module: nn.Module, args: _Args, out: object) -> None:
        parts = tuple(out) if isinstance(out, tuple | list) else (out,)
        self._left = parts
        # Copies: the next norm may write to these tensors.
        self.layers[number].returned = (
            tuple(map(_copied, parts)) if isinstance(out, tuple | list) else _copied(out)
        )

    def _leave_router(self, number: int, module: nn.Module, args: _Args, out: object) -> None:
        self.routed[number].append(out[0] if isinstance(out, tuple) else out)

    def _enter_norm(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        hidden, residual = (*map(_copied, _floats((*args, *kwargs.values()))), None, None)[:2]
        if isinstance(hidden, Tensor):
            other = residual if isinstance(residual, Tensor) else None
            self.norms[module].append(NormCall(hidden, other))

    def _leave_norm(self, module: nn.Module, args: _Args, out: object) -> None:
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Tensor):
            self.norms[module][-1].second = out[1].clone()


def _floats(values: Iterable[object]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _noise(*tensors: object) -> dict[int, Tensor]:
    """Random rows for each tensor, by its id; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {
        id(x): torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        for x in tensors if isinstance(x, Tensor)
    }  # fmt: skip
