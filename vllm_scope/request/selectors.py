"""Rules that pick tokens of a request.

A selector has one of these forms:
    "all"              every token that is processed
    "prompt"           the prompt's tokens
    "generated"        the generated tokens (the last sampled token is never processed)
    "last_prompt"      the last token of the prompt
    "last"             the last token that is processed
    [0, 5, -1]         absolute positions; negative positions count from the prompt's end
    slice(4, 12)       positions; a negative start or stop counts from the prompt's end
    Positions(0, 5)    the same positions as [0, 5]
    TokenIds(13)       every position that has one of these token ids
    Union(a, b)        the tokens of a and the tokens of b
    a | b              Union(a, b), if a or b is a selector object
    Except(a, b)       the tokens of a without the tokens of b
    a - b              Except(a, b), if a or b is a selector object

Owns:  the selectors, their parsing and JSON, and `select`.
Runs:  in every process, with numpy and without torch.

Promise: `select` returns two masks, `certain` and `possible`. While a request runs, a process does
not always know whether a token is selected: "last" depends on the final length, and TokenIds
depends on ids that can still be on the device. The worker reads the rows of all tokens that are
possible. After the request has ended, both masks are equal, and the front-end keeps only the rows
of selected tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown

MAX_ITEMS = 65_536
MAX_DEPTH = 8
#: The largest number of parts of one selector, and of all distinct selectors of a request together.
#: The second number is 256 + 32, because each of 256 edits and 32 reads can have a different
#: selector. The evaluation of one part takes 5 us in each step, in EngineCore and in the workers.
#: If a request has edits, the evaluation takes 5 us more for each KV block.
MAX_PARTS, MAX_PARTS_IN_ALL = 64, 288
WORDS = ("all", "prompt", "generated", "last_prompt", "last")
#: The token ids of a prompt. If the ids are a list, each use converts the list to an int64 array,
#: which takes 40 ns for each token.
Ids = Sequence[int] | NDArray[np.int64]
#: The memory of one position or id in a selector, in bytes: the Python int, and the element of the
#: array.
ITEM_BYTES = 96
#: The measured memory of one part of a selector, in bytes, without the part's items. The memory of
#: a Union or Except is divided among its parts, and is included in this number.
_PART_BYTES = 512
#: A number that is larger than any position, and that int64 can represent.
FAR = 1 << 40


@dataclass(frozen=True)
class Tokens:
    """Some tokens of one request, with all facts that a selector uses.

    Attributes:
        positions: int64 [n], ascending, distinct. Each position is an index into prompt + generated
            tokens.
        num_prompt: length of the prompt.
        ids: int64 [n], the token id at each position. -1 if the id is not known yet.
        num_processed: number of all processed positions, or None while the request runs.
    """

    positions: NDArray[np.int64]
    num_prompt: int
    ids: NDArray[np.int64]
    num_processed: int | None

    @staticmethod
    def running(positions: NDArray[np.int64], num_prompt: int, prompt_ids: Ids) -> Tokens:
        """The Tokens of a running request, in which the ids of generated tokens are not known."""
        ids = np.full(positions.shape, -1, np.int64)
        in_prompt = positions < num_prompt
        ids[in_prompt] = np.asarray(prompt_ids, np.int64)[positions[in_prompt]]
        return Tokens(positions, num_prompt, ids, None)


@dataclass(frozen=True)
class Masks:
    """The tokens that are certainly selected, and the tokens that are possibly selected, as bool
    masks [n]. A token that is certain is also possible."""

    certain: NDArray[np.bool_]
    possible: NDArray[np.bool_]


class Selector:
    """The base class of all selectors. Selectors are frozen, comparable and hashable."""

    #: The selectors that this selector combines (Union and Except).
    parts: tuple[Selector, ...] = ()
    #: None makes numpy call the methods below for `array | selector` and `array - selector`.
    __array_ufunc__ = None

    def __or__(self, other: object) -> Union:
        return Union(self, other)

    def __ror__(self, other: object) -> Union:
        return Union(other, self)

    def __sub__(self, other: object) -> Except:
        return Except(self, other)

    def __rsub__(self, other: object) -> Except:
        return Except(other, self)

    @property
    def uniform(self) -> bool:
        """True if the phase (prompt or generated) alone decides whether a token is selected."""
        return bool(self.parts) and all(part.uniform for part in self.parts)

    @property
    def sees_ids(self) -> bool:
        """True if the selection depends on token ids."""
        return any(part.sees_ids for part in self.parts)

    def picks_phase(self, generated: bool) -> bool:
        """True if the selector selects the tokens of this phase. The selector must be uniform."""
        raise NotImplementedError

    def select(self, tokens: Tokens) -> Masks:
        raise NotImplementedError

    def to_json(self) -> object:
        raise NotImplementedError

    def first_position(self, num_prompt: int, prompt_ids: Ids) -> int:
        """A lower bound of the first position that can be selected."""
        positions = np.arange(num_prompt, dtype=np.int64)
        possible = self.select(Tokens.running(positions, num_prompt, prompt_ids)).possible
        hits = np.flatnonzero(possible)
        # The bound limits how many tokens come from the prefix cache, which has only tokens of the
        # prompt. Therefore no bound above the first generated position is needed.
        return int(hits[0]) if hits.size else num_prompt

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        """Raise SpecError if the selector names a position that this request cannot have."""
        for part in self.parts:
            part.check(num_prompt, max_position, where)

    def check_decided(
        self, num_prompt: int, prompt_ids: Ids, max_position: int, where: str
    ) -> None:
        """Raise SpecError if a token can be processed before the engine knows whether the token is
        selected.

        This check is for edits, because an edit applies when the token is processed. Reads do not
        need the check, because the front-end can drop rows later.
        """
        if self.uniform:
            return
        positions = np.arange(max_position + 1, dtype=np.int64)
        masks = self.select(Tokens.running(positions, num_prompt, prompt_ids))
        if (masks.certain != masks.possible).any():
            raise SpecError(
                f"{where} depends on tokens that are not known yet when it must apply ('last', or "
                "ids among the generated tokens); an edit takes all, prompt, generated, "
                "last_prompt, positions or a slice, or token ids of the prompt alone: "
                "Except(TokenIds(...), 'generated')."
            )


def _in(numbers: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask: True for each of `numbers` that is in `ascending`. For few numbers, this is faster
    than np.isin."""
    at = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[at] == numbers
    return found


