"""A sink that trains a sparse autoencoder on the rows of requests, while an engine serves them.

    "sinks": {"live_sae": {"path": "/data/sae.pt", "features": 4096, "on_overload": "drop"}}
    Read("resid_post", layers=[12], to="live_sae")

With `drop`, requests do not wait for the training. The manifest counts the dropped rows.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_scope.sinks import Block, Ending, Report


class Sae(nn.Module):
    """decode(relu(encode(x - b))), where b is the bias of `decode`."""

    def __init__(self, hidden_size: int, features: int) -> None:
        super().__init__()
        self.encode = nn.Linear(hidden_size, features)
        self.decode = nn.Linear(features, hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        active = torch.relu(self.encode(x - self.decode.bias))
        return self.decode(active), active


class LiveSae:
    """Trains on batches of at most `batch_rows` rows of one stream.

    Attributes:
        losses: for each batch, the mean squared error divided by the rows' variance.
    """

    live = False
    takes_scores = False

    def __init__(
        self,
        path: str,
        features: int = 4096,
        batch_rows: int = 1024,
        learning_rate: float = 1e-3,
        sparsity: float = 1e-3,
    ) -> None:
        self._path = Path(path)
        self._features, self._batch_rows = features, batch_rows
        self._learning_rate, self._sparsity = learning_rate, sparsity
        self._waiting: list[Tensor] = []
        self.sae: Sae | None = None
        self.losses: list[float] = []

    def write(self, block: Block) -> None:
        # A copy, because the rows are valid only during the call.
        self._waiting.append(block.rows.to(torch.float32, copy=True))
        if sum(map(len, self._waiting)) >= self._batch_rows:
            rows = torch.cat(self._waiting)
            self._waiting = []
            for batch in rows.split(self._batch_rows):
                self._train(batch)

    def _train(self, rows: Tensor) -> None:
        if self.sae is None:
            torch.manual_seed(0)
            self.sae = Sae(rows.shape[1], self._features)
            self._scale = rows.std()
            self._optimizer = torch.optim.Adam(self.sae.parameters(), self._learning_rate)
        with torch.enable_grad():
            rows = rows / self._scale
            rebuilt, active = self.sae(rows)
            error = (rebuilt - rows).square().mean()
            (error + self._sparsity * active.mean()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(error.detach() / rows.var()))

    def finish(self, ending: Ending) -> Report:
        loss = self.losses[-1] if self.losses else None
        return Report(details={"batches": len(self.losses), "loss": loss})

    def flush(self) -> None:
        if self.sae is not None:
            partial = self._path.with_suffix(".tmp")
            torch.save(self.sae.state_dict(), partial)
            os.replace(partial, self._path)

    def close(self) -> None: ...
