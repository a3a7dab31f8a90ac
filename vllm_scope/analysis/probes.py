"""Linear probes: a concept as one direction and a threshold, fitted to labelled rows.

Owns:  LinearProbe, how it is fitted, and its files.
From:  rows [n, hidden_size] and labels.   To: scores, here or while serving.

A probe's files are NAME.safetensors and beside it NAME.json (vectors.probe_files).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.sites import SiteLayer
from vllm_scope.vectors.module import as_stream, as_vector
from vllm_scope.vectors.probe_files import fold, probe_path, read_place, read_weights

Labels = Sequence[bool] | NDArray[np.bool_] | Tensor


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """score = row . weight + bias, positive where the concept is likelier than not.

    Attributes:
        weight: float32 [hidden_size], read-only.
        bias: of the raw stream; no scaler comes before.
        site, layer: the stream whose rows it is for.
        pooling: what a row of its training was, as "last_prompt" or "prompt".
        model: whose stream.
        threshold: the score from which on the concept counts as present.
    """

    weight: NDArray[np.float32]
    bias: float
    site: str
    layer: int
    pooling: str | None = None
    model: str | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        site, layer = as_stream((self.site, self.layer))
        object.__setattr__(self, "site", site)
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "weight", as_vector(self.weight, "weight"))
        for name in ("bias", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise SpecError(f"{name} is {shown(value)}; it is a number.")
            if not np.isfinite(value):
                raise SpecError(f"{name} is {value}; it must be finite.")
            object.__setattr__(self, name, float(value))

    def scores(self, rows: Tensor) -> Tensor:
        """float32 [...] of rows [..., hidden_size] of any float dtype."""
        if rows.shape[-1] != len(self.weight):
            raise SpecError(
                f"rows have shape {list(rows.shape)}; this probe is for {len(self.weight)} values."
            )
        return rows.float() @ torch.tensor(self.weight, device=rows.device) + self.bias

    def probabilities(self, rows: Tensor) -> Tensor:
        """float32 [...]: of the concept, as the logistic regression that it was fitted by."""
        return self.scores(rows).sigmoid()

    def auroc(self, rows: Tensor, labels: Labels) -> float:
        """How often a row with the concept scores above one without; 0.5 is chance.

        Needs scikit-learn.

        Raises:
            SpecError: the labels are all the same, or not one for each row.
        """
        from sklearn.metrics import roc_auc_score

        truth = _checked_labels(rows, labels)
        scores = self.scores(rows).detach().cpu().numpy()
        # All rows at once: scikit-learn would take each column for a label of its own.
        return float(roc_auc_score(truth.reshape(-1), scores.reshape(-1)))


def train_probe(
    rows: Tensor,
    labels: Labels,
    stream: SiteLayer,
    *,
    c: float = 0.1,
    pooling: str | None = None,
    model: str | None = None,
) -> LinearProbe:
    """Logistic regression on standardised rows, folded into one weight and a bias.

    Needs scikit-learn (`vllm-scope[probes]`).

    Args:
        rows: [n, hidden_size], any float dtype.
        labels: [n], whether the concept is present; both kinds must occur.
        stream: (site, layer) of the rows.
        c: inverse strength of the L2 penalty, on the standardised rows.
        pooling, model: kept on the probe.

    Raises:
        SpecError: shapes disagree, rows are not finite, or there is one label only.
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise ImportError(
            "fitting a probe needs scikit-learn: pip install 'vllm-scope[probes]'."
        ) from None
    if rows.dim() != 2:
        raise SpecError(f"rows have shape {list(rows.shape)}; they are [n, hidden_size].")
    truth = _checked_labels(rows, labels)
    if not rows.isfinite().all():
        raise SpecError("rows have NaN or Inf; leave those rows out.")
    scaler, classifier = StandardScaler(), LogisticRegression(C=c, solver="newton-cholesky")
    make_pipeline(scaler, classifier).fit(rows.detach().cpu().float().numpy(), truth)
    weight, bias = fold(
        classifier.coef_[0], float(classifier.intercept_[0]), scaler.mean_, scaler.scale_
    )
    return LinearProbe(weight.astype(np.float32), bias, *stream, pooling=pooling, model=model)


def save_probe(path: str | Path, probe: LinearProbe) -> None:
    """Write NAME.safetensors and NAME.json.

    Args:
        path: of the .safetensors file.
    """
    from safetensors.numpy import save_file

    path = probe_path(path)
    body = {k: v for k, v in asdict(probe).items() if k not in ("weight", "bias")}
    # float64, as the sum of a probe's whole width is kept exactly.
    save_file({"weight": probe.weight, "bias": np.array([probe.bias])}, path)
    path.with_suffix(".json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def load_probe(path: str | Path) -> LinearProbe:
    """The probe in NAME.safetensors and NAME.json.

    Raises:
        SpecError: too large, malformed, or fields that are missing or unknown.
        OSError: one of the files cannot be read.
    """
    path = probe_path(path)
    weight, bias = read_weights(path)
    return LinearProbe(weight, bias, **read_place(path.with_suffix(".json")))


def _checked_labels(rows: Tensor, labels: Labels) -> NDArray[np.bool_]:
    truth = np.asarray(labels, bool)
    if truth.shape != rows.shape[:-1]:
        raise SpecError(
            f"there are labels of shape {list(truth.shape)} for rows of shape "
            f"{list(rows.shape)}; give one for each row."
        )
    if truth.all() or not truth.any():
        raise SpecError("the labels are all the same; both kinds must occur.")
    return truth
