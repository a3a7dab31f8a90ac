"""Rows to fit a probe or a direction to: one per result, or one per token.

From:  results, as `out.scope`.   To: contrast, probes.

Promise: a result with missing rows is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from vllm_scope.errors import SpecError
from vllm_scope.request.sites import SiteLayer

Pooling = Literal["last", "mean"]


class Result(Protocol):
    """The rows of one completion; `vllm_scope.results.result.ScopeResult` is one.

    `result[site, layer]` is [num_positions, hidden_size] (of sites inside the attention
    [num_positions, heads, numbers of a head]) in any float dtype;
    `positions(site, layer)` the absolute positions of those rows, int64, ascending.
    If there is a `status`, "complete" means that no row is missing.
    """

    def keys(self) -> list[SiteLayer]: ...
    def __getitem__(self, stream: SiteLayer, /) -> Tensor: ...
    def positions(self, site: str, layer: int | None = None) -> Tensor: ...


def check_complete(result: Result, where: str) -> None:
    """Raise SpecError if a result has a status other than "complete"."""
    status = getattr(result, "status", "complete")
    if status != "complete":
        raise SpecError(
            f"{where} is {status!r}: rows of it are missing, or still to come. Leave it out, "
            "or run its request again."
        )


def pooled_rows(
    results: Sequence[Result], streams: Iterable[SiteLayer] | None = None, pooling: Pooling = "last"
) -> dict[SiteLayer, Tensor]:
    """One row per result and stream.

    Args:
        results: each with rows at every stream.
        streams: (site, layer) of each; None: all streams of the first result.
        pooling: "last": the row of the highest position that was read; "mean": the mean of
            all rows that were read. The read chooses the positions: `tokens="last_prompt"`,
            or "prompt" for a mean over the prompt.

    Returns:
        (site, layer) -> float32 [num_results, hidden_size], or [num_results, heads, ...] inside
        the attention, in the order of `results`.

    Raises:
        SpecError: no results, one that is not complete, or one without rows at a stream.
    """
    if pooling not in ("last", "mean"):
        raise SpecError(f"pooling is {pooling!r}; it is 'last' or 'mean'.")
    _check_all(results)
    wanted = list(results[0].keys() if streams is None else streams)
    pooled = {}
    for stream in wanted:
        rows = []
        for i, result in enumerate(results):
            of_result = result[stream].float()
            if not len(of_result):
                raise SpecError(f"results[{i}] has no row at {stream}; its read selected no token.")
            rows.append(of_result[-1] if pooling == "last" else of_result.mean(0))
        pooled[stream] = torch.stack(rows)
    return pooled


def token_rows(
    results: Sequence[Result], labels: Sequence[bool], stream: SiteLayer
) -> tuple[Tensor, Tensor]:
    """All rows of a stream, each with its result's label, to fit a probe of single tokens.

    Hold out whole results, and not rows: the tokens of one text are much alike.

    Args:
        results: each with rows at the stream.
        labels: one for each result.

    Returns:
        float32 [num_rows, hidden_size], in the order of results and positions, and bool
        [num_rows].

    Raises:
        SpecError: no results, one that is not complete, or not a label for each.
    """
    _check_all(results)
    if len(labels) != len(results):
        raise SpecError(f"there are {len(results)} results and {len(labels)} labels; give as many.")
    rows = [result[stream].float() for result in results]
    lengths = torch.tensor([len(of_result) for of_result in rows])
    return torch.cat(rows), torch.as_tensor(labels, dtype=torch.bool).repeat_interleave(lengths)


def _check_all(results: Sequence[Result]) -> None:
    if not results:
        raise SpecError("there are no results to take rows of; give at least one.")
    for i, result in enumerate(results):
        check_complete(result, f"results[{i}]")
