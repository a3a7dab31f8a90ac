"""What the functions of views refuse, each time in one sentence.

Owns:  `expect`, `texts_of`, `labels_of`, `numbers_of`.
To:    attention, feature_page, page, side, sparse; analysis.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from operator import index

from vllm_scope.errors import SpecError, shown


def expect(is_so: bool, name: str, value: object, allowed: str) -> None:
    """Raises SpecError, with what came and what is allowed, if it is not so."""
    if not is_so:
        raise SpecError(f"{name} is {shown(value)}; it is {allowed}.")


def texts_of(value: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """A list of texts; empty for None."""
    is_list = not isinstance(value, str | bytes) and isinstance(value, Iterable)
    found = tuple(value) if value is not None and is_list else ()
    is_so = value is None or (is_list and all(isinstance(one, str) for one in found))
    expect(is_so, name, value, "a list of texts, such as [tokenizer.decode([i]) for i in ids]")
    return found


def labels_of(value: Mapping[int, str] | None) -> Mapping[int, str]:
    """A word or two about a feature, by its number; empty for None."""
    is_so = value is None or (
        isinstance(value, Mapping)
        and all(isinstance(i, int) and isinstance(label, str) for i, label in value.items())
    )
    expect(is_so, "labels", value, "number -> text, such as {7: 'capitals'}")
    return value or {}


def numbers_of(
    value: object, name: str, there: Container[int] | None = None, of: str = ""
) -> list[int]:
    """A list of whole numbers.

    Args:
        there: what each of them is in; None: anything.
        of: what is there, for the message: "the layer has heads 0 to 3".
    """
    given = (
        None if isinstance(value, str | bytes) or not isinstance(value, Iterable) else list(value)
    )
    wrong = f"{name} is {shown(value)}; it is a list of whole numbers."
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
