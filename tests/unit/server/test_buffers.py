"""The bytes of tensors, whatever numpy and torch say of the strides of none and of one number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_scope.server.encode import buffer_of

NUMBERS = np.arange(6, dtype=np.int64)


@pytest.mark.parametrize(
    "chosen",
    [NUMBERS[NUMBERS > 9], np.repeat(NUMBERS, [0] * 6), NUMBERS[::6], NUMBERS[::2], NUMBERS],
)
def test_the_bytes_of_some_numbers(chosen):
    assert bytes(buffer_of(torch.from_numpy(chosen))) == chosen.tobytes()
