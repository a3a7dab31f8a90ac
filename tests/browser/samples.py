"""Results of the real classes, with numbers that the views must show."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.saes.test_max_activating import documents, table, unique
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.compat.vllm_lens.attention import compute_attention_weights
from vllm_scope.control.activity import OUTCOMES, Activity, Ring, State
from vllm_scope.control.tally import Tally
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.results.features import SparseFeatures
from vllm_scope.results.lens import LensTokens, TopTokens
from vllm_scope.saes.max_activating import MaxActivating
from vllm_scope.sweeps.table import SweepTable
from vllm_scope.views import TokenStrip, token_strip

#: None of these may be more than text, wherever a model or a user puts it.
HOSTILE = [
    "</script><img src=x onerror=\"window.ran = 1\">", "<script>window.ran = 1</script>",
    "<!-- <script>", '" onfocus="window.ran = 1', "javascript:window.ran=1", "</style>",
    "&lt;b&gt;", "<iframe src='//x'>", "${window.ran = 1}", "\u2028", "\u202eevil",
    "\ud800", "\x00", "مرحبا",
]  # fmt: skip
TEXTS = ["Q", ":", " What", " is", " it", "?\n", " A", ":", " Rindos"]
SCORES = np.array([0.25, -1, 0.5, 0.75, 2.5, 0.1, np.nan, 0.6, np.nan], np.float32)


def strip(texts: list[str] = TEXTS) -> TokenStrip:
    scores = np.resize(SCORES, len(texts))
    return token_strip(texts, scores, threshold=0.5, verdict=4, caption="Answer of Mira")


def sweep_table(texts: list[str] = TEXTS) -> SweepTable:
    found = SweepTable.empty(
        [texts], [0, 2, 5], range(len(texts)), None, "logit difference", "resid_pre", "patch"
    )
    found.values[:] = np.random.default_rng(0).normal(size=found.values.shape)
    found.values[0, 1, 2] = np.nan
    found.plain[:], found.source[:] = 0.125, 2
    return found


class Tokenizer:
    """Of a vocabulary whose token i is texts[i]."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts[i % len(self._texts)] for i in ids)


def lens(num_positions: int = 5, k: int = 3) -> LensTokens:
    """Layers 0 and 4; layer 4 has no row at the last position."""

    def of(layer: int, count: int) -> TopTokens:
        generator = torch.Generator().manual_seed(layer)
        logits = torch.randn(count, 12, generator=generator).log_softmax(1)
        values, ids = logits.topk(k)
        return TopTokens.of_rows(SparseRows(ids.int(), values), torch.arange(count))

    return LensTokens({0: of(0, num_positions), 4: of(4, num_positions - 1)})


def features() -> SparseFeatures:
    rows = SparseRows(
        torch.tensor([[7, -1, 5], [-1, -1, -1], [4, 6, 7]], dtype=torch.int32),
        torch.tensor([[1.0, 0, 2], [0, 0, 0], [3, 5, 4]]),
        read=ReadFeatures(99),
    )
    return SparseFeatures(rows, torch.tensor([1, 2, 4]))


def attention(num_positions: int = 6) -> torch.Tensor:
    """[4, num_positions, num_positions]"""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(num_positions, 4, 8, generator=generator)
    k = torch.randn(num_positions, 2, 8, generator=generator)
    return compute_attention_weights(q, k, scale=0.35)


def max_activating() -> MaxActivating:
    return table(unique(documents(7)))


#: When `activity` was told, and the largest values of the requests that its first monitor scored.
NOW_S = 1_800_000_007.0
VALUES = [0.1, 0.1, 0.2, 0.3, 0.45, 0.5, 0.55, 0.7, 0.7, 0.9]


def activity(name: str = "risky", request_id: str = "cmpl-7") -> Activity:
    """Of a monitor above 0.5 that scores a request each 20 s, the last one now; and of one that
    has scored nothing."""
    clock = iter([NOW_S - 20 * i for i in reversed(range(len(VALUES)))])
    tally = Tally(0.5, NOW_S - 600, clock=lambda: next(clock, NOW_S))
    for i, value in enumerate(VALUES):
        verdict = (3 + i, value) if value > 0.5 else None
        tally.add(value, f"{request_id}-{i}", 0, verdict)
    escalations = dict(zip(OUTCOMES, (2, 1, 0, 1), strict=True))
    found = {
        name: tally.found("resid_post", "escalate", [2, 5], None, escalations),
        f"{name}, later": Tally(0.9).found("embed", "flag", [], name, {}),
    }
    sinks = {"memory": {"bytes": 1000}, "filesystem": {"rows": 12, "drops": 5, "errors": 1}}
    state = State(
        3, 2, 3 << 20, 64 << 20, 1, 2 << 20, 8 << 20, [Ring(4 << 20, 1 << 20, 7.4)], sinks
    )
    return Activity(NOW_S, found, state)
