"""A saved probe knows which tokens it was fitted to, in which template, and says so when served."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from tests.toy_model import TensorResult
from vllm_scope import Probe, SpecError, TokenIds
from vllm_scope.analysis.probes import (
    Calibration,
    LinearProbe,
    load_probe,
    save_probe,
    template_digest,
    train_probe,
)
from vllm_scope.analysis.rows import token_rows
from vllm_scope.vectors.probe_files import ProbeWarning

STREAM = ("resid_post", 5)


def probe_of(**known) -> LinearProbe:
    return LinearProbe([1.0, 2.0], 0.5, *STREAM, **known)


@pytest.mark.parametrize(
    ("pooling", "tokens", "fits"),
    [
        pytest.param("last_prompt", "last_prompt", True, id="the-same-token"),
        pytest.param("last_prompt", [-1], True, id="the-same-token-by-position"),
        pytest.param("last_prompt", "all", False, id="last-of-the-prompt-on-all"),
        pytest.param("last_prompt", "generated", False, id="last-of-the-prompt-on-an-answer"),
        pytest.param("prompt", "last_prompt", True, id="one-of-them"),
        pytest.param("prompt", slice(0, 4), True, id="some-of-them"),
        pytest.param("prompt", "all", False, id="prompt-on-all"),
        pytest.param("generated", "prompt", False, id="answers-on-the-prompt"),
        pytest.param("generated", "last", True, id="the-last-of-an-answer"),
        pytest.param("all", TokenIds(7), True, id="any"),
        pytest.param("prompt", TokenIds(7), False, id="ids-that-may-be-generated"),
        pytest.param("mean", "all", False, id="a-mean-is-no-token"),
        pytest.param(None, "all", True, id="unknown"),
    ],
)
def test_serving_on_other_tokens_warns(pooling, tokens, fits):
    probe = probe_of(pooling=pooling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = probe.action("mood", tokens=tokens)
    assert isinstance(served, Probe)
    assert (served.site, served.layers, served.name) == ("resid_post", (5,), "mood")
    assert served.weight.numpy.tolist() == [1.0, 2.0]
    assert served.bias == 0.5
    assert len(caught) == (0 if fits else 1)
    for each in caught:
        assert each.category is ProbeWarning
        assert f"'mood' was fitted to rows of {pooling!r}" in str(each.message)
        assert each.filename == __file__


def test_the_warning_comes_once():
    probe = probe_of(pooling="last_prompt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            probe.action("mood", tokens="all")
        probe.action("mood", tokens="all")
        assert len(caught) == 1
        probe.action("mood", tokens="generated")
        assert len(caught) == 2


@pytest.mark.parametrize(
    ("pooling", "tokens"),
    [("last_prompt", "last_prompt"), ("generated", "generated"), (None, "all")],
)
def test_a_probe_is_served_on_the_tokens_that_it_was_fitted_to_unless_others_are_named(
    pooling, tokens
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe_of(pooling=pooling).action("p").tokens.to_json() == tokens


RAW, CHAT, OTHER = template_digest(None), template_digest("{{ a }}"), template_digest("{{ b }}")


@pytest.mark.parametrize(
    ("fitted", "served", "fits"),
    [
        (RAW, RAW, True), (CHAT, CHAT, True), (CHAT, OTHER, False), (RAW, CHAT, False),
        (CHAT, RAW, False), (None, CHAT, True), (CHAT, None, True), (CHAT, "chat", True),
        ("chat", OTHER, True), (RAW, "chat", False), ("chat", RAW, False),
    ],
)  # fmt: skip
def test_serving_in_another_template_warns(fitted, served, fits):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probe_of(pooling="all", template=fitted).action("mood", template=served)
    assert [each.category for each in caught] == [ProbeWarning] * (not fits)
    if not fits:
        assert "chat template" in str(caught[0].message)


def test_a_template_is_known_by_its_digest():
    assert RAW == "none"
    assert CHAT.startswith("sha256:")
    assert len({RAW, CHAT, OTHER}) == 3
    with pytest.raises(SpecError, match=r"template is .\{\{ a \}\}.; it must be .none., .chat."):
        probe_of(template="{{ a }}")
    with pytest.raises(SpecError, match="template is 'sha256:1'"):
        probe_of().action("p", template="sha256:1")


def test_files_keep_a_probes_pooling_template_and_calibration(tmp_path):
    probe = probe_of(
        pooling="generated", template=CHAT, model="org/model", calibration=Calibration(0.5, -1.0)
    )
    save_probe(tmp_path / "p.safetensors", probe)
    again = load_probe(tmp_path / "p.safetensors")
    assert (again.pooling, again.template, again.model) == ("generated", CHAT, "org/model")
    assert again.calibration == Calibration(0.5, -1.0)
    rows = torch.randn(5, 2)
    assert torch.equal(again.probabilities(rows), probe.probabilities(rows))
    assert torch.equal(probe.probabilities(rows), (0.5 * probe.scores(rows) - 1.0).sigmoid())


def test_both_files_of_a_probe_have_the_mode_that_the_umask_gives(tmp_path):
    save_probe(tmp_path / "p.safetensors", probe_of())
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    with pytest.raises(FileNotFoundError):
        save_probe(tmp_path / "missing" / "p.safetensors", probe_of())


def test_files_without_these_fields_load_and_serve_without_a_warning(tmp_path):
    save_probe(tmp_path / "p.safetensors", probe_of())
    (tmp_path / "p.json").write_text('{"site": "resid_post", "layer": 5, "threshold": 1.5}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = load_probe(tmp_path / "p.safetensors")
        probe.action("p", tokens="generated", template=CHAT)
    assert (probe.pooling, probe.template, probe.calibration) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"template": 1}, "template is 1, of the wrong type"),
        ({"template": "jinja"}, "template is 'jinja'; it must be"),
        ({"calibration": [1, 2]}, "calibration is .*, of the wrong type"),
        ({"calibration": {"slope": 1}}, "calibration is .*; it must have slope and offset"),
        ({"calibration": {"slope": "1", "offset": 0}}, "slope is '1'; it must be a number"),
        ({"calibration": {"slope": float("inf"), "offset": 0}}, "slope is inf; it must be finite"),
    ],
)
def test_wrong_fields_are_refused(tmp_path, field, message):
    save_probe(tmp_path / "p.safetensors", probe_of())
    body = {"site": "resid_post", "layer": 5} | field
    (tmp_path / "p.json").write_text(json.dumps(body))
    with pytest.raises(SpecError, match=message):
        load_probe(tmp_path / "p.safetensors")


def test_a_calibrated_probability_is_the_frequency_of_the_concept():
    """Scores are logits of twice the truth's, shifted; calibration takes both back."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 1, generator=generator)
    labels = torch.rand(4000, generator=generator) < logits[:, 0].sigmoid()
    probe = LinearProbe([2.0], 3.0, *STREAM, pooling="all", threshold=0.25)
    fitted = probe.calibrated(logits, labels)
    assert fitted.calibration.slope == pytest.approx(0.5, abs=0.05)
    assert fitted.calibration.offset == pytest.approx(-1.5, abs=0.15)
    assert (fitted.pooling, fitted.threshold, fitted.bias) == ("all", 0.25, 3.0)
    kept = fitted.probabilities(logits)
    assert float(kept.mean()) == pytest.approx(float(labels.float().mean()), abs=0.005)
    assert abs(float(probe.probabilities(logits).mean()) - float(kept.mean())) > 0.1
    # Rows that are told apart without a mistake leave no infinite slope.
    apart = probe.calibrated(torch.tensor([[-1.0], [1.0]]), [False, True])
    assert np.isfinite([apart.calibration.slope, apart.calibration.offset]).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e8])
