"""Selects the rows and labels to which a probe or a direction is fitted, per result or per token.

Owns:  Result, Labels, `pooled_rows`, `token_rows`, and the checks that other files share
       (`as_rows`, `truth_of`, `stream_of`, `streams_of`).
From:  results, such as `out.scope`.   To: contrast, probes.

Promise: the functions refuse a result with missing rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import SITES, SiteLayer

Pooling = Literal["last", "mean"]
#: Whether the concept is present in each row or result, as 0 and 1, or False and True.
Labels = Sequence[bool] | NDArray[np.bool_] | Tensor


class Result(Protocol):
    """The rows of one completion. `vllm_scope.results.result.ScopeResult` and
    `vllm_scope.files.CapturedRequest` implement this protocol.

    `result[site, layer]` has the rows [num_positions, hidden_size], in any float dtype. For a site
    inside the attention, the shape of the rows is [num_positions, heads, numbers of a head].
    `positions(site, layer)` has the absolute positions of these rows as int64, in ascending order.
    If a result has a `status`, "complete" (of an engine) or "ok" (of a file) means that no row is
    missing.
    """

    def keys(self) -> list[SiteLayer]: ...
    def __getitem__(self, stream: SiteLayer, /) -> Tensor: ...
    def positions(self, site: str, layer: int | None = None) -> Tensor: ...


def streams_of(result: Result) -> list[SiteLayer]:
    """The streams of a result that have rows of the model. In a file, features are stored as rows
    too. These rows have indices and values of features, and their streams are left out."""
    return [stream for stream in result.keys() if stream[0] in SITES]


def check_complete(result: Result, where: str) -> None:
    """Raise SpecError if the result's status says that rows are missing."""
    status = getattr(result, "status", "complete")
    if status not in ("complete", "ok"):
        raise SpecError(
            f"{where} is {status!r}: some of its rows are missing, or have not arrived. Leave this "
            "result out, or run its request again."
        )


def pooled_rows(
    results: Sequence[Result], streams: Iterable[SiteLayer] | None = None, pooling: Pooling = "last"
) -> dict[SiteLayer, Tensor]:
    """Compute one row per result and stream.

    Args:
        results: results that have rows at every stream, such as
            `[out.scope for out in outputs]`, or the requests of an opened folder:
            `list(vllm_scope.open(folder))`.
        streams: the (site, layer) of each stream, or None for all streams of the first result.
        pooling: "last" for the row of the highest position that was read, or "mean" for the mean of
            all rows that were read. The `tokens` of the request's Read choose the positions: for
            example, "last_prompt", or "prompt" for a mean over the prompt.

    Returns:
        Maps each (site, layer) to float32 rows [num_results, hidden_size], in the order of
        `results`. Inside the attention, the shape is [num_results, heads, numbers of a head].

    Raises:
        SpecError: there are no results, an item is not a result, a result is not complete, or the
            Read of a stream selected no token of a request.
        KeyError: a request did not read a stream.
    """
    if pooling not in ("last", "mean"):
        raise SpecError(f"pooling is {pooling!r}; it must be 'last' or 'mean'.")
    results = _checked_all(results)
    wanted = streams_of(results[0]) if streams is None else _checked_streams(streams)
    pooled = {}
    for stream in wanted:
        rows = []
        for i, result in enumerate(results):
            of_result = as_rows(result[stream]).float()
            if not len(of_result):
                raise SpecError(f"results[{i}] has no row at {stream}; its read selected no token.")
            rows.append(of_result[-1] if pooling == "last" else of_result.mean(0))
        pooled[stream] = torch.stack(rows)
    return pooled


def token_rows(
    results: Sequence[Result], labels: Labels, stream: SiteLayer
) -> tuple[Tensor, Tensor]:
    """All rows of a stream, and a label for each row, to fit a probe of single tokens.

    A row has the label of its result. To test the probe, use results to which the probe was not
    fitted, because the rows of one text are similar.

    Args:
        results: results that have rows at the stream.
        labels: one label for each result, which is 0 or 1, or False or True.

    Returns:
        The rows as float32 [num_rows, hidden_size], in the order of results and positions, and the
        labels as bool [num_rows].

    Raises:
        SpecError: there are no results, a result is not complete, there is not one label for each
            result, or a label has another value.
        KeyError: a request did not read the stream.
    """
    results, stream = _checked_all(results), stream_of(stream)
    truth = truth_of(labels)
    if truth.shape != (len(results),):
        raise SpecError(
            f"there are {len(results)} results and labels of shape {list(truth.shape)}; give one "
            "label for each result."
        )
    rows = [as_rows(result[stream]).float() for result in results]
    lengths = torch.tensor([len(of_result) for of_result in rows])
    return torch.cat(rows), torch.from_numpy(truth).repeat_interleave(lengths)


