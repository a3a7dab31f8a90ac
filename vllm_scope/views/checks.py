"""Checks the arguments of functions that make views. Each error message is one sentence.

Owns:  `expect`, `words_of`, `whole_of`, `texts_of`, `labels_of`, `numbers_of`, `decoder_of`.
To:    all views; analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from vllm_scope.errors import SpecError, shown


def expect(is_so: bool, name: str, value: object, allowed: str) -> None:
    """Raise SpecError if `is_so` is False. The message contains the value and a description of the
    allowed values."""
    if not is_so:
        raise SpecError(f"{name} is {shown(value)}; it must be {allowed}.")


def words_of(value: str, name: str) -> str:
    """Return the value unchanged. Raises SpecError if the value is not a text."""
    expect(isinstance(value, str), name, value, "a text")
    return value


def whole_of(value: SupportsIndex, name: str) -> int:
    """Return the value as an int. Raises SpecError if the value is not a whole number."""
    try:
        found = None if isinstance(value, bool) else index(value)
    except TypeError:
        found = None
    if found is None:
        raise SpecError(f"{name} is {shown(value)}; it must be a whole number.")
    return found


def decoder_of(tokenizer: Any) -> Callable[[int], str] | None:
    """A function that returns the text of a token id, or None if `tokenizer` is None.

    Raises:
        SpecError: the tokenizer has no `decode`.
    """
    if tokenizer is None:
        return None
    decode = getattr(tokenizer, "decode", None)
    # An object of type bytes also has a `decode`.
    is_one = callable(decode) and not isinstance(tokenizer, str | bytes | type)
    expect(is_one, "tokenizer", tokenizer, "an object with `decode`, such as llm.get_tokenizer()")
    return lambda token: str(tokenizer.decode([token]))


def texts_of(value: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """The texts of a list, or () if `value` is None. Raises SpecError if an item is not a text."""
    given = () if value is None else _items(value)
    found = () if given is None else tuple(given)
    is_so = given is not None and all(isinstance(one, str) for one in found)
    expect(is_so, name, value, "a list of texts, such as [tokenizer.decode([i]) for i in ids]")
    return found


def _items(value: object) -> list[Any] | None:
    """The items of an iterable object. None for a text, and for an object that is not iterable."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # an array or a tensor without axes
        return None


def labels_of(value: Mapping[int, str] | None) -> Mapping[int, str]:
    """The labels of features, by the feature's number. None means no labels. Raises SpecError if
    `value` is not a mapping from numbers to texts."""
    is_so = value is None or (
        isinstance(value, Mapping)
        and all(isinstance(i, int) and isinstance(label, str) for i, label in value.items())
    )
    expect(is_so, "labels", value, "a dict of texts by number, such as {7: 'capitals'}")
    return value or {}


def numbers_of(
    value: object, name: str, there: Container[int] | None = None, of: str = ""
) -> list[int]:
    """The whole numbers of a list.

    Args:
        there: the allowed numbers. If None, every number is allowed.
        of: a description of the allowed numbers, such as "the layer has heads 0 to 3".

    Raises:
        SpecError: `value` is not a list of whole numbers, or a number is not allowed.
    """
    given = _items(value)
    wrong = f"{name} is {shown(value)}; it must be a list of whole numbers."
    try:
        found = [index(one) for one in given or ()]
    except TypeError:
        raise SpecError(wrong) from None
    if given is None or any(isinstance(one, bool) for one in given):
        raise SpecError(wrong)
    missing = [] if there is None else [one for one in found if one not in there]
    if missing:
        raise SpecError(f"{name} has {missing[0]}; {of}.")
    return found
