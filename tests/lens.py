"""What a lens must deliver: vLLM's own log-probabilities at the last layer, and Hugging Face's norm
and unembedding at every other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import Reference


def agree(
    found: Iterable[tuple[int, float]], wanted: Mapping[int, float], tolerance: float
) -> None:
    """The tokens of a lens are the likeliest of `wanted`; of tokens that are as near to each other
    as the tolerance either may be chosen.

    Args:
        wanted: token id -> log-probability, of the likeliest tokens and maybe others.
    """
    found = list(found)
    values = [value for _, value in found]
    assert values == sorted(values, reverse=True)
    assert len(dict(found)) == len(found) > 0
    for token, value in found:
        near = wanted.get(token)
        assert near is None or abs(value - near) <= tolerance, (token, value, near)
    best = sorted(wanted.values(), reverse=True)[: len(found)]
    for value, right in zip(values, best, strict=True):
        assert abs(value - right) <= tolerance, (value, right)


def check_last_layer(output: Any, tokens: Any, tolerance: float) -> None:
    """The tokens of the last layer equal what vLLM returned with the request.

    Args:
        output: a RequestOutput with logprobs and prompt_logprobs of at least as many tokens.
        tokens: TopTokens of all positions.
    """
    (completion,) = output.outputs
    after = [*output.prompt_logprobs[1:], *completion.logprobs]  # item p: predicted at position p
    assert tokens.positions.tolist() == list(range(len(after)))
    for position, wanted in enumerate(after):
        known = {token: one.logprob for token, one in wanted.items()}
        agree(tokens.top(position), known, tolerance)


def log_probs(ref: Reference, rows: Tensor) -> Tensor:
    """float64 [n, vocab]: Hugging Face's norm and unembedding of rows, and what the configuration
    says of its logits."""
    model, config = ref.model, ref.model.config
    norm = next(getattr(model.base_model, name) for name in ("norm", "ln_f")
                if hasattr(model.base_model, name))  # fmt: skip
    with torch.no_grad():
        head = model.get_output_embeddings()
        logits = norm(rows.float()).double() @ head.weight.double().T
    if head.bias is not None:
        logits += head.bias.double()
    logits *= getattr(config, "logit_scale", None) or 1.0
    logits /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = cap * (logits / cap).tanh()
    return logits.log_softmax(-1)


def check_layers(result: Any, found: Mapping[int, Any], ref: Reference, tolerance: float) -> None:
    """The tokens of every layer equal those of Hugging Face's own stream."""
    assert result.status == "complete", (result, result.error)
    streams = ref.streams(result.token_ids[:-1])
    for layer, tokens in found.items():
        exact = log_probs(ref, streams[layer + 1])
        for position in tokens.positions.tolist():
            agree(tokens.top(position), dict(enumerate(exact[position].tolist())), tolerance)
