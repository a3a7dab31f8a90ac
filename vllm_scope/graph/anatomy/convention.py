"""What a decoder layer returns, and how the residual stream is computed from the returned values.

Owns:  Convention; `convention_of`, which reads the convention from the source of layer and model;
       `final_norm_of`, which finds the norm that the model calls after its layers.
Runs:  one time, after the model is loaded.
From:  source.   To: layers.

Promise: if the convention is not certain, the model gets no taps. Two independent signs must agree.
One sign is the values that a layer returns. The other sign is how the model uses these values, in
its loop over the layers or as arguments of the final norm. If the signs disagree or are not
understood, supposed.py must find the convention from the numbers of a forward. If supposed.py finds
no convention, the model gets no taps.

Most decoder layers of vLLM 0.32 return (hidden, residual), and the stream is their sum. Some layers
return one tensor. Other layers return a pair whose `hidden` already contains the residual. For
these layers, hidden + residual would be a wrong stream, and no error would show it. The forward of
such a layer has the statement `residual = hidden_states` outside of every `if`. If a layer has this
statement inside an `if`, the layer is refused. Only a test whether there is a residual is allowed.

There are two special cases at the model's end. In one case, the final norm returns its residual
unchanged (Cohere). In the other case, the layers return None as the residual, and the model adds no
residual (Gemma 4).
"""

from __future__ import annotations

import ast
import enum

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.source import forward_of, is_norm, settled


class Convention(enum.Enum):
    SUM = "the layer returns (hidden, residual); the stream is their sum"
    TENSOR = "the layer returns the stream"
    DEAD_RESIDUAL = "the layer returns (stream, None or a residual that it contains already)"


def convention_of(layer: nn.Module, model: nn.Module) -> Convention:
    """The convention of a decoder layer inside its model.

    Raises:
        CompatError: there is no source code, or more than one loop calls layers; or the two signs
            of the convention (see the top of this file) are not understood or disagree.
    """
    name, outer = type(layer).__name__, type(model).__name__
    forward = forward_of(layer)
    loop = _model_forward(model)
    _check_single_pass(loop, outer)
    shapes = {_shape(node.value) for node in _returns(forward)}
    if len(shapes) != 1:
        raise CompatError(f"{name}.forward has {len(shapes)} forms of return statement")
    (shape,) = shapes
    if shape == 1:
        if _returns_named_pair(forward):
            raise CompatError(f"{name}.forward returns a pair under one name")
        made = _returned_object(forward)
        if made is not None:
            raise CompatError(f"{name}.forward returns a {made}, not a tensor")
        if not _loop_reads_one_tensor(loop):
            raise CompatError(f"{outer} does not use the layer's output as is")
        return Convention.TENSOR
    if shape != 2:
        raise CompatError(f"{name}.forward returns {shape} values, not 1 or 2")
    joined = _joins_residual(_without_residual(loop) if _returns_none(forward) else loop, model)
    dead = _overwrites_residual(forward, name)
    if joined and not dead and "residual" in _parameters(forward):
        return Convention.SUM
    if dead and not joined:
        return Convention.DEAD_RESIDUAL
    raise CompatError(
        f"{name} returns a pair, and {outer} {'adds' if joined else 'does not add'} the second "
        "to the first, and the layer's own source disagrees"
    )


def final_norm_of(model: nn.Module) -> str | None:
    """The attribute name of the norm that the model calls after its layers. None if the model calls
    several norms, or no norm, after the layers."""
    forward = _model_forward(model)
    end = max(node.end_lineno or 0 for node in ast.walk(forward) if isinstance(node, ast.For))
    found = {
        node.func.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Call) and node.lineno > end
        and isinstance(node.func, ast.Attribute) and is_norm(node.func.attr)
        and ast.unparse(node.func.value) == "self"
    }  # fmt: skip
    return found.pop() if len(found) == 1 else None


