"""Which tokens: one language for reads (and whatever else picks tokens).

A selector is written as
    "all"           every token that is processed
    "prompt"        the prompt's tokens
    "generated"     the generated tokens (the last one is sampled, never processed)
    "last_prompt"   the last token of the prompt
    "last"          the last token that is processed
    [0, 5, -1]      absolute positions; negative ones count from the prompt's end
    slice(4, 12)    positions; negative ends count from the prompt's end, too
    TokenIds(13)    wherever these token ids stand
    Union(a, b)     in any of them
    Except(a, b)    in a and not in b

Owns:  parsing, JSON, and `select`.
Runs:  everywhere. numpy, no torch.

Promise: a worker, while a token is processed, may not know yet what the caller
needs to know (the length at the end, a sampled id that is still on the GPU). So
`select` answers with two masks, `certain` and `possible`: workers read what is
possible, the front-end keeps what is certain once everything is known. Then both
masks are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown

MAX_ITEMS = 65_536
MAX_DEPTH = 8
#: Selectors inside one selector, and inside all distinct ones of a request. In EngineCore and in
#: workers each takes 5 us at every step, and at every KV block of a request with edits. Each of
#: 256 edits and 32 reads may have its own.
MAX_PARTS, MAX_PARTS_IN_ALL = 64, 288
WORDS = ("all", "prompt", "generated", "last_prompt", "last")
#: Of a prompt. What looks at them makes int64 [n] of a list, at 40 ns a token.
Ids = Sequence[int] | NDArray[np.int64]
#: Larger than any position, and exact in int64.
FAR = 1 << 40


@dataclass(frozen=True)
class Tokens:
    """What is known about some tokens of one request.

    Attributes:
        positions: int64 [n], absolute: index into prompt + generated; ascending, distinct.
        num_prompt: length of the prompt.
        ids: int64 [n], the token at each position, -1 where it is not known yet.
        num_processed: how many positions are processed in the end, or None while
            the request still runs.
    """

    positions: NDArray[np.int64]
    num_prompt: int
    ids: NDArray[np.int64]
    num_processed: int | None

    @staticmethod
    def running(positions: NDArray[np.int64], num_prompt: int, prompt_ids: Ids) -> Tokens:
        """Of a request that runs: what it generates is not known."""
        ids = np.full(positions.shape, -1, np.int64)
        in_prompt = positions < num_prompt
        ids[in_prompt] = np.asarray(prompt_ids, np.int64)[positions[in_prompt]]
        return Tokens(positions, num_prompt, ids, None)


@dataclass(frozen=True)
class Masks:
    """bool [n] each; certain implies possible."""

    certain: NDArray[np.bool_]
    possible: NDArray[np.bool_]


class Selector:
    """Base of all selectors. They are values: frozen, comparable, hashable."""

    @property
    def uniform(self) -> bool:
        """The answer depends on the phase (prompt or generated) alone."""
        return False

    def select(self, tokens: Tokens) -> Masks:
        raise NotImplementedError

    def check_decided(
        self, num_prompt: int, prompt_ids: Ids, max_position: int, where: str
    ) -> None:
        """Raise SpecError where the answer is not known when a token is processed.

        An edit must know then whether it applies; a read can be sorted out later.
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

    def to_json(self) -> Any:
        raise NotImplementedError

    def first_position(self, num_prompt: int, prompt_ids: Ids) -> int:
        """A position at or below the first that may be selected."""
        positions = np.arange(num_prompt, dtype=np.int64)
        possible = self.select(Tokens.running(positions, num_prompt, prompt_ids)).possible
        hits = np.flatnonzero(possible)
        # Past the prompt a prefix-cache hit of this very request cannot reach, so
        # the first generated position is as good a bound as any later one.
        return int(hits[0]) if hits.size else num_prompt

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        """Raise SpecError where the selector can never mean a token of this request."""


