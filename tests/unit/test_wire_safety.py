"""Nothing that comes over a wire is unpickled, evaluated or imported by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_scope

ROOT = Path(vllm_scope.__file__).parent
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "importlib", "imp", "pkgutil", "runpy", "code", "codeop",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_TEXT = r"torch\.load\(|allow_pickle\s*=\s*True|yaml\.(?:unsafe_)?load\("
#: File -> what it may import, each with its reason.
EXCEPTIONS = {
    # The operator's options name sinks, which are entry points; no request does.
    "sinks/options.py": {"importlib"},
    # The operator's options name policies, which are entry points; no request does.
    "control/policy_options.py": {"importlib"},
    # Modules of this package: constants of this file.
    "compat/__init__.py": {"importlib"},
    "compat/vllm_lens/__init__.py": {"importlib"},
    # Whether a package is installed that vLLM could not import; nothing is imported by it.
    "engine/describe.py": {"importlib"},
    # Modules of vLLM: constants of engine/seams.py.
    "engine/wrapping.py": {"pkgutil"},
    # The name of an error.
    "harvests/several.py": {"pickle"},
    # Answers of the processes that a harvest has started, over its own pipes.
    "harvests/processes.py": {"pickle"},
    # Qwen-Scope publishes .pt files. The operator names them; weights_only builds tensors alone.
    "saes/qwen_scope.py": {"torch.load("},
}


def forbidden_in(source: Path) -> Iterator[str]:
    """The forbidden modules, calls and texts of a source."""
    text = source.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {node.module.split(".")[0]} & FORBIDDEN_MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {node.func.id} & FORBIDDEN_CALLS
        else:
            continue
        yield from names
    yield from re.findall(FORBIDDEN_TEXT, text)


def found_in(root: Path) -> dict[str, set[str]]:
    """What each source of a package has that is forbidden; sources without any included."""
    sources = sorted(root.rglob("*.py"))
    return {path.relative_to(root).as_posix(): set(forbidden_in(path)) for path in sources}


FOUND = found_in(ROOT)


@pytest.mark.parametrize("source", FOUND)
def test_no_source_can_run_what_it_is_sent(source):
    assert FOUND[source] == EXCEPTIONS.get(source, set())


def test_every_exception_is_of_a_source():
    assert EXCEPTIONS.keys() <= FOUND.keys()


def test_a_forbidden_import_in_a_new_folder_is_found(tmp_path):
    new = tmp_path / "engine" / "new" / "file.py"
    new.parent.mkdir(parents=True)
    new.write_text("import pickle\n")
    assert found_in(tmp_path) == {"engine/new/file.py": {"pickle"}}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from pickle import loads", "pickle"),
        ("import os, importlib.metadata as m", "importlib"),
        ("from importlib import util", "importlib"),
        ("import pkgutil", "pkgutil"),
        ("def f():\n    import dill", "dill"),
        ("eval('1')", "eval"),
        ("x = __import__('os')", "__import__"),
        ("torch.load('x')", "torch.load("),
        ("np.load(x, allow_pickle = True)", "allow_pickle = True"),
        ("yaml.unsafe_load(x)", "yaml.unsafe_load("),
    ],
)
def test_the_guard_sees_what_it_forbids(line, found, tmp_path):
    source = tmp_path / "bad.py"
    source.write_text(line + "\n")
    assert list(forbidden_in(source)) == [found]
