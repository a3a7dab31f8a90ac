"""What a page says of the trained autoencoder is what the example wrote, and an engine reads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from examples.train_sae import TopK, largest, save
from vllm_scope.saes.load import load_sae

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_autoencoder_has_the_figures_that_the_example_wrote():
    found = json.loads((ROOT / "examples" / "train_sae.json").read_text())
    row = (
        f"| {found['rows']:,} | {found['loss']:.3f} | {found['L0']:.1f} | {found['dead']:.1%} | "
        f"{found['explained variance']:.1%} |"
    )
    assert row in (ROOT / "docs" / "harvest.md").read_text().replace("\N{NO-BREAK SPACE}", " ")


def test_a_saved_autoencoder_has_the_features_and_rows_of_the_trained_one(tmp_path):
    torch.manual_seed(0)
    rows = 5 * torch.randn(300, 12) + torch.arange(12)
    trained = TopK(12, 40, 4, rows)
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    for _ in range(20):  # so that no bias is zero
        trained.step(rows, optimizer)
    save(tmp_path, trained, "blocks.3.hook_resid_post")
    loaded = load_sae(tmp_path, name="mine")
    assert (loaded.place, loaded.k, loaded.d_sae) == (("resid_post", 3), 4, 40)
    with torch.no_grad():
        _, made, values = trained(rows)
        features = largest(values, 4)
        of_rows = made / trained.scale + trained.mean
    torch.testing.assert_close(loaded.encode(rows), features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loaded.decode(features), of_rows, rtol=1e-4, atol=1e-4)
