"""The tokens that one step computes, and the tokens whose rows a batch holds.

Owns:  StepBatch, Labels.
Runs:  StepBatch in the worker; Labels in the worker and in messages to front-ends.

The objects that each step makes are msgspec.Structs. A frozen dataclass takes 1.4 us
to make, ten times as long. A step makes three such objects, on the thread that launches the model.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints
from vllm_scope.program.layout import Layout


class StepBatch(msgspec.Struct, frozen=True, eq=False):
    """The requests and the tokens of one forward, in vLLM's row order.

    Attributes:
        req_ids: the requests, in the order of their rows.
        query_start: int [num_reqs + 1], first row of each request.
        num_computed: int [num_reqs], position of each request's first row.
        optimistic: True if `num_computed` counts draft tokens that may have been rejected;
            the true positions are then on the device.
    """

    req_ids: list[str]
    query_start: Ints
    num_computed: Ints
    optimistic: bool = False


class Labels(msgspec.Struct, frozen=True, eq=False):
    """The tokens whose rows and scores a batch holds, in slot order.

    Attributes:
        keys: int64 [num_tokens], the key of each token's request.
        positions: int64 [num_tokens], each token's position in its request.
        layout_of: int32 [num_tokens], index into `layouts`.
        layouts: the distinct layouts.
        rows: int64 [num_tokens], the tokens' rows in the step (to look up true positions).
    """

    keys: Ints
    positions: Ints
    layout_of: NDArray[np.int32]
    layouts: tuple[Layout, ...]
    rows: Ints

    @property
    def sums(self) -> bool:
        """True if some rows stay on the device, where they are added to sums."""
        return any(layout.sent is not layout for layout in self.layouts)

    @property
    def encodes(self) -> bool:
        """True if heads work on some rows on their way out of the arena."""
        return any(layout.arena is not layout for layout in self.layouts)
