"""Each notebook runs, what it claims holds, and its committed outputs are of what it runs."""

from __future__ import annotations

import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")

from nbclient.exceptions import CellExecutionError  # noqa: E402

from notebooks.run import NOTEBOOKS, ROOT, picture, run  # noqa: E402

#: Things that differ from run to run, or from machine to machine.
VARYING = re.compile(r"0x[0-9a-f]{6}|it/s|\d\d:\d\d:\d\d|(?<![\w./])/(?:home|root|tmp|usr|work)/")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    """The kinds of a cell's outputs, such as a stream or a picture."""
    return [sorted(out.get("data", [out.output_type])) for out in cell.outputs]


def write(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@each_notebook
def test_a_notebook_runs_and_shows_what_its_committed_outputs_show(path):
    committed = nbformat.read(path, as_version=4)
    for cell, expected in zip(code_cells(run(path)), code_cells(committed), strict=True):
        assert shown(cell) == shown(expected), cell.source


@each_notebook
def test_committed_cells_were_run_once_in_order_and_say_nothing_that_varies(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not set(cell.metadata) - {"tags"}, cell.source
        for out in cell.outputs:
            texts = [out.get("text", ""), *(out.get("data") or {}).values()]
            kinds = ["text/plain", *(out.get("data") or {})]
            for kind, text in zip(kinds, texts, strict=True):
                assert kind == "image/png" or not VARYING.search(text), text


@each_notebook
def test_the_page_of_notebooks_has_each_notebook_and_its_picture(path):
    page = (ROOT / "docs" / "notebooks.md").read_text()
    drawn = f"notebook-{path.stem}.png"
    assert f"(../notebooks/{path.name})" in page
    assert f"({drawn})" in page
    found = picture(nbformat.read(path, as_version=4))
    assert (ROOT / "docs" / drawn).read_bytes() == found


def test_a_claim_that_does_not_hold_is_an_error(tmp_path):
    path = write(tmp_path / "wrong.ipynb", "found = 0.4", "assert found > 0.5")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(path)


def test_warnings_and_times_are_not_kept(tmp_path):
    path = write(tmp_path / "warns.ipynb", "import sys\nprint('W', file=sys.stderr)\nprint('kept')")
    (cell,) = run(path).cells
    assert [out.text for out in cell.outputs] == ["kept\n"]
    assert not cell.metadata


def test_what_a_cell_prints_is_one_output_however_slowly_it_is_printed(tmp_path):
    path = write(tmp_path / "slow.ipynb", "import time\nprint('a')\ntime.sleep(1)\nprint('b')")
    (cell,) = run(path).cells
    assert [out.text for out in cell.outputs] == ["a\nb\n"]


def test_notebooks_run_in_the_root_with_this_checkout(tmp_path):
    path = write(tmp_path / "where.ipynb", "import vllm_scope\nprint(vllm_scope.__file__)")
    (cell,) = run(path).cells
    assert cell.outputs[0].text.strip() == str(ROOT / "vllm_scope" / "__init__.py")
