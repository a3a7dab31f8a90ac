"""Linear probes: a direction and a threshold, fitted to labelled rows, which find a concept.

Owns:  LinearProbe, its fitting and calibration, and its files.
From:  rows [n, hidden_size] and labels.   To: scores, in this process or on a server.

A probe's files are NAME.safetensors and, in the same folder, NAME.json (vectors.probe_files).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.analysis.rows import Labels, as_rows, stream_of, truth_of
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Probe
from vllm_scope.request.selectors import WORDS
from vllm_scope.request.sites import MODEL_SITES, SiteLayer
from vllm_scope.vectors.module import as_stream, as_vector
from vllm_scope.vectors.probe_files import (
    RAW,
    ProbeWarning,
    checked_template,
    doubts,
    finite,
    fold,
    probe_path,
    read_place,
    read_weights,
)

Rows = Tensor | NDArray[np.floating]


def template_digest(template: str | None) -> str:
    """The value of `LinearProbe.template` for a chat template: "sha256:...", or "none" for None.

    Args:
        template: the attribute `chat_template` of the tokenizer.
    """
    if template is None:
        return RAW
    return f"sha256:{hashlib.sha256(template.encode()).hexdigest()}"


@dataclass(frozen=True)
class Calibration:
    """The numbers in sigmoid(slope * score + offset), which is the probability for a score."""

    slope: float
    offset: float

    def __post_init__(self) -> None:
        for name in ("slope", "offset"):
            object.__setattr__(self, name, finite(getattr(self, name), name))


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A probe whose score of a row is row . weight + bias.

    Without a calibration, the concept is more likely present than absent if the score is above 0.

    Attributes:
        weight: float32 [hidden_size], a read-only array.
        bias: a float. Weight and bias apply to rows as they are in the stream, without a scaler.
        site, layer: the stream whose rows the probe scores.
        pooling: the tokens whose rows the probe was fitted to, as a word that an action's `tokens`
            accepts, such as "last_prompt", "prompt", "generated" or "all". Another word, such as
            "mean", means that a row was not the row of a single token. None means that the tokens
            are unknown.
        model: the model of the stream.
        threshold: the concept counts as present if the score is above this number.
        template: the chat template of the prompts to which the probe was fitted, as a
            `template_digest`. "none" means that the prompts had no chat template. "chat" means an
            unknown chat template. None means that it is unknown whether the prompts had one.
        calibration: the calibration that `probabilities` uses, or None if scores are logits.

    Raises:
        SpecError: a value has a wrong type or shape, or is not finite.
    """

    weight: NDArray[np.float32]
    bias: float
    site: str
    layer: int
    pooling: str | None = None
    model: str | None = None
    threshold: float = 0.0
    template: str | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        site, layer = as_stream((self.site, self.layer))
        object.__setattr__(self, "site", site)
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "weight", as_vector(self.weight, "weight"))
        for name in ("bias", "threshold"):
            object.__setattr__(self, name, finite(getattr(self, name), name))
        checked_template(self.template)
        # The warnings that this probe has given. `_told` is no field, because `save_probe` writes
        # all fields.
        object.__setattr__(self, "_told", set())

    def __repr__(self) -> str:
        facts = [f"bias {self.bias:.4g}", f"threshold {self.threshold:.4g}"]
        facts += [f"pooling {self.pooling!r}"] * (self.pooling is not None)
        facts += ["calibrated"] * (self.calibration is not None)
        width = len(self.weight)
        return f"<LinearProbe of {self.site} {self.layer}: {width} weights, {', '.join(facts)}>"

    def action(self, name: str, tokens: object = None, template: str | None = None) -> Probe:
        """The action that scores a request's tokens with this probe.

        Args:
            name: the name of the scores in the result.
            tokens: a selector. None selects the tokens that `pooling` names. If `pooling` is None
                or a word such as "mean", None selects all tokens.
            template: the template of the request's prompt, in the form of `LinearProbe.template`,
                or None if the template is not checked.

        Warns:
            ProbeWarning: the probe was fitted to other tokens, or with another template. A probe
                gives the same warning only one time.

        Raises:
            SpecError: `vllm_scope.Probe` refuses the arguments, or `template` has another form.
        """
        if tokens is None:
            tokens = self.pooling if self.pooling in WORDS else "all"
        at = None if self.site in MODEL_SITES else self.layer
        action = Probe(
            self.weight, bias=self.bias, site=self.site, layers=at, name=name, tokens=tokens
        )
        served = checked_template(template)
        for doubt in doubts(name, self.pooling, action.tokens, self.template, served):
            if doubt not in self._told:  # type: ignore[attr-defined]
                self._told.add(doubt)  # type: ignore[attr-defined]
                warnings.warn(doubt, ProbeWarning, stacklevel=2)
        return action

    def scores(self, rows: Rows) -> Tensor:
        """The float32 scores [...] of rows [..., hidden_size], which can have any float dtype."""
        rows = as_rows(rows)
        if rows.shape[-1] != len(self.weight):
            raise SpecError(
                f"rows have shape {list(rows.shape)}; this probe is for {len(self.weight)} values."
            )
        return rows.float() @ torch.tensor(self.weight, device=rows.device) + self.bias

    def probabilities(self, rows: Rows) -> Tensor:
        """The probabilities of the concept for rows [..., hidden_size], as float32 [...]. If the
        probe has no calibration, the probability is the sigmoid of the score."""
        scores = self.scores(rows)
        if self.calibration is not None:
            scores = self.calibration.slope * scores + self.calibration.offset
        return scores.sigmoid()

    def calibrated(self, rows: Rows, labels: Labels) -> LinearProbe:
        """A copy of this probe with a calibration by Platt's method.

        Needs scikit-learn.

        Args:
            rows: rows [n, hidden_size] to which the probe was not fitted.
            labels: whether the concept is present in each row, as 0 and 1, or False and True. Both
                values must occur.

        Raises:
            SpecError: all labels are the same, a label has another value, or there are not as many
                labels as rows.
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        rows = as_rows(rows)
        truth = _checked_labels(rows, labels).reshape(-1)
        scores = self.scores(rows).detach().cpu().double().numpy().reshape(-1, 1)
        # Without a scaler, scikit-learn would stop at the slope 0 if all scores are small.
        scaler = StandardScaler()
        scores = scaler.fit_transform(scores)
        # With the targets 0 and 1, perfectly separated rows would make the slope infinite. Platt's
        # targets are a little above 0 and a little below 1. Each row occurs two times: with the
        # label True and the weight `target`, and with the label False and the weight 1 - target.
        hits, misses = truth.sum(), (~truth).sum()
        target = np.where(truth, (hits + 1) / (hits + 2), 1 / (misses + 2))
        fitted = LogisticRegression(C=np.inf).fit(
            np.concatenate([scores, scores]),
            np.repeat([True, False], len(scores)),
            sample_weight=np.concatenate([target, 1 - target]),
        )
        slope, offset = fold(
            fitted.coef_[0], float(fitted.intercept_[0]), scaler.mean_, scaler.scale_
        )
        return replace(self, calibration=Calibration(slope[0], offset))

    def auroc(self, rows: Rows, labels: Labels) -> float:
        """How often a row with the concept has a higher score than a row without the concept.

        Needs scikit-learn. Each row with the concept forms a pair with each row without it. The
        result is the share of the pairs in which the row with the concept has the higher score (an
        equal score counts as half). Random scores give 0.5.

        Args:
            rows, labels: the arguments of `calibrated`.

        Raises:
            SpecError: for the same reasons as in `calibrated`.
        """
        from sklearn.metrics import roc_auc_score

        rows = as_rows(rows)
        truth = _checked_labels(rows, labels)
        scores = self.scores(rows).detach().cpu().numpy()
        # Both arrays are flat. In a 2-D array, scikit-learn would take each column as a class.
        return float(roc_auc_score(truth.reshape(-1), scores.reshape(-1)))


def train_probe(
    rows: Rows,
    labels: Labels,
    stream: SiteLayer,
    *,
    c: float = 0.1,
    pooling: str | None = None,
    model: str | None = None,
    template: str | None = None,
) -> LinearProbe:
    """Fit a probe by logistic regression on standardised rows.

    The scaler that standardises the rows is then included in the probe's weight and bias. Needs
    scikit-learn (`vllm-scope[probes]`).

    Args:
        rows: a tensor or a numpy array [n, hidden_size] of any float dtype.
        labels: whether the concept is present in each row, as 0 and 1, or False and True. Both
            values must occur.
        stream: the site and the layer of the rows.
        c: the inverse strength of the L2 penalty, on the standardised rows.
        pooling: the tokens of the rows, as a word that an action's `tokens` accepts, such as
            "last_prompt". "mean" means that a row is not the row of a single token. None means that
            the tokens are unknown.
        model, template: values of the fields of the probe.

    Raises:
        SpecError: there is not one label for each row, rows are not finite, labels have other
            values or are all the same, or the stream or the pooling is not valid.
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
    rows, stream = as_rows(rows), as_stream(stream_of(stream))
    checked_pooling(pooling)
    if rows.dim() != 2:
        raise SpecError(f"rows have shape {list(rows.shape)}; they must be [n, hidden_size].")
    truth = _checked_labels(rows, labels)
    rows = rows.detach().cpu().float()
    if not rows.isfinite().all():
        raise SpecError("rows have NaN or Inf in float32; leave those rows out.")
    scaler, classifier = StandardScaler(), LogisticRegression(C=c, solver="newton-cholesky")
    make_pipeline(scaler, classifier).fit(rows.numpy(), truth)
    weight, bias = fold(
        classifier.coef_[0], float(classifier.intercept_[0]), scaler.mean_, scaler.scale_
    )
    return LinearProbe(
        weight.astype(np.float32), bias, *stream, pooling=pooling, model=model, template=template
    )


