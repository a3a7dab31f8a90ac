"""The compiled kernel equals the definition bit for bit, rounding included."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.program import OP_READ

pytestmark = pytest.mark.gpu
POISON = -1280.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", [64, 127, 896, 4096, 5000, 16_384])
def test_the_kernel_equals_the_definition(dtype, hidden_size):
    from vllm_scope.tap import definition, kernel

    generator = torch.Generator("cuda").manual_seed(hidden_size)

    def rand(*shape, high=None):
        if high is not None:
            low, high = high
            options = {"device": "cuda", "generator": generator, "dtype": torch.int32}
            return torch.randint(low, high, shape, **options)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    for case in range(20):
        num_rows, num_taps, num_programs = 1 + case * 3, 4, 5
        layered = case % 2
        programs = torch.zeros(num_programs, num_taps, 2, dtype=torch.int32, device="cuda")
        programs[..., 0] = rand(num_programs, num_taps, high=(0, num_taps))
        programs[..., 1] = rand(num_programs, num_taps, high=(0, 2))
        ops = torch.zeros(num_taps, 4, dtype=torch.int32, device="cuda")
        ops[:, 0], ops[:, 1] = OP_READ, torch.arange(num_taps)
        tokens = rand(num_rows + 3, 4, high=(-1, num_programs))
        slots = torch.randperm(num_rows + 3, device="cuda", generator=generator)
        tokens[:, 1] = slots if layered else slots * num_taps
        arena = torch.full(
            ((num_rows + 3) * num_taps, hidden_size), POISON, dtype=dtype, device="cuda"
        )
        wide = rand(num_rows, hidden_size + 16)
        hidden = wide[:, :hidden_size]
        residual = rand(num_rows, hidden_size) if case % 3 else None
        expected, written = arena.clone(), arena.clone()
        tap = torch.tensor(case % num_taps, dtype=torch.int32, device="cuda")
        rest = (tokens, programs, ops, tap, 0, 1 - layered)
        definition.tap_rows(hidden, residual, expected, *rest)
        kernel.tap_rows(hidden, residual, written, *rest)
        assert torch.equal(written, expected)