def _sure(mask: NDArray[np.bool_]) -> Masks:
    return Masks(mask, mask)


@dataclass(frozen=True)
class Word(Selector):
    word: str

    @property
    def uniform(self) -> bool:
        return self.word in ("all", "prompt", "generated")

    def picks_phase(self, generated: bool) -> bool:
        return self.word == "all" or (self.word == "generated") is generated

    def select(self, tokens: Tokens) -> Masks:
        p, n = tokens.positions, tokens.num_prompt
        match self.word:
            case "all":
                return _sure(np.ones(p.shape, bool))
            case "prompt":
                return _sure(p < n)
            case "generated":
                return _sure(p >= n)
            case "last_prompt":
                return _sure(p == n - 1)
        if tokens.num_processed is None:
            # The prompt's last token and each later token can be the last token.
            return Masks(np.zeros(p.shape, bool), p >= n - 1)
        return _sure(p == tokens.num_processed - 1)

    def first_position(self, num_prompt: int, prompt_ids: Ids) -> int:
        if self.word in ("all", "prompt"):
            return 0
        return num_prompt if self.word == "generated" else max(num_prompt - 1, 0)

    def to_json(self) -> str:
        return self.word


@dataclass(frozen=True)
class Positions(Selector):
    """A list of absolute positions. Negative positions count from the prompt's end.

    Attributes:
        positions: the distinct positions, ascending.
    """

    positions: tuple[int, ...]

    def __init__(self, *positions: object) -> None:
        """Make a selector from whole numbers, or from one list, range or array of whole numbers."""
        one = as_numbers(positions[0]) if len(positions) == 1 else positions
        found = tuple(as_numbers(one)) if isinstance(one, list | tuple) else (one,)
        _check_ints(found, "Positions")
        object.__setattr__(self, "positions", tuple(sorted(set(found))))
        if found != self.positions:
            object.__setattr__(self, "_given", found)

    @property
    def given(self) -> tuple[int, ...]:
        """The positions in the order of the caller. `_given` is not a field. Therefore selectors
        with the same positions are equal, and the order is not sent to other processes."""
        given: tuple[int, ...] = self.__dict__.get("_given", self.positions)
        return given

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.asarray(self.positions, np.int64)

    def select(self, tokens: Tokens) -> Masks:
        p, n = tokens.positions, tokens.num_prompt
        mask = _in(p, self._sorted)
        if self._sorted[0] < 0:  # negative positions count from the prompt's end
            mask |= (p < n) & _in(p - n, self._sorted)
        return _sure(mask)

    def first_position(self, num_prompt: int, prompt_ids: Ids) -> int:
        ascending = self.positions
        middle = bisect_left(ascending, 0)  # the number of negative positions
        first = bisect_left(ascending, -num_prompt, 0, middle)
        found = [ascending[first] + num_prompt] if first < middle else []
        return min(found + list(ascending[middle : middle + 1]) + [num_prompt])

    def to_json(self) -> list[int]:
        return list(self.positions)

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        first, last = self.positions[0], self.positions[-1]
        if first < -num_prompt:
            raise SpecError(
                f"{where} has {first}; this prompt has {num_prompt} tokens, "
                f"so {-num_prompt} is its first."
            )
        if last > max_position:
            raise SpecError(
                f"{where} has {last}; with this prompt and max_tokens the last "
                f"position that can be processed is {max_position}."
            )


