"""The tokens of a lens in a result: for each layer and position, the likeliest tokens.

Owns:  TopTokens (the tokens of one layer), LensTokens (the tokens of all layers of one LensTopK),
       Lenses (all LensTokens, by name).
Runs:  in the front-end, and in every process that unpickles a result.
From:  batch.sparse, scores.   To: result; server.encode; analysis.lens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.request.resolved import lens_label
from vllm_scope.results.scores import Named, ScoreTable
from vllm_scope.results.snapshot import Snapshot

if TYPE_CHECKING:
    from vllm_scope.views.document import Picture


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The likeliest next tokens at each position, from the rows of one layer. CPU tensors.

    Attributes:
        positions: int64 [num_positions], ascending, absolute. The tokens at position p are
            predictions for position p + 1.
        token_ids: int64 [num_positions, k], the likeliest token first.
        log_probs: float32 [num_positions, k], natural logarithms.
    """

    positions: Tensor
    token_ids: Tensor
    log_probs: Tensor

    @staticmethod
    def of_rows(rows: SparseRows, positions: Tensor) -> TopTokens:
        """The tokens that a worker delivered. k is at most the size of the vocabulary."""
        k = int(rows.counts.max()) if len(rows) else rows.shape[1]
        return TopTokens(positions, rows.indices[:, :k].long(), rows.values[:, :k])

    def top(self, position: int) -> list[tuple[int, float]]:
        """(token id, log-probability) of each token at a position, the likeliest token first.

        Raises:
            KeyError: `positions` does not have this position.
        """
        (found,) = (self.positions == position).nonzero(as_tuple=True)
        if not len(found):
            raise KeyError(f"position {position} has no tokens of this lens; see positions.")
        ids, values = self.token_ids[found[0]].tolist(), self.log_probs[found[0]].tolist()
        return list(zip(ids, values, strict=True))

    def __len__(self) -> int:
        return len(self.positions)


class LensTokens(Mapping[int, TopTokens]):
    """The tokens of one LensTopK by layer. The layers are in ascending order.

    Args:
        tokenizer: decodes token ids for `picture`. If None, the picture shows token ids.
    """

    def __init__(self, layers: Mapping[int, TopTokens], tokenizer: Any = None) -> None:
        self._layers, self._tokenizer = dict(sorted(layers.items())), tokenizer

    def decoded(self, tokenizer: Any) -> LensTokens:
        """LensTokens with the same tokens and with a tokenizer. A notebook then shows the texts of
        the tokens.

        Args:
            tokenizer: an object with `decode`, such as `llm.get_tokenizer()`.
        """
        return LensTokens(self._layers, tokenizer)

    def __getitem__(self, layer: int) -> TopTokens:
        if layer not in self._layers:
            asked = ", ".join(map(str, self._layers))
            raise KeyError(f"the lens was not applied at layer {layer!r}; it has: {asked}.")
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        count = max(map(len, self._layers.values()), default=0)
        return f"LensTokens(layers {', '.join(map(str, self))}; {count} positions)"

    def picture(self, tokens: Sequence[str] | None = None) -> Picture:
        """A picture that shows the likeliest token for each position and layer (`views.lens_grid`).

        Args:
            tokens: the text of each token of the prompt and the answer, from position 0 on.
        """
        from vllm_scope.views.sparse import lens_grid

        return lens_grid(self, tokenizer=self._tokenizer, tokens=tokens)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


class Lenses(Named[LensTokens]):
    """The tokens of each LensTopK, by the name of the LensTopK."""

    def __init__(self, table: ScoreTable, of: Snapshot) -> None:
        self._layers: dict[str, list[int]] = {}
        for one in table.features.values():
            if one.lens is not None:
                self._layers.setdefault(one.lens[0], []).append(one.cells[0].place.layer)
        super().__init__(list(self._layers), table, of)

    def __getitem__(self, name: str) -> LensTokens:
        self._check(name, "lens of this request is", "it has")
        return LensTokens({layer: self._tokens_of(name, layer) for layer in self._layers[name]})

    def _tokens_of(self, name: str, layer: int) -> TopTokens:
        rows, positions = self._table.sparse(lens_label(name, layer), self._of)
        return TopTokens.of_rows(rows, torch.from_numpy(positions))
