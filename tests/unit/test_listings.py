"""Each folder's `__init__` lists its files and folders, so that a newcomer finds the right one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_scope

PACKAGE = Path(vllm_scope.__file__).parent
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_listing_of_a_folder_names_all_that_is_in_it(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    folders = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
    assert [name for name in (*sorted(files), *sorted(folders)) if name not in text] == []
