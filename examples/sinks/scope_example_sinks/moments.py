"""A sink that computes the mean and covariance of each stream, and keeps no rows.

"sinks": {"moments": {"path": "/data/moments.npz"}}
Read("resid_post", layers=[12], to="moments")
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_scope.sinks import Block, Ending, Report


@dataclass
class Stream:
    """The moments of one (site, layer).

    Attributes:
        mean: float64 [hidden_size].
        scatter: float64 [hidden_size, hidden_size], the sum of (x - mean)(x - mean)^T.
    """

    count: int
    mean: np.ndarray
    scatter: np.ndarray

    def add(self, rows: np.ndarray) -> None:
        """Add rows by the formula of Chan, Golub and LeVeque (1979), in any order."""
        mean = rows.mean(axis=0)
        centred = rows - mean
        delta, total = mean - self.mean, self.count + len(rows)
        self.scatter += centred.T @ centred
        self.scatter += np.outer(delta, delta) * (self.count * len(rows) / total)
        self.mean += delta * (len(rows) / total)
        self.count = total

    @property
    def covariance(self) -> np.ndarray:
        return self.scatter / max(self.count - 1, 1)


class Moments:
    """The moments are exact, because with `live = False` the sink gets each accepted row once."""

    live = False
    takes_scores = False

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.streams: dict[str, Stream] = {}

    def write(self, block: Block) -> None:
        rows = block.rows.double().numpy()
        size = rows.shape[1]
        stream = self.streams.setdefault(
            f"{block.site}.{block.layer}", Stream(0, np.zeros(size), np.zeros((size, size)))
        )
        stream.add(rows)

    def finish(self, ending: Ending) -> Report:
        return Report(details={name: stream.count for name, stream in self.streams.items()})

    def flush(self) -> None:
        arrays = {}
        for name, stream in self.streams.items():
            arrays |= {f"{name}.mean": stream.mean, f"{name}.covariance": stream.covariance}
            arrays[f"{name}.count"] = np.array(stream.count)
        partial = self._path.with_suffix(".tmp.npz")
        np.savez(partial, **arrays)
        os.replace(partial, self._path)  # a reader sees the new file or the earlier file

    def close(self) -> None: ...
