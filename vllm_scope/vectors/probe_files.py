"""The two files of a linear probe: NAME.safetensors and NAME.json, in one folder.

Owns:  the files' content; `doubts`, which compares a request with the probe's training data.
Runs:  anywhere, also in clients. Therefore torch is not imported.
To:    analysis.probes, cli.watch, probe_weights.

NAME.safetensors has `weight` [hidden_size] and `bias` [1]. If a scaler comes before the probe, the
file also has the scaler's `mean` and `scale`. The reader folds the scaler into weight and bias.
NAME.json has the probe's `site` and `layer`. NAME.json can also have `pooling`, `template`,
`calibration`, `model` and `threshold`. `pooling` is the selector of the training tokens. If a
training row was not the row of one token, `pooling` is a word such as "mean". `template` is the
chat template of the training prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, naming, shown
from vllm_scope.request.selectors import WORDS, Tokens, parse_selector
from vllm_scope.vectors.containers import check_size, read_bytes, read_safetensors
from vllm_scope.vectors.module import as_stream, as_vector

#: The values of `template` for prompts without a chat template, and for an unknown chat template.
RAW, CHAT = "none", "chat"
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
#: To compare two selectors, `_covers` applies them to a sample request with this number of
#: positions. The first half of the positions is the prompt.
_POSITIONS = 4096


class CalibrationFields(TypedDict):
    slope: float
    offset: float


class ProbeFields(TypedDict):
    """The content of NAME.json."""

    site: str
    layer: int
    pooling: NotRequired[str | None]
    template: NotRequired[str | None]
    calibration: NotRequired[CalibrationFields | None]
    model: NotRequired[str | None]
    threshold: NotRequired[float]


class ProbeWarning(UserWarning):
    """A request uses a probe on tokens or a chat template that were not in the training data."""


def doubts(
    name: str, pooling: str | None, tokens: object, fitted: str | None, template: str | None
) -> list[str]:
    """Reasons why a probe's scores can be meaningless in a request. Each reason is one sentence.

    Args:
        name: the probe's name, for the messages.
        pooling, fitted: the tokens and the chat template of the training data, from `pooling` and
            `template` of NAME.json.
        tokens, template: the tokens and the template of the request. If `pooling` is None, tokens
            are not compared. If `fitted` or `template` is None, templates are not compared.
    """
    found = []
    if pooling is not None and not _covers(pooling, tokens):
        shown_tokens = parse_selector(tokens, "tokens").to_json()
        found.append(
            f"the probe {name!r} was fitted to rows of {pooling!r} and is served on "
            f"tokens={shown(shown_tokens)}; on other tokens a probe's scores may mean "
            "nothing: fit the probe to rows of the tokens that it scores, and check it on held-out "
            "rows."
        )
    if fitted is not None and template is not None and not _same_template(fitted, template):
        found.append(
            f"the probe {name!r} was fitted to {_said(fitted)} and is served on {_said(template)}; "
            "on such prompts its scores may mean nothing: fit it to prompts of the form that it "
            "scores."
        )
    return found


def _covers(pooling: str, tokens: object) -> bool:
    """True if `pooling` selects all tokens that `tokens` selects. False if `pooling` is a mean of
    rows."""
    if pooling not in WORDS:
        return False
    sample = Tokens(
        np.arange(_POSITIONS), _POSITIONS // 2, np.full(_POSITIONS, -1, np.int64), _POSITIONS
    )
    fitted = parse_selector(pooling, "pooling").select(sample).certain
    served = parse_selector(tokens, "tokens").select(sample).possible
    return not (served & ~fitted).any()


def _same_template(one: str, other: str) -> bool:
    if CHAT in (one, other):
        return RAW not in (one, other)
    return one == other


def _said(template: str) -> str:
    if template == RAW:
        return "prompts without a chat template"
    return "a chat" if template == CHAT else f"prompts of the chat template {template[:19]}"


def checked_template(template: object) -> str | None:
    """Return the template. Raises SpecError if the template is not None, "none", "chat" or a
    digest."""
    if template is None or template in (RAW, CHAT):
        return None if template is None else str(template)
    if not isinstance(template, str) or not _DIGEST.fullmatch(template):
        raise SpecError(
            f"template is {shown(template)}; it must be 'none', 'chat' or the 'sha256:...' that "
            "analysis.probes.template_digest makes of a chat template."
        )
    return template


def probe_path(path: str | Path) -> Path:
    """Convert the path to a Path. Raises SpecError if the path does not end in .safetensors."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise SpecError(f"{path} ends in {path.suffix!r}; a probe's file ends in .safetensors.")
    return path