def truth_of(labels: Labels) -> NDArray[np.bool_]:
    """Copy the labels to an array of bools that has the same shape.

    Raises:
        SpecError: a label is not 0 or 1, and not False or True, or nested lists of labels differ in
            length.
    """
    if isinstance(labels, Tensor):
        # numpy has no bfloat16, so labels of a float dtype become float32.
        on_cpu = labels.detach().cpu()
        labels = (on_cpu.float() if on_cpu.is_floating_point() else on_cpu).numpy()
    try:
        found = np.asarray(labels)
    except ValueError:
        raise SpecError(
            f"labels is {shown(labels)}, whose parts differ in length; give one label for each row."
        ) from None
    if found.dtype.kind == "O":
        kinds = bool | int | float | np.bool_ | np.number
        good = all(isinstance(one, kinds) and one in (0, 1) for one in found.reshape(-1).tolist())
    else:
        good = found.dtype.kind in "biuf" and bool(np.isin(found, (0, 1)).all())
    if not good:
        # np.unique sorts its items, and Python cannot sort objects of several types.
        different = found.reshape(-1) if found.dtype.kind == "O" else np.unique(found)
        raise SpecError(
            f"labels has the values {shown(different.tolist())}; a label is 0 or 1, or False or "
            "True. For one class of several give [label == CLASS for label in labels]."
        )
    return found.astype(bool)


def as_rows(rows: object, what: str = "rows") -> Tensor:
    """The rows as a tensor. A tensor is returned unchanged. A numpy array is copied, to float64 if
    its numbers have more than 4 bytes, else to float32.

    Raises:
        SpecError: `rows` is not a tensor, and not a numpy array of numbers.
    """
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "fiu":
        # Copy, because torch does not accept read-only arrays or arrays with negative strides.
        return torch.from_numpy(
            np.array(rows, np.float64 if rows.dtype.itemsize > 4 else np.float32)
        )
    if not isinstance(rows, Tensor):
        raise SpecError(
            f"{what} is {shown(rows)}; it must be a tensor or a numpy array of numbers, such as "
            "pooled_rows(results)[stream]."
        )
    return rows


def stream_of(stream: object, where: str = "stream") -> SiteLayer:
    """The pair (site, layer) as a tuple. This function does not check the name of the site.

    Raises:
        SpecError: `stream` is not a pair of a text and a whole number.
    """
    pair = tuple(stream) if isinstance(stream, list | tuple) else ()
    if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], int | np.integer):
        raise SpecError(
            f"{where} is {shown(stream)}; it must be (site, layer), such as ('resid_post', 5)."
        )
    return pair[0], int(pair[1])


def _checked_streams(streams: Iterable[SiteLayer]) -> list[SiteLayer]:
    found = [streams] if isinstance(streams, str) else list(streams)
    if len(found) == 2 and isinstance(found[0], str):  # one stream in place of a list of streams
        raise SpecError(
            f"streams is {shown(streams)}; it must be a list of streams: [{shown(tuple(found))}]."
        )
    return [stream_of(one, f"streams[{i}]") for i, one in enumerate(found)]


def _is_result(value: object) -> bool:
    return hasattr(value, "keys") and hasattr(value, "positions")


def _checked_all(results: Iterable[Result]) -> list[Result]:
    if _is_result(results):
        raise SpecError("results is one result; give a list of them: [result].")
    if not isinstance(results, Iterable):
        raise SpecError(
            f"results is {shown(results)}; it must be a list of results, such as "
            "[out.scope for out in outputs]."
        )
    found = list(results)
    if not found:
        raise SpecError("there are no results to take rows of; give at least one.")
    for i, result in enumerate(found):
        if not _is_result(result):
            raise SpecError(
                f"results[{i}] is {shown(result)}, which has no rows; a result is the scope of an "
                "output whose request had a Read: give [out.scope for out in outputs]."
            )
        check_complete(result, f"results[{i}]")
    return found
