"""Systems of a comparison: their rows, where they are, and what they are started with."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.systems import BESIDE, config_of, one_declared, path_of, spread
from benchmarks.throughput import modes_of


def test_the_table_has_rows_of_the_engines_that_run_and_of_no_others():
    everyone: dict[str, Any] = {name: None for names in (["plain"], *BESIDE) for name in names}
    modes = modes_of(everyone, 6)
    assert {engine for engine, _ in modes.values()} == set(everyone)
    two = modes_of({"plain": None, "interp": None}, 6)
    assert {engine for engine, _ in two.values()} == {"plain", "interp"}
    assert two["interp all layers"] == ("interp", {"layers": [0, 1, 2, 3, 4, 5]})


def test_the_layer_that_is_declared_is_the_layer_that_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 32, "vocab_size": 9}))
    options = {"model": str(tmp_path), "hf_overrides": {"num_hidden_layers": 6}}
    assert config_of(options) == {"num_hidden_layers": 6, "vocab_size": 9}
    (layer,) = spread(6, 1)
    assert modes_of({"interp-one": None}, 6)["interp-one 1 layer"][1] == {"layers": [layer]}
    assert one_declared(options)["declared"] == {
        "static_points": [f"resid_post.{layer}"], "static_writes": [],
    }  # fmt: skip


def test_a_systems_folder_comes_first_on_the_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTERP_ENGINE_PATH", "folder")
    monkeypatch.setenv("PYTHONPATH", "/other")
    assert path_of("INTERP_ENGINE_PATH") == f"{tmp_path}/folder:/other"
