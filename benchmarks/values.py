"""Rows that an engine delivered, compared with Hugging Face's rows for the same tokens.

`benchmarks.engine`, or a module that replaces it, has written the rows to a file. The
model runs on each request alone, so rows of shared batches are compared with rows of single runs.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Workload, drawn


class Reference:
    """Hugging Face's model of a folder, on the CPU."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, self._dtype)
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype).eval()

    @property
    def layers(self) -> list[int]:
        """All layers of the model."""
        return list(range(self._model.config.num_hidden_layers))

    def worst(self, work: Workload) -> float:
        """The largest relative error of a row that this workload has kept."""
        kept = torch.load(work.keep)
        found = 0.0
        for number, (ids, rows) in enumerate(zip(kept["token_ids"], kept["rows"], strict=True)):
            wanted = self._rows(ids[: rows.shape[1]], self._added(work, number))
            wanted = wanted[work.layers or []].double()
            errors = (rows.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            # Python's `max` ignores NaN.
            found = max(found, float(errors.nan_to_num(nan=torch.inf).max()))
        return found

    def _added(self, work: Workload, number: int) -> Tensor | None:
        """The vector that is added to one request's stream in the middle layer, or None."""
        if work.edits is None:
            return None
        size = self._model.config.hidden_size
        return torch.from_numpy(drawn(size, 1000 + (number if work.edits == "own" else 0)))

    @torch.no_grad()
    def _rows(self, ids: list[int], added: Tensor | None) -> Tensor:
        """[num_layers, num_positions, hidden_size] of `resid_post`."""
        layers, streams = self._model.model.layers, []

        def leave(layer: int, out: Tensor) -> Tensor:
            if added is not None and layer == len(layers) // 2:
                out = out + added.to(out.dtype)
            streams.append(out[0])
            return out

        hooks = [
            module.register_forward_hook(lambda _, args, out, layer=layer: leave(layer, out))
            for layer, module in enumerate(layers)
        ]
        try:
            self._model(torch.tensor([ids]), logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(streams)
