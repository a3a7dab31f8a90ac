"""Copies regions from the arena to the ring, applies heads, and adds rows to sums.

Owns:  Filler, which has the Packer, the Summing and the side stream. Filler also decides which
       steps are deferred.
Runs:  `copy` and `put_off` on the worker's thread, `fill_waiting` on the drain thread. On a CPU, if
       a watch needs the rows of a step, `fill_waiting` runs on the worker's thread.
From:  drain, deliverer.   To: packer, summing, the leases.

On a GPU, a small step is usually deferred (`put_off`) under two conditions. The step has features,
a lens, or probes that no tap computes. No watch needs the step's rows. The drain thread later
copies the rows of several deferred steps together. The device then needs fewer launches, and reads
large weights one time for all of these steps. The worker's thread enqueues the copies of all other
steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Bank, Told
from vllm_scope.transport.ring import HostRing, JoinedLease, Lease
from vllm_scope.worker.arena import Arena, Region, StreamFence
from vllm_scope.worker.drain_items import Rows, adjacent, joined
from vllm_scope.worker.held_saes import PairMakers
from vllm_scope.worker.packer import Packer, first_slots
from vllm_scope.worker.side_stream import SideStream, to_host
from vllm_scope.worker.summing import Summing

logger = logging.getLogger("vllm.vllm_scope")

HEAD_FAILED = (
    "scores, features, tokens of a lens or encoded rows of some tokens could not be computed on "
    "the device; the worker's log contains the reason. Send the request again when other requests "
    "have finished, or start the server with a smaller gpu_memory_utilization."
)
ROWS_LOST = (
    "some rows could not be delivered, and the engine decodes speculatively, so that earlier rows "
    "of the same positions can belong to rejected tokens; the worker's log contains the reason. "
    "Send the request again when other requests have finished, or start the server with a smaller "
    "gpu_memory_utilization."
)


class Filler:
    """Fills leases of the ring with rows of the arena, or with the results of heads.

    Args:
        saes: The same as for Packer.
        moments_bytes: The number of bytes of device memory for the sums of Moments.
        joins: True if heads are applied to the rows of several steps together. A GPU then needs
            fewer launches, and reads the weights of a held SAE one time for all these steps. If
            None, `joins` is True on a GPU and False on a CPU.
        forget: The filler calls this function with the keys of requests that lost rows or scores.
            From then on, the score store must not keep the scores of these requests.
        drafts: True if a computed token can be rejected (speculative decoding). A request that
            loses rows then fails.

    Attributes:
        failed: maps the key of a running request to the error with which the request will end. The
            reason is that a head has failed, or that the request lost rows.
    """

    def __init__(
        self,
        arena: Arena,
        ring: HostRing,
        widths: Widths,
        forget: Callable[[Collection[int]], None],
        saes: PairMakers,
        moments_bytes: int,
        joins: bool | None,
        drafts: bool,
    ) -> None:
        self._drafts = drafts
        self._arena, self._ring, self._widths, self._forget = arena, ring, widths, forget
        dtype, device = arena.slots.dtype, arena.slots.device
        self.stream = SideStream(device)
        self._joins = self.stream.is_cuda if joins is None else joins
        self.failed: dict[int, str] = {}
        #: Three counts of arena slots, used on a GPU. `_num_put_off`: the slots of all deferred
        #: steps so far. `_num_caught_up`: the slots of deferred steps that the drain thread has
        #: copied. `_most_put_off`: the largest number of slots that may wait for the drain thread.
        self._num_put_off, self._num_caught_up, self._most_put_off = 0, 0, arena.num_slots // 4
        self.packer = Packer(dtype, device, widths, saes, self.stream.entered)
        with self.stream.entered():
            self.summing = Summing(dtype, device, widths, moments_bytes)

    def num_slots(self, region: Region, labels: Labels, boundary: int | None) -> int:
        """The number of slots that the rows of a region need in the ring."""
        return self.packer.num_slots(labels, boundary) if labels.encodes else region.num_slots

    # Steps that the drain thread copies later

    def may_put_off(self, region: Region, labels: Labels) -> bool:
        """True if, on a GPU, the drain thread should copy this step together with other steps.

        There are four conditions. The step is small. The number of waiting slots stays within a
        limit. Heads multiply some of the step's rows by weights. No row is added to sums."""
        return (
            self._joins
            and region.num_slots <= self._most_put_off // 8
            and self._num_waiting + region.num_slots <= self._most_put_off
            and any(map(_multiplies, labels.layouts))
            and not labels.sums
        )

    def put_off(self, region: Region, hurry: Callable[[], None]) -> torch.cuda.Event:
        """Leave the copy of a region to the drain thread. `hurry` wakes the drain thread. Returns
        the event after which taps have written the region's rows."""
        assert isinstance(region.fence, StreamFence)
        region.fence.put_off(hurry)
        self._num_put_off += region.num_slots
        return self.stream.after_taps()

    @property
    def _num_waiting(self) -> int:
        return self._num_put_off - self._num_caught_up

    @property
    def much_waits(self) -> bool:
        """True if the number of slots that wait for the drain thread is above half of its limit."""
        return 2 * self._num_waiting > self._most_put_off

    def fill_waiting(self, steps: Sequence[Rows]) -> list[Rows]:
        """Copy the regions of steps to their leases, and wait for the copies. Returns the copied
        steps. The rows of all other steps are lost."""
        filled: list[Rows] = []
        for some in adjacent(steps, self._joins):
            regions = [step.region for step in some if step.region is not None]
            try:
                filled += self._filled(some)
            finally:
                with self.stream.entered():
                    for region in regions:
                        region.fence.set()
                self._num_caught_up += sum(r.num_slots for r in regions if some[0].tapped)
        if self.stream.is_cuda and steps:
            self.stream.wait_here()
        return filled

    def _filled(self, steps: Sequence[Rows]) -> Sequence[Rows]:
        """Fill the leases of steps together. After a failure, fill each lease separately. Returns
        the steps whose leases were filled."""
        try:
            # On a GPU, the worker's thread also fills leases, in inference mode. Therefore the
            # drain thread uses inference mode too.
            with self.stream.entered(), torch.inference_mode(self.stream.is_cuda):
                self._fill_together(steps)
            return steps
        except Exception:
            if len(steps) == 1:
                # After this error, the engine and all later steps continue.
                logger.exception("vllm-scope: rows could not be delivered")
                self.lose(steps[0].labels)
                return ()
        return [one for step in steps for one in self._filled([step])]

    def _fill_together(self, steps: Sequence[Rows]) -> None:
        first, regions = steps[0], [step.region for step in steps if step.region is not None]
        # All taps run on the model's stream, on which the last event follows all earlier events.
        if steps[-1].tapped is not None:
            self.stream.wait_for(steps[-1].tapped)
        if len(steps) == 1:
            self._fill(regions[0], first.labels, first.boundary, first.lease, first.positions)
            return
        start, stop = regions[0].start, regions[-1].stop
        whole = Region(start, stop - start, regions[-1].fence)
        lease = JoinedLease([step.lease for step in steps], self._ring)
        self._fill(whole, joined([step.labels for step in steps]), None, lease, None)

    # Steps that are copied at once, on a GPU

    def copy(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None,
        lease: Lease,
        positions: Tensor | None,
    ) -> tuple[torch.cuda.Event | None, Tensor | None]:
        """Enqueue the copy of a region to its lease. Returns the event after the copy, and a copy
        of `positions` on the host. The event is None if the rows are lost."""
        if positions is not None:
            positions = to_host(positions)
        # If rows are added to sums, the sums query this event in later steps. In this case the next
        # step must not record the same event again.
        written = self.stream.wait_for_taps(lasting=labels.sums)
        copied, whole = self.stream.event(), True
        with self.stream.entered():
            try:
                self._fill(region, labels, boundary, lease, positions, written.query)
            except Exception:
                # If no device memory is left, the encoding of rows can fail. The engine's step must
                # continue after this error.
                logger.exception("vllm-scope: rows could not be encoded")
                self.stream.synchronize()  # after this call, no kernel writes to the lease
                whole = False
            copied.record()
            region.fence.set()
        if not whole:
            self.lose(labels)
        return copied if whole else None, positions

    def _fill(
        self, region: Region, labels: Labels, boundary: int | None, lease: Lease,
        positions: Tensor | None, ready: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        if labels.encodes:
            rows = self._arena.view(region)
            if labels.sums:
                firsts = first_slots(labels, boundary, self._widths)
                words = rows.view(torch.int64)
                self.summing.add(words, labels, boundary, firsts, positions, ready)
            self._fail(self.packer.pack(rows, labels, boundary, lease.slots), HEAD_FAILED)
        else:
            lease.slots.copy_(self._arena.view(region).view(torch.uint8), non_blocking=True)

    def _fail(self, keys: Collection[int], why: str) -> None:
        """Record the error with which these requests will end, and stop keeping their scores."""
        self.failed.update(dict.fromkeys(keys, why))
        self._forget(keys)

    def lose(self, labels: Labels) -> None:
        """Stop keeping scores of requests that lost rows. These requests report the lost rows as
        dropped. With drafts, these requests fail: otherwise the row of a rejected draft could be
        delivered for a position whose own row is lost."""
        keys = set(labels.keys.tolist())
        if self._drafts:
            self._fail(keys, ROWS_LOST)
        else:
            self._forget(keys)


def _multiplies(layout: Layout) -> bool:
    """True if heads multiply the rows of this layout by weights, outside the taps."""
    return any(isinstance(head, Bank) and not isinstance(head, Told) for head, _ in layout.encoded)
