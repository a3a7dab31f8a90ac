"""Gathers the parts of the unembedding from all ranks on the first rank of a tensor-parallel group.

Owns:  `gather_parts`, `renew_parts`, `part_alone`, `tensors_of`.
Runs:  in every worker of a tensor-parallel group, on its main thread, at the model's load and after
       a change of the weights.
From:  unembedding (finds the head), vLLM's group of ranks.   To: own_lens.

Promise: ranks exchange messages for a lens only before the first request and after a change of the
weights. A rank that applies a lens waits for no other rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.errors import CompatError, ConfigError


def check_part(head: nn.Module, group: Any) -> None:
    """Raises CompatError if this package cannot gather the parts of an unembedding.

    Args:
        head: the model's own unembedding on this rank.
        group: vLLM's tensor-parallel group.
    """
    ranks = getattr(head, "tp_size", None)
    if not isinstance(ranks, int) or head._modules:
        raise CompatError("the unembedding is no single module of vLLM's")
    if ranks > 1 and getattr(head, "parallel_group", None) not in (None, group):
        raise CompatError("the unembedding is shared by another group than the layers'")


def gather_parts(head: nn.Module, group: Any, most_mib: float) -> tuple[nn.Module, ...]:
    """On the first rank, the parts of all ranks, in the order of the vocabulary. On all other
    ranks, the result is empty.

    Every rank of the group must call this function, on its main thread. The ranks send the tensors
    through host memory.

    Args:
        head: this rank's part of the unembedding, for which `check_part` raised no error.
        group: vLLM's tensor-parallel group.
        most_mib: additional_config['scope'].unembedding_mib.

    Raises:
        ConfigError: the parts of the other ranks take more than `most_mib`. Every rank raises this
            error.
    """
    tensors = tensors_of(head)
    needed = len(_others(head, group)) * sum(one.nbytes for one in tensors.values()) / 2**20
    if needed > most_mib:
        raise ConfigError(
            f"additional_config['scope'].unembedding_mib is {most_mib:g}; the other ranks' parts "
            f"of the unembedding take {needed:,.1f} MiB of the first rank's device. Raise it, or "
            "leave it out: requests then have no lens."
        )
    found = _exchanged(head, group)
    copies = [
        {name: torch.empty_like(tensors[name]).copy_(one) for name, one in some.items()}
        for some in found[1:]
    ]
    return tuple(part_alone(head, some) for some in (*found[:1], *copies))


def renew_parts(head: nn.Module, parts: Sequence[nn.Module], group: Any) -> None:
    """Copy the current weights of the ranks' heads into the parts that the first rank holds.

    Every rank of the group must call this function, as for `gather_parts`.

    Args:
        parts: the result of `gather_parts`.
    """
    for part, new in zip(parts, _exchanged(head, group), strict=True):
        for name, one in tensors_of(part).items():
            one.data.copy_(new[name])


def _others(head: nn.Module, group: Any) -> list[int]:
    """The ranks whose parts the first rank does not have. Empty if every rank has the whole
    head."""
    return list(group.ranks[1:]) if head.tp_size != 1 else []


def _exchanged(head: nn.Module, group: Any) -> list[dict[str, Tensor]]:
    """On the first rank, the tensors of each rank's part by name. On all other ranks, the result is
    empty. The tensors of other ranks are in host memory."""
    tensors, others = tensors_of(head), _others(head, group)
    if not group.rank_in_group:
        came = [
            {name: _received(one, rank, group) for name, one in tensors.items()} for rank in others
        ]
        return [tensors, *came]
    for one in tensors.values() if others else ():
        torch.distributed.send(_bytes_of(one), group.ranks[0], group=group.cpu_group)
    return []


def tensors_of(head: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a head, by name."""
    found = {**head._parameters, **head._buffers}
    return {name: one for name, one in found.items() if one is not None}


def part_alone(head: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a head with the given tensors. The copy computes logits only for the tokens of
    which these tensors have a row. Any thread can use the copy.

    Args:
        tensors: the tensors by name, as `tensors_of` returns them.
    """
    own = copy.copy(head)
    own._parameters = {
        name: one if one is None else nn.Parameter(tensors[name], requires_grad=False)
        for name, one in head._parameters.items()
    }
    own._buffers = {name: tensors.get(name) for name in head._buffers}
    own.tp_size = 1  # type: ignore[assignment]
    if hasattr(head, "cpu_linear"):
        # On a CPU, vLLM's matrix product uses memory of oneDNN, which two threads must not use at
        # the same time.
        # vllm 0.32, model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm
        own.cpu_linear = nn.functional.linear  # type: ignore[assignment]
    return own


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: uint8 [num_bytes], on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _received(like: Tensor, rank: int, group: Any) -> Tensor:
    """A tensor that another rank has sent, in host memory."""
    host = torch.empty(like.shape, dtype=like.dtype)
    torch.distributed.recv(host.reshape(-1).view(torch.uint8), rank, group=group.cpu_group)
    return host
