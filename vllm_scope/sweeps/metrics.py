"""Computes the value of a sweep's cell from the log-probabilities of the next token.

Owns:  Metric, and the metrics LogitDifference, Logprob and KL.
From:  the log-probabilities that vLLM returns for the last token of a prompt.   To: plan.

Promise: a metric needs no logits. A token's logit minus the token's log-probability is the same
number for all tokens of the vocabulary. Therefore the difference of two tokens' logits equals the
difference of these tokens' log-probabilities.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError, SpecError, naming, shown
from vllm_scope.request.bounded_json import is_unicode
from vllm_scope.request.selectors import as_numbers

logger = logging.getLogger("vllm.vllm_scope")

#: The most tokens that a metric can name, which is vLLM's MAX_LOGPROB_TOKEN_IDS.
MOST_TOKENS = 128
#: A warning names at most _MOST_TOLD texts, and shows at most _MOST_IDS token ids of each text.
_MOST_TOLD, _MOST_IDS = 3, 8
#: Log-probabilities of the next token in float64. The array has the tokens that a metric names, in
#: the metric's order, or all tokens in the order of their ids.
Logprobs = NDArray[np.float64]
#: A function that returns the token ids of a text.
Encode = Callable[[str], list[int]]


class Metric(ABC):
    """A number that is computed from the log-probabilities of the next token.

    To define a new metric, implement `token_ids` and `value`. A server accepts only
    LogitDifference, Logprob and KL.
    """

    #: The metric's name in a sweep's table and in the picture of the table.
    name: ClassVar[str] = "metric"

    @abstractmethod
    def token_ids(self, encode: Encode, num_prompts: int) -> list[tuple[int, ...]]:
        """Name the tokens whose log-probabilities the metric uses, for each prompt.

        A tuple has at most 128 token ids, all different. An empty tuple means all tokens, for which
        the engine must have max_logprobs=-1.

        Args:
            encode: a function that returns the token ids of a text, without special tokens.

        Raises:
            SpecError: a text has no token, or the number of tokens is not the number of prompts.
        """

    @abstractmethod
    def value(self, found: Logprobs, clean: Logprobs) -> float:
        """Compute the value of one cell.

        Args:
            found: the log-probabilities after the edit, in float64, one for each token id that
                `token_ids` returned for the prompt, in the same order. If `token_ids` returned an
                empty tuple, `found` has all tokens of the vocabulary, in the order of the ids.
            clean: the same tokens' log-probabilities without the edit.
        """


@dataclass(frozen=True)
class LogitDifference(Metric):
    """The logit of token `a` minus the logit of token `b`.

    Args:
        a, b: a token's id, a text, or a list with an id or a text for each prompt. A text, such as
            " Paris" (with the space before the word), stands for its first token. If a text has
            several tokens, a warning in the log names the text.
    """

    a: Any
    b: Any
    name: ClassVar[str] = "logit difference"

    def token_ids(self, encode: Encode, num_prompts: int) -> list[tuple[int, ...]]:
        a = _tokens(self.a, encode, num_prompts, "LogitDifference.a")
        b = _tokens(self.b, encode, num_prompts, "LogitDifference.b")
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            if one == other:
                texts = [of for of in (_at(self.a, i), _at(self.b, i)) if isinstance(of, str)]
                told = f", the first of {' and of '.join(map(shown, texts))}" if texts else ""
                raise SpecError(
                    f"LogitDifference has the token {one} as a and as b of prompts[{i}]{told}; the "
                    "difference would be 0, so give two different tokens, as ids or as texts."
                )
        return list(zip(a, b, strict=True))

    def value(self, found: Logprobs, clean: Logprobs) -> float:
        return float(found[0] - found[1])


@dataclass(frozen=True)
class Logprob(Metric):
    """The log-probability of a token.

    Args:
        token: a token in the form of the argument `a` of LogitDifference.
    """

    token: Any
    name: ClassVar[str] = "log-probability"

    def token_ids(self, encode: Encode, num_prompts: int) -> list[tuple[int, ...]]:
        return [(one,) for one in _tokens(self.token, encode, num_prompts, "Logprob.token")]

    def value(self, found: Logprobs, clean: Logprobs) -> float:
        return float(found[0])


@dataclass(frozen=True)
class KL(Metric):
    """The divergence KL(clean || edited) of the next token over the whole vocabulary, in nats.

    vLLM must return the log-probabilities of all tokens. Start the engine with
    `LLM(..., max_logprobs=-1)`. The time for a cell is proportional to the vocabulary's size.
    """

    name: ClassVar[str] = "KL divergence"

    def token_ids(self, encode: Encode, num_prompts: int) -> list[tuple[int, ...]]:
        return [()] * num_prompts

    def value(self, found: Logprobs, clean: Logprobs) -> float:
        chance = np.exp(clean)
        some = chance > 0  # otherwise a token with probability 0 would give 0 * inf, which is NaN
        return float(np.sum(chance[some] * (clean[some] - found[some])))


def token_ids_of(metric: Metric, encode: Encode, num_prompts: int) -> list[tuple[int, ...]]:
    """Call `metric.token_ids`, and check the result.

    Raises:
        SpecError: the metric does not return tuples of token ids, one for each prompt, or a tuple
            has more than MOST_TOKENS ids or an id twice.
    """
    found = metric.token_ids(encode, num_prompts)
    name = f"{type(metric).__name__}.token_ids"
    if not isinstance(found, Sequence) or len(found) != num_prompts:
        raise SpecError(
            f"{name} returns {shown(found)}; it must return a list with a tuple for each of the "
            f"{num_prompts} prompts."
        )
    tokens = [as_numbers(one) for one in found]
    for one in tokens:
        if not isinstance(one, list | tuple) or not all(type(x) is int and x >= 0 for x in one):
            raise SpecError(
                f"{name} has {shown(one)}; each prompt must have a tuple of whole numbers from 0."
            )
        if len(one) > MOST_TOKENS or len(set(one)) < len(one):
            raise SpecError(
                f"{name} has {len(one)} tokens for a prompt, {len(set(one))} of them different; "
                f"give at most {MOST_TOKENS} different tokens, or an empty tuple for all tokens."
            )
    return [tuple(one) for one in tokens]


def value_of(metric: Metric, found: Logprobs, clean: Logprobs, where: str) -> float:
    """Call `metric.value`, and return the result as a float.

    Raises:
        ScopeError: `metric.value` raises an exception, or does not return a number.
    """
    try:
        return float(metric.value(found, clean))
    except Exception as error:
        raise ScopeError(
            f"{type(metric).__name__}.value failed for a cell of {where} "
            f"({type(error).__name__}: {error}); it must return a number."
        ) from error


def encode_text(text: str, encode: Encode, where: str) -> list[int]:
    """The token ids of a text. If a SpecError is raised, its message begins with `where`."""
    if not is_unicode(text):
        raise SpecError(
            f"{where} is {shown(text)}, which has half of a surrogate pair; give whole characters."
        )
    with naming(where):
        return encode(text)


def _at(value: Any, i: int) -> object:
    """The token id or text that `value`, an argument of a metric, has for prompt `i`."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return value[i] if several else value


