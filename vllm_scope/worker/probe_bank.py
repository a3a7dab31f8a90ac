"""Computes the probes of one place on the device, for many rows together.

Owns:  DeviceBank (the weights of one bank), DeviceStack (the weights of several similar banks),
       Banks (the banks that requests hold).
Runs:  in workers that have a drain. The worker's thread loads weights. The drain thread computes
       the numbers of nets. On a GPU, the drain thread does this only for deferred steps
       (worker.filler). For the other steps, the worker's thread enqueues the computation on the
       drain's stream.
From:  request.nets (weights).   To: packer.

Promise: one matrix product in float32 computes the first layers of all nets of a bank. The weights
of a request's banks are kept until the numbers of the request's last rows were computed. Of the
weights that no running request uses, at most IDLE_BYTES are kept.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank
from vllm_scope.request.nets import Net
from vllm_scope.worker.side_stream import Entering

#: Of the weights that no running request holds, at most this many bytes are kept.
IDLE_BYTES = 64 << 20
#: A bank with more bytes of weights than this number is not copied into a stack.
MOST_STACKED = 1 << 20
#: The largest number of bytes of weights in all cached stacks. A single stack can have more bytes.
MOST_STACK_BYTES = 64 << 20
#: The result of one product has at most this many bytes. If the outputs of the first layers for all
#: rows have more bytes, the rows are divided, and each part of the rows gets its own product.
MOST_BYTES = 64 << 20
_HIDDEN = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


class DeviceBank:
    """The weights of one bank.

    Args:
        nets: the bank's nets, in the order in which the bank returns their numbers.
    """

    def __init__(self, nets: Sequence[Net], device: torch.device) -> None:
        self.num_bytes = sum(net.num_bytes for net in nets)
        firsts = [net.layers[0] for net in nets]
        #: The weights of all first layers, [width of a row, outputs of all first layers].
        weight = torch.cat([_tensor(weight) for weight, _ in firsts])
        self.weight = _to(weight, device).t()
        self.bias: Tensor | None = None
        if any(bias is not None for _, bias in firsts):
            biases = [
                torch.zeros(weight.shape[0]) if bias is None else _tensor(bias)
                for weight, bias in firsts
            ]
            self.bias = _to(torch.cat(biases), device)
        self._sizes = [weight.shape[0] for weight, _ in firsts]
        #: For each net, the activation function, and the layers after the first layer.
        self._rest = [
            (net.hidden, [(_to(_tensor(w), device), _on(b, device)) for w, b in net.layers[1:]])
            for net in nets
        ]
        self.linear = not any(layers for _, layers in self._rest)
        self._most_rows = max(1, MOST_BYTES // (4 * sum(self._sizes)))

    def pack(self, rows: Tensor) -> Tensor:
        """The float32 numbers of all nets, for rows [num_rows, width]. The result is uint8
        [num_rows, bytes in whole slots], on the rows' device. The host does not wait for the
        device."""
        if len(rows) > self._most_rows:
            return torch.cat([self.pack(some) for some in rows.split(self._most_rows)])
        x = rows.float()
        found = x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if not self.linear:
            parts = found.split(self._sizes, dim=1)
            found = torch.cat(list(map(self._finish, parts, self._rest)), dim=1)
        return _in_slots(found)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """The width of a row, the number of outputs of all first layers, and whether a first layer
        has a bias."""
        return (*self.weight.shape, self.bias is not None)

    @staticmethod
    def _finish(x: Tensor, rest: tuple[str | None, list[tuple[Tensor, Tensor | None]]]) -> Tensor:
        hidden, layers = rest
        for weight, bias in layers:
            assert hidden is not None
            x = torch.nn.functional.linear(_HIDDEN[hidden](x), weight, bias)
        return x


class DeviceStack:
    """Several banks, whose numbers are computed by one matrix product. All banks have linear nets,
    and get equal numbers of rows.

    Args:
        banks: Linear banks with equal shapes.
    """

    def __init__(self, banks: Sequence[DeviceBank]) -> None:
        self._weight = torch.stack([bank.weight for bank in banks])
        biases = [bank.bias for bank in banks if bank.bias is not None]
        size = len(banks), 1, self._weight.shape[2]
        self._bias = torch.stack(biases)[:, None] if biases else self._weight.new_zeros(size)
        self.num_bytes = sum(bank.num_bytes for bank in banks)
        self._most_rows = max(1, MOST_BYTES // (4 * len(banks) * self._weight.shape[2]))

    def pack(self, rows: Tensor) -> Tensor:
        """The numbers of all banks, in the format of DeviceBank.pack. `rows` has the rows for the
        first bank, then the rows for the second bank, and so on. The result has the same order."""
        x = rows.view(len(self._weight), -1, rows.shape[1])
        # `bmm` is not used, because in torch 2.13 each call of `bmm` takes 0.1 to 0.2 ms of Python
        # on the host.
        parts = [
            torch.baddbmm(self._bias, some.float(), self._weight)
            for some in x.split(self._most_rows, dim=1)
        ]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return _in_slots(found.view(len(rows), -1))


def _in_slots(numbers: Tensor) -> Tensor:
    """The bytes of some numbers, uint8 [num_rows, bytes in whole slots], with padding. `numbers` is
    float32 [num_rows, n]."""
    size = 4 * numbers.shape[1]
    filling = slots_of_row(size) * SLOT_BYTES - size
    if filling:
        numbers = torch.nn.functional.pad(numbers, (0, filling // 4))
    return numbers.contiguous().view(torch.uint8)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array.numpy.copy())


def _on(array: Array | None, device: torch.device) -> Tensor | None:
    return None if array is None else _to(_tensor(array), device)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        # A copy from memory that is not pinned would wait for the stream.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class Banks:
    """The banks that running requests hold. In addition, the banks that were released most
    recently, up to IDLE_BYTES.

    Args:
        entered: A function that returns the context in which banks are loaded.
    """

    def __init__(self, device: torch.device, entered: Entering = nullcontext) -> None:
        self._device, self._entered = device, entered
        #: This lock is needed because the worker's thread calls `hold`, and the drain thread calls
        #: `release`.
        self._lock = threading.Lock()
        #: All loaded banks. The banks that no request holds are in the order of their release.
        self._loaded: dict[Bank, DeviceBank] = {}
        self._holders: Counter[Bank] = Counter()
        #: Maps a tuple of banks to the stack of these banks. The least recently used stack is
        #: first. Running requests hold all banks of a stack.
        self._stacks: dict[tuple[Bank, ...], DeviceStack] = {}

    def hold(self, banks: Mapping[Bank, Sequence[Net]]) -> None:
        """Load and hold banks. If the device has no room, raise torch.OutOfMemoryError, and hold
        none of these banks."""
        with self._lock:
            try:
                for bank, nets in banks.items():
                    if bank not in self._loaded:
                        with self._entered():
                            self._loaded[bank] = DeviceBank(nets, self._device)
            except torch.OutOfMemoryError:
                self._drop_idle(0)
                raise
            self._holders.update(banks.keys())

    def release(self, banks: Iterable[Bank]) -> None:
        """Release the banks of ended requests. If several ended requests held a bank, `banks`
        contains the bank several times."""
        with self._lock:
            over = False
            for bank, count in Counter(iter(banks)).items():
                self._holders[bank] -= count
                if not self._holders[bank]:
                    over = True
                    del self._holders[bank]
                    self._loaded[bank] = self._loaded.pop(bank)
            if not over:
                return
            self._stacks = {
                banks: stack for banks, stack in self._stacks.items()
                if self._holders.keys() >= set(banks)
            }  # fmt: skip
            self._drop_idle(IDLE_BYTES)

    def _drop_idle(self, most_bytes: int) -> None:
        idle = [bank for bank in self._loaded if bank not in self._holders]
        size = sum(self._loaded[bank].num_bytes for bank in idle)
        for bank in idle:
            if size <= most_bytes:
                break
            size -= self._loaded.pop(bank).num_bytes

    def __getitem__(self, bank: Bank) -> DeviceBank:
        return self._loaded[bank]

    def stack(self, banks: tuple[Bank, ...]) -> DeviceStack:
        """The stack of several held banks. `like` must return equal keys for these banks."""
        with self._lock:
            found = self._stacks.pop(banks, None)
            if found is None:
                found = DeviceStack([self._loaded[bank] for bank in banks])
                size = found.num_bytes + sum(one.num_bytes for one in self._stacks.values())
                while self._stacks and size > MOST_STACK_BYTES:
                    size -= self._stacks.pop(next(iter(self._stacks))).num_bytes
            self._stacks[banks] = found  # the most recently used stack is at the end
            return found

    def like(self, bank: Bank) -> object:
        """The key of a bank. Banks with equal keys can be in one stack."""
        one = self._loaded.get(bank)
        if one is None or not one.linear or one.num_bytes > MOST_STACKED:
            return bank
        return one.shape
