"""Cross-layer transcoders of random numbers in circuit-tracer's layout, and what they must compute:
float64, in its notation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.unit.saes.published import Weights, jump, relu, save

HOOKS = 'feature_input_hook: "hook_resid_mid"\nfeature_output_hook: "hook_mlp_out"\n'


@dataclass(frozen=True)
class WrittenClt:
    """A CLT in a folder."""

    path: Path
    weights: list[Weights]

    def encode(self, layer: int, x: np.ndarray) -> np.ndarray:
        w = self.weights[layer]
        pre = np.einsum("...d,fd->...f", x, w["W_enc"]) + w["b_enc"]
        return jump(pre, w["threshold"]) if "threshold" in w else relu(pre)

    def decode(self, layer: int, x: list[np.ndarray]) -> np.ndarray:
        w = self.weights[layer]
        rows = w["b_dec"] + (x[layer] @ w["W_skip"] if "W_skip" in w else 0.0)
        for i in range(layer + 1):
            rows = rows + self.encode(i, x[i]) @ self.weights[i]["W_dec"][:, layer - i]
        return rows


def write_clt(
    path: Path, num_layers: int, width: int, d_sae: int, jumps: bool = False, skips: bool = False,
    config: str | None = HOOKS,
) -> WrittenClt:  # fmt: skip
    rng, weights = np.random.default_rng(5), []
    for i in range(num_layers):
        shapes = {
            "W_enc": (d_sae, width), "b_enc": (d_sae,), "b_dec": (width,),
            "W_dec": (d_sae, num_layers - i, width),
        }  # fmt: skip
        shapes |= {"threshold": (d_sae,)} if jumps else {}
        shapes |= {"W_skip": (width, width)} if skips else {}
        w = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        w["W_enc"] /= np.float32(width**0.5)
        if jumps:
            w["threshold"] = np.abs(w["threshold"]) / 4
        save(path / f"W_dec_{i}.safetensors", {f"W_dec_{i}": w["W_dec"]})
        rest = {f"{name}_{i}": value for name, value in w.items() if name != "W_dec"}
        save(path / f"W_enc_{i}.safetensors", rest)
        weights.append({name: value.astype(np.float64) for name, value in w.items()})
    if config is not None:
        (path / "config.yaml").write_text(config)
    return WrittenClt(path, weights)