@dataclass(frozen=True)
class Span(Selector):
    """A slice of positions. A negative start or stop counts from the prompt's end."""

    start: int | None
    stop: int | None
    step: int | None

    def select(self, tokens: Tokens) -> Masks:
        p, n = tokens.positions, tokens.num_prompt
        start = 0 if self.start is None else self.start + (n if self.start < 0 else 0)
        stop = FAR if self.stop is None else self.stop + (n if self.stop < 0 else 0)
        start = max(start, 0)
        return _sure((p >= start) & (p < stop) & ((p - start) % (self.step or 1) == 0))

    def to_json(self) -> dict[str, object]:
        return {"slice": [self.start, self.stop, self.step]}


@dataclass(frozen=True)
class TokenIds(Selector):
    """Every position that has one of these token ids."""

    ids: tuple[int, ...]

    def __init__(self, *ids: int) -> None:
        found = tuple(as_numbers(ids))
        _check_ints(found, "TokenIds", least=0)
        object.__setattr__(self, "ids", found)

    @property
    def sees_ids(self) -> bool:
        return True

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.unique(np.asarray(self.ids, np.int64))

    def select(self, tokens: Tokens) -> Masks:
        hit = _in(tokens.ids, self._sorted)
        return Masks(hit, hit | (tokens.ids < 0))

    def to_json(self) -> dict[str, object]:
        return {"token_ids": list(self.ids)}


