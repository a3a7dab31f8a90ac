"""Rows that engines of a comparison deliver are compared with Hugging Face's, row by row."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine import Workload, drawn, keep
from benchmarks.values import Reference
from tests.checkpoints import NUM_LAYERS, make_checkpoint
from tests.checkpoints import Reference as Hooked

LAYERS = list(range(NUM_LAYERS))
IDS = [list(range(30, 38)), list(range(60, 68))]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def kept(path, tmp_path):
    """Writes the rows of `resid_post` of a workload's layers, and returns the workload."""
    model = Hooked(path, torch.float32)

    def write(change=lambda rows: rows, **options):
        work = Workload("two", 2, 4, 5, keep=str(tmp_path / "rows"), **options)
        rows = []
        for number, ids in enumerate(IDS):
            edits = []
            if work.edits == "own":
                vector = torch.from_numpy(drawn(128, 1000 + number))
                edits = [("resid_post", NUM_LAYERS // 2, lambda x, v=vector: x + v)]
            with torch.no_grad():
                streams, _ = model.edited(ids, edits)
            # The last token that was sampled has no row.
            rows.append(torch.stack([streams["resid_post", n][:-1] for n in work.layers]))
        keep(work, IDS, change(rows))
        return work

    return write


def test_equal_rows_differ_by_rounding_alone(path, kept):
    reference = Reference(path, "float32")
    assert reference.layers == LAYERS
    assert reference.worst(kept(layers=LAYERS)) < 1e-5
    assert reference.worst(kept(layers=[1])) < 1e-5
    assert reference.worst(kept(layers=LAYERS, edits="own")) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rows: rows[::-1], id="of-another-request"),
        pytest.param(lambda rows: [r.roll(1, 1) for r in rows], id="of-another-position"),
        pytest.param(lambda rows: [r.roll(1, 0) for r in rows], id="of-another-layer"),
    ],
)
def test_a_row_in_another_place_is_an_error(path, kept, change):
    assert Reference(path, "float32").worst(kept(change, layers=LAYERS)) > 0.1


def test_an_edit_that_had_no_effect_is_an_error(path, kept):
    work = kept(layers=LAYERS)
    edited = Workload("two", 2, 4, 5, layers=LAYERS, edits="own", keep=work.keep)
    assert Reference(path, "float32").worst(edited) > 1e-3
