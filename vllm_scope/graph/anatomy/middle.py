"""Where a decoder layer's stream can be read between its attention and its MLP.

Owns:  `norm_before_mlp`, which returns the name of the norm whose input is `resid_mid`.
Runs:  one time, after the model is loaded.
From:  source.   To: tapped.

Promise: a layer is accepted only if its source meets three conditions. Between the calls of
attention and MLP, exactly one norm has the whole stream as its input. This norm adds the residual
(`hidden, residual = norm(hidden, residual)`), or follows directly after `residual = hidden`. Every
path through the forward calls the attention and the norm. (Gemma has another norm, whose input is
only the attention's output, and not the stream.)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.source import forward_of, is_norm

_MLP_WORDS = ("mlp", "feed_forward", "ffn", "moe")


@dataclass(frozen=True)
class _Call:
    """The statement `target = self.name(args)` or `target = source`. For `target = source`, `name`
    is empty, and `args` has only `source`. `targets` is the number of targets."""

    name: str
    args: tuple[str, ...]
    targets: int


def norm_before_mlp(layer: nn.Module, convention: Convention) -> str:
    """The name of the layer's attribute that is the norm before the MLP.

    Raises:
        CompatError: the layer's source cannot be read, or does not meet the conditions at the top
            of this file.
    """
    name = type(layer).__name__
    forward = forward_of(layer)
    calls = [found for node in ast.walk(forward) for found in _parse(node)]
    calls.sort(key=lambda pair: pair[0])
    listed = [call for _, call in calls]
    last_attention = max(
        (i for i, call in enumerate(listed) if _is_attention(call.name)), default=-1
    )
    if last_attention < 0:
        raise CompatError(f"{name}.forward calls nothing that is attention")
    found: dict[str, None] = {}
    for i in range(last_attention + 1, len(listed)):
        call = listed[i]
        if any(word in call.name for word in _MLP_WORDS) and not is_norm(call.name):
            break
        joins = len(call.args) == 2 and call.targets == 2 and "residual" in call.args[1]
        before = listed[i - 1]
        follows = before.name == "" and before.args == call.args[:1] and len(call.args) == 1
        if is_norm(call.name) and (joins if convention is Convention.SUM else follows):
            found[call.name] = None
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise CompatError(
            f"{name}.forward has {names} where one norm between attention and MLP was expected"
        )
    (norm,) = found
    # If a path skips the norm or the attention, the norm's input is not always `resid_mid`.
    for what, is_it in (("its attention", _is_attention), (f"the norm {norm}", norm.__eq__)):
        if not _always(forward.body, is_it):
            raise CompatError(f"{name}.forward may leave out {what}")
    return norm


def _always(body: list[ast.stmt], is_it: Callable[[str], bool]) -> bool:
    """True if every path through these statements raises an exception or calls a wanted module.
    `is_it` returns True for the name of a wanted module."""
    for node in body:
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.If):
            if _always(node.body, is_it) and _always(node.orelse, is_it):
                return True
            if any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
                return False
        elif isinstance(node, ast.With):
            if _always(node.body, is_it):
                return True
        elif not isinstance(node, ast.For | ast.While):
            calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
            if any(is_it(call.attr) for call in calls if isinstance(call, ast.Attribute)):
                return True
    return False


def _is_attention(name: str) -> bool:
    return ("attn" in name or "attention" in name) and not is_norm(name)


def _parse(node: ast.AST) -> list[tuple[tuple[int, int], _Call]]:
    """If the node is a statement `target = self.name(...)` or `residual = hidden`: one pair of the
    position (line, column) and the statement. Otherwise an empty list."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    target, value, at = node.targets[0], node.value, (node.lineno, node.col_offset)
    targets = len(target.elts) if isinstance(target, ast.Tuple) else 1
    if isinstance(value, ast.Name) and isinstance(target, ast.Name) and "resid" in target.id:
        return [(at, _Call("", (value.id,), 1))]
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == "self"
    ):
        args = tuple(a.id if isinstance(a, ast.Name) else "" for a in value.args)
        return [(at, _Call(value.func.attr, args, targets))]
    return []
