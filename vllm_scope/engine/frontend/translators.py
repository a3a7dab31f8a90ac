"""Requests in other systems' words: keys of `extra_args` that stand for actions.

Owns:  the translators by key, and a request's SamplingParams after translation.
Runs:  in the front-end, before a request is checked and when outputs are returned.
From:  compat (which registers translators).   To: requests, outputs.

Promise: after translation a request has a spec like any other. A translator decorates only the
outputs of its requests, and its errors affect only these requests. An error of the spec names what
the caller wrote (`in_words`).
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

#: Called with (output, completion) after each new snapshot, `completion.scope`. Runs on the event
#: loop, so it must be quick.
Decorator = Callable[[RequestOutput, CompletionOutput], None]


class Translation(Struct, frozen=True):
    """What some keys of a request mean.

    Attributes:
        actions: empty if the keys ask for nothing.
        decorate: gives outputs the attributes that users of the keys expect.
        functions: Python functions to run between layers; only together with actions. `decorate`
            must hold a reference to `functions`.
        paths: path of an action or of its field, such as "edits[3]" or "edits[3].vector" -> the
            caller's words for it, in errors. The number in a path is the action's index among the
            actions of its kind in `actions`. `named` makes `paths`.
        check: called with the SAEs that the engine holds, by name. Raises SpecError if they do not
            fit what the keys ask for.
    """

    actions: tuple[Action, ...] = ()
    decorate: Decorator | None = None
    functions: Functions | None = None
    paths: Mapping[str, str] = NO_PATHS
    check: Callable[[Mapping[str, Sae]], None] | None = None


class Decorators(Struct, frozen=True):
    """The decorators and paths of a request's translations.

    Attributes:
        paths: as in Translation, but the index is among all actions of that kind in the request.
    """

    each: tuple[Decorator, ...] = ()
    paths: Mapping[str, str] = NO_PATHS

    def __iter__(self) -> Iterator[Decorator]:
        return iter(self.each)

    def __deepcopy__(self, memo: object) -> Decorators:
        # vLLM copies the parameters of each request, and decorators may hold vectors.
        return self


#: Called with the values that a request has for the translator's keys, by key, and with the
#: engine's sites. Raises SpecError if the keys ask for something that is not possible.
Translator = Callable[[Mapping[str, object], Sites], Translation]
#: An engine's VllmConfig -> values that are added to every request; None to translate only
#: requests with keys.
Everywhere = Callable[[VllmConfig], Mapping[str, object] | None]


@dataclass(frozen=True)
class Uncounted:
    """A value of `extra_args` that only its translator looks through.

    vLLM looks through all dicts and lists in `extra_args`, which takes 0.6 s for 600,000 numbers;
    it does not look into an Uncounted. A translator counts the items of a value before it reads
    them.
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
        """What `everywhere` adds to each request at the moment; None if it adds nothing."""
        return None if self.everywhere is None else self.everywhere(vllm_config)


#: The translators that apply to a request, each with what its `everywhere` adds at the moment.
Applying = Sequence[tuple[_Entry, Mapping[str, object] | None]]

_entries: dict[str, _Entry] = {}
_keys: frozenset[str] = frozenset()
#: The entries with an `everywhere`.
_everywhere: tuple[_Entry, ...] = ()


def register(
    name: str, keys: Iterable[str], translate: Translator, everywhere: Everywhere | None = None
) -> None:
    """Register a translator, or replace the one of this name.

    Args:
        keys: the translator's keys of `extra_args`; no other translator may have them.
        translate: called for each request that has one of the keys.
        everywhere: if it returns values, `translate` is called for every request.
    """
    global _keys, _everywhere
    _entries[name] = _Entry(frozenset(keys), translate, everywhere)
    _keys = frozenset().union(*(entry.keys for entry in _entries.values()))
    _everywhere = tuple(entry for entry in _entries.values() if entry.everywhere is not None)


def applying(params: object, vllm_config: VllmConfig) -> Applying:
    """The translators that apply to a request; none for most requests."""
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
    """A copy of SamplingParams with a spec in place of the keys; the same object if no translator
    applies.

    Args:
        applied: as `applying` returned it for these parameters.
        saes: the SAEs that the engine holds, by name.

    Raises:
        SpecError: the keys ask for something that is not possible.
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


#: (a request's spec, ids of added actions) -> the added actions, the joined spec, and its paths. An
#: entry keeps its actions alive, so that no other object gets their ids. Monitors add the same
#: actions to every request.
_known: Remembered[tuple[object, ...], tuple[list[Action], str, dict[str, str]]]
_known = Remembered(16 << 20)
#: Length of the longest spec for which `_known` has an entry.
_LONGEST = 1 << 16


def _joined(text: object, translations: list[Translation]) -> tuple[str, dict[str, str]]:
    """The text of a spec with the translations' actions after its own, and the paths for its
    errors."""
    added = [action for each in translations for action in each.actions]
    key = (text, *map(id, added))
    known = None if any(each.paths for each in translations) else _known.get(key)
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
    """The JSON text of a spec with exactly these actions. `translated` makes the same text for a
    request that gets these actions and has none of its own."""
    return _joined(None, [Translation(actions)])[0]


def decorators_of(params: object) -> Decorators:
    """The decorators and paths of a request; empty without translations."""
    found = (getattr(params, "extra_args", None) or {}).get(DECORATORS)
    return found if isinstance(found, Decorators) else Decorators()


# The names of actions in errors


def named(said: Iterable[tuple[Action, Mapping[str, str]]]) -> dict[str, str]:
    """The `paths` of a Translation.

    Args:
        said: the translation's actions in order, each with the caller's words for the action (key
            "") and for its fields (such as key ".tokens"). In errors, a field without words of its
            own has the action's words and the field's name.
    """
    counts: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for action, words in said:
        name = _field_of(action)
        paths |= {f"{name}[{counts[name]}]{end}": path for end, path in words.items()}
        counts[name] += 1
    return paths


def in_words(text: str, paths: Mapping[str, str]) -> str:
    """An error text whose leading path is replaced by the caller's words.

    A caller of another system's keys cannot write `site='embed'`, so the advice to write it is
    removed.

    Args:
        paths: path of an action or of its field -> the caller's words.
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
    """Apply `in_words` to a SpecError that the `with` block raises."""
    try:
        yield
    except SpecError as error:
        raise SpecError(in_words(str(error), paths)) from None


_PATH = re.compile(r"(\w+(?:\[\d+\])?)(\.\w+)?")


def _field_of(action: Action) -> str:
    """The field of a spec that holds the action."""
    return next(name for name, cls in ACTIONS.items() if isinstance(action, cls))


def _moved(paths: Mapping[str, str], before: Iterable[Action]) -> dict[str, str]:
    """The paths of a translation, with numbers that also count the actions before its own."""
    counts = Counter(map(_field_of, before))
    moved = {}
    for path, words in paths.items():
        name, number, end = re.split(r"\[(\d+)\]", path, maxsplit=1)
        moved[f"{name}[{int(number) + counts[name]}]{end}"] = words
    return moved


class OfEach(Mapping[object, object]):
    """Stands for an attribute of an output with several completions, each of which has a value of
    its own. To index it, iterate over it, take its length or test its truth raises ScopeError."""

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
    its attribute is an OfEach."""
    setattr(completion, name, value)
    alone = len(output.outputs) == 1
    setattr(output, name, value if alone else OfEach(name, len(output.outputs)))
