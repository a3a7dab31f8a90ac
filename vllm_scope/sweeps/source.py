"""The rows from which the edits of a sweep take their vectors.

Owns:  `given_rows`, ReadRows, and `of_head`.
From:  sweep (rows of the caller), results (rows that requests have read).   To: plan, paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.request.arrays import of_bfloat16
from vllm_scope.request.sites import Place, Sites

Floats = NDArray[np.float32]


def given_rows(value: Any, shape: tuple[int, int, int], row_shape: tuple[int, ...]) -> Floats:
    """The caller's rows as an array of the shape [num_prompts, num_layers, num_positions, width].

    If a dimension has length 1, its one entry is used for all prompts, layers or positions.

    Args:
        shape: (num_prompts, num_layers, num_positions) of the sweep.
        row_shape: the shape of one row, which is [width] or [num_heads, size of a head].

    Raises:
        SpecError: `value` has the wrong shape, or an item that is not a finite number.
    """
    if hasattr(value, "detach"):
        value = value.detach().to("cpu").float().numpy()
    try:
        rows = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise SpecError(
            f"Sweep.source is {shown(value)}; it must be a prompt, a list of prompts, rows, "
            "or {'module': name}."
        ) from None
    width = int(np.prod(row_shape))
    found = None
    if len(row_shape) == 2 and rows.shape[-2:] == row_shape:
        found = _fitting(rows.reshape(*rows.shape[:-2], width), shape, width)
    # With one head, `row_shape` is (1, width). Rows of shape [prompts, layers, 1, width], for one
    # position, then end with `row_shape` too, and the call above can find nothing.
    if found is None:
        found = _fitting(rows, shape, width)
    if found is None:
        prompts, layers, positions = shape
        raise SpecError(
            f"Sweep.source has the shape {list(np.shape(value))}; here it must be [{width}], "
            f"[{layers}, {width}], [{layers}, {positions}, {width}] or "
            f"[{prompts}, {layers}, {positions}, {width}]."
        )
    if not np.isfinite(found).all():
        raise SpecError("Sweep.source has a number that is NaN or infinite; give finite numbers.")
    return found


def _fitting(rows: Floats, shape: tuple[int, int, int], width: int) -> Floats | None:
    """The rows with four dimensions, or None if their shape does not fit the sweep.

    Args:
        rows: [width], [layers, width], [layers, positions, width], or
            [prompts, layers, positions, width].
    """
    if rows.ndim == 2:
        rows = rows[:, None]
    if 1 <= rows.ndim <= 4:
        rows = rows.reshape(*(1,) * (4 - rows.ndim), *rows.shape)
    fits = rows.ndim == 4 and rows.shape[3] == width
    if not fits or any(n not in (1, most) for n, most in zip(rows.shape, shape, strict=False)):
        return None
    return rows


class ReadRows:
    """Rows of a prompt, in the model's dtype. `at` converts the rows of a cell to float32.

    Args:
        result: the ScopeResult of the request that read the rows.
        share: the rows' share of the budget, or None. The share ends when this object is deleted.
    """

    def __init__(self, result: Any, share: object = None) -> None:
        self._result, self._share = result, share
        self._known: dict[Place, tuple[NDArray[np.int64], NDArray[Any]]] = {}

    def check(self, where: str) -> None:
        """Raise ScopeError if a row did not arrive."""
        if self._result.dropped:
            raise ScopeError(f"rows of {where} are missing: {self._result.error}")

    def at(self, place: Place, positions: list[int]) -> Floats:
        """The rows of a place at `positions`, as float32 [num_positions, width].

        The result must have these rows.
        """
        known, rows = self._of(place)
        found = rows[np.searchsorted(known, positions)]
        return of_bfloat16(found) if found.dtype == np.uint16 else found.astype(np.float32)

    def _of(self, place: Place) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The positions of a place's rows, and a view of the rows, [num_rows, width].

        numpy has no bfloat16, so the bits of bfloat16 rows are in an array of uint16. The arrays
        are numpy's, because numpy selects rows on the calling thread. torch would wake a thread on
        each core. On 16 cores, the selection by torch took ten times as long as a cell.
        """
        import torch  # the import is here, because an HTTP client uses Sweep without torch

        if place not in self._known:
            rows = self._result[place].flatten(1)
            bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
            self._known[place] = self._result.positions(*place).numpy(), bits.numpy()
        return self._known[place]


def of_head(rows: Floats, head: int, sites: Sites, site: str, other: Floats | None) -> Floats:
    """Rows with the numbers of one head from `rows`, and those of all other heads from `other`.

    Args:
        rows: rows of the shape [..., width].
        other: rows of the same shape, or None if the numbers of the other heads are 0.
    """
    _, size = sites.row_shape(site)
    found = np.zeros_like(rows) if other is None else other.copy()
    found[..., head * size : (head + 1) * size] = rows[..., head * size : (head + 1) * size]
    return found
