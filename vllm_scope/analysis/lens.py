"""The logit lens: which tokens the unembedding reads in a row of any layer.

From:  results, or rows [..., hidden_size].   To: logits, and the likeliest tokens.

Promise: at the last layer's `resid_post` the logits are the model's own, up to
rounding, for models that end in one norm and a linear unembedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_scope.analysis.rows import Result, check_complete
from vllm_scope.errors import SpecError


@dataclass(frozen=True, eq=False)
class Lens:
    """A model's final norm and unembedding.

    Attributes:
        norm_weight: [hidden_size]. Of Gemma, one plus what the checkpoint holds.
        eps: of the norm.
        unembedding: [vocab_size, hidden_size]; the embedding, where they are tied.
        norm: "rms" divides by the root mean square; "layer" by the standard
            deviation, around the mean.
        norm_bias: [hidden_size], for a layer norm that has one.

    Raises:
        SpecError: shapes disagree.
    """

    norm_weight: Tensor
    eps: float
    unembedding: Tensor
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.norm not in ("rms", "layer"):
            raise SpecError(f"norm is {self.norm!r}; it is 'rms' or 'layer'.")
        size = self.unembedding.shape[-1]
        for name in ("norm_weight", "norm_bias"):
            weight = getattr(self, name)
            if weight is not None and weight.shape != (size,):
                raise SpecError(
                    f"{name} has shape {list(weight.shape)} and unembedding "
                    f"{list(self.unembedding.shape)}; they are [hidden_size] and "
                    "[vocab_size, hidden_size]."
                )

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [..., vocab_size] of rows [..., hidden_size], computed in float32.

        A model that caps its logits (Gemma 2) or scales them does so afterwards;
        neither changes which tokens are likeliest.
        """
        rows, size = rows.float(), (self.unembedding.shape[-1],)
        if rows.shape[-1:] != size:
            raise SpecError(f"rows have shape {list(rows.shape)}; this lens is for size {size[0]}.")
        weight = self.norm_weight.float()
        if self.norm == "rms":
            normed = torch.nn.functional.rms_norm(rows, size, weight, self.eps)
            if self.norm_bias is not None:
                normed = normed + self.norm_bias.float()
        else:
            bias = None if self.norm_bias is None else self.norm_bias.float()
            normed = torch.nn.functional.layer_norm(rows, size, weight, bias, self.eps)
        return normed @ self.unembedding.float().T


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The likeliest tokens at each position that was read of one stream.

    Attributes:
        positions: int64 [num_positions], absolute.
        token_ids: int64 [num_positions, k], the likeliest first.
        log_probs: float32 [num_positions, k], natural logarithms.
    """

    positions: Tensor
    token_ids: Tensor
    log_probs: Tensor


def top_tokens(
    lens: Lens, result: Result, k: int = 5, site: str = "resid_post"
) -> dict[int, TopTokens]:
    """What the lens reads at each layer of a site, by layer, ascending.

    The tokens at position p are predictions of the token at p + 1.

    Raises:
        SpecError: the result is not complete or has no rows of the site.
    """
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
