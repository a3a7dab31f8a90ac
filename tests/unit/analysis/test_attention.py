"""Attention patterns from rows of q and k, against a loop over queries and heads."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.toy_model import TensorResult
from vllm_scope.analysis.attention import attention_pattern
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.errors import ScopeError, SpecError

HEADS, KV_HEADS, SIZE, NUM_KEYS = 6, 2, 8, 9
Q, K = ("q", 2), ("k", 2)
PLAIN = {
    "scale": 0.3, "sliding_window": None, "logits_soft_cap": None, "alibi_slopes": None,
    "sinks": None, "exact": True,
}  # fmt: skip
SLOPES = [0.5, 0.25, 0.1, 0.3, 0.05, 0.7]


def result_of(queries: list[int], num_keys: int = NUM_KEYS) -> TensorResult:
    torch.manual_seed(0)
    rows = {Q: torch.randn(len(queries), HEADS, SIZE), K: torch.randn(num_keys, KV_HEADS, SIZE)}
    return TensorResult(rows, {Q: queries, K: list(range(num_keys))})


def by_loop(result: TensorResult, kernel: dict) -> torch.Tensor:
    """Of all heads, by the definition."""
    queries = result.at[Q]
    out = torch.zeros(HEADS, len(queries), queries[-1] + 1)
    for head in range(HEADS):
        for i, query in enumerate(queries):
            scores = {}
            for key in range(query + 1):
                if kernel["sliding_window"] and query - key >= kernel["sliding_window"]:
                    continue
                score = kernel["scale"] * result[Q][i, head] @ result[K][key, head // 3]
                if cap := kernel["logits_soft_cap"]:
                    score = cap * torch.tanh(score / cap)
                if kernel["alibi_slopes"]:
                    score = score - kernel["alibi_slopes"][head] * (query - key)
                scores[key] = score.exp()
            total = sum(scores.values())
            if kernel["sinks"]:
                total = total + torch.tensor(kernel["sinks"][head]).exp()
            for key, score in scores.items():
                out[head, i, key] = score / total
    return out


@pytest.mark.parametrize("queries", [list(range(NUM_KEYS)), [8], [1, 4, 6]], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"sliding_window": 3}, id="window"),
        pytest.param({"logits_soft_cap": 0.4}, id="soft-cap"),
        pytest.param({"alibi_slopes": SLOPES}, id="alibi"),
        pytest.param({"sinks": SLOPES}, id="sinks"),
        pytest.param(
            {"sinks": SLOPES, "sliding_window": 2, "logits_soft_cap": 0.7, "alibi_slopes": SLOPES},
            id="all",
        ),
    ],
)
def test_the_pattern_is_the_softmax_of_what_each_query_sees(changes, queries):
    result, kernel = result_of(queries), PLAIN | changes
    expected = by_loop(result, kernel)
    found = attention_pattern(result, 2, kernel=kernel)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    some = attention_pattern(result, 2, [4, 0], kernel=kernel)
    torch.testing.assert_close(some, expected[[4, 0]], rtol=1e-5, atol=1e-6)


class Arrays(dict):
    """numpy rows of an answer's bytes, as a client has them."""

    def __init__(self, result: TensorResult) -> None:
        super().__init__({stream: received(rows.half()) for stream, rows in result.rows.items()})
        self._at = result.at

    def positions(self, site: str, layer: int) -> np.ndarray:
        return received(torch.tensor(self._at[site, layer]))


def received(rows: torch.Tensor) -> np.ndarray:
    sent = rows.numpy()
    return np.frombuffer(sent.tobytes(), sent.dtype).reshape(sent.shape)


def test_rows_may_be_numpy_arrays_in_half_precision_that_cannot_be_written():
    result = result_of([3, 5])
    arrays = Arrays(result)
    assert not arrays[Q].flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns once in a process, if it is not told otherwise
        torch.set_warn_always(True)
        try:
            found = attention_pattern(arrays, 2, kernel=PLAIN)
        finally:
            torch.set_warn_always(False)
    torch.testing.assert_close(found, by_loop(result, PLAIN), rtol=0, atol=1e-2)


def test_the_kernel_is_the_results_own():
    result = result_of([0, 1])
    result.sites = SimpleNamespace(kernels={2: PLAIN})
    expected = attention_pattern(result, 2, kernel=PLAIN)
    assert torch.equal(attention_pattern(result, 2), expected)


def test_a_cache_of_several_results_pads_with_zeros():
    results = [result_of(list(range(n)), n) for n in (3, 5)]
    for one in results:
        one.sites = SimpleNamespace(kernels={2: PLAIN})
    cache = ActivationCache(results, num_layers=4)
    found = cache["pattern", 2]
    assert found.shape == (2, HEADS, 5, 5)
    assert torch.equal(found, cache["blocks.2.attn.hook_pattern"])
    assert torch.equal(found, cache["pattern", -2])
    for one, weights in zip(results, found, strict=True):
        n = len(one.at[Q])
        assert torch.equal(weights[:, :n, :n], attention_pattern(one, 2))
        assert not weights[:, n:].any()
        assert not weights[:, :, n:].any()
    assert "blocks.2.attn.hook_pattern" in cache
    assert "blocks.1.attn.hook_pattern" not in cache
    assert ("pattern", 7) not in cache


@pytest.mark.parametrize("keys", [[0, 1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4]])
def test_a_query_whose_keys_are_not_all_there_has_no_pattern(keys):
    result = result_of([2, 5], len(keys))
    result.at[K] = keys
    words = "rows of k are missing at layer 2; the last query needs k at all positions from 0 to 5"
    with pytest.raises(ScopeError, match=words):
        attention_pattern(result, 2, kernel=PLAIN)


def test_no_query_has_an_empty_pattern():
    assert attention_pattern(result_of([]), 2, kernel=PLAIN).shape == (HEADS, 0, 0)


@pytest.mark.parametrize(
    ("layer", "options", "error", "words"),
    [
        (1, {"kernel": PLAIN}, KeyError, "q"),
        (2, {"kernel": PLAIN, "heads": [6]}, SpecError, "has 6; the layer has heads 0 to 5"),
        (2, {"kernel": PLAIN, "heads": [-1]}, SpecError, "has -1; the layer has heads 0 to 5"),
        (
            2,
            {"kernel": PLAIN, "heads": [0.9]},
            SpecError,
            r"heads is \[0.9\]; it must be a list of whole",
        ),
        (
            2,
            {"kernel": PLAIN, "heads": [True]},
            SpecError,
            r"heads is \[True\]; it must be a list of",
        ),
        (
            2,
            {"kernel": PLAIN, "heads": ["a"]},
            SpecError,
            r"heads is \['a'\]; it must be a list of",
        ),
        (
            2,
            {"kernel": PLAIN, "heads": 1},
            SpecError,
            "heads is 1; it must be a list of whole numbers",
        ),
        (2, {}, SpecError, r"give kernel=client.info\(\)\['attention'\]"),
        (2, {"kernel": PLAIN | {"exact": False}}, ScopeError, "layer 2 does more than scale, cap"),
    ],
)
def test_what_has_no_pattern_is_refused(layer, options, error, words):
    with pytest.raises(error, match=words):
        attention_pattern(result_of([0, 1]), layer, **options)