def test_a_calibration_does_not_depend_on_the_size_of_the_scores(scale):
    rng = np.random.default_rng(0)
    labels = rng.random(200) < 0.4
    scores = torch.from_numpy(np.where(labels, 1.0, -1.0) + rng.normal(size=200))[:, None].float()
    expected, found = (
        LinearProbe([size], 0.0, *STREAM).calibrated(scores, labels).probabilities(scores)
        for size in (1.0, scale)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert float(expected[labels].mean() - expected[~labels].mean()) > 0.3


def test_token_rows_are_one_for_each_token():
    results = [
        TensorResult({STREAM: torch.full((2, 3), 1.0, dtype=torch.bfloat16)}),
        TensorResult({STREAM: torch.full((1, 3), 2.0, dtype=torch.bfloat16)}),
    ]
    rows, labels = token_rows(results, [True, False], STREAM)
    assert (rows.dtype, rows[:, 0].tolist()) == (torch.float32, [1.0, 1.0, 2.0])
    assert labels.tolist() == [True, True, False]
    with pytest.raises(SpecError, match=r"2 results and labels of shape \[1\]"):
        token_rows(results, [True], STREAM)
    with pytest.raises(SpecError, match="results\\[0\\] is 'streaming'"):
        token_rows([TensorResult({}, status="streaming")], [True], STREAM)
    with pytest.raises(SpecError, match="no results"):
        token_rows([], [], STREAM)


def test_a_trained_probe_keeps_its_template():
    rows, labels = torch.randn(20, 2), torch.arange(20) % 2 == 0
    probe = train_probe(rows, labels, STREAM, pooling="prompt", template=CHAT)
    assert (probe.pooling, probe.template) == ("prompt", CHAT)
