"""A linear probe's two files: NAME.safetensors and NAME.json beside it.

Owns:  what stands in them. Without torch: clients read them too.
To:    analysis.probes, cli.watch.

NAME.safetensors has `weight` [hidden_size] and `bias` [1], and where a scaler came before,
its `mean` and `scale`, which are folded. NAME.json says where the probe belongs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.vectors.containers import check_size, read_bytes, read_safetensors
from vllm_scope.vectors.module import as_vector


def probe_path(path: str | Path) -> Path:
    """Raises SpecError for a file of another ending."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise SpecError(f"{path} ends in {path.suffix!r}; a probe's file ends in .safetensors.")
    return path


def read_weights(path: Path) -> tuple[NDArray[np.float32], float]:
    """float32 [hidden_size] and the bias, of the raw stream.

    Raises:
        SpecError: too large, or malformed.
        OSError: it cannot be read.
    """
    arrays, _ = read_safetensors(read_bytes(path))
    needed, known = {"weight", "bias"}, {"weight", "bias", "mean", "scale"}
    if not needed <= set(arrays) <= known or ("mean" in arrays) != ("scale" in arrays):
        raise SpecError(
            f"{path} has {shown(sorted(arrays))}; a probe's tensors are weight and bias, and "
            "mean and scale where a scaler comes first."
        )
    weight = as_vector(arrays["weight"], "weight")
    if arrays["bias"].size != 1:
        raise SpecError(f"{path}: bias has shape {list(arrays['bias'].shape)}; it is one number.")
    bias = float(arrays["bias"].reshape(()))
    if "mean" in arrays:
        mean, scale = (as_vector(arrays[name], name) for name in ("mean", "scale"))
        if not len(mean) == len(scale) == len(weight) or not (scale > 0).all():
            raise SpecError(f"{path}: mean and scale are of {len(weight)} values, scale above 0.")
        folded, bias = fold(weight, bias, mean, scale)
        weight = folded.astype(np.float32)
    return weight, bias


def read_place(path: Path) -> dict[str, Any]:
    """The fields of NAME.json: site, layer, and maybe pooling, model and threshold.

    Raises:
        SpecError: too large, malformed, or fields that are missing or unknown.
        OSError: it cannot be read.
    """
    check_size(path.stat().st_size, str(path))
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}.") from None
    kinds = {"pooling": str | None, "model": str | None, "threshold": int | float}
    needed, known = {"site", "layer"}, {"site", "layer", *kinds}
    if not isinstance(body, dict) or not needed <= set(body) <= known:
        raise SpecError(f"{path} has {shown(body)}; its fields are {', '.join(sorted(known))}.")
    for name, kind in kinds.items():
        if name in body and not isinstance(body[name], kind):
            raise SpecError(f"{path}: {name} is {shown(body[name])}, of the wrong type.")
    return body


def fold(
    weight: NDArray[Any], bias: float, mean: NDArray[Any], scale: NDArray[Any]
) -> tuple[NDArray[np.float64], float]:
    """((x - mean) / scale) . weight + bias, as x . folded + bias."""
    folded = np.asarray(weight, np.float64) / scale
    return folded, bias - float(folded @ np.asarray(mean, np.float64))
