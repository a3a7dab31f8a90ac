"""Random selectors, reads and specs; and what a selector means, one token at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from vllm_scope import Except, Read, Spec, TokenIds, Union
from vllm_scope.selectors import WORDS, Selector, parse_selector

#: Few token ids, so that a random sequence repeats them.
VOCAB = 5


def is_selected(
    form: Any, position: int, num_prompt: int, token_id: int, num_processed: int
) -> bool:
    """Whether the JSON form of a selector picks a token, when everything is known."""

    def ask(part: Any) -> bool:
        return is_selected(part, position, num_prompt, token_id, num_processed)

    def from_prompt_end(place: int) -> int:
        return place + num_prompt if place < 0 else place

    if isinstance(form, str):
        return {
            "all": True,
            "prompt": position < num_prompt,
            "generated": position >= num_prompt,
            "last_prompt": position == num_prompt - 1,
            "last": position == num_processed - 1,
        }[form]
    if isinstance(form, list):
        return any(position == from_prompt_end(place) for place in form)
    ((kind, body),) = form.items()
    if kind == "token_ids":
        return token_id in body
    if kind == "union":
        return any(ask(part) for part in body)
    if kind == "except":
        return ask(body[0]) and not ask(body[1])
    start, stop, step = body
    start = 0 if start is None else max(from_prompt_end(start), 0)
    stop = num_processed if stop is None else from_prompt_end(stop)
    return position in range(start, stop, step or 1)


def _places() -> st.SearchStrategy[int]:
    return st.integers(-6, 20)


def _leaves() -> st.SearchStrategy[Selector]:
    ends = st.none() | _places()
    return st.one_of(
        st.sampled_from(WORDS).map(lambda word: parse_selector(word, "word")),
        st.lists(_places(), min_size=1, max_size=4).map(lambda p: parse_selector(p, "places")),
        st.builds(slice, ends, ends, st.none() | st.integers(1, 4)).map(
            lambda s: parse_selector(s, "slice")
        ),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(lambda i: TokenIds(*i)),
    )


def selectors() -> st.SearchStrategy[Selector]:
    """All kinds, with unions and exclusions inside each other."""
    return st.recursive(
        _leaves(),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: Union(*parts)),
            st.builds(Except, inner, inner),
        ),
        max_leaves=5,
    )


def reads(num_layers: int) -> st.SearchStrategy[Read]:
    layers = st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers)
    sites = st.sampled_from(["resid_post", "resid_pre", "post_block", "pre_attn"])
    return st.one_of(
        st.builds(Read, sites, layers | st.just("all"), selectors()),
        st.builds(Read, st.just("embed"), st.just("all"), selectors()),
    )


def specs(num_layers: int, max_reads: int = 4) -> st.SearchStrategy[Spec]:
    return st.lists(reads(num_layers), min_size=1, max_size=max_reads).map(
        lambda found: Spec(tuple(found))
    )
