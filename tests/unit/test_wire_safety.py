"""Nothing that comes over a wire is unpickled, evaluated or imported by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import vllm_scope

ROOT = Path(vllm_scope.__file__).parent
#: Where bytes, text or names from outside arrive.
FOLDERS = ("server", "client", "engine", "vectors", "sinks", "files", "codecs", "tap")
SOURCES = [
    *(p for folder in FOLDERS for p in sorted((ROOT / folder).glob("*.py"))), *ROOT.glob("*.py"),
]  # fmt: skip
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "importlib", "code",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def calls_and_imports(source: Path):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], "import") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Sinks are entry points, which the operator's options name, before any request.
            whole = node.module == "importlib.metadata"
            yield (node.module if whole else node.module.split(".")[0]), "import"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, "call"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_can_run_what_it_is_sent(source):
    for name, kind in calls_and_imports(source):
        forbidden = FORBIDDEN_MODULES if kind == "import" else FORBIDDEN_CALLS
        assert name not in forbidden, f"{source}: {kind} {name}"
    text = source.read_text()
    assert not re.search(r"torch\.load\(|allow_pickle\s*=\s*True|yaml\.load\(", text), source


def test_the_guard_sees_what_it_forbids(tmp_path):
    source = tmp_path / "bad.py"
    source.write_text("from pickle import loads\nimport importlib\neval('1')\n")
    found = set(calls_and_imports(source))
    assert found == {("pickle", "import"), ("importlib", "import"), ("eval", "call")}
