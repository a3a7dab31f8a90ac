"""Requests in other words: keys of `extra_args` that stand for actions.

Owns:  which keys have a translator, and a request's SamplingParams after it.
Runs:  in the front-end, before a request is checked and where outputs are given out.
From:  faces (which register).   To: frontend.

Promise: behind this seam a request is a spec like any other. What a translator adds to
outputs is added to outputs of its requests only, and an error in it never leaves them. An
error of the spec names what the caller wrote, wherever it is found: `in_words`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm_scope.engine.functions import FUNCTIONS, Functions, keep
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.actions import Action, Probe, Read
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec, scope

#: Where a request's Decorators are in `extra_args` until the front-end takes them out again.
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
        paths: what errors call the actions, of which `named` makes them: "edits[3]" or
            "edits[3].vector", counted by kind among these actions -> the caller's words.
    """

    actions: tuple[Action, ...] = ()
    decorate: Decorator | None = None
    functions: Functions | None = None
    paths: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decorators:
    """What a request's translators said beside its actions.

    Attributes:
        paths: as a Translation's, counted among all actions of the request.
    """

    each: tuple[Decorator, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Decorator]:
        return iter(self.each)


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
    translations: list[Translation] = []
    for entry in _entries.values():
        values = {key: extra.pop(key) for key in entry.keys if key in extra}
        of_all = entry.everywhere(vllm_config) if entry.everywhere is not None else None
        if not values and of_all is None:
            continue
        values |= of_all or {}
        translation = entry.translate(values, sites)
        if translation.actions:
            translations.append(translation)
        if translation.functions is not None:
            extra[FUNCTIONS] = keep(translation.functions)
    if translations:
        own = Spec.from_json(extra["scope"]) if "scope" in extra else None
        actions = [*own.reads, *own.probes, *own.edits] if own is not None else []
        paths: dict[str, str] = {}
        for each in translations:
            paths |= _moved(each.paths, actions)
            actions += each.actions
        extra |= scope(*actions)
        decorators = (each.decorate for each in translations)
        extra[DECORATORS] = Decorators(tuple(d for d in decorators if d is not None), paths)
    params = copy(params)
    params.extra_args = extra or None
    return params


def decorators_of(params: Any) -> Decorators:
    """What a request's translators said beside its actions; nothing of one without."""
    found = (getattr(params, "extra_args", None) or {}).get(DECORATORS)
    return found if isinstance(found, Decorators) else Decorators()


# What errors call the actions


def named(said: Iterable[tuple[Action, Mapping[str, str]]]) -> dict[str, str]:
    """The paths of a translation.

    Args:
        said: its actions in their order, each with the caller's words: "" for the action,
            ".tokens" for one of its fields. A field without words follows the action's.
    """
    counts: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for action, words in said:
        name = _field_of(action)
        paths |= {f"{name}[{counts[name]}]{end}": path for end, path in words.items()}
        counts[name] += 1
    return paths


def in_words(text: str, paths: Mapping[str, str]) -> str:
    """A sentence that begins with a path, with the caller's words in its place.

    Args:
        paths: path -> the caller's words; that of a field, or of all that have the field.
    """
    if found := _PATH.match(text):
        whole, action, end = found[0], found[1], found[2] or ""
        if whole in paths:
            return paths[whole] + text[found.end() :]
        if action in paths:
            return paths[action] + end + text[found.end() :]
    return text


@contextmanager
def called(paths: Mapping[str, str]) -> Iterator[None]:
    """Have a SpecError inside begin with the caller's words, as `in_words` does."""
    try:
        yield
    except SpecError as error:
        raise SpecError(in_words(str(error), paths)) from None


_PATH = re.compile(r"(\w+(?:\[\d+\])?)(\.\w+)?")


def _field_of(action: Action) -> str:
    """Where a spec has it."""
    return {Read: "reads", Probe: "probes"}.get(type(action), "edits")


def _moved(paths: Mapping[str, str], before: Iterable[Action]) -> dict[str, str]:
    """Paths of a translation, where these actions come before its own."""
    counts = Counter(map(_field_of, before))
    moved = {}
    for path, words in paths.items():
        name, number, end = re.split(r"\[(\d+)\]", path, maxsplit=1)
        moved[f"{name}[{int(number) + counts[name]}]{end}"] = words
    return moved


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
