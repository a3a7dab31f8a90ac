"""What the actions of a request do to one token, in plain numbers and without programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_scope.program.operations import OP_ABLATE, OP_ADD, OP_ADD_NORM, OP_CLAMP, OP_SET
from vllm_scope.request.nets import Aggregate, Ema, Net, RollingMean
from vllm_scope.request.resolved import Resolved, ResolvedEdit, ResolvedProbe
from vllm_scope.request.selectors import Selector, Tokens
from vllm_scope.request.sites import Place, SiteLayer, Sites, point_of

#: An edit of one token: code, its two numbers, and its vector in float64.
Edited = tuple[int, float, float, np.ndarray]


def known(selector: Selector, position: int, prompt: Sequence[int]) -> tuple[bool, bool]:
    """Whether a token is certainly, and possibly, selected while it is processed."""
    token_id = prompt[position] if position < len(prompt) else -1
    one = Tokens(np.array([position]), len(prompt), np.array([token_id]), None)
    masks = selector.select(one)
    return bool(masks.certain[0]), bool(masks.possible[0])


def edits_at(
    asked: Resolved, sites: Sites, boundary: int, groups: int, position: int, prompt: Sequence[int]
) -> list[Edited]:
    """The edits of the first `groups` sites of a boundary, in the order they apply."""
    return [
        _edit_of(edit, position, len(prompt))
        for group in range(groups)
        for edit in asked.edits
        if edit.stream.boundary == boundary
        and edit.stream.group == group
        and known(edit.tokens, position, prompt)[0]
    ]


def _edit_of(edit: ResolvedEdit, position: int, num_prompt: int) -> Edited:
    v = edit.values.numpy.astype(np.float64)
    if edit.kind == "replace":
        at = [p + num_prompt if p < 0 else p for p in edit.positions].index(position)
        return (OP_SET, 0.0, 0.0, v[at])
    if edit.kind == "add" and not edit.norm_match:
        return (OP_ADD, edit.numbers[0], 0.0, v)
    v = v / np.linalg.norm(v)
    if edit.kind == "clamp":
        # (clip(k p, k lo, k hi) - k p) k is k * k times (clip(p, lo, hi) - p)
        lo, hi, strength = edit.numbers
        if strength == 0:
            return (OP_CLAMP, -np.inf, np.inf, v)
        k = np.sqrt(strength)
        return (OP_CLAMP, k * lo, k * hi, k * v)
    code = {"add": OP_ADD_NORM, "ablate": OP_ABLATE}[edit.kind]
    a, b = (*edit.numbers, 0.0, 0.0)[:2]
    return (code, a, b, v)


def apply(edits: list[Edited], x: np.ndarray) -> np.ndarray:
    """A row after some edits, float64."""
    x = np.asarray(x, np.float64)
    for code, a, b, v in edits:
        along = x @ v
        if code == OP_ADD:
            x = x + a * v
        elif code == OP_ADD_NORM:
            x = x + a * np.linalg.norm(x) * v
        elif code == OP_ABLATE:
            x = x - along * v
        elif code == OP_CLAMP:
            x = x + (np.clip(along, a, b) - along) * v
        else:
            x = v
    return x


_HIDDEN = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "silu": lambda x: x * 0.5 * (1 + np.tanh(x / 2)),
    "tanh": np.tanh,
}


def numbers_of(net: Net, rows: np.ndarray) -> np.ndarray:
    """What a net makes of rows, float64 [n, numbers] of [n, width]."""
    x = np.asarray(rows, np.float64)
    for i, (weight, bias) in enumerate(net.layers):
        if i:
            assert net.hidden is not None
            x = _HIDDEN[net.hidden](x)
        x = x @ weight.numpy.astype(np.float64).T
        if bias is not None:
            x = x + bias.numpy
    return x


def terms_of(net: Net, rows: np.ndarray) -> np.ndarray:
    """How large the terms are that `numbers_of` adds, [n, numbers], whatever their signs."""
    x = np.abs(np.asarray(rows, np.float64))
    for weight, bias in net.layers:
        x = x @ np.abs(weight.numpy.astype(np.float64)).T
        if bias is not None:
            x = x + np.abs(bias.numpy)
    return x


def scores_of(probe: ResolvedProbe, numbers: np.ndarray) -> list[float]:
    """A probe's scores, float64, of the sums over its cells, [n, numbers of a cell]."""
    rows = np.asarray(numbers, np.float64)
    found = [_pooled(rows[: n + 1]) if probe.pools else float(rows[n, 0]) for n in range(len(rows))]
    found = [score + probe.bias for score in found]
    if probe.activation == "sigmoid":
        # The half of a tanh does not overflow.
        return [0.5 + 0.5 * math.tanh(score / 2) for score in found]
    return found


def _pooled(rows: np.ndarray) -> float:
    """The sum over heads of the softmax-weighted average of values, of all rows."""
    total = 0.0
    for logits, values in zip(*np.split(rows.T, 2), strict=True):
        weights = np.exp(logits - logits.max())
        total += float(weights @ values / weights.sum())
    return total


def aggregates_of(aggregate: Aggregate, scores: Sequence[float]) -> list[float]:
    """The aggregate at each position of all scores up to there."""
    found: list[float] = []
    for n in range(1, len(scores) + 1):
        some = list(scores[:n])
        if aggregate == "max":
            found.append(max(some))
        elif aggregate == "mean":
            found.append(math.fsum(some) / n)
        elif isinstance(aggregate, Ema):
            last = some[-1] if n == 1 else found[-1]
            found.append(aggregate.decay * last + (1 - aggregate.decay) * some[-1])
        else:
            assert isinstance(aggregate, RollingMean)
            size = aggregate.window
            means = [math.fsum(some[i - size : i]) / size for i in range(size, n + 1)]
            if not means:
                found.append(math.fsum(some) / n)
            else:
                found.append(max(means) if aggregate.then == "max" else means[-1])
    return found


def level_of(sites: Sites, stream: SiteLayer, when: str = "after") -> int:
    """How many sites of its boundary have been edited where a read looks."""
    return Place(*stream).group + (1 if when == "after" else 0)


def named_point(sites: Sites, stream: SiteLayer, when: str = "after") -> int:
    """The point that a read of this stream names; its rows have it as their label."""
    return point_of(Place(*stream).boundary, level_of(sites, stream, when))
