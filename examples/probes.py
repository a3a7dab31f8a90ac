"""Linear probes: how well a concept can be read from the residual stream, layer by layer.

Owns:  Reading (one prompt's rows and label), LayerProbe, and the fitting of both probes of a layer.
From:  demo.py, which reads the rows through vLLM.   To: the table, the figure, the page.

Each layer has two probes, because they answer two questions. The first probe is fitted at the
prompts' last tokens: is the concept in the stream after the prompt? The second probe is fitted at
every token of the prompts, with the label of the prompt. Where the stream does not have the
concept, the second probe gives a probability near one half. Therefore the second probe can colour a
whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from sklearn.metrics import log_loss
from torch import Tensor

from vllm_scope.analysis.probes import LinearProbe, train_probe

if TYPE_CHECKING:
    from vllm_scope.results.result import ScopeResult

Stream = tuple[str, int]

# Inverse strengths of the L2 penalty. The tokens of one prompt are not independent samples, so the
# fit on all tokens needs the stronger penalty.
LAST_TOKEN_C: Final = 0.1
EVERY_TOKEN_C: Final = 0.01


@dataclass(frozen=True)
class Reading:
    """One prompt after generation: its tokens, its label, and its rows.

    Attributes:
        tokens: the text of each token, of the prompt and then generated.
        num_prompt: number of the prompt's tokens.
        label: whether the concept is present (positive, lying).
        scope: the rows. The last sampled token has no row.
    """

    tokens: tuple[str, ...]
    num_prompt: int
    label: bool
    scope: "ScopeResult"

    def rows(self, stream: Stream) -> Tensor:
        """[num_positions, hidden_size]. Row p is position p, because reads start at position 0."""
        return self.scope[stream]

    def prompt_positions(self, token: str) -> list[int]:
        """The positions in the prompt of tokens with this text."""
        return [p for p in range(self.num_prompt) if self.tokens[p] == token]


@dataclass(frozen=True)
class LayerProbe:
    """The probes of one concept at one stream.

    Attributes:
        every_token: the probe fitted at every token of the training prompts.
        auroc_last: AUROC of a probe fitted at last tokens, at the last tokens of held-out prompts.
        auroc_every: AUROC of `every_token` at all tokens of held-out prompts.
        loss: log loss of `every_token` on held-out prompts, in nats: the mean of its losses at all
            tokens and at last tokens.
    """

    stream: Stream
    every_token: LinearProbe
    auroc_last: float
    auroc_every: float
    loss: float

    def probabilities(self, reading: Reading) -> Tensor:
        """[num_positions]: the probability of the concept at each position that was read."""
        return self.every_token.probabilities(reading.rows(self.stream))

    def auroc_at(self, readings: Sequence[Reading], positions: Sequence[int]) -> float:
        """The AUROC of `every_token` at one position of each prompt."""
        rows = [r.rows(self.stream)[p] for r, p in zip(readings, positions, strict=True)]
        return self.every_token.auroc(torch.stack(rows), [r.label for r in readings])


def fit_layer(stream: Stream, train: Sequence[Reading], test: Sequence[Reading]) -> LayerProbe:
    """Fit both probes of a stream on `train` and measure them on `test`."""
    last_token = train_probe(*_last_rows(train, stream), stream, c=LAST_TOKEN_C)
    every_token = train_probe(*_every_row(train, stream), stream, c=EVERY_TOKEN_C)
    at_last, at_every = _last_rows(test, stream), _every_row(test, stream)
    return LayerProbe(
        stream,
        every_token,
        auroc_last=last_token.auroc(*at_last),
        auroc_every=every_token.auroc(*at_every),
        loss=(_loss(every_token, *at_every) + _loss(every_token, *at_last)) / 2,
    )


def best_of(probes: Sequence[LayerProbe]) -> int:
    """Index of the layer whose probe has the lowest loss, at all tokens and at last tokens.

    AUROC cannot choose, because several layers rank all prompts correctly.
    """
    return min(range(len(probes)), key=lambda i: probes[i].loss)


def _loss(probe: LinearProbe, rows: Tensor, labels: list[bool]) -> float:
    return float(log_loss(labels, probe.probabilities(rows).numpy()))


def _last_rows(readings: Sequence[Reading], stream: Stream) -> tuple[Tensor, list[bool]]:
    rows = torch.stack([reading.rows(stream)[reading.num_prompt - 1] for reading in readings])
    return rows, [reading.label for reading in readings]


def _every_row(readings: Sequence[Reading], stream: Stream) -> tuple[Tensor, list[bool]]:
    rows = torch.cat([reading.rows(stream)[: reading.num_prompt] for reading in readings])
    return rows, [reading.label for reading in readings for _ in range(reading.num_prompt)]
