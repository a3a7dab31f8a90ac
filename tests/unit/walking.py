"""One request whose gate has a state, advanced by a tap in steps of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_scope.graph.tap.definition import NUM_COLUMNS, NUM_TOKEN_COLUMNS
from vllm_scope.graph.tap.states import NUM_WALK_COLUMNS
from vllm_scope.program.operations import OP_EMA, OP_HYSTERESIS, OP_PID, REGISTERS, STATE_NUMBERS

#: code -> numbers a to e.
NUMBERS = {
    OP_EMA: (0.9, 1 - 0.9, 1.7, 1.0, 0.1),
    OP_HYSTERESIS: (0.8, -0.3, 0.0, 1.0, 0.0),
    OP_PID: (0.1, 0.37, 0.11, -0.21, 9.0),
}
#: The register of the score, and of the value; the position of the first token.
SCORE, VALUE, BEGIN = 7, 0, 5


def advanced(
    tap_rows: Callable[..., None], code: int, scores: Tensor, sizes: Sequence[int],
    device: str = "cpu", replays: int = 0,
    rejected: int = 0, num_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """The log after steps of these sizes, [num_tokens, STATE_NUMBERS].

    Args:
        scores: [num_tokens].
        rejected: so many drafts of each step are not accepted.
        num_tokens: that there are places for; None for all.
        replays: the last step also computes so many tokens before, which have their states.
    """
    rows = max(sizes) + replays + rejected
    scores = torch.cat([scores, torch.full((rejected,), 99.0)])
    bits = torch.tensor(NUMBERS[code]).view(torch.int32).tolist()
    ops = torch.full((1, NUM_COLUMNS), -1, dtype=torch.int32)
    ops[0] = torch.tensor([code, -1, -1, -1, *bits[:2], -1, VALUE, SCORE, *bits[2:]])
    log = torch.zeros((len(scores), STATE_NUMBERS), device=device)
    registers = torch.zeros((rows, REGISTERS), device=device)
    walks = torch.zeros((rows, NUM_WALK_COLUMNS), dtype=torch.int32, device=device)
    walks[:, 1], walks[:, 2], walks[:, 3] = 1, num_tokens or len(scores), BEGIN
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    addresses = [tensor.data_ptr() for tensor in (registers, walks, log, positions)]
    tables = [
        torch.zeros((rows, NUM_TOKEN_COLUMNS), dtype=torch.int32),
        torch.zeros((1, 1), dtype=torch.int32), ops,
        torch.zeros((1, 8)), torch.tensor([0, 1, 0, 0], dtype=torch.int32),
        torch.tensor([0, 0, *addresses]),
    ]  # fmt: skip
    tables = [table.to(device) for table in tables]
    done = 0
    for i, size in enumerate(sizes):
        again = min(replays, done) if i == len(sizes) - 1 else 0
        first, count = done - again, size + again + rejected
        registers[:count, SCORE] = scores[first : first + count].to(device)
        registers[:again, SCORE] += 1e-3  # computed in another chunk
        registers[again + size : count, SCORE] = 99.0
        positions[:count] = BEGIN + torch.arange(first, first + count)
        walks[:count, 5] = torch.arange(count)
        walks[:, 4] = BEGIN + done if again else 0
        hidden, arena = torch.zeros((count, 8), device=device), torch.zeros((1, 4), device=device)
        tap_rows(hidden, None, arena, *tables, 0, 0)
        done += size
        if num_tokens is None:
            assert torch.equal(registers[:count, VALUE], log[first : first + count, 0])
    return log[: len(scores) - rejected].cpu()