@dataclass(frozen=True)
class Union(Selector):
    """The tokens that at least one of several selectors selects. `a | b` makes a Union.

    Attributes:
        parts: the merged selectors. No part is a Union. At most one part is a Positions, which has
            the positions of all merged Positions. At most one part is a TokenIds, which has the ids
            of all merged TokenIds.
    """

    parts: tuple[Selector, ...]

    def __init__(self, *parts: object) -> None:
        if not parts:
            raise SpecError("Union() is empty; give it at least one selector.")
        _check_parts(len(parts), "Union")
        found = [parse_selector(part, f"Union[{i}]") for i, part in enumerate(parts)]
        object.__setattr__(self, "parts", _merged(found))
        _check_depth(self)

    def picks_phase(self, generated: bool) -> bool:
        return any(part.picks_phase(generated) for part in self.parts)

    def select(self, tokens: Tokens) -> Masks:
        masks = [part.select(tokens) for part in self.parts]
        return Masks(
            np.logical_or.reduce([m.certain for m in masks]),
            np.logical_or.reduce([m.possible for m in masks]),
        )

    def to_json(self) -> dict[str, object]:
        return {"union": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class Except(Selector):
    """The tokens that `base` selects and `without` does not select. `a - b` makes an Except."""

    base: Selector
    without: Selector

    def __init__(self, base: object, without: object) -> None:
        object.__setattr__(self, "base", parse_selector(base, "Except[0]"))
        object.__setattr__(self, "without", parse_selector(without, "Except[1]"))
        _check_depth(self)

    @property
    def parts(self) -> tuple[Selector, ...]:  # type: ignore[override]
        return self.base, self.without

    def picks_phase(self, generated: bool) -> bool:
        return self.base.picks_phase(generated) and not self.without.picks_phase(generated)

    def select(self, tokens: Tokens) -> Masks:
        base, without = self.base.select(tokens), self.without.select(tokens)
        return Masks(base.certain & ~without.possible, base.possible & ~without.certain)

    def to_json(self) -> dict[str, object]:
        return {"except": [part.to_json() for part in self.parts]}


def _merged(parts: list[Selector]) -> tuple[Selector, ...]:
    """The parts of a Union, merged into as few parts as possible, because each part takes time at
    every step."""
    flat = [one for part in parts for one in (part.parts if isinstance(part, Union) else [part])]
    positions = [p for one in flat if isinstance(one, Positions) for p in one.positions]
    ids = {i for one in flat if isinstance(one, TokenIds) for i in one.ids}
    found = [one for one in flat if not isinstance(one, Positions | TokenIds)]
    if ids:
        found.insert(0, TokenIds(*sorted(ids)))
    if positions:
        found.insert(0, Positions(*positions))
    return tuple(dict.fromkeys(found))


def _depth(selector: Selector) -> int:
    return 1 + max(map(_depth, selector.parts)) if selector.parts else 0


def _leaves(selector: Selector) -> list[Selector]:
    return [leaf for part in selector.parts for leaf in _leaves(part)] or [selector]


def _check_depth(selector: Selector) -> None:
    if _depth(selector) > MAX_DEPTH:
        raise SpecError(f"a selector is nested more than {MAX_DEPTH} deep.")


def _check_parts(count: int, where: str) -> None:
    if count > MAX_PARTS:
        raise SpecError(
            f"{where} has {count:,} parts; at most {MAX_PARTS}. Positions go in one list, token "
            "ids in one TokenIds(...)."
        )


def items_of(selector: Selector) -> int:
    """The number of positions and ids that a selector names."""
    leaves = _leaves(selector)
    return sum(len(getattr(one, "positions", getattr(one, "ids", ()))) for one in leaves)


def num_bytes_of(selector: Selector) -> int:
    """Estimated memory of a selector, in bytes."""
    return _PART_BYTES * len(_leaves(selector)) + ITEM_BYTES * items_of(selector)


def check_size(selector: Selector, where: str) -> None:
    """Raise SpecError if one selector has too many parts or items."""
    leaves = _leaves(selector)
    _check_parts(len(leaves), where)
    items = items_of(selector)
    if items > MAX_ITEMS:
        raise SpecError(f"{where} has {items:,} items in all; at most {MAX_ITEMS:,}.")


def check_sizes(selectors: Iterable[Selector]) -> None:
    """Raise SpecError if the selectors of one request have too many parts together.

    Equal selectors are evaluated only one time, and therefore only one of them counts. A single
    word takes almost no time and does not count.
    """
    distinct = [one for one in dict.fromkeys(selectors) if not isinstance(one, Word)]
    count = sum(len(_leaves(one)) for one in distinct)
    if count > MAX_PARTS_IN_ALL:
        raise SpecError(
            f"the request's selectors have {count:,} parts in all; at most {MAX_PARTS_IN_ALL}. Let "
            "several actions have the same tokens, or send several requests."
        )


def _check_ints(items: tuple[Any, ...], where: str, least: int = 1 - FAR) -> None:
    """Raise SpecError if there are no items, if there are too many, or if an item is not an int
    from `least` to FAR - 1."""
    if not items:
        raise SpecError(f"{where} is empty; name at least one, or use 'all'.")
    if len(items) > MAX_ITEMS:
        raise SpecError(f"{where} has {len(items):,} items; at most {MAX_ITEMS:,}.")
    if set(map(type, items)) == {int} and least <= min(items) and max(items) < FAR:
        return
    for item in items:  # find the wrong item, which the error text names
        if isinstance(item, bool) or not isinstance(item, int) or abs(item) >= FAR:
            raise SpecError(
                f"{where} has {shown(item)}; its items must be whole numbers of at most 40 bits."
            )
        if item < least:
            raise SpecError(f"{where} has {item}; its items must not be negative.")


def _parse_slice(parts: object, where: str) -> Span:
    if not isinstance(parts, list | tuple) or len(parts) != 3:
        raise SpecError(f"{where} is {shown(parts)}; a slice is [start, stop, step].")
    for part in parts:
        if part is not None:
            _check_ints((part,), where)
    if parts[2] is not None and parts[2] < 1:
        raise SpecError(f"{where} has step {parts[2]}; steps are 1 or more.")
    return Span(*parts)


def as_numbers(value: object) -> Any:
    """Convert a numpy array or torch tensor to Python numbers. A range, tuple or list becomes a
    list, and arrays among its items are converted too. Other values are returned unchanged."""
    if isinstance(value, range | tuple | list):
        return [as_numbers(item) if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def parse_selector(value: object, where: str, depth: int = 0) -> Selector:
    """Parse a selector from its Python or JSON form.

    Raises:
        SpecError: `value` is not a selector. The text names `where`, the given value and the
            allowed values.
    """
    if depth > MAX_DEPTH:
        raise SpecError(f"{where[:80]} is nested more than {MAX_DEPTH} deep.")
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        if value not in WORDS:
            raise SpecError(f"{where} is {shown(value)}; the words are {', '.join(WORDS)}.")
        return Word(value)
    if isinstance(value, slice):
        return _parse_slice([value.start, value.stop, value.step], where)
    value = as_numbers(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list | tuple):
        _check_ints(tuple(value), where)
        return Positions(*value)
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, body),) = value.items()
        if kind == "slice":
            return _parse_slice(body, where)
        if kind in ("token_ids", "union", "except") and isinstance(body, list):
            return _parse_object(kind, body, f"{where}.{kind}", depth)
    raise _no_selector(value, where)


def _parse_object(kind: str, body: list[Any], where: str, depth: int) -> Selector:
    if not body:
        raise SpecError(f"{where} is empty; give at least one item.")
    if kind == "token_ids":
        _check_ints(tuple(body), where, least=0)
        return TokenIds(*body)
    _check_parts(len(body), where)
    parts = [parse_selector(part, where, depth + 1) for part in body]
    if kind == "union":
        return Union(*parts)
    if len(parts) != 2:
        raise _no_selector({kind: body}, where.removesuffix(f".{kind}"))
    return Except(*parts)


def _no_selector(value: object, where: str) -> SpecError:
    return SpecError(
        f"{where} is {shown(value)}; give one of {', '.join(WORDS)}, a list of positions, a slice, "
        "TokenIds(...), Union(...) or Except(..., ...)."
    )
