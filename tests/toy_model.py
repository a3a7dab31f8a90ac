"""The toy model on Hugging Face's implementation, edited and read by plain forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.steering import Edit, Edits, Stream
from toyworld.evaluate import LoadedModel


@dataclass
class TensorResult:
    """Rows in memory, as a result has them. Without `at`, the positions are 0, 1, 2, ..."""

    rows: dict[Stream, Tensor]
    at: dict[Stream, list[int]] | None = None
    status: str = "complete"

    def keys(self) -> list[Stream]:
        return list(self.rows)

    def __getitem__(self, stream: Stream) -> Tensor:
        return self.rows[stream]

    def positions(self, site: str, layer: int = 0) -> Tensor:
        if self.at is not None:
            return torch.tensor(self.at[site, layer], dtype=torch.int64)
        return torch.arange(len(self.rows[site, layer]))


class ToyModel:
    """What `examples.steering` asks of an engine: `generate`, `read`, `token_ids`."""

    def __init__(self, folder: Path, max_tokens: int = 48) -> None:
        self._loaded = LoadedModel(folder)
        self._max_tokens = max_tokens
        base = self._loaded.model.model
        self.modules: dict[Stream, torch.nn.Module] = {("embed", 0): base.embed_tokens}
        self.modules |= {("resid_post", k): layer for k, layer in enumerate(base.layers)}

    @property
    def model(self) -> Any:
        return self._loaded.model

    def token_ids(self, text: str) -> list[int]:
        return self._loaded.tokenizer(text).input_ids

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], edits: Sequence[Edits]) -> list[str]:
        batch = self._batch(prompts, "left")
        num_pads = (batch.attention_mask == 0).sum(1).tolist()
        with self._edited(edits, num_pads):
            tokens = self.model.generate(**batch, max_new_tokens=self._max_tokens, do_sample=False)
        new = tokens[:, batch.input_ids.shape[1] :]
        return self._loaded.tokenizer.batch_decode(new, skip_special_tokens=True)

    @torch.inference_mode()
    def read(self, prompts: Sequence[str], edits: Sequence[Edits]) -> list[TensorResult]:
        batch = self._batch(prompts, "right")
        read: dict[Stream, Tensor] = {}

        def keep(stream: Stream) -> Any:
            return lambda _module, _inputs, output: read.update({stream: output})

        with self._edited(edits, [0] * len(prompts)):
            # After the edits' hooks: rows as the next layer receives them.
            hooks = [m.register_forward_hook(keep(stream)) for stream, m in self.modules.items()]
            self.model.model(**batch, use_cache=False)
            for hook in hooks:
                hook.remove()
        lengths = batch.attention_mask.sum(1).tolist()
        return [
            TensorResult({stream: rows[i, :length] for stream, rows in read.items()})
            for i, length in enumerate(lengths)
        ]

    def _batch(self, prompts: Sequence[str], side: str) -> Any:
        tokenizer = self._loaded.tokenizer
        encoded = tokenizer(list(prompts), padding=True, padding_side=side, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        return encoded

    @contextmanager
    def _edited(self, edits: Sequence[Edits], num_pads: list[int]) -> Iterator[None]:
        streams = {edit.stream for each in edits for edit in each}
        hooks = [
            self.modules[stream].register_forward_hook(_Editor(stream, edits, num_pads))
            for stream in streams
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Editor:
    """A forward hook: the edits of one stream, over the steps of one generation."""

    def __init__(self, stream: Stream, edits: Sequence[Edits], num_pads: list[int]) -> None:
        self._edits = [[edit for edit in each if edit.stream == stream] for each in edits]
        self._num_pads = num_pads
        self._num_columns = 0

    def __call__(self, _module: object, _inputs: object, output: Tensor) -> Tensor:
        edited = output.clone()
        first, self._num_columns = self._num_columns, self._num_columns + output.shape[1]
        for i, edits in enumerate(self._edits):
            for edit in edits:
                columns = slice(None)
                if edit.positions is not None:
                    columns = [p + self._num_pads[i] - first for p in edit.positions]
                    columns = [c for c in columns if 0 <= c < output.shape[1]]
                edited[i, columns] = _apply(edit, edited[i, columns])
        return edited


def _apply(edit: Edit, rows: Tensor) -> Tensor:
    if edit.kind == "add":
        return rows + edit.scale * edit.vector
    if edit.kind == "ablate":
        unit = edit.vector / edit.vector.norm()
        return rows - (rows @ unit)[:, None] * unit
    return edit.vector.expand_as(rows)
