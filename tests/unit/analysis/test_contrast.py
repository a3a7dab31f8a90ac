"""Directions from contrasts, and the rows that they are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.toy_model import TensorResult
from tests.unit.delivered import keep
from vllm_scope import Read, Spec
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.analysis.contrast import mean_difference, pairs_digest, principal_difference
from vllm_scope.analysis.rows import pooled_rows, token_rows
from vllm_scope.errors import SpecError
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.sites import Sites, point_of
from vllm_scope.results.buffer import Pending, pieces_of
from vllm_scope.vectors import Provenance

STREAM = ("resid_post", 5)
BOTH = [mean_difference, principal_difference]


def planted(num_pairs: int = 40, length: float = 3.0, nuisance: float = 0.0):
    """Pairs that differ by `length` along one axis, some noise, and what both share."""
    torch.manual_seed(0)
    axis = torch.nn.functional.normalize(torch.randn(16), dim=0)
    shared = nuisance * torch.randn(num_pairs, 1) * torch.randn(16)
    noise = 0.1 * torch.randn(2, num_pairs, 16)
    up = shared + noise[0] + length / 2 * axis
    down = shared + noise[1] - length / 2 * axis
    return axis, {STREAM: up}, {STREAM: down}


@pytest.mark.parametrize("method", BOTH)
def test_a_planted_direction_is_found_with_its_sign(method):
    axis, up, down = planted(nuisance=20.0)
    vector = torch.tensor(method(up, down)[STREAM])
    assert float(vector @ axis) > 0.99
    assert float(vector.norm()) == pytest.approx(1.0, abs=1e-6)
    turned = torch.tensor(method(down, up)[STREAM])
    torch.testing.assert_close(turned, -vector)


@pytest.mark.parametrize("method", BOTH)
def test_not_normalised_once_the_vector_moves_one_mean_onto_the_other(method):
    _, up, down = planted()
    vector = torch.tensor(method(up, down, normalise=False)[STREAM])
    unit = vector / vector.norm()
    assert float(vector.norm()) == pytest.approx(3.0, rel=0.05)
    moved = (down[STREAM] + vector).mean(0)
    assert float(moved @ unit) == pytest.approx(float(up[STREAM].mean(0) @ unit), abs=1e-4)


def test_the_mean_difference_is_the_difference_of_means():
    up, down = torch.randn(5, 8), torch.randn(3, 8)
    vector = mean_difference({STREAM: up}, {STREAM: down}, normalise=False)[STREAM]
    np.testing.assert_allclose(vector, (up.mean(0) - down.mean(0)).numpy(), rtol=1e-5, atol=1e-6)


def test_the_principal_difference_finds_what_pairs_differ_in_by_a_different_way_each():
    # Every pair differs along the first axis, by 1 to 9; the means also differ a
    # little along the second, as one pair does.
    by = torch.arange(1.0, 10.0)
    up = torch.zeros(9, 4)
    up[:, 0], up[0, 1] = by, 5.0
    vector = principal_difference({STREAM: up}, {STREAM: torch.zeros(9, 4)})[STREAM]
    assert vector[0] > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_may_be_of_any_float_dtype(dtype):
    axis, up, down = planted()
    module = mean_difference({STREAM: up[STREAM].to(dtype)}, {STREAM: down[STREAM].to(dtype)})
    assert float(torch.tensor(module[STREAM]) @ axis) > 0.99


def test_a_module_says_how_it_was_made():
    _, up, down = planted()
    known = Provenance(model="org/model", revision="r", dataset=pairs_digest([("good", "bad")]))
    made = principal_difference(up, down, normalise=False, provenance=known).provenance
    assert (made.model, made.revision, made.dataset) == (known.model, "r", known.dataset)
    assert (made.method, made.normalised) == ("principal_difference", False)
    assert made.created_by.startswith("vllm-scope ")


def test_the_digest_of_pairs_is_of_their_content():
    pairs = [("a", "b"), ("c", "d")]
    assert pairs_digest(pairs) == pairs_digest(reversed(pairs))
    assert pairs_digest(pairs) != pairs_digest([("a", "d"), ("c", "b")])
    assert pairs_digest(pairs) != pairs_digest([("b", "a"), ("d", "c")])
    assert pairs_digest([("ä", "b")]).startswith("sha256:")


ROWS = torch.ones(2, 4)
SPOILED = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize(
    ("up", "down", "message"),
    [
        pytest.param({STREAM: ROWS}, {("embed", 0): ROWS}, "one side only", id="other-streams"),
        pytest.param({STREAM: ROWS[:0]}, {STREAM: ROWS}, r"positives at .* \[0, 4\]", id="no-rows"),
        pytest.param({STREAM: ROWS}, {STREAM: ROWS[0]}, r"negatives at .* \[4\]", id="one-row"),
        pytest.param({STREAM: ROWS}, {STREAM: ROWS[:, :3]}, "have 4 values .* have 3", id="sizes"),
        pytest.param({STREAM: SPOILED}, {STREAM: SPOILED}, "NaN or Inf", id="nan"),
        pytest.param({STREAM: ROWS}, {STREAM: ROWS}, "do not differ", id="all-the-same"),
        pytest.param({}, {}, "no vectors", id="nothing"),
    ],
)
def test_rows_without_a_direction_are_refused(method, up, down, message):
    with pytest.raises(SpecError, match=message):
        method(up, down)


def test_pairs_need_two_rows_each():
    with pytest.raises(SpecError, match="2 positives and 1 negatives"):
        principal_difference({STREAM: ROWS}, {STREAM: 2 * ROWS[:1]})


# --- Rows of results ---------------------------------------------------------


def result_of(*values: float, status: str = "complete") -> TensorResult:
    """Positions 3, 4, ...; row i is [values[i], values[i]]."""
    rows = torch.tensor(values, dtype=torch.bfloat16)[:, None].expand(-1, 2)
    positions = list(range(3, 3 + len(values)))
    return TensorResult({STREAM: rows, ("embed", 0): -rows}, {STREAM: positions}, status)


@pytest.mark.parametrize(
    ("pooling", "expected"), [("last", [3.0, 7.0]), ("mean", [2.0, 6.5])], ids=["last", "mean"]
)
def test_each_result_becomes_one_row(pooling, expected):
    results = [result_of(1, 2, 3), result_of(6, 7)]
    rows = pooled_rows(results, pooling=pooling)
    assert list(rows) == [STREAM, ("embed", 0)]
    assert rows[STREAM].dtype == torch.float32
    assert rows[STREAM].tolist() == [[value, value] for value in expected]
    assert torch.equal(rows["embed", 0], -rows[STREAM])
    assert list(pooled_rows(results, [STREAM], pooling)) == [STREAM]


@pytest.mark.parametrize("status", ["streaming", "incomplete", "aborted", "failed"])
def test_a_result_with_missing_rows_is_not_pooled(status):
    with pytest.raises(SpecError, match=rf"results\[1\] is '{status}'"):
        pooled_rows([result_of(1), result_of(1, status=status)])


def test_a_result_whose_read_selected_nothing_is_not_pooled():
    with pytest.raises(SpecError, match=r"results\[1\] has no row"):
        pooled_rows([result_of(1), result_of()])


def test_pooling_is_last_or_mean_of_something():
    with pytest.raises(SpecError, match="no results"):
        pooled_rows([])
    with pytest.raises(SpecError, match="pooling is 'max'"):
        pooled_rows([result_of(1)], pooling="max")


def test_results_of_an_engine_can_be_pooled_and_cached():
    sites = Sites(num_layers=2, hidden_size=2, dtype="bfloat16", boundaries=(0, 2, 4))
    reads = Spec((Read("resid_post", tokens="prompt"),)).resolve(sites)
    pending = Pending(1, reads, sites, [7, 8, 9], max_tokens=2, num_stages=1)
    rows = torch.arange(12.0).reshape(3, 2, 2).bfloat16()
    layout, order = Layout((point_of(2, 1), point_of(4, 1))), np.arange(3)
    slots = torch.zeros(3, 2, SLOT_BYTES, dtype=torch.uint8)
    slots[..., :4] = rows.view(torch.uint8)
    pieces = pieces_of(layout, layout, slots.view(3, -1).numpy(), Widths((4,)))
    keep(pending, pieces, np.stack([order, order]))
    running = pending.snapshot([5], None)
    pending.finish(0, None)
    result = pending.snapshot([5, 6], "length")

    pooled = pooled_rows([result])
    assert pooled[("resid_post", 1)].tolist() == [[10.0, 11.0]]
    assert torch.equal(ActivationCache(result)["resid_post", 0][0], rows[:, 0])
    with pytest.raises(SpecError, match="is 'streaming'"):
        pooled_rows([running])


class _Output:
    """As an output of vLLM, whose rows are in its scope."""

    def __init__(self, scope: TensorResult | None) -> None:
        self.scope = scope


def test_what_is_no_list_of_results_is_refused_in_one_sentence():
    result = TensorResult({STREAM: torch.ones(2, 3)})
    advice = r"give \[out.scope for out in outputs\]"
    for results, streams, words in (
        ([_Output(result)], None, rf"results\[0\] is .*_Output.*, which has no rows; .*{advice}"),
        ([result, None], None, rf"results\[1\] is None, which has no rows; .*{advice}"),
        (result, None, r"results is one result; give a list of them"),
        (_Output(result), None, r"results is .*_Output.*; it must be a list of results, such as"),
        ([result], "resid_post", r"streams\[0\] is 'resid_post'; it must be \(site, layer\)"),
        ([result], STREAM, r"streams is \('resid_post', 5\); it must be a list of streams: \[\("),
    ):
        with pytest.raises(SpecError, match=words):
            pooled_rows(results, streams)
        if streams is None:
            with pytest.raises(SpecError, match=words):
                token_rows(results, [True], STREAM)
    with pytest.raises(SpecError, match=r"stream is 'resid_post'; it must be \(site, layer\)"):
        token_rows([result], [True], "resid_post")


def test_results_may_come_one_by_one_and_have_numpy_rows():
    results = [TensorResult({STREAM: np.full((2, 3), i, np.float32)}) for i in range(2)]
    assert pooled_rows(iter(results))[STREAM].tolist() == [[0.0] * 3, [1.0] * 3]
    rows, truth = token_rows(iter(results), [0, 1], STREAM)
    assert (rows[:, 0].tolist(), truth.tolist()) == ([0, 0, 1, 1], [False, False, True, True])


@pytest.mark.parametrize("method", BOTH)
def test_contrasts_take_numpy_rows_by_stream(method):
    _, up, down = planted()
    as_numpy = [{STREAM: side[STREAM].numpy()} for side in (up, down)]
    assert method(*as_numpy) == method(up, down)
    with pytest.raises(
        SpecError, match=r"positives is tensor.*; it must be a dict from \(site, layer\)"
    ):
        method(up[STREAM], down[STREAM])
