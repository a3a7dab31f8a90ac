"""Probes of every kind at every site, and what their scores must be: float64 on rows that the same
request read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_scope import AttentionPool, Ema, Mlp, Probe, Read, RollingMean

NUM_LAYERS = 3
SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z")
READS = tuple(Read(site) for site in SITES)
AGGREGATES = ("max", "mean", Ema(0.8), RollingMean(4), RollingMean(5, "max"))
#: Relative to the size of the terms that are added.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mlp(seed: int, width: int, hidden: str = "relu", sizes: tuple[int, ...] = (5,)) -> Mlp:
    layers, takes = [], width
    for i, size in enumerate((*sizes, 1)):
        layers.append((numbers(seed + i, size, takes) / takes**0.5, numbers(seed + 50 + i, size)))
        takes = size
    return Mlp(layers, hidden)


def pool(seed: int, width: int, num_heads: int = 2) -> AttentionPool:
    query, value = numbers(seed, num_heads, width), numbers(seed + 1, num_heads, width)
    return AttentionPool(query / width**0.5, value / width**0.5)


def every_kind(width_of: dict[str, int], tokens: Any = "all") -> list[Probe]:
    """At each site a linear one, one of two layers, an Mlp and an AttentionPool."""
    found = []
    for i, (site, width) in enumerate(width_of.items()):
        seed, at = 1000 * i, {"site": site, "tokens": tokens}
        aggregate = AGGREGATES[i % len(AGGREGATES)]
        layer = i % NUM_LAYERS
        found += [
            Probe(numbers(seed, width), layer=layer, bias=0.5, name=f"{site}.linear", **at),
            Probe(
                numbers(seed + 1, 2, width), layers=[0, 2], activation="sigmoid",
                name=f"{site}.two", aggregate=aggregate, **at,
            ),
            Probe(mlp(seed + 2, width), layer=layer, name=f"{site}.mlp", bias=-1.0, **at),
            Probe(
                pool(seed + 3, width), layer=layer, name=f"{site}.pool", aggregate="max", **at
            ),
        ]  # fmt: skip
    width = width_of["resid_post"]
    return [
        *found,
        Probe(mlp(7, width, "gelu", (6, 4)), layer=1, name="deep", tokens=tokens),
        Probe(
            [mlp(8, width, "tanh"), mlp(9, width, "silu")], layers=[1, 2], name="several",
            tokens=tokens,
        ),
        Probe([pool(10, width), pool(12, width)], layers=[0, 1], name="pools", tokens=tokens),
    ]  # fmt: skip


def check(result: Any, probes: list[Probe], tolerance: float) -> None:
    """Scores and aggregates of a complete result, at each position of the reads."""
    assert result.status == "complete", (result, result.error)
    for probe in probes:
        positions = result.scores.positions(probe.name).tolist()
        found = result.scores[probe.name]
        assert found.dtype == torch.float32
        exact, terms = _scores(result, probe, positions)
        error = float(((found.double() - exact).abs() / terms).max())
        assert error <= tolerance, (probe.name, error)
        if probe.aggregate is None:
            assert probe.name not in result.aggregates
            continue
        running = result.aggregates[probe.name]
        wanted = aggregate(found.double().numpy(), probe.aggregate)
        assert float((running.double() - torch.from_numpy(wanted)).abs().max()) <= 1e-6, probe.name
        assert result.aggregates.positions(probe.name).tolist() == positions


def _scores(result: Any, probe: Probe, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n]; and the size of the terms, which a rounding error is relative to."""
    total, terms = 0, 0
    for layer, weight in zip(probe.layers, probe.weights(), strict=True):
        at = result.positions(probe.site, layer)
        here = torch.isin(at, torch.tensor(positions))
        rows = result[probe.site, layer].flatten(1).double()[here]
        if isinstance(weight, Mlp):
            values, size = _mlp(rows, weight)
        elif isinstance(weight, AttentionPool):
            both = torch.from_numpy(np.concatenate([weight.query.numpy, weight.value.numpy]))
            values, size = rows @ both.double().T, rows.abs() @ both.double().abs().T
        else:
            w = torch.from_numpy(weight.numpy.copy()).double()[None]
            values, size = rows @ w.T, rows.abs() @ w.abs().T
        total, terms = total + values, terms + size
    if probe.pools:
        logits, values = total.chunk(2, dim=1)
        pooled = [
            (logits[: t + 1].softmax(0) * values[: t + 1]).sum() for t in range(len(positions))
        ]
        # An error of a logit moves the weights of all values.
        spread = values.abs().max() + 1
        score, terms = torch.stack(pooled) + probe.bias, terms.max() * spread
        terms = terms.expand(len(positions))
    else:
        score, terms = total[:, 0] + probe.bias, terms[:, 0] + abs(probe.bias)
    return (score.sigmoid() if probe.activation else score), terms


def _mlp(x: torch.Tensor, weight: Mlp) -> tuple[torch.Tensor, torch.Tensor]:
    how = {
        "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
    }[weight.hidden]  # fmt: skip
    for i, (matrix, bias) in enumerate(weight.layers):
        w, b = (torch.from_numpy(a.numpy.copy()).double() for a in (matrix, bias))
        x, size = how(x) if i else x, (how(x) if i else x).abs() @ w.abs().T + b.abs()
        x = x @ w.T + b
    return x, size + 1


def aggregate(scores: np.ndarray, kind: Any) -> np.ndarray:
    """By the definition, one position after another."""
    found: list[float] = []
    for t in range(len(scores)):
        so_far = scores[: t + 1]
        if kind == "max":
            found.append(so_far.max())
        elif kind == "mean":
            found.append(so_far.mean())
        elif isinstance(kind, Ema):
            found.append(
                scores[0] if not t else kind.decay * found[-1] + (1 - kind.decay) * scores[t]
            )
        elif kind.then is None or t + 1 < kind.window:
            found.append(so_far[-kind.window :].mean())
        else:
            means = [scores[i : i + kind.window].mean() for i in range(t + 2 - kind.window)]
            found.append(max(means))
    return np.array(found)
