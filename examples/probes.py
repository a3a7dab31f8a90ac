"""Linear probes: how well a concept can be read off the residual stream, layer by layer.

Owns:  Reading (one prompt's rows and label), LayerProbe, and what they are fitted to.
From:  demo.py, which reads the rows through vLLM.   To: the table, the figure, the page.

Two probes per layer, because they answer two questions. One is fitted at the
prompts' last tokens: is the concept there once the prompt has been read? The other
is fitted at every token of the prompts, each labelled as its prompt: where the
stream does not tell, that probe has learned to stay near one half, so that it can
colour a whole text.
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

# Inverse strengths of the L2 penalty. The tokens of one prompt are no independent
# samples, so the fit on all of them needs the stronger one.
LAST_TOKEN_C: Final = 0.1
EVERY_TOKEN_C: Final = 0.01


@dataclass(frozen=True)
class Reading:
    """One prompt after generation: its tokens, its label, and what was read.

    Attributes:
        tokens: the text of each token, prompt and generated.
        num_prompt: how many of them are the prompt's.
        label: whether the concept is present (positive, lying).
        scope: the rows; the token sampled last has none.
    """

    tokens: tuple[str, ...]
    num_prompt: int
    label: bool
    scope: "ScopeResult"

    def rows(self, stream: Stream) -> Tensor:
        """[num_positions, hidden_size]; row p is position p, since reads start at 0."""
        return self.scope[stream]

    def prompt_positions(self, token: str) -> list[int]:
        """Where a token with this text stands in the prompt."""
        return [p for p in range(self.num_prompt) if self.tokens[p] == token]


@dataclass(frozen=True)
class LayerProbe:
    """What one stream tells about one concept.

    Attributes:
        every_token: the probe fitted at every token of the training prompts.
        auroc_last: at the last tokens of held-out prompts, of a probe fitted there.
        auroc_every: at all tokens of held-out prompts, of `every_token`.
        loss: of `every_token` on held-out prompts, in nats; the mean of its losses at
            all tokens and at last tokens.
    """

    stream: Stream
    every_token: LinearProbe
    auroc_last: float
    auroc_every: float
    loss: float

    def probabilities(self, reading: Reading) -> Tensor:
        """[num_positions]: of the concept, at each position that was read."""
        return self.every_token.probabilities(reading.rows(self.stream))

    def auroc_at(self, readings: Sequence[Reading], positions: Sequence[int]) -> float:
        """Of `every_token` at one position of each prompt."""
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
    """Index of the layer that colours texts best, and not only their last tokens.

    By loss, since several layers rank all prompts correctly.
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
