"""A PyTorch data set of rows. Several workers can use the data set, and it can resume in the middle
of an epoch.

Owns:  RowDataset.
Runs:  in a training process, and in the workers of its DataLoader.
From:  reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vllm_scope.errors import FileError, shown
from vllm_scope.files.reader import open as open_capture


class RowDataset(IterableDataset[Tensor]):
    """Batches of rows of one stream, [batch_size, hidden_size], in a new order in each epoch.

    Use `DataLoader(dataset, batch_size=None, num_workers=...)`. In an epoch, each row is in exactly
    one batch of one worker. Each worker's last batch may be smaller. The data set can be pickled,
    because each process opens the files itself.

    The data set counts epochs, and each worker has its own copy of the data set. If you use
    workers, keep the workers from epoch to epoch (`persistent_workers=True`), or call `set_epoch`
    before each epoch. If you do neither, all epochs have the same order.

    `state_dict` returns the number of batches taken so far. After `load_state_dict`, the data set
    continues after these batches. Most rows of these batches are not read again. torchdata's
    StatefulDataLoader calls both methods in each worker. A plain DataLoader does not call
    `state_dict` and `load_state_dict`. With a plain DataLoader, use no workers, and call
    `state_dict` and `load_state_dict` yourself.

    Args:
        path: the path of captured rows, as for `vllm_scope.open`.
        shuffle: if False, every epoch has the rows in the order of the files.
        seed: the seed of epoch 0. The seed of epoch n is `seed` + n. An epoch ends when an iterator
            has returned its last batch.
        part: (index, number of parts), for several training processes.

    Raises:
        FileError: batch_size is below 1, or `part` is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        site: str,
        layer: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1:
            raise FileError(f"batch_size is {batch_size}; it must be at least 1.")
        if not 0 <= part[0] < part[1]:
            raise FileError(
                f"part is {shown(part)}; it must be (index, number of parts), and the index must "
                "be at least 0 and less than the number of parts."
            )
        self._path, self._stream = os.fspath(path), (site, layer)
        self._batch_size, self._shuffle, self._seed, self._part = batch_size, shuffle, seed, part
        self._epoch = self._taken = 0

    def __iter__(self) -> Iterator[Tensor]:
        part = self._parts()
        batches = open_capture(self._path).iter_rows(
            *self._stream, self._batch_size, self._shuffle, self._seed + self._epoch,
            part=part, skip=self._taken,
        )  # fmt: skip
        for batch in batches:
            self._taken += 1
            # Clone the batch, because a worker that sends a view would send the whole file.
            yield batch if self._shuffle else batch.clone()
        self._epoch, self._taken = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin this epoch. The first epoch is 0. Workers that already run do
        not use the new epoch."""
        self._epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of batches taken in the epoch, and the settings that decide the
        order of the rows."""
        return {"epoch": self._epoch, "taken": self._taken, "part": self._parts()} | self._order()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator continue after the batches that were taken before `state_dict`.

        Raises:
            FileError: the state has another seed, `shuffle`, batch size or part than this data set.
        """
        now = {"part": self._parts()} | self._order()
        for name, value in now.items():
            said = state.get(name)
            said = tuple(said) if isinstance(said, list) else said  # JSON makes lists of tuples
            if said != value:
                raise FileError(
                    f"the state is of {name} {said}, and this data set has {value}; "
                    "batches would be repeated or left out. Use the same value."
                )
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])

    def _order(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "batch_size": self._batch_size}

    def _parts(self) -> tuple[int, int]:
        """(index, number of parts) of the data set. In a worker, (index, number of parts) of the
        rows that this worker yields."""
        index, count = self._part
        worker = get_worker_info()
        if worker is None:
            return index, count
        return index * worker.num_workers + worker.id, count * worker.num_workers
