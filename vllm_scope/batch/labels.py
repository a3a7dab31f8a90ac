"""The tokens that one step computes, and the tokens whose rows a batch contains.

Owns:  StepBatch, Labels.
Runs:  StepBatch is used in the worker. Labels are used in the worker and in messages to front-ends.

StepBatch and Labels are msgspec.Structs, because the thread that launches the model creates both in
each step. Creating a frozen dataclass takes 1.4 us, ten times as long as creating a Struct.
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
        req_ids: the ids of the requests, in the order of their rows.
        query_start: int [num_reqs + 1], the first row of each request, and then the number of rows.
        num_computed: int [num_reqs], the position of each request's first row.
        optimistic: True if `num_computed` can include rejected draft tokens. In this case, the
            actual positions are on the device.
    """

    req_ids: list[str]
    query_start: Ints
    num_computed: Ints
    optimistic: bool = False


class Labels(msgspec.Struct, frozen=True, eq=False):
    """The tokens whose rows and scores a batch contains, in slot order.

    Attributes:
        keys: int64 [num_tokens], the key of each token's request.
        positions: int64 [num_tokens], each token's position in its request.
        layout_of: int32 [num_tokens], the index of each token's layout in `layouts`.
        layouts: the distinct layouts.
        rows: int64 [num_tokens], the row of each token in the step. The worker uses this row to
            find the token's actual position.
    """

    keys: Ints
    positions: Ints
    layout_of: NDArray[np.int32]
    layouts: tuple[Layout, ...]
    rows: Ints

    @property
    def sums(self) -> bool:
        """True if the worker adds some of the rows to sums on the device."""
        return any(layout.sent is not layout for layout in self.layouts)

    @property
    def encodes(self) -> bool:
        """True if a head is applied to some of the rows after they leave the arena."""
        return any(layout.arena is not layout for layout in self.layouts)
