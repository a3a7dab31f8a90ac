"""The logit lens applies the model's norm and unembedding to a row of any layer.

From:  results, or rows [..., hidden_size].   To: logits, and the likeliest tokens.

Promise: the logits at the last layer's `resid_post` equal the model's logits up to rounding. After
its layers, the model must have one norm and a linear unembedding. The model can also multiply its
logits by a factor, or limit them by a soft cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_scope.analysis.rows import Result, check_complete
from vllm_scope.errors import SpecError, shown
from vllm_scope.results.lens import TopTokens

#: The fields in which a configuration can give the epsilon of the final norm. Each field is mapped
#: to the kind of norm that a model with this field usually has.
_EPS: dict[str, Literal["rms", "layer"]] = {
    "rms_norm_eps": "rms", "layer_norm_eps": "layer", "layer_norm_epsilon": "layer",
}  # fmt: skip
#: The exceptions to _EPS: the kind of norm of the models (by `model_type`) for which _EPS is wrong.
#: Source: the files of these models in vLLM, and the file of falcon_mamba in transformers.
_NORMS: dict[object, Literal["rms", "layer"]] = {
    "exaone": "rms", "falcon_mamba": "rms", "mamba": "rms", "mamba2": "rms", "molmo": "rms",
    "molmo2_text": "rms", "nemotron_h": "rms", "orion": "layer", "phimoe": "layer",
}  # fmt: skip
#: The fields in which a configuration can give the soft cap of logits.
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True, eq=False)
class Lens:
    """A model's final norm and unembedding, and the cap and the scale of its logits.

    `from_config` takes everything except the tensors from a Hugging Face configuration.

    Attributes:
        norm_weight: the norm's weight, [hidden_size]. For Gemma, one plus the checkpoint's values.
        eps: the norm's epsilon.
        unembedding: the matrix [vocab_size, hidden_size]. For a model with tied weights, this is
            the embedding.
        norm: the kind of the norm. "rms" divides by the root mean square. "layer" subtracts the
            mean, and then divides by the standard deviation.
        norm_bias: the norm's bias, [hidden_size], or None.
        unembedding_bias: the unembedding's bias, [vocab_size], or None. Phi and GPT-J have a bias.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap), as in Gemma 2. If None, logits
            are not capped.
        logit_scale: the factor of the logits after the cap, as in Cohere. For Granite, the factor
            is 1 / logits_scaling.

    Raises:
        SpecError: the shapes do not fit together, `norm` has another value, or a cap or a scale is
            not a number above 0.
    """

    norm_weight: Tensor
    eps: float
    unembedding: Tensor
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: Tensor | None = None
    unembedding_bias: Tensor | None = None
    soft_cap: float | None = None
    logit_scale: float = 1.0

    @staticmethod
    def from_config(
        config: object,
        norm_weight: Tensor,
        unembedding: Tensor,
        *,
        norm_bias: Tensor | None = None,
        unembedding_bias: Tensor | None = None,
    ) -> Lens:
        """A lens with the norm, the soft cap and the scale of a model's configuration.

        Args:
            config: the content of config.json as a mapping, or Hugging Face's configuration
                object. If the configuration has a `text_config`, the fields of `text_config` are
                used.
            norm_weight, unembedding, norm_bias, unembedding_bias: the tensors of `Lens`.

        Raises:
            SpecError: the configuration does not have the norm's epsilon, a field is not a number,
                or `Lens` refuses the values.
        """
        to_dict = getattr(config, "to_dict", None)
        body = config if to_dict is None else to_dict()
        if not isinstance(body, Mapping):
            raise SpecError(f"{shown(config)} is no configuration; pass config.json's content.")
        body = body.get("text_config") or body
        name = next((name for name in _EPS if body.get(name) is not None), None)
        if name is None:
            raise SpecError(
                "the configuration names no rms_norm_eps, layer_norm_eps or layer_norm_epsilon; "
                "make the Lens from its parts."
            )
        eps = body[name]
        if isinstance(eps, bool) or not isinstance(eps, int | float):
            raise SpecError(f"{name} is {shown(eps)}; it must be a number.")
        cap = next((name for name in _CAPS if body.get(name) is not None), None)
        soft_cap = _above_zero(body[cap], cap) if cap is not None else None
        return Lens(
            norm_weight, eps, unembedding, _NORMS.get(body.get("model_type"), _EPS[name]),
            norm_bias, unembedding_bias, soft_cap, _logit_scale(body),
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.norm not in ("rms", "layer"):
            raise SpecError(f"norm is {self.norm!r}; it must be 'rms' or 'layer'.")
        vocab_size, size = self.unembedding.shape
        expected = {"norm_weight": size, "norm_bias": size, "unembedding_bias": vocab_size}
        for name, length in expected.items():
            weight = getattr(self, name)
            if weight is not None and weight.shape != (length,):
                raise SpecError(
                    f"{name} has shape {list(weight.shape)} and unembedding "
                    f"{list(self.unembedding.shape)}; {name} must have {length:,} values."
                )
        if self.soft_cap is not None:
            _above_zero(self.soft_cap, "soft_cap")
        _above_zero(self.logit_scale, "logit_scale")

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [..., vocab_size] of rows [..., hidden_size], computed in float32."""
        rows, size = rows.float(), (self.unembedding.shape[-1],)
        if rows.shape[-1:] != size:
            raise SpecError(f"rows have shape {list(rows.shape)}; this lens is for size {size[0]}.")
        weight, bias = self.norm_weight.float(), _float(self.norm_bias)
        if self.norm == "rms":
            normed = torch.nn.functional.rms_norm(rows, size, weight, self.eps)
            if bias is not None:
                normed = normed + bias
        else:
            normed = torch.nn.functional.layer_norm(rows, size, weight, bias, self.eps)
        head_bias = _float(self.unembedding_bias)
        logits = torch.nn.functional.linear(normed, self.unembedding.float(), head_bias)
        if self.soft_cap is not None:
            logits = self.soft_cap * (logits / self.soft_cap).tanh()
        return logits * self.logit_scale


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _logit_scale(config: Mapping[str, object]) -> float:
    """The factor of the logits, which is the product of all factors in a configuration."""
    found = {
        name: _above_zero(config[name], name)
        for name in ("logit_scale", "lm_head_multiplier", "logits_scaling", "dim_model_base")
        if config.get(name) is not None
    }
    scale = found.get("logit_scale", 1.0) * found.get("lm_head_multiplier", 1.0)
    if "dim_model_base" in found:  # MiniCPM divides the row before the unembedding
        scale *= found["dim_model_base"] / _above_zero(config.get("hidden_size"), "hidden_size")
    if "logits_scaling" in found:
        # Granite divides by this field, and HyperCLOVA X multiplies by a field of the same name.
        multiplies = str(config.get("model_type", "")).startswith("hyperclovax")
        scale *= found["logits_scaling"] if multiplies else 1 / found["logits_scaling"]
    return scale


def _above_zero(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{name} is {shown(value)}; it must be a number above 0.")
    return float(value)


def top_tokens(
    lens: Lens, result: Result, k: int = 5, site: str = "resid_post"
) -> dict[int, TopTokens]:
    """Maps layers, in ascending order, to the lens's likeliest tokens at a site.

    The tokens at position p are predictions for position p + 1.

    Raises:
        SpecError: the result is not complete, or has no rows of the site. Or `k` is below 1 or
            above the lens's number of tokens.
    """
    most = len(lens.unembedding)
    if not 1 <= k <= most:
        raise SpecError(f"k is {k}; it must be from 1 to {most:,}, the lens's number of tokens.")
    check_complete(result, "the result")
    layers = sorted(layer for name, layer in result.keys() if name == site)
    if not layers:
        raise SpecError(f"the result has no {site!r}; it has {result.keys()}.")
    found = {}
    for layer in layers:
        log_probs = lens.logits(result[site, layer]).log_softmax(-1)
        best = log_probs.topk(k)
        found[layer] = TopTokens(result.positions(site, layer), best.indices, best.values)
    return found
