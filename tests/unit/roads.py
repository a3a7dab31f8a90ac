"""A front-end's inbox and a sender to it, over the real road."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at, slots_per_token, tokens_in
from vllm_scope import Add, Features, LensTopK, Probe, Read, Spec
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.actions import Action
from vllm_scope.request.resolved import ResolvedProbe
from vllm_scope.request.sites import Sites
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import Inbox
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.ring import HostRing
from vllm_scope.transport.senders import SharedSender

PATIENCE_S = 10
WIDTHS = Widths((ROW_BYTES,))
SITES = Sites(3, 4, "float32", tuple(range(7)))

#: What a token delivers: a layout, or just the boundaries at which it is read.
Delivers = Layout | tuple[int, ...]


def number_of(point: int, at: int, position: int, number: int) -> float:
    """What stands in place `at` of a bank's numbers."""
    return 1024 * at + 32 * position + point + number / 1024


def numbers_of(
    probe: ResolvedProbe, position: int, number: Callable[[int], int] | int = 0
) -> Tensor:
    """float32 [numbers of a cell]: what was sent for a probe, summed over its cells.

    Args:
        number: of the computation; a function of the point, if cells came from several.
    """
    found = []
    for cell in probe.cells:
        point, places = cell.place.point(), range(cell.first, cell.first + probe.num_values)
        which = number if isinstance(number, int) else number(point)
        found.append(torch.tensor([number_of(point, at, position, which) for at in places]))
    return reduce(torch.add, found)


@dataclass
class Road:
    """An inbox and a sender to it."""

    inbox: Inbox
    sender: SharedSender
    ring: HostRing

    def send(
        self, tokens: list[tuple[int, int, Delivers, int]], boundary: int | None = None
    ) -> None:
        """One step: (key, position, what it delivers, number of the computation).

        A row holds its position, point, number and a 7, and a bank what `number_of` says; nobody's
        slots hold -1.
        """
        listed = [d if isinstance(d, Layout) else reads_at(*d) for _, _, d, _ in tokens]
        layouts = list(dict.fromkeys(listed))
        labels = labels_of(
            [key for key, *_ in tokens], [position for _, position, *_ in tokens],
            [layouts.index(layout) for layout in listed], tuple(layouts),
        )  # fmt: skip
        lease = self.ring.acquire(sum(slots_per_token(labels, boundary)))
        lease.slots.view(torch.float32).fill_(-1)
        told = tokens_in(labels, lease.slots, boundary)
        for (_, position, here, words), (*_, number) in zip(told, tokens, strict=True):
            for row, point in enumerate(here.points):
                words[row] = torch.tensor([position, point, number, 7])
            for bank, points, first, size in here.encoded_at(WIDTHS):
                for i, point in enumerate(points):
                    made = words[first + i * size : first + (i + 1) * size].view(-1)
                    for at in range(bank.row_bytes // 4):
                        made[at] = number_of(point, at, position, number)
        self.sender.send_rows(RowBatch(labels, lease, WIDTHS, boundary))
        lease.release()

    def finish(self, pending: Pending, num_stages: int = 1, error: str | None = None) -> None:
        for stage in range(num_stages):
            self.sender.send_finish(pending.key, stage, error)
        pending.done.result(PATIENCE_S)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        probe = self.open("embed", num_prompt=1)
        self.finish(probe)

    def open(
        self, *actions: Action | str, num_prompt: int = 3, max_tokens: int = 4, num_stages: int = 1
    ) -> Pending:
        found = [Read(a) if isinstance(a, str) else a for a in actions]
        kinds = (Read, Probe, Add, Features)
        lists = (tuple(a for a in found if isinstance(a, kind)) for kind in kinds)
        spec = Spec(*lists, lens=tuple(a for a in found if isinstance(a, LensTopK)))
        return self.inbox.open(spec.resolve(SITES), SITES, [1] * num_prompt, max_tokens, num_stages)
