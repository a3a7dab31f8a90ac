"""Rows as a PyTorch data set: shared among workers, and resumed in the middle of an epoch.

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
    """Batches of rows of one stream, [batch_size, hidden_size], shuffled anew in each epoch.

    Use `DataLoader(dataset, batch_size=None, num_workers=...)`. Each row comes once in an epoch, in
    one of the workers; each worker's last batch may be smaller. Each process opens the files when
    it reads them, so the data set can be sent to any process.

    The object counts its epochs. A worker has a copy of the object: keep the workers from epoch to
    epoch (`persistent_workers=True`), or call `set_epoch` before each epoch. Otherwise each epoch
    has the order of the first.

    `state_dict` says how many batches were taken, and `load_state_dict` goes on after them, mostly
    without reading them. torchdata's StatefulDataLoader calls both in each worker. A plain
    DataLoader calls neither; call them yourself, without workers.

    Args:
        path: the path of captured rows, as for `vllm_scope.open`.
        shuffle: False: rows come in the order of the files, in every epoch.
        seed: the seed of epoch 0; epoch n has seed + n. The next epoch begins after an iterator
            has given its last batch.
        part: (index, number of parts), for several training processes.

    Raises:
        FileError: batch_size is below 1, or there is no such part.
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
                f"part is {shown(part)}; it must be (index, number of parts), and the index is 0 "
                "to the number less 1."
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
            # A worker would send a view together with its whole file.
            yield batch if self._shuffle else batch.clone()
        self._epoch, self._taken = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin this epoch; the first epoch is 0. Workers that run already
        keep their own count."""
        self._epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of batches taken in it, and the settings that determine the order
        of batches."""
        return {"epoch": self._epoch, "taken": self._taken, "part": self._parts()} | self._order()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on after the batches that a state counts as taken.

        Raises:
            FileError: the state has another seed, `shuffle`, batch size or part.
        """
        now = {"part": self._parts()} | self._order()
        for name, value in now.items():
            if state.get(name) != value:
                raise FileError(
                    f"the state is of {name} {state.get(name)}, and this data set has {value}; "
                    "batches would come twice or not at all. Use the same."
                )
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])

    def _order(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "batch_size": self._batch_size}

    def _parts(self) -> tuple[int, int]:
        """(index, number of parts): the data set's part, or a worker's part of that part."""
        index, count = self._part
        worker = get_worker_info()
        if worker is None:
            return index, count
        return index * worker.num_workers + worker.id, count * worker.num_workers
