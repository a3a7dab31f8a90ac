"""Checks an operator's options with pydantic, and makes the error text for a wrong option.

Owns:  `checked` (turns a ValidationError of pydantic into a ConfigError), `nearest`, Number.
Runs:  in each process that parses options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, FiniteFloat, ValidationError

from vllm_scope.errors import ConfigError, shown

Options = TypeVar("Options", bound=BaseModel)

#: For each kind of pydantic's errors, the last words of this package's error text. A word in braces
#: is replaced by the value that pydantic's error has for the word.
_MUST: dict[str, str] = {
    "string_type": "must be a string",
    "string_too_short": "must have {min_length} or more characters",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "dict_type": "must be an object",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
#: pydantic's kinds of error for a key that is not a field of the model, or is not a string.
_NO_OPTION = ("extra_forbidden", "invalid_key")
#: The last part of pydantic's path if the error is about a key of a mapping.
_KEY = "[key]"


def _number(value: object) -> object:
    if isinstance(value, bool | str | bytes):
        raise ValueError("it must be a number")
    return value


#: A finite number in options. Booleans and strings are refused.
Number = Annotated[FiniteFloat, BeforeValidator(_number)]


def checked(
    model: type[Options], body: Mapping[Any, object], where: str, unsaid: Collection[str] = ()
) -> Options:
    """Check options, and return the options as an instance of `model`.

    Args:
        where: the beginning of an error's sentence, before the option's name.
        unsaid: fields of `model` that callers do not set. Error texts do not list these fields.

    Raises:
        ConfigError: an option is missing, or its value or name is wrong. The text is about one
            option. For a wrong value, the text has the value and the allowed values. For a wrong
            name, the text has the names of all options. If a validator raises a ConfigError, its
            text is used.
    """
    try:
        return model.model_validate(dict(body))
    except ValidationError as error:
        options = [name for name in model.model_fields if name not in unsaid]
        # Errors about unknown names come first, because pydantic makes two errors for a misspelt
        # name: the name is unknown, and the right name is missing.
        found = sorted(error.errors(), key=lambda one: one["type"] not in _NO_OPTION)
        sentence = _sentence_of(found[0], options)
        raise ConfigError(f"{where}{sentence.rstrip('.')}.") from None


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: "; did you mean ...?" or a full stop."""
    near = get_close_matches(name, known, cutoff=0.65)
    return f"; did you mean {' or '.join(near)}?" if near else "."


def _sentence_of(error: Any, options: list[str]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    first, *rest = error["loc"] or ("",)
    path = str(first)
    if kind in _NO_OPTION and not rest:
        return f"{path} is no option{nearest(path, options)} The options are {', '.join(options)}"
    if kind == "value_error" and (not path or isinstance(context["error"], ConfigError)):
        return str(context["error"])  # a sentence of this package, which names the option
    path += "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest if p != _KEY)
    if kind == "missing":
        return f"{path} is missing; it must be given"
    if rest and rest[-1] == _KEY:
        came = f"{path.removesuffix(f'[{rest[-2]}]')} has the key {shown(error['input'])}"
    else:
        came = f"{path} is {shown(error['input'])}"
    if kind == "value_error":
        return f"{came}; {context['error']}"
    if kind not in _MUST:
        return f"{came}; {error['msg']}"
    limits = {name: _plain(value) for name, value in context.items()}
    return f"{came}; it {_MUST[kind].format(**limits)}"


def _plain(limit: object) -> object:
    """Return the limit. A float that is a whole number becomes an int, such as 1 for 1.0."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
