"""What a page says of the trained autoencoder is what the example wrote."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_autoencoder_has_the_figures_that_the_example_wrote():
    found = json.loads((ROOT / "examples" / "train_sae.json").read_text())
    row = (
        f"| {found['rows']:,} | {found['loss']:.3f} | {found['L0']:.1f} | {found['dead']:.1%} | "
        f"{found['explained variance']:.1%} |"
    )
    assert row in (ROOT / "docs" / "harvest.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