def read_weights(path: Path) -> tuple[NDArray[np.float32], float]:
    """Read the weight, float32 [hidden_size], and the bias. The weight and the bias are for rows
    that no scaler has changed.

    Raises:
        SpecError: the file is too large or malformed.
        OSError: the file cannot be read.
    """
    arrays, _ = read_safetensors(read_bytes(path))
    needed, known = {"weight", "bias"}, {"weight", "bias", "mean", "scale"}
    if not needed <= set(arrays) <= known or ("mean" in arrays) != ("scale" in arrays):
        raise SpecError(
            f"{path} has {shown(sorted(arrays))}; a probe's tensors are weight and bias, and "
            "mean and scale if there is a scaler."
        )
    weight = as_vector(arrays["weight"], "weight")
    if arrays["bias"].size != 1:
        raise SpecError(
            f"{path}: bias has shape {list(arrays['bias'].shape)}; it must be one number."
        )
    bias = float(arrays["bias"].reshape(()))
    if "mean" in arrays:
        with naming(str(path)):
            folded, bias = fold_tensors(weight, bias, arrays)
        weight = folded.astype(np.float32)
    return weight, bias


def read_place(path: Path) -> ProbeFields:
    """Read the fields of NAME.json: `site`, `layer`, and the optional fields that are in the file.

    Raises:
        SpecError: the file is too large or malformed, or a field is missing, unknown or wrong.
        OSError: the file cannot be read.
    """
    check_size(path.stat().st_size, str(path))
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}.") from None
    kinds = {
        "pooling": str | None, "template": str | None, "calibration": dict | None,
        "model": str | None, "threshold": int | float,
    }  # fmt: skip
    needed, known = {"site", "layer"}, {"site", "layer", *kinds}
    if not isinstance(body, dict) or not needed <= set(body) <= known:
        raise SpecError(f"{path} has {shown(body)}; its fields are {', '.join(sorted(known))}.")
    for name, kind in kinds.items():
        if name in body and not isinstance(body[name], kind):
            raise SpecError(f"{path}: {name} is {shown(body[name])}, of the wrong type.")
    checked_template(body.get("template"))
    if "threshold" in body:
        finite(body["threshold"], "threshold")
    calibration = body.get("calibration")
    if calibration is not None:
        if set(calibration) != {"slope", "offset"}:
            raise SpecError(f"calibration is {shown(calibration)}; it must have slope and offset.")
        for name, value in calibration.items():
            finite(value, name)
    body["site"], body["layer"] = as_stream((body["site"], body["layer"]))
    return msgspec.convert(body, ProbeFields)


def finite(value: object, name: str) -> float:
    """Return the value as a float. Raises SpecError if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpecError(f"{name} is {shown(value)}; it must be a number.")
    try:
        found = float(value)
    except OverflowError:  # a whole number that is too large for a float
        found = np.inf
    if not np.isfinite(found):
        raise SpecError(f"{name} is {shown(value)}; it must be finite.")
    return found


def fold_tensors(
    weight: np.ndarray, bias: float, tensors: Mapping[str, object]
) -> tuple[NDArray[np.float64], float]:
    """Call `fold` with `mean` and `scale` from `tensors`. Raises SpecError if their sizes differ
    from the size of `weight`, or if a number of `scale` is not above 0."""
    mean, scale = (as_vector(tensors[name], name) for name in ("mean", "scale"))
    if not len(mean) == len(scale) == len(weight) or not (scale > 0).all():
        raise SpecError(
            f"mean and scale must each have {len(weight)} values, "
            "and the values of scale must be above 0."
        )
    return fold(weight, bias, mean, scale)


def fold(
    weight: np.ndarray, bias: float, mean: np.ndarray, scale: np.ndarray
) -> tuple[NDArray[np.float64], float]:
    """Returns (folded, folded_bias), with x . folded + folded_bias = ((x - mean) / scale) . weight
    + bias."""
    folded = np.asarray(weight, np.float64) / scale
    return folded, bias - float(folded @ np.asarray(mean, np.float64))
