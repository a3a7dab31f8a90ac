"""Parts of rows are joined in the order of heads, and each rank gets its own part back."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.graph.anatomy.split import Split


@pytest.mark.parametrize(
    ("num_ranks", "heads"),
    [
        pytest.param(2, 4, id="two-heads-each"),
        pytest.param(4, 4, id="one-head-each"),
        pytest.param(4, 2, id="each-head-twice"),
        pytest.param(4, 1, id="one-head-for-all"),
    ],
)
def test_the_joined_row_is_the_row_of_one_rank(num_ranks, heads):
    rows = torch.arange(3.0 * heads * 5).view(3, heads * 5)
    per_rank = max(1, heads // num_ranks)
    # As vLLM's QKVParallelLinear gives heads to ranks.
    firsts = [rank * heads // num_ranks for rank in range(num_ranks)]
    parts = [rows[:, first * 5 : (first + per_rank) * 5] for first in firsts]
    for rank, part in enumerate(parts):
        split = Split(heads * 5, per_rank * 5, rank, num_ranks, lambda _: torch.cat(parts, 1))
        assert torch.equal(split.joined(part), rows)
        assert torch.equal(split.own(rows), part)