def _tokens(value: Any, encode: Encode, num_prompts: int, where: str) -> list[int]:
    """Return one token id for each prompt. A warning in the log names texts with several tokens."""
    value = as_numbers(value)
    several = isinstance(value, Sequence) and not isinstance(value, str)
    each = list(value) if several else [value]
    if several and len(each) != num_prompts:
        raise SpecError(
            f"{where} has {len(each)} tokens for {num_prompts} prompts; give one for each prompt, "
            "or one for all prompts."
        )
    names = [f"{where}[{i}]" if several else where for i in range(len(each))]
    ids = [_token_ids(one, encode, name) for one, name in zip(each, names, strict=True)]
    found = [some[0] for some in ids]
    if long := {one: some for one, some in zip(each, ids, strict=True) if some[1:]}:
        told = tuple(
            (shown(text), some[:_MOST_IDS], len(some))
            for text, some in islice(long.items(), _MOST_TOLD)
        )
        _warn(where, told, len(long) - len(told))
    if not several:
        return found * num_prompts
    return found


@lru_cache(maxsize=256)
def _warn(where: str, texts: tuple[tuple[str, tuple[int, ...], int], ...], num_more: int) -> None:
    """Log a warning that texts have several tokens, but only one time for the same arguments.

    The cache keeps the arguments, so the caller shortens the texts and the token ids.

    Args:
        texts: for each named text, its short repr, its first token ids and its number of tokens.
        num_more: the number of further texts that have several tokens.
    """
    some = []
    for text, ids, num_ids in texts:
        more = f", {num_ids - len(ids)} more" if num_ids > len(ids) else ""
        some.append(f"{text} ({', '.join(map(str, ids))}{more})")
    if num_more:
        some.append(f"{num_more} more")
    logger.warning(
        "vllm-scope: %s has texts of several tokens, of which the metric takes the first: %s.",
        where, ", ".join(some),
    )  # fmt: skip


def _token_ids(value: object, encode: Encode, where: str) -> tuple[int, ...]:
    """The token ids of a text. For a token id, the result is a tuple that has only this id."""
    if isinstance(value, str):
        ids = encode_text(value, encode, where)
        if not ids:
            raise SpecError(f"{where} is {shown(value)}, which has no token; give another text.")
        return tuple(ids)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{where} is {shown(value)}; it must be a token's id or a text.")
    return (value,)
