"""SAEs of random numbers in SAELens's format, and what they must compute: float64, in SAELens's
notation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.saes.published import V6, Weights, write_saelens

ARCHITECTURES = ("standard", "jumprelu", "topk", "batchtopk", "gated")
#: Of the largest feature of a position, or of 1 if it is smaller.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_VECTORS = {
    "standard": ("b_enc",), "topk": ("b_enc",), "jumprelu": ("b_enc", "threshold"),
    "batchtopk": ("b_enc", "threshold"), "gated": ("b_gate", "b_mag", "r_mag"),
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """An SAE in a folder."""

    path: Path
    architecture: str
    layer: int
    weights: Weights
    k: int

    def encode(self, rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Features, float64 [n, d_sae]; and how far each is from the point where it jumps."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        inner = (rows.double().numpy() - w["b_dec"]) @ w["W_enc"]
        if self.architecture == "gated":
            pi = inner + w["b_gate"]
            magnitude = inner * np.exp(w["r_mag"]) + w["b_mag"]
            return (pi > 0) * np.maximum(magnitude, 0), np.abs(pi * np.exp(w["r_mag"]))
        pre = inner + w["b_enc"]
        if self.architecture == "batchtopk":  # written with rescale_acts_by_decoder_norm
            pre = pre * np.linalg.norm(w["W_dec"], axis=1)
        if "threshold" in w:
            return np.where(pre > w["threshold"], np.maximum(pre, 0), 0), abs(pre - w["threshold"])
        if self.architecture == "topk":
            order = np.sort(pre, axis=1)
            least = (order[:, -self.k] + order[:, -self.k - 1])[:, None] / 2
            return np.where(pre > least, np.maximum(pre, 0), 0), np.abs(pre - least)
        return np.maximum(pre, 0), np.full(pre.shape, np.inf)


def write(path: Path, architecture: str, width: int, layer: int, d_sae: int = 1024) -> Written:
    rng = np.random.default_rng(ARCHITECTURES.index(architecture))
    shapes = {"W_enc": (width, d_sae), "W_dec": (d_sae, width), "b_dec": (width,)}
    shapes |= dict.fromkeys(_VECTORS[architecture], (d_sae,))
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights["W_enc"] /= np.float32(width**0.5)
    weights["W_dec"] /= np.float32(width**0.5)
    weights["b_dec"] /= 4
    for name in {"threshold", "r_mag"} & set(weights):
        weights[name] = np.abs(weights[name]) / 4
    config: dict[str, Any] = V6 | {
        "architecture": architecture, "d_in": width, "d_sae": d_sae,
        "metadata": {"hook_name": f"blocks.{layer}.hook_resid_post"},
    }  # fmt: skip
    more = {"topk": {"k": 12}, "batchtopk": {"k": 12, "rescale_acts_by_decoder_norm": True}}
    write_saelens(path, config | more.get(architecture, {}), weights)
    return Written(path, architecture, layer, weights, 12)


def check(
    found: Any,
    sae: Written,
    rows: torch.Tensor,
    tolerance: float,
    top_k: int | None = None,
    indices: list[int] | None = None,
    threshold: float | None = None,
) -> None:
    """What arrived equals the SAE's own encode of rows, which are at `found.tokens`; features that
    are closer to a choice than the tolerance may fall to either side."""
    exact, jumps = sae.encode(rows)
    assert len(found.tokens) == len(rows) > 0
    num_values = 0
    for i, position in enumerate(found.tokens.tolist()):
        near = tolerance * max(1.0, exact[i].max())
        got = dict(found.top(position))
        assert len(got) <= (top_k or len(indices or ()))
        values = list(got.values())
        assert values == sorted(values, reverse=True)
        num_values += len(got)
        sure = jumps[i] > near
        for index, value in got.items():
            assert abs(value - exact[i, index]) <= near or not sure[index], (position, index)
        least = max(0.0, threshold or 0.0)
        if top_k is not None and len(got) == top_k:
            least = max(least, min(values))
        wanted = sure & (exact[i] > least + near)
        if indices is not None:
            assert set(got) <= set(indices)
            wanted &= np.isin(np.arange(len(wanted)), indices)
        missing = set(np.flatnonzero(wanted).tolist()) - set(got)
        assert not missing, (position, missing)
    assert num_values, "no feature is active; the test shows nothing"
    for index in list(dict(found.top(int(found.tokens[-1]))))[:3]:
        dense = found.dense(index)
        assert dense.shape == found.tokens.shape
        assert float(dense[-1]) == dict(found.top(int(found.tokens[-1])))[index]
