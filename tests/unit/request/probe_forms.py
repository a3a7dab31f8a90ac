"""Random probes of every form: linear, Mlp, AttentionPool; of one layer or several; thresholds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.unit.strategies import NUMBERS, arrays, selectors
from vllm_scope import AttentionPool, Ema, Mlp, Probe, RollingMean, Spec
from vllm_scope.request.nets import HIDDEN
from vllm_scope.request.sites import MODEL_SITES, SITES


@st.composite
def mlps(draw: Any, width: int) -> Mlp:
    sizes = [width, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)), 1]
    pairs = zip(sizes[1:], sizes[:-1], strict=True)
    layers = [(draw(arrays(out, size)), draw(arrays(out))) for out, size in pairs]
    return Mlp(layers, draw(st.sampled_from(HIDDEN)))


def pools(width: int, num_heads: int) -> st.SearchStrategy[AttentionPool]:
    one = arrays(num_heads, width)
    return st.builds(AttentionPool, one, one)


def aggregates() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from([None, "max", "mean"]),
        st.floats(0, 1, exclude_max=True).map(Ema),
        st.builds(RollingMean, st.integers(1, 9), st.sampled_from([None, "max"])),
    )


@st.composite
def _verdicts(draw: Any) -> dict[str, Any]:
    """Tokens, threshold and action that go together."""
    found = {"tokens": draw(selectors()), "threshold": draw(st.none() | NUMBERS)}
    if found["threshold"] is not None and draw(st.booleans()):
        found |= {"action": "stop", "tokens": draw(st.sampled_from(["all", "prompt", "generated"]))}
    return found


@st.composite
def any_probes(draw: Any, num_layers: int, width: int) -> Probe:
    site = draw(st.sampled_from(SITES))
    some = st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers, unique=True)
    layers = [0] if site in MODEL_SITES else draw(some)
    heads = draw(st.integers(1, 2))
    one = draw(st.sampled_from([mlps(width), pools(width, heads)]))
    weights = st.one_of(
        st.just("module"),
        arrays(len(layers), width),
        st.lists(one, min_size=len(layers), max_size=len(layers)),
    )
    return Probe(
        draw(weights),
        bias=draw(NUMBERS),
        site=site,
        layers=layers,
        name=draw(st.text(min_size=8, max_size=12)),
        activation=draw(st.sampled_from([None, "sigmoid"])),
        aggregate=draw(aggregates()),
        **draw(_verdicts()),
    )


def probe_specs(num_layers: int, width: int = 4) -> st.SearchStrategy[Spec]:
    """One or two probes, and nothing else; the second one may be a later stage of a cascade."""
    some = st.lists(
        any_probes(num_layers, width), min_size=1, max_size=2, unique_by=lambda probe: probe.name
    )
    return st.tuples(some, st.booleans()).map(lambda drawn: Spec((), _staged(*drawn)))


def _staged(found: list[Probe], cascade: bool) -> tuple[Probe, ...]:
    first, last = found[0], found[-1]
    leads = first.threshold is not None and first.action == "flag" and first.tokens.uniform
    if cascade and leads and len(found) == 2 and last.tokens.to_json() in ("all", "generated"):
        return first, replace(last, after=first.name)
    return tuple(found)