def _in(numbers: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the numbers are among the others; for few numbers, cheaper than np.isin."""
    at = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    return ascending[at] == numbers


def _sure(mask: NDArray[np.bool_]) -> Masks:
    return Masks(mask, mask)


@dataclass(frozen=True)
class Word(Selector):
    word: str

    @property
    def uniform(self) -> bool:
        return self.word in ("all", "prompt", "generated")

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
            # Any token from the last of the prompt on may turn out to be the last.
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
    positions: tuple[int, ...]

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.unique(np.asarray(self.positions, np.int64))

    def select(self, tokens: Tokens) -> Masks:
        p, n = tokens.positions, tokens.num_prompt
        mask = _in(p, self._sorted)
        if self._sorted[0] < 0:  # they count from the end of the prompt
            mask |= (p < n) & _in(p - n, self._sorted)
        return _sure(mask)

    def to_json(self) -> list[int]:
        return list(self.positions)

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        for position in self.positions:
            if position < -num_prompt:
                raise SpecError(
                    f"{where} has {position}; this prompt has {num_prompt} tokens, "
                    f"so {-num_prompt} is its first."
                )
            if position > max_position:
                raise SpecError(
                    f"{where} has {position}; with this prompt and max_tokens the last "
                    f"position that can be processed is {max_position}."
                )


@dataclass(frozen=True)
class Span(Selector):
    start: int | None
    stop: int | None
    step: int | None

    def select(self, tokens: Tokens) -> Masks:
        p, n = tokens.positions, tokens.num_prompt
        step = self.step or 1
        # Negative ends count from the prompt's end, as positions do.
        start = 0 if self.start is None else self.start + (n if self.start < 0 else 0)
        stop = FAR if self.stop is None else self.stop + (n if self.stop < 0 else 0)
        start = max(start, 0)
        return _sure((p >= start) & (p < stop) & ((p - start) % step == 0))

    def to_json(self) -> dict[str, Any]:
        return {"slice": [self.start, self.stop, self.step]}


@dataclass(frozen=True)
class TokenIds(Selector):
    ids: tuple[int, ...]

    def __init__(self, *ids: int) -> None:
        object.__setattr__(self, "ids", tuple(as_numbers(ids)))
        _check_ints(self.ids, "TokenIds")
        if any(i < 0 for i in self.ids):
            raise SpecError(f"TokenIds has {min(self.ids)}; token ids are not negative.")

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.unique(np.asarray(self.ids, np.int64))

    def select(self, tokens: Tokens) -> Masks:
        hit = _in(tokens.ids, self._sorted)
        return Masks(hit, hit | (tokens.ids < 0))

    def to_json(self) -> dict[str, Any]:
        return {"token_ids": list(self.ids)}


@dataclass(frozen=True)
class Union(Selector):
    """In any of some selectors.

    Attributes:
        parts: without unions among them; at most one Positions and one TokenIds, which hold the
            positions and ids of all that were given.
    """

    parts: tuple[Selector, ...]

    def __init__(self, *parts: Any) -> None:
        if not parts:
            raise SpecError("Union() is empty; give it at least one selector.")
        _check_parts(len(parts), "Union")
        found = [parse_selector(part, f"Union[{i}]") for i, part in enumerate(parts)]
        object.__setattr__(self, "parts", _merged(found))
        _check_depth(self)

    @property
    def uniform(self) -> bool:
        return all(part.uniform for part in self.parts)

    def select(self, tokens: Tokens) -> Masks:
        masks = [part.select(tokens) for part in self.parts]
        return Masks(
            np.logical_or.reduce([m.certain for m in masks]),
            np.logical_or.reduce([m.possible for m in masks]),
        )

    def to_json(self) -> dict[str, Any]:
        return {"union": [part.to_json() for part in self.parts]}

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        for part in self.parts:
            part.check(num_prompt, max_position, where)


@dataclass(frozen=True)
class Except(Selector):
    base: Selector
    without: Selector

    def __init__(self, base: Any, without: Any) -> None:
        object.__setattr__(self, "base", parse_selector(base, "Except[0]"))
        object.__setattr__(self, "without", parse_selector(without, "Except[1]"))
        _check_depth(self)

    @property
    def uniform(self) -> bool:
        return self.base.uniform and self.without.uniform

    def select(self, tokens: Tokens) -> Masks:
        base, without = self.base.select(tokens), self.without.select(tokens)
        return Masks(base.certain & ~without.possible, base.possible & ~without.certain)

    def to_json(self) -> dict[str, Any]:
        return {"except": [self.base.to_json(), self.without.to_json()]}

    def check(self, num_prompt: int, max_position: int, where: str) -> None:
        self.base.check(num_prompt, max_position, where)
        self.without.check(num_prompt, max_position, where)


def _merged(parts: list[Selector]) -> tuple[Selector, ...]:
    """As few parts as pick the same tokens: each of them costs time at every step."""
    flat = [one for part in parts for one in (part.parts if isinstance(part, Union) else [part])]
    positions = {p for one in flat if isinstance(one, Positions) for p in one.positions}
    ids = {i for one in flat if isinstance(one, TokenIds) for i in one.ids}
    found = [one for one in flat if not isinstance(one, Positions | TokenIds)]
    if ids:
        found.insert(0, TokenIds(*sorted(ids)))
    if positions:
        found.insert(0, Positions(tuple(sorted(positions))))
    return tuple(dict.fromkeys(found))


def _depth(selector: Selector) -> int:
    if isinstance(selector, Union):
        return 1 + max(_depth(part) for part in selector.parts)
    if isinstance(selector, Except):
        return 1 + max(_depth(selector.base), _depth(selector.without))
    return 0


def _check_depth(selector: Selector) -> None:
    if _depth(selector) > MAX_DEPTH:
        raise SpecError(f"a selector is nested more than {MAX_DEPTH} deep.")


def _check_parts(count: int, where: str) -> None:
    if count > MAX_PARTS:
        raise SpecError(
            f"{where} has {count:,} parts; at most {MAX_PARTS}. Positions go in one list, token "
            "ids in one TokenIds(...)."
        )


def check_size(selector: Selector, where: str) -> None:
    """Raise SpecError where a whole selector costs too much at each token."""
    leaves = _leaves(selector)
    _check_parts(len(leaves), where)
    items = sum(len(getattr(x, "positions", getattr(x, "ids", ()))) for x in leaves)
    if items > MAX_ITEMS:
        raise SpecError(f"{where} has {items:,} items in all; at most {MAX_ITEMS:,}.")


def check_sizes(selectors: Iterable[Selector]) -> None:
    """Raise SpecError where the selectors of one request cost too much at each token.

    Equal selectors cost what one of them costs, and a single word nearly nothing.
    """
    distinct = [one for one in dict.fromkeys(selectors) if not isinstance(one, Word)]
    count = sum(len(_leaves(one)) for one in distinct)
    if count > MAX_PARTS_IN_ALL:
        raise SpecError(
            f"the request's selectors have {count:,} parts in all; at most {MAX_PARTS_IN_ALL}. Let "
            "several actions have the same tokens, or send several requests."
        )


def _leaves(selector: Selector) -> list[Selector]:
    if isinstance(selector, Union):
        return [leaf for part in selector.parts for leaf in _leaves(part)]
    if isinstance(selector, Except):
        return [*_leaves(selector.base), *_leaves(selector.without)]
    return [selector]


def _check_ints(items: tuple[Any, ...], where: str, least: int = -FAR) -> None:
    if not items:
        raise SpecError(f"{where} is empty; name at least one, or use 'all'.")
    if len(items) > MAX_ITEMS:
        raise SpecError(f"{where} has {len(items):,} items; at most {MAX_ITEMS:,}.")
    if set(map(type, items)) == {int} and max(items) < FAR and max(least, 1 - FAR) <= min(items):
        return
    for item in items:  # else one of them is wrong
        if isinstance(item, bool) or not isinstance(item, int) or abs(item) >= FAR:
            raise SpecError(f"{where} has {shown(item)}; it holds whole numbers.")
        if item < least:
            raise SpecError(f"{where} has {item}; its numbers are not negative.")


def _parse_slice(parts: Any, where: str) -> Span:
    if not isinstance(parts, list | tuple) or len(parts) != 3:
        raise SpecError(f"{where} is {shown(parts)}; a slice is [start, stop, step].")
    for part in parts:
        if part is not None:
            _check_ints((part,), where)
    if parts[2] is not None and parts[2] < 1:
        raise SpecError(f"{where} has step {parts[2]}; steps are 1 or more.")
    return Span(*parts)


def as_numbers(value: Any) -> Any:
    """Positions or ids as Python's numbers, from a range, numpy or torch; others as they are."""
    if isinstance(value, range | tuple | list):
        return [as_numbers(item) if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def parse_selector(value: Any, where: str, depth: int = 0) -> Selector:
    """A selector from its Python or JSON form.

    Raises:
        SpecError: naming `where`, what came and what is allowed.
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
        return Positions(tuple(sorted(set(value))))
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, body),) = value.items()
        if kind == "slice":
            return _parse_slice(body, where)
        if kind in ("token_ids", "union", "except") and isinstance(body, list):
            if not body:
                raise SpecError(f"{where}.{kind} is empty; give it at least one.")
            if kind == "token_ids":
                _check_ints(tuple(body), f"{where}.token_ids", least=0)
                return TokenIds(*body)
            _check_parts(len(body), f"{where}.{kind}")
            parts = [parse_selector(p, f"{where}.{kind}", depth + 1) for p in body]
            if kind == "union":
                return Union(*parts)
            if len(parts) == 2:
                return Except(*parts)
    raise SpecError(
        f"{where} is {shown(value)}; give one of {', '.join(WORDS)}, a list of positions, a slice, "
        "TokenIds(...), Union(...) or Except(..., ...)."
    )
