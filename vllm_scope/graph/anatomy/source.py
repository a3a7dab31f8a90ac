"""The source of a module's forward, without the branches that the module never takes.

Owns:  `forward_of`, `function_of`, `settled`, `is_norm`.
Runs:  one time, after the model is loaded.
To:    convention, middle, layers, watched.

A forward can test the module's own flags (`if self.do_layer_norm_before:`). If the module's
attributes determine the result of a test, `forward_of` keeps only the branch that runs. Otherwise
`forward_of` keeps both branches. Modules of vLLM do not change these attributes after the model is
loaded.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from torch import nn

from vllm_scope.errors import CompatError

#: The line and the column of an `if` in the source code.
_Place = tuple[int, int]


@cache
def function_of(function: Callable[..., object], owner: type) -> ast.FunctionDef:
    """The syntax tree of the source code of a method.

    Raises:
        CompatError: the method's source cannot be read, or the method is not a plain function.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        raise CompatError(f"the source of {owner.__name__}.forward cannot be read") from None
    (node,) = ast.parse(source).body
    if not isinstance(node, ast.FunctionDef):
        raise CompatError(f"{owner.__name__}.forward is not a plain function")
    return node


def forward_of(module: nn.Module, owner: type | None = None) -> ast.FunctionDef:
    """The module's forward without the branches that this module never takes.

    Args:
        owner: the class whose forward is returned. None for the module's class.

    Raises:
        CompatError: as `function_of`.
    """
    owner = owner or type(module)
    function = getattr(owner, "forward")  # noqa: B009
    whole = function_of(function, owner)
    answers = {
        (node.lineno, node.col_offset): answer
        for node in ast.walk(whole)
        if isinstance(node, ast.If | ast.IfExp)
        and (answer := _answer(node.test, module)) is not None
    }
    return _settled_source(function, owner, frozenset(answers.items())) if answers else whole


@cache  # cached, because many layers of a model have equal flags
def _settled_source(
    function: Callable[..., object], owner: type, answers: frozenset[tuple[_Place, bool]]
) -> ast.FunctionDef:
    return settled(function_of(function, owner), dict(answers))


def settled(function: ast.FunctionDef, answers: Mapping[_Place, bool]) -> ast.FunctionDef:
    """A copy of a function. In the copy, the branch that runs replaces each `if` whose result is in
    `answers`."""
    found = _TestsRemoved(answers).visit(deepcopy(function))
    assert isinstance(found, ast.FunctionDef)
    return found


def is_norm(name: str) -> bool:
    """True if an attribute with this name counts as a norm."""
    return "norm" in name or name.startswith("ln")


class _TestsRemoved(ast.NodeTransformer):
    """Replaces each `if` statement and each `if` expression whose result is known. The branch that
    runs takes the place of the `if`."""

    def __init__(self, answers: Mapping[_Place, bool]) -> None:
        self._answers = answers

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        kept = self._kept(node)
        return kept or ast.copy_location(ast.Pass(), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        kept: ast.AST = self._kept(node)
        return kept

    def _kept(self, node: Any) -> Any:
        answer = self._answers.get((node.lineno, node.col_offset))
        self.generic_visit(node)
        return node if answer is None else node.body if answer else node.orelse


def _answer(test: ast.expr, module: nn.Module) -> bool | None:
    """The result of a test, if the module's attributes determine the result. Otherwise None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _answer(test.operand, module)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        answers = [_answer(value, module) for value in test.values]
        decides = isinstance(test.op, ast.Or)
        if decides in answers:
            return decides
        return None if None in answers else not decides
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(test.left, test.ops[0], test.comparators[0], module)
    value = _attribute(test, module)
    return value if isinstance(value, bool) else None


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, module: nn.Module) -> bool | None:
    """The result of a test such as `self.name is None` or `self.name == 3`, or of its negation.
    None for any other test, or if the result is not known."""
    value = _attribute(left, module)
    if value is _UNKNOWN or not isinstance(right, ast.Constant):
        return None
    if isinstance(op, ast.Is | ast.IsNot) and right.value is None:
        return (value is None) is isinstance(op, ast.Is)
    if isinstance(op, ast.Eq | ast.NotEq) and isinstance(value, bool | int | str):
        return (value == right.value) is isinstance(op, ast.Eq)
    return None


_UNKNOWN = object()


def _attribute(node: ast.expr, module: nn.Module) -> Any:
    """The value of the attribute in an expression `self.name`. _UNKNOWN for any other
    expression."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        return getattr(module, node.attr, _UNKNOWN)
    return _UNKNOWN
