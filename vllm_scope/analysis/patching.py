"""TransformerLens's functions for activation patching, which use a `Sweep`.

Owns:  `get_act_patch_...`, with the names of the functions in `transformer_lens.patching`.
From:  vllm_scope.sweep.   To: notebooks that were written for TransformerLens.

Each function takes an LLM, corrupted prompts, clean prompts of the same length, and a metric. The
function patches rows of the clean run into the corrupted run, and returns the mean of the metric
over the prompts in float64. In TransformerLens, the metric is a function of logits. In this file,
the metric is a `LogitDifference`, a `Logprob` or a `KL`. Attention patterns cannot be patched.
Queries and keys are patched after the rotary embedding. TransformerLens patches queries and keys
before the rotary embedding. The effect is the same, because both runs have the same positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_scope.sweeps import Sweep
from vllm_scope.sweeps.metrics import Metric

if TYPE_CHECKING:
    from vllm import LLM


class Patching(Protocol):
    """The signature of the functions in this file."""

    def __call__(
        self, llm: LLM, corrupted: object, clean: object, metric: Metric, progress: bool = True
    ) -> Tensor: ...


def _patching(site: str, shape: str, **options: Any) -> Callable[..., Tensor]:
    """Make a function that patches a site.

    Args:
        shape: the shape of the function's result, for the function's docstring.
        options: more arguments of the Sweep.
    """

    def patch(
        llm: LLM, corrupted: object, clean: object, metric: Metric, progress: bool = True
    ) -> Tensor:
        import vllm_scope

        asked = Sweep(clean, metric=metric, site=site, **options)
        values = vllm_scope.sweep(llm, corrupted, asked, progress=progress).values
        return torch.from_numpy(np.nanmean(values, 0))

    patch.__doc__ = f"Patch {site!r}; returns float64 {shape}."
    return patch


_BY_POS: dict[str, Any] = {"heads": "all"}
_ALL_POS: dict[str, Any] = {"heads": "all", "together": True}

get_act_patch_resid_pre: Patching = _patching("resid_pre", "[num_layers, num_positions]")
get_act_patch_resid_mid: Patching = _patching("resid_mid", "[num_layers, num_positions]")
get_act_patch_attn_out: Patching = _patching("attn_out", "[num_layers, num_positions]")
get_act_patch_mlp_out: Patching = _patching("mlp_out", "[num_layers, num_positions]")
_HEADS = "[num_layers, num_positions, num_heads]"
get_act_patch_attn_head_out_by_pos: Patching = _patching("z", _HEADS, **_BY_POS)
get_act_patch_attn_head_q_by_pos: Patching = _patching("q", _HEADS, **_BY_POS)
get_act_patch_attn_head_k_by_pos: Patching = _patching("k", _HEADS, **_BY_POS)
get_act_patch_attn_head_v_by_pos: Patching = _patching("v", _HEADS, **_BY_POS)
_ALL = "[num_layers, num_heads]"
get_act_patch_attn_head_out_all_pos: Patching = _patching("z", _ALL, **_ALL_POS)
get_act_patch_attn_head_q_all_pos: Patching = _patching("q", _ALL, **_ALL_POS)
get_act_patch_attn_head_k_all_pos: Patching = _patching("k", _ALL, **_ALL_POS)
get_act_patch_attn_head_v_all_pos: Patching = _patching("v", _ALL, **_ALL_POS)


def get_act_patch_block_every(
    llm: LLM, corrupted: object, clean: object, metric: Metric, progress: bool = True
) -> Tensor:
    """Run three sweeps, which patch resid_pre, attn_out and mlp_out. Returns float64
    [3, num_layers, num_positions]."""
    each = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return torch.stack([patch(llm, corrupted, clean, metric, progress) for patch in each])
