"""Requests in other words: keys of `extra_args` that stand for actions.

Owns:  which keys have a translator, and a request's SamplingParams after it.
Runs:  in the front-end, before a request is checked and where outputs are given out.
From:  faces (which register).   To: frontend.

Promise: behind this seam a request is a spec like any other. What a translator adds to
outputs is added to outputs of its requests only, and an error in it never leaves them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm_scope.actions import Action
from vllm_scope.engine.functions import FUNCTIONS, Functions, keep
from vllm_scope.errors import ScopeError
from vllm_scope.sites import Sites
from vllm_scope.spec import Spec, scope

logger = logging.getLogger("vllm.vllm_scope")

#: Where decorators are in `extra_args` until the front-end takes them out again.
DECORATORS = "scope_decorators"

#: (output, completion): called whenever the completion got a snapshot of its rows, as
#: `completion.scope`. On the event loop, so it is quick.
Decorator = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Translation:
    """What some keys of a request mean.

    Attributes:
        actions: none where the keys ask for nothing.
        decorate: gives outputs the attributes that the keys' users expect.
        functions: Python to run between layers. Only beside actions, and `decorate` is to
            hold on to it.
    """

    actions: tuple[Action, ...] = ()
    decorate: Decorator | None = None
    functions: Functions | None = None


#: The values of a translator's keys, those that a request has; the engine's sites.
#: Raises SpecError where they ask for what cannot be.
Translator = Callable[[Mapping[str, Any], Sites], Translation]
#: By an engine's VllmConfig: values that all its requests have beside their own; None
#: where only those with keys are to be translated.
Everywhere = Callable[[Any], Mapping[str, Any] | None]


@dataclass(frozen=True)
class _Entry:
    keys: frozenset[str]
    translate: Translator
    everywhere: Everywhere | None


_entries: dict[str, _Entry] = {}
_keys: frozenset[str] = frozenset()
_everywhere: tuple[Everywhere, ...] = ()


def register(
    name: str, keys: Iterable[str], translate: Translator, everywhere: Everywhere | None = None
) -> None:
    """Let keys of `extra_args` be translated; the same name again replaces it.

    Args:
        keys: that no other translator has.
        translate: called for each request with one of the keys.
        everywhere: where an engine has values for every request, for each of them.
    """
    global _keys, _everywhere
    _entries[name] = _Entry(frozenset(keys), translate, everywhere)
    _keys = frozenset().union(*(entry.keys for entry in _entries.values()))
    _everywhere = tuple(e.everywhere for e in _entries.values() if e.everywhere is not None)


def concerned(params: Any, vllm_config: Any) -> bool:
    """Whether some translator has to do with a request."""
    if not hasattr(params, "extra_args"):
        return False
    if has_keys(params.extra_args):
        return True
    return any(everywhere(vllm_config) is not None for everywhere in _everywhere)


def has_keys(extra: Mapping[str, Any] | None) -> bool:
    return bool(extra) and not _keys.isdisjoint(extra or ())


def keys() -> frozenset[str]:
    """Of `extra_args`, those that some translator has."""
    return _keys


def translated(params: Any, vllm_config: Any, sites: Sites) -> Any:
    """A copy of SamplingParams with a spec in place of the keys.

    Raises:
        SpecError: they ask for what cannot be.
    """
    extra = dict(params.extra_args or {})
    actions: list[Action] = []
    decorators: list[Decorator] = []
    for entry in _entries.values():
        values = {key: extra.pop(key) for key in entry.keys if key in extra}
        of_all = entry.everywhere(vllm_config) if entry.everywhere is not None else None
        if not values and of_all is None:
            continue
        values |= of_all or {}
        translation = entry.translate(values, sites)
        actions += translation.actions
        if translation.actions and translation.decorate is not None:
            decorators.append(translation.decorate)
        if translation.functions is not None:
            extra[FUNCTIONS] = keep(translation.functions)
    if actions:
        own = Spec.from_json(extra["scope"]) if "scope" in extra else None
        mine = (*own.reads, *own.probes, *own.edits) if own is not None else ()
        extra |= scope(*mine, *actions)
        extra[DECORATORS] = decorators
    params = copy(params)
    params.extra_args = extra or None
    return params


class OfEach(Mapping[Any, Any]):
    """Stands on an output of several completions for what each of them has."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def __getitem__(self, key: Any) -> Any:
        raise ScopeError(
            f"this output has {self._number} completions; use output.outputs[i].{self._name}."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self[None])

    def __len__(self) -> int:
        return len(self[None])


def give(output: Any, completion: Any, name: str, value: Any) -> None:
    """Set an attribute of a completion; of its output too, where it is the only one."""
    setattr(completion, name, value)
    alone = len(output.outputs) == 1
    setattr(output, name, value if alone else OfEach(name, len(output.outputs)))


def decorate(decorators: Iterable[Decorator], output: Any, completion: Any) -> None:
    for one in decorators:
        try:
            one(output, completion)
        except Exception:
            # One request's attributes are not worth the step of all the others.
            logger.exception("vllm-scope: output %s was not decorated", output.request_id)