def save_probe(path: str | Path, probe: LinearProbe) -> None:
    """Write a probe to NAME.safetensors and NAME.json.

    Args:
        path: the path of the .safetensors file.
    """
    from safetensors.numpy import save

    path = probe_path(path)
    body = {k: v for k, v in asdict(probe).items() if k not in ("weight", "bias")}
    # The bias is written in float64, because float32 would round a bias that includes a scaler.
    # `save_file` would give the file the mode 0600, whatever the umask is.
    path.write_bytes(save({"weight": probe.weight, "bias": np.array([probe.bias])}))
    path.with_suffix(".json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def load_probe(path: str | Path) -> LinearProbe:
    """Read the probe in NAME.safetensors and NAME.json.

    Raises:
        SpecError: a file is too large or malformed, or has missing or unknown fields.
        OSError: one of the files cannot be read.
    """
    path = probe_path(path)
    weight, bias = read_weights(path)
    read = read_place(path.with_suffix(".json"))
    found = read.get("calibration")
    calibration = None if found is None else Calibration(**found)
    return LinearProbe(
        weight, bias, read["site"], read["layer"], read.get("pooling"), read.get("model"),
        read.get("threshold", 0.0), read.get("template"), calibration,
    )  # fmt: skip


def checked_pooling(pooling: object) -> None:
    """Raise SpecError if `pooling` is not None, a word of `tokens`, or "mean"."""
    if pooling is not None and pooling not in (*WORDS, "mean"):
        raise SpecError(
            f"pooling is {shown(pooling)}; it must be one of {', '.join(WORDS)}, or 'mean' for "
            "rows that are not of a single token, or None if it is not known."
        )


def _checked_labels(rows: Tensor, labels: Labels) -> NDArray[np.bool_]:
    truth = truth_of(labels)
    if truth.shape != rows.shape[:-1]:
        raise SpecError(
            f"there are labels of shape {list(truth.shape)} for rows of shape "
            f"{list(rows.shape)}; give one label for each row."
        )
    if truth.all() or not truth.any():
        raise SpecError("the labels are all the same; both values must occur.")
    return truth
