"""What the functions of views refuse, each time in one sentence.

Owns:  `expect`, `texts_of`, `labels_of`, `numbers_of`.
To:    attention, feature_page, page, side, sparse.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

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
    is_list = not isinstance(value, str | bytes) and isinstance(value, Iterable)
    found = list(value) if isinstance(value, Iterable) and is_list else []
    for one in found if is_list else [value]:
        is_number = hasattr(one, "__index__") and not isinstance(one, bool)
        if not (is_list and is_number):
            raise SpecError(f"{name} is {shown(value)}; it is a list of whole numbers.")
        if there is not None and int(one) not in there:
            raise SpecError(f"{name} has {int(one)}; {of}.")
    return [int(one) for one in found]
