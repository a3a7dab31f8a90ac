"""Translates the keys of other systems in `extra_args` to actions.

Owns:  the registered translators, and the code that replaces their keys in a request's
       SamplingParams by a spec.
Runs:  in the front-end, before the check of a request and when outputs are returned.
From:  compat (registers translators).   To: requests, outputs.

Promise: after translation, a request has an ordinary spec. A translator changes only the outputs of
requests to which it applies (`applying`). If a translator fails, only these requests get an error.
If the spec is not valid, the error names the fields that the caller wrote (`in_words`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

from msgspec import Struct

from vllm_scope.engine.functions import FUNCTIONS, Functions, keep
from vllm_scope.engine.refusals import NO_PATHS
from vllm_scope.engine.vllm_types import CompletionOutput, RequestOutput, SamplingParams, VllmConfig
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.actions import Action
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.sites import EMBEDDING, Sites, embedding_hint
from vllm_scope.request.spec import ACTIONS, Spec, scope

if TYPE_CHECKING:
    from vllm_scope.saes.sae import Sae

Params = TypeVar("Params", bound=SamplingParams)
#: The key of `extra_args` that holds a request's Decorators until the front-end removes them.
DECORATORS = "scope_decorators"

#: A function that gets the output and the completion after each new snapshot (`completion.scope`).
#: A decorator must be quick, because decorators run on the event loop.
Decorator = Callable[[RequestOutput, CompletionOutput], None]


class Translation(Struct, frozen=True):
    """The meaning of some keys of a request.

    Attributes:
        actions: the actions with the same meaning as the keys; empty if the keys request nothing.
        decorate: sets the attributes of outputs that users of the keys expect.
        functions: Python functions that run between layers; only allowed together with actions.
            `decorate` must hold a reference to `functions`.
        paths: maps the path of an action or of its field, such as "edits[3]" or "edits[3].vector",
            to the caller's words, which replace the path in errors. The number in a path is the
            action's index among the actions of the same kind in `actions`. `named` makes `paths`.
        check: a function that gets the SAEs that the engine holds, by name. The function raises
            SpecError if these SAEs do not fit the keys.
    """

    actions: tuple[Action, ...] = ()
    decorate: Decorator | None = None
    functions: Functions | None = None
    paths: Mapping[str, str] = NO_PATHS
    check: Callable[[Mapping[str, Sae]], None] | None = None


class Decorators(Struct, frozen=True):
    """The decorators and paths of a request's translations.

    Attributes:
        paths: like Translation.paths, but the index counts all actions of that kind in the request.
    """

    each: tuple[Decorator, ...] = ()
    paths: Mapping[str, str] = NO_PATHS

    def __iter__(self) -> Iterator[Decorator]:
        return iter(self.each)

    def __deepcopy__(self, memo: object) -> Decorators:
        # vLLM copies the parameters of each request. A copy of decorators would take time, because
        # decorators can hold vectors.
        return self


#: A function that gets the values of the translator's keys in a request, by key, and the engine's
#: sites. The function raises SpecError if the keys request something that is not possible.
Translator = Callable[[Mapping[str, object], Sites], Translation]
#: A function that gets an engine's VllmConfig. If the function returns values, the translator is
#: called for every request, with these values in addition to the request's own. If the function
#: returns None, the translator is called only for requests with its keys.
Everywhere = Callable[[VllmConfig], Mapping[str, object] | None]


@dataclass(frozen=True)
class Uncounted:
    """A value of `extra_args` whose content only its translator reads.

    vLLM visits all dicts and lists in `extra_args`, which takes 0.6 s for 600,000 numbers. vLLM
    does not visit the content of an Uncounted. Instead, the translator limits the number of items.
    """

    value: object = field(repr=False)

    @staticmethod
    def value_of(value: object) -> object:
        return value.value if isinstance(value, Uncounted) else value


@dataclass(frozen=True)
class _Entry:
    keys: frozenset[str]
    translate: Translator
    everywhere: Everywhere | None

    def of_all(self, vllm_config: VllmConfig) -> Mapping[str, object] | None:
        """The values that `everywhere` now adds to each request; None if it adds no values."""
        return None if self.everywhere is None else self.everywhere(vllm_config)


#: The translators that apply to a request, each with the values that its `everywhere` returns.
Applying = Sequence[tuple[_Entry, Mapping[str, object] | None]]

_entries: dict[str, _Entry] = {}
_keys: frozenset[str] = frozenset()
#: The translators that have a function `everywhere`.
_everywhere: tuple[_Entry, ...] = ()


def register(
    name: str, keys: Iterable[str], translate: Translator, everywhere: Everywhere | None = None
) -> None:
    """Register a translator, or replace the translator of this name.

    Args:
        keys: the translator's keys of `extra_args`. No other translator is allowed to have these
            keys.
        translate: the function that is called for each request with one of the keys.
        everywhere: if this function returns values, `translate` is called for every request.
    """
    global _keys, _everywhere
    _entries[name] = _Entry(frozenset(keys), translate, everywhere)
    _keys = frozenset().union(*(entry.keys for entry in _entries.values()))
    _everywhere = tuple(entry for entry in _entries.values() if entry.everywhere is not None)


def applying(params: object, vllm_config: VllmConfig) -> Applying:
    """The translators that apply to a request; empty for most requests."""
    if not hasattr(params, "extra_args"):
        return []
    extra = params.extra_args or {}
    some = _entries.values() if has_keys(extra) else _everywhere
    found = []
    for entry in some:
        of_all = entry.of_all(vllm_config)
        if of_all is not None or not entry.keys.isdisjoint(extra):
            found.append((entry, of_all))
    return found


def has_keys(extra: Mapping[str, object] | None) -> bool:
    return bool(extra) and not _keys.isdisjoint(extra or ())


def keys() -> frozenset[str]:
    """The keys of all translators."""
    return _keys


def translated(params: Params, applied: Applying, sites: Sites, saes: Mapping[str, Sae]) -> Params:
    """A copy of SamplingParams with a spec in place of the keys. If no translator applies, the
    result is `params` itself.

    Args:
        applied: the result of `applying` for these parameters.
        saes: the SAEs that the engine holds, by name.

    Raises:
        SpecError: the keys request something that is not possible.
    """
    if not applied:
        return params
    extra = dict(params.extra_args or {})
    translations: list[Translation] = []
    for entry, of_all in applied:
        values = {key: Uncounted.value_of(extra.pop(key)) for key in entry.keys if key in extra}
        translation = entry.translate(values | dict(of_all) if of_all else values, sites)
        if translation.check is not None:
            translation.check(saes)
        if translation.actions:
            translations.append(translation)
        if translation.functions is not None:
            extra[FUNCTIONS] = keep(translation.functions)
    if translations:
        text, paths = _joined(extra.get("scope"), translations)
        extra["scope"] = text
        decorators = [each.decorate for each in translations if each.decorate is not None]
        extra[DECORATORS] = Decorators(tuple(decorators), paths)
    params = copy(params)
    params.extra_args = extra or None
    return params


#: Maps a request's spec and the added actions, by their `id()`, to the added actions, the joined
#: spec and its paths. This table saves time, because monitors add the same actions to every
#: request. An entry keeps its actions alive. Otherwise a new object could get the `id()` of a freed
#: action.
_known: Remembered[tuple[object, ...], tuple[list[Action], str, dict[str, str]]]
_known = Remembered(16 << 20)
#: The largest length of a request's own spec in the keys of `_known`.
_LONGEST = 1 << 16


def _joined(text: object, translations: list[Translation]) -> tuple[str, dict[str, str]]:
    """Returns the text of the joined spec, and the paths for the errors of this spec. The joined
    spec has the actions of `text`, then the actions of the translations."""
    added = [action for each in translations for action in each.actions]
    key = (text, *map(id, added))
    if isinstance(text, str | None) and not any(each.paths for each in translations):
        known = _known.get(key)
        if known is not None:
            return known[1], known[2]
    own = None if text is None else Spec.from_json(text)
    actions: list[Action] = [] if own is None else [*own.actions]
    paths: dict[str, str] = {}
    for each in translations:
        paths |= _moved(each.paths, actions)
        actions += each.actions
    policy = () if own is None or own.policy is None else (own.policy,)
    made = scope(*actions, *policy)["scope"]
    if not paths and (text is None or len(str(text)) <= _LONGEST):
        _known.put(key, (added, made, paths), 2 * len(made))
    return made, paths


def text_of(actions: tuple[Action, ...]) -> str:
    """The JSON text of a spec with exactly these actions. If a request has no other actions,
    `translated` makes the same text."""
    return _joined(None, [Translation(actions)])[0]


def decorators_of(params: object) -> Decorators:
    """The decorators and paths of a request; empty if the request has no translations."""
    found = (getattr(params, "extra_args", None) or {}).get(DECORATORS)
    return found if isinstance(found, Decorators) else Decorators()


# The caller's words for actions in errors


def named(said: Iterable[tuple[Action, Mapping[str, str]]]) -> dict[str, str]:
    """Make the value of the attribute `paths` of a Translation.

    Args:
        said: for each action of the translation in order, the action and a mapping of the caller's
            words. The key "" has the words for the action. A key such as ".tokens" has the words
            for a field of the action. A field without words gets the action's words and the field's
            name.
    """
    counts: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for action, words in said:
        name = _field_of(action)
        paths |= {f"{name}[{counts[name]}]{end}": path for end, path in words.items()}
        counts[name] += 1
    return paths


def in_words(text: str, paths: Mapping[str, str]) -> str:
    """An error text, with the caller's words in place of the path at the start of the text.

    The text's advice to write `site='embed'` is removed, because a caller of another system's keys
    cannot write a site.

    Args:
        paths: maps the path of an action or of its field to the caller's words.
    """
    if found := _PATH.match(text):
        whole, action, end = found[0], found[1], found[2] or ""
        rest = text[found.end() :].removesuffix(embedding_hint(EMBEDDING))
        if whole in paths:
            return paths[whole] + rest
        if action in paths:
            return paths[action] + end + rest
    return text


@contextmanager
def called(paths: Mapping[str, str]) -> Iterator[None]:
    """Apply `in_words` to a SpecError that is raised in the `with` block."""
    try:
        yield
    except SpecError as error:
        raise SpecError(in_words(str(error), paths)) from None


_PATH = re.compile(r"(\w+(?:\[\d+\])?)(\.\w+)?")


def _field_of(action: Action) -> str:
    """The name of the field of a spec that contains actions of this kind."""
    return next(name for name, cls in ACTIONS.items() if isinstance(action, cls))


def _moved(paths: Mapping[str, str], before: Iterable[Action]) -> dict[str, str]:
    """The paths of a translation, in which the numbers also count the actions in `before`."""
    counts = Counter(map(_field_of, before))
    moved = {}
    for path, words in paths.items():
        name, number, end = re.split(r"\[(\d+)\]", path, maxsplit=1)
        moved[f"{name}[{int(number) + counts[name]}]{end}"] = words
    return moved


class OfEach(Mapping[object, object]):
    """The value of an output's attribute, if the completions have different values. Any use as a
    mapping (index, iteration, length, truth) raises ScopeError."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def __getitem__(self, key: object) -> NoReturn:
        raise ScopeError(
            f"this output has {self._number} completions; use output.outputs[i].{self._name}."
        )

    def __iter__(self) -> Iterator[object]:
        return iter(self[None])

    def __len__(self) -> int:
        return len(self[None])


def give(output: RequestOutput, completion: CompletionOutput, name: str, value: object) -> None:
    """Set an attribute of a completion and of its output. If the output has several completions,
    the value of the output's attribute is an OfEach."""
    setattr(completion, name, value)
    alone = len(output.outputs) == 1
    setattr(output, name, value if alone else OfEach(name, len(output.outputs)))