def treats_half_apart(layer: nn.Module) -> bool:
    """True if a layer's forward names `float16`. Such a layer scales the stream in float16."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "float16"
        for node in ast.walk(forward_of(layer))
    )


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}


def _returns(function: ast.FunctionDef) -> list[ast.Return]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Return)]


def _shape(value: ast.expr | None) -> int:
    return len(value.elts) if isinstance(value, ast.Tuple) else 1


def _returns_named_pair(layer: ast.FunctionDef) -> bool:
    """True if a layer has `out = (a, b); return out`."""
    names = {node.value.id for node in _returns(layer) if isinstance(node.value, ast.Name)}
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
        for node in ast.walk(layer)
    )


def _returned_object(layer: ast.FunctionDef) -> str | None:
    """The name `SomeClass` in `return SomeClass(...)`. None for other return statements."""
    for node in _returns(layer):
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            name = node.value.func.id
            if name[:1].isupper():
                return name
    return None


def _check_single_pass(forward: ast.FunctionDef, name: str) -> None:
    """Raises CompatError if more than one loop calls layers. A layer could then run two times in a
    forward, with two rows per position."""
    loops = [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.For | ast.While) and _calls_layer(node)
    ]
    if len(loops) > 1:
        raise CompatError(f"{name} runs its layers in more than one loop")


def _calls_layer(loop: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and ("layer" in node.func.id or "block" in node.func.id)
        for node in ast.walk(loop)
    )  # fmt: skip


def _overwrites_residual(layer: ast.FunctionDef, name: str) -> bool:
    """True if the forward has an unconditional `residual = hidden_states`.

    Raises:
        CompatError: `residual = hidden_states` depends on a condition that does not test whether
            there is a residual.
    """
    if any(_is_overwrite(node) for node in layer.body):
        return True
    for node in ast.walk(layer):
        if isinstance(node, ast.If) and not _asks_for_no_residual(node.test):
            here = [*node.body, *node.orelse]
            if any(_is_overwrite(inner) for inner in here):
                raise CompatError(
                    f"{name}.forward overwrites the residual where "
                    f"`{ast.unparse(node.test)}`, which is not known before it runs"
                )
    return False


def _is_overwrite(node: ast.stmt) -> bool:
    """True if the statement is `residual = hidden_states`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and node.value.id.startswith("hidden")
        and any(isinstance(t, ast.Name) and t.id == "residual" for t in node.targets)
    )


def _asks_for_no_residual(test: ast.expr) -> bool:
    """True if the expression tests whether there is a residual."""
    return ast.unparse(test) in ("residual is None", "residual is not None", "not residual")


def _model_forward(model: nn.Module) -> ast.FunctionDef:
    """The forward with the loop over the layers, from the model's class or a base class."""
    for owner in type(model).__mro__:
        if "forward" in vars(owner):
            function = forward_of(model, owner)
            if any(isinstance(node, ast.For) for node in ast.walk(function)):
                return function
    raise CompatError(f"{type(model).__name__}.forward has no loop over layers")


def _returns_none(layer: ast.FunctionDef) -> bool:
    """True if each return statement returns a pair whose second value is None."""
    values = [node.value for node in _returns(layer)]
    return all(
        isinstance(value, ast.Tuple)
        and isinstance(value.elts[1], ast.Constant)
        and value.elts[1].value is None
        for value in values
    )


def _without_residual(loop: ast.FunctionDef) -> ast.FunctionDef:
    """The forward of a model, without the branches that need a residual."""
    answers = {
        (node.lineno, node.col_offset): ast.unparse(node.test) != "residual is not None"
        for node in ast.walk(loop)
        if isinstance(node, ast.If) and _asks_for_no_residual(node.test)
    }
    return settled(loop, answers)


def _joins_residual(forward: ast.FunctionDef, model: nn.Module) -> bool:
    """True if the model's forward adds the residual to `hidden`, or calls a norm(hidden, residual)
    that adds both."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [a.id for a in node.args if isinstance(a, ast.Name)]
            norm = node.func.attr
            if (
                is_norm(norm) and len(names) == 2 and "residual" in names[1]
                and not _leaves_residual(getattr(model, norm, None))
            ):  # fmt: skip
                return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [s.id for s in (node.left, node.right) if isinstance(s, ast.Name)]
            if any("residual" in s for s in sides) and any("hidden" in s for s in sides):
                return True
    return False


def _leaves_residual(norm: nn.Module | None) -> bool:
    """True if a norm only returns its second argument unchanged, and does not compute with it."""
    if norm is None:
        return False
    forward = forward_of(norm)
    names = [arg.arg for arg in forward.args.args]
    if len(names) != 3:  # the names are self, hidden and residual
        return False
    returned = {
        id(one)
        for node in _returns(forward) if isinstance(node.value, ast.Tuple)
        for one in node.value.elts[1:]
    }  # fmt: skip
    uses = [n for n in ast.walk(forward) if isinstance(n, ast.Name) and n.id == names[2]]
    return bool(uses) and all(id(use) in returned for use in uses)


def _loop_reads_one_tensor(forward: ast.FunctionDef) -> bool:
    """True if the loop over the layers assigns a layer's output to a single name: `hidden =
    layer(...)`."""
    for node in ast.walk(forward):
        if isinstance(node, ast.For):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
                    called = inner.value.func
                    name = getattr(called, "id", getattr(called, "attr", ""))
                    if "layer" in name or "block" in name:
                        return isinstance(inner.targets[0], ast.Name)
    return False
