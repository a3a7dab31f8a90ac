"""Checks which texts, tokens and log-probabilities a sweep can use on an engine.

Owns:  Bounded and NoTokenizer (the tokenizers that a Plan uses), the checks, and `cells_at_once`.
Runs:  in the front-end process, before a sweep's first request.
To:    sweeping.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_scope.errors import SpecError, shown
from vllm_scope.sweeps.plan import Tokenizer

#: The largest number of log-probabilities that all cells in the engine can have together.
MAX_LOGPROBS: Final = 1 << 22


class NoTokenizer:
    """Replaces the tokenizer of an engine that was started with skip_tokenizer_init."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise SpecError(
            f"{shown(text)} is a text, and this engine has no tokenizer; give token ids."
        )

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class Bounded:
    """A tokenizer that refuses texts that are too long for the engine. If a text has more
    characters than any prompt of this engine can have, the text is refused before it is encoded, as
    in vLLM. If a text has too many tokens, the text is refused as soon as it is encoded. Source:
    vllm 0.30 to 0.33, renderers/params.py, TokenizeParams._text_len_check
    """

    def __init__(self, tokenizer: Tokenizer, model: Any) -> None:
        self._tokenizer, self._model, self.decode = tokenizer, model, tokenizer.decode
        of_token = getattr(tokenizer, "max_chars_per_token", None)
        self._most = None if of_token is None else model.max_model_len * of_token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._most is not None and len(text) > self._most:
            raise SpecError(
                f"the text has {len(text):,} characters; the longest possible prompt of this "
                f"engine has at most {self._most:,}. Give a shorter text."
            )
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if found:
            check_tokens(self._model, found, "the text")
        return found


def check_tokens(model: Any, ids: list[int], where: str) -> None:
    """Raises SpecError if a prompt leaves no room for one more token, or has a token outside the
    vocabulary."""
    num_tokens = model.get_vocab_size()
    if len(ids) >= model.max_model_len:
        raise SpecError(
            f"{where} has {len(ids):,} tokens; this engine takes at most "
            f"{model.max_model_len - 1:,}, because it samples one more. Give a shorter prompt, or "
            "start it with a larger max_model_len."
        )
    if not 0 <= min(ids) <= max(ids) < num_tokens:
        raise SpecError(
            f"{where} has the tokens {min(ids)} to {max(ids)}; the vocabulary has 0 to "
            f"{num_tokens - 1}."
        )


def check_logprobs(model: Any, token_ids: list[tuple[int, ...]]) -> None:
    """Raises SpecError if the engine does not return the log-probabilities that a metric needs.

    Args:
        token_ids: for each prompt, the tokens that the metric needs; empty if it needs all tokens.
    """
    num_tokens = model.get_vocab_size()
    for i, ids in enumerate(token_ids):
        if max(ids, default=0) >= num_tokens:
            raise SpecError(
                f"Sweep.metric names the token {max(ids)} for prompts[{i}]; the vocabulary has 0 "
                f"to {num_tokens - 1}."
            )
    if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        raise SpecError(
            f"this engine has logprobs_mode {shown(model.logprobs_mode)}; a sweep's metric is "
            "computed from log-probabilities, so start the engine with 'raw_logprobs'."
        )
    if not all(token_ids) and -1 < model.max_logprobs < num_tokens:
        raise SpecError(
            f"the metric takes all {num_tokens:,} log-probabilities of a token, and this "
            f"engine gives at most {model.max_logprobs}; start it with max_logprobs=-1."
        )


def cells_at_once(most: int, num_logprobs: int) -> int:
    """The number of cells that the engine can have at the same time: at most `most`. The number is
    smaller if the log-probabilities of these cells would otherwise take more than about 1 GiB.

    Args:
        num_logprobs: the number of log-probabilities of one cell. vLLM makes a Python object of
            about 225 bytes for each log-probability.
    """
    return max(1, min(most, MAX_LOGPROBS // num_logprobs))
