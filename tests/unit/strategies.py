"""Random selectors, actions and specs; and what a selector means, one token at a time."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from vllm_scope import (
    Ablate,
    Add,
    AttentionPool,
    Clamp,
    Except,
    Mlp,
    Probe,
    Read,
    Replace,
    Spec,
    SpecError,
    TokenIds,
    Union,
)
from vllm_scope.request.actions import Edit
from vllm_scope.request.nets import HIDDEN
from vllm_scope.request.selectors import WORDS, Selector, parse_selector

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


def decided_selectors() -> st.SearchStrategy[Selector]:
    """Those that are known when a token is processed, as edits need them."""

    def known(selector: Selector) -> Selector:
        return Except(selector, "generated") if isinstance(selector, TokenIds) else selector

    phases = st.sampled_from(["all", "prompt", "generated"])
    return st.one_of(
        _leaves().filter(lambda s: s.to_json() != "last").map(known),
        st.builds(Except, phases, st.sampled_from([[0], [2, -1]])),
    )


#: Numbers that float32 and JSON hold exactly.
NUMBERS = st.integers(-64, 64).map(lambda n: n / 8)


def arrays(*shape: int) -> st.SearchStrategy[np.ndarray]:
    """float32, no row of it zero."""
    size = math.prod(shape)
    return st.lists(NUMBERS, min_size=size, max_size=size).map(
        lambda numbers: _nowhere_zero(np.array(numbers, np.float32).reshape(shape))
    )


def _nowhere_zero(array: np.ndarray) -> np.ndarray:
    array[..., 0] += np.where(array.any(axis=-1), 0, 1).astype(np.float32)
    return array


def _layers(num_layers: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers, unique=True)


_SITES = st.sampled_from(["resid_post", "resid_pre", "resid_mid", "post_block", "pre_attn"])


def reads(num_layers: int) -> st.SearchStrategy[Read]:
    layers, when = _layers(num_layers) | st.just("all"), st.sampled_from(["after", "before"])
    return st.one_of(
        st.builds(Read, _SITES, layers=layers, tokens=selectors(), when=when),
        st.builds(Read, st.just("embed"), tokens=selectors(), when=when),
    )


def _mlps(width: int) -> st.SearchStrategy[Mlp]:
    """With one hidden layer of three."""
    return st.builds(
        lambda first, bias, last, hidden: Mlp([(first, bias), (last, [0.5])], hidden),
        arrays(3, width), arrays(3), arrays(1, 3), st.sampled_from(HIDDEN),
    )  # fmt: skip


@st.composite
def probes(draw: Any, num_layers: int, hidden_size: int) -> Probe:
    """All kinds, of one layer or several. Their names are distinct with near certainty.

    A pool of three heads has more numbers than taps make at one place.
    """
    layers = draw(_layers(num_layers))
    one = arrays(draw(st.sampled_from([1, 1, 2, 3])), hidden_size)
    shaped = draw(st.sampled_from([_mlps(hidden_size), st.builds(AttentionPool, one, one)]))
    weights = st.lists(shaped, min_size=len(layers), max_size=len(layers))
    return Probe(
        draw(arrays(len(layers), hidden_size) | weights),
        bias=draw(NUMBERS),
        site=draw(_SITES),
        layers=layers,
        name=draw(st.text(min_size=8, max_size=12)),
        tokens=draw(selectors()),
    )


@st.composite
def edits(draw: Any, num_layers: int, hidden_size: int) -> Edit:
    """All kinds; vectors for all layers and one for each."""
    site = draw(_SITES | st.just("embed"))
    layers = [0] if site == "embed" else draw(_layers(num_layers))
    shape: tuple[int, ...] = (hidden_size,)
    if draw(st.booleans()):
        shape = (len(layers), hidden_size)
    where = {"site": site, "layers": layers}
    tokens = draw(decided_selectors())
    match draw(st.sampled_from(["add", "ablate", "clamp", "replace"])):
        case "add":
            vector, match = draw(arrays(*shape)), draw(st.booleans())
            return Add(vector, scale=draw(NUMBERS), norm_match=match, tokens=tokens, **where)
        case "ablate":
            return Ablate(draw(arrays(*shape)), tokens=tokens, **where)
        case "clamp":
            lo, hi = sorted((draw(NUMBERS), draw(NUMBERS)))
            lo, hi = draw(st.sampled_from([(lo, hi), (lo, hi), (None, hi), (lo, None)]))
            strength = draw(st.floats(0, 1))
            return Clamp(
                draw(arrays(*shape)), lo=lo, hi=hi, tokens=tokens, strength=strength, **where
            )
    # From the start or from the prompt's end, so that none is named twice.
    places = st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True)
    positions = draw(places | places.map(lambda some: [-1 - p for p in some]))
    rows = arrays(*shape[:-1], len(positions), hidden_size)
    return Replace(draw(rows), positions=positions, **where)


def specs(
    num_layers: int, hidden_size: int = 4, only_reads: bool = False
) -> st.SearchStrategy[Spec]:
    """Reads, probes and edits: any number of each, in any order."""
    no_probes: st.SearchStrategy[list[Any]] = st.just([])
    some_probes, some_edits = no_probes, no_probes
    if not only_reads:
        some_probes = st.lists(
            probes(num_layers, hidden_size), max_size=2, unique_by=lambda p: p.name
        )
        some_edits = st.lists(edits(num_layers, hidden_size), max_size=3)
    return (
        st.tuples(
            st.lists(reads(num_layers), min_size=1 if only_reads else 0, max_size=3),
            some_probes,
            some_edits,
        )
        .filter(any)
        .map(lambda found: Spec(*map(tuple, found)))
    )


def sentence(call: Callable[[], object]) -> str:
    """What a SpecError says: one sentence or more, in one line, short whatever came."""
    with pytest.raises(SpecError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith("."), text
    assert "\n" not in text
    assert len(text) < 2000
    return text


def as_json(dtype: object = "float32", shape: object = (4,), data: object = None) -> dict:
    """The JSON form of an array, [1, -2, 0.5, 0] unless something of it is wrong."""
    shape = list(shape) if isinstance(shape, tuple) else shape
    if data is None:
        data = base64.b64encode(np.array([1, -2, 0.5, 0], "<f4").tobytes()).decode()
    return {"dtype": dtype, "shape": shape, "data": data}
