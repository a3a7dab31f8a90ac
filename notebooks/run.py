"""Runs a notebook and keeps its outputs, without the outputs that differ between machines.

Runs:  `make notebooks` writes the notebooks and their pictures anew; tests/notebooks runs them and
       writes nothing.
From:  notebooks/*.ipynb, and nbclient (requirements/notebooks.txt).
To:    the same files; docs/notebook-NAME.png, the output of the cell with the tag `picture`.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: The time limit of one cell. One of the cells starts an engine.
SECONDS = 300


def run(path: Path) -> NotebookNode:
    """The notebook with new outputs, run from the repository's root.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has raised an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=folder,
        record_timing=False,
        coalesce_streams=True,  # what a slow cell prints comes in several messages
    )
    client.execute()
    # The kernel's version depends on this machine, and so do warnings with times and paths.
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def picture(notebook: NotebookNode) -> bytes:
    """The PNG of the cell with the tag `picture`."""
    (cell,) = (c for c in notebook.cells if "picture" in c.metadata.get("tags", ()))
    (png,) = (out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", ()))
    return b64decode(png)


def main(names: Sequence[str]) -> None:
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            notebook = run(path)
            nbformat.write(notebook, path)
            (ROOT / "docs" / f"notebook-{path.stem}.png").write_bytes(picture(notebook))
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
