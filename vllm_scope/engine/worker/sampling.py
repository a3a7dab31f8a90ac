"""Makes Model Runner V1 return the right log-probabilities if only some requests name tokens.

Owns:  the wrapper of V1's sampler.
Runs:  in the sampler of every worker process with V1.

A request can name the tokens whose log-probabilities it wants (`logprob_token_ids`), as cells of
sweeps do. If one request of a step names tokens, V1's sampler returns only named tokens for all
requests. Requests for the likeliest tokens then get padding. If the worker uses draft tokens, it
fails instead. With this wrapper, each request of a step without draft tokens gets the
log-probabilities that it wants, as with V2. If a step has draft tokens, requests that name tokens
still get no log-probabilities of the named tokens.
vllm 0.30 to 0.33, v1/sample/sampler.py, Sampler.forward
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_scope.engine import wrapping
from vllm_scope.engine.vllm_types import SamplerOutput, SamplerV1, SamplingMetadata


def _forward(
    original: Callable[..., SamplerOutput],
    self: SamplerV1,
    logits: object,
    sampling_metadata: SamplingMetadata,
    *args: object,
    **kwargs: object,
) -> SamplerOutput:
    asked, most = sampling_metadata.logprob_token_ids, sampling_metadata.max_num_logprobs
    if not asked or most is None:  # no request names tokens, or none wants the likeliest tokens
        return original(self, logits, sampling_metadata, *args, **kwargs)
    changed: Any = sampling_metadata
    whole = replace(changed, max_num_logprobs=-1, logprob_token_ids=None)
    output = original(self, logits, whole, *args, **kwargs)
    if most == -1:  # the caller is the sampler of drafts, which needs the whole vocabulary
        return output
    of_all, sampled = output.logprobs_tensors.logprobs, output.sampled_token_ids[:, 0].long()
    likeliest = self.gather_logprobs(of_all, most, token_ids=sampled)
    named = self.gather_specific_token_logprobs(of_all, asked, sampled)
    # With pinned memory, as in vLLM's own code, the host does not wait for the device.
    rows = torch.tensor(list(asked), pin_memory=self.pin_memory)
    rows = rows.to(sampled.device, non_blocking=True)
    output.logprobs_tensors = likeliest._replace(
        logprob_token_ids=_joined(likeliest.logprob_token_ids, named.logprob_token_ids, rows, 0),
        logprobs=_joined(likeliest.logprobs, named.logprobs, rows, float("-inf")),
    )
    return output


def _joined(likeliest: Tensor, named: Tensor, rows: Tensor, padding: float) -> Tensor:
    """A copy of `likeliest`, in which the rows at the indices `rows` are the rows of `named` at
    these indices. The result has as many columns as the wider tensor. Shorter rows get padding."""
    size = max(likeliest.shape[1], named.shape[1])
    found = likeliest.new_full((len(likeliest), size), padding)
    found[:, : likeliest.shape[1]] = likeliest
    found.index_fill_(0, rows, padding)
    found[:, : named.shape[1]].index_copy_(0, rows, named.index_select(0, rows).to(found.dtype))
    return found


@cache
def wrap() -> None:
    """Wrap V1's sampler. Only workers with V1 call this function, because the import of the sampler
    takes time."""
    wrapping.wrap("Sampler.forward", _forward)
