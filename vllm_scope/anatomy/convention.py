"""What a decoder layer returns, and so what the residual stream is at its exit.

Owns:  Convention, and the reading of it from the layer's and the model's source.
Runs:  once, after the model is loaded. Knows source code, no instances.

Promise: fail closed. Two independent signs must agree: what the layer returns,
and what the model makes of it at the end (the final norm's arguments). Where they
do not, or where a sign is not understood, the model gets no taps.

Of vLLM 0.32's decoder layers most return (hidden, residual) whose sum is the
stream; some return one tensor; some return a residual that is dead, because the
hidden states contain it already. The last kind has the signature of the first,
and summing it would be silently wrong: their forward starts from an unconditional
`residual = hidden_states`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from vllm_scope.errors import CompatError


class Convention(enum.Enum):
    SUM = "the layer returns (hidden, residual); the stream is their sum"
    TENSOR = "the layer returns the stream"
    DEAD_RESIDUAL = "the layer returns (stream, a residual that it contains already)"


def convention_of(layer_class: type, model_class: type) -> Convention:
    """The convention of a decoder layer inside its model.

    Raises:
        CompatError: the source is not there, or its signs are unknown or disagree.
    """
    layer = function_of(getattr(layer_class, "forward"), layer_class)  # noqa: B009
    _check_single_pass(model_class)
    shapes = {_shape(node.value) for node in _returns(layer)}
    if len(shapes) != 1:
        raise CompatError(f"{layer_class.__name__}.forward returns in {len(shapes)} ways")
    (shape,) = shapes
    if shape == 1:
        if _returns_named_pair(layer):
            raise CompatError(f"{layer_class.__name__}.forward returns a pair under one name")
        if not _loop_reads_one_tensor(model_class):
            raise CompatError(f"{model_class.__name__} does not use the layer's output as is")
        return Convention.TENSOR
    if shape != 2:
        raise CompatError(f"{layer_class.__name__}.forward returns {shape} values, not 1 or 2")
    joined = _joins_residual(model_class)
    dead = _overwrites_residual(layer)
    if joined and not dead and "residual" in _parameters(layer):
        return Convention.SUM
    if dead and not joined:
        return Convention.DEAD_RESIDUAL
    raise CompatError(
        f"{layer_class.__name__} returns a pair, and {model_class.__name__} "
        f"{'adds' if joined else 'does not add'} the second to the first, which the "
        "layer's own source does not bear out"
    )


def treats_half_apart(layer_class: type) -> bool:
    """Whether a layer's forward asks for float16: those that do scale the stream there."""
    layer = function_of(getattr(layer_class, "forward"), layer_class)  # noqa: B009
    return any(
        isinstance(node, ast.Attribute) and node.attr == "float16" for node in ast.walk(layer)
    )


@cache  # the layers of a model are of few classes, and each is looked at for several reasons
def function_of(function: Callable[..., Any], owner: type) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        raise CompatError(f"the source of {owner.__name__}.forward cannot be read") from None
    (node,) = ast.parse(source).body
    if not isinstance(node, ast.FunctionDef):
        raise CompatError(f"{owner.__name__}.forward is not a plain function")
    return node


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}


def _returns(function: ast.FunctionDef) -> list[ast.Return]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Return)]


def _shape(value: ast.expr | None) -> int:
    return len(value.elts) if isinstance(value, ast.Tuple) else 1


def _returns_named_pair(layer: ast.FunctionDef) -> bool:
    """`out = (a, b); return out`."""
    names = {node.value.id for node in _returns(layer) if isinstance(node.value, ast.Name)}
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
        for node in ast.walk(layer)
    )


def _check_single_pass(model_class: type) -> None:
    """Each layer runs once a forward; else a position has several rows of one layer."""
    loops = [
        node
        for node in ast.walk(_model_forward(model_class))
        if isinstance(node, ast.For | ast.While) and _calls_layer(node)
    ]
    if len(loops) > 1:
        raise CompatError(f"{model_class.__name__} runs its layers in more than one loop")


def _calls_layer(loop: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and ("layer" in node.func.id or "block" in node.func.id)
        for node in ast.walk(loop)
    )  # fmt: skip


def _overwrites_residual(layer: ast.FunctionDef) -> bool:
    """An unconditional `residual = hidden_states` at the top level of the forward."""
    for node in layer.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and node.value.id.startswith("hidden")
            and any(isinstance(t, ast.Name) and t.id == "residual" for t in node.targets)
        ):
            return True
    return False


def _model_forward(model_class: type) -> ast.FunctionDef:
    """The forward that loops over the layers; a subclass may just pass on to it."""
    for owner in model_class.__mro__:
        if "forward" in vars(owner):
            function = function_of(vars(owner)["forward"], owner)
            if any(isinstance(node, ast.For) for node in ast.walk(function)):
                return function
    raise CompatError(f"{model_class.__name__}.forward has no loop over layers")


def _joins_residual(model_class: type) -> bool:
    """The model ends with norm(hidden, residual) or hidden + residual."""
    for node in ast.walk(_model_forward(model_class)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [a.id for a in node.args if isinstance(a, ast.Name)]
            if "norm" in node.func.attr and len(names) == 2 and "residual" in names[1]:
                return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [s.id for s in (node.left, node.right) if isinstance(s, ast.Name)]
            if any("residual" in s for s in sides) and any("hidden" in s for s in sides):
                return True
    return False


def _loop_reads_one_tensor(model_class: type) -> bool:
    """The loop over the layers is `hidden = layer(...)`, a single name."""
    for node in ast.walk(_model_forward(model_class)):
        if isinstance(node, ast.For):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
                    called = inner.value.func
                    name = getattr(called, "id", getattr(called, "attr", ""))
                    if "layer" in name or "block" in name:
                        return isinstance(inner.targets[0], ast.Name)
    return False
