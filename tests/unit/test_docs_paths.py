"""Every file, folder and module that a document or a docstring names is there."""

import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_scope"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
FOLDERS = ("vllm_scope", "tests", "benchmarks", "examples", "toyworld")
MODULES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

FILE_IN_FOLDER = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+\w+\.py\b")
FOLDER = re.compile(r"`((?:\w+/)+)`")
LISTED = re.compile(r"^(\w+(?:\.py|/)) +\S", re.MULTILINE)
MODULE = re.compile(r"(?<!ops\.)\bvllm_scope((?:\.[a-z]\w*)+)")
#: Groups of entry points, whose names look like a module's.
GROUPS = {".policies", ".controller"}
OF_OTHERS = re.compile(r"^Source: \w+ \d.*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def docstrings(file: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, documented)]
    return OF_OTHERS.sub("", "\n\n".join(ast.get_docstring(n) or "" for n in nodes))


def bases(file: Path) -> list[Path]:
    """Where a path named in `file` may begin: a folder above it, the package, or vLLM."""
    above = [folder for folder in file.parents if folder.is_relative_to(ROOT)]
    vllm = importlib.util.find_spec("vllm")
    return [*above, PACKAGE, *(Path(p) for p in (vllm and vllm.submodule_search_locations) or [])]


def missing_paths(text: str, file: Path) -> set[str]:
    named = {*FILE_IN_FOLDER.findall(text), *FOLDER.findall(text)}
    return {n for n in named if not any((base / n).exists() for base in bases(file))}


def is_module(dotted: str) -> bool:
    """Whether `.a.b.C` names a module of the package, a name in one, or a group of entry points."""
    if dotted in GROUPS:
        return True
    place = PACKAGE
    for name in dotted.split(".")[1:]:
        if not (place / name).is_dir():
            inside = place / "__init__.py"
            return (place / f"{name}.py").exists() or bool(
                re.search(rf"\b{name}\b", inside.read_text())
            )
        place /= name
    return True


def test_every_path_and_module_in_a_document_exists():
    for page in PAGES:
        text = page.read_text()
        assert not missing_paths(text, page), page
        assert not [name for name in MODULE.findall(text) if not is_module(name)], page


def test_every_path_and_module_in_a_docstring_exists():
    for file in MODULES:
        text = docstrings(file)
        assert not missing_paths(text, file), file
        assert not [name for name in MODULE.findall(text) if not is_module(name)], file


@pytest.mark.parametrize(
    "folder",
    sorted(file.parent for file in MODULES if file.name == "__init__.py"),
    ids=lambda folder: str(folder.relative_to(ROOT)),
)
def test_what_a_folder_lists_is_in_it_once(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = LISTED.findall(text)
    assert not [name for name in listed if not (folder / name).exists()]
    assert len(listed) == len(set(listed))


def test_the_glossary_names_types_where_they_are():
    rows = re.findall(
        r"^\| [^|]+ \| ((?:`\w+`(?:, )?)+) \|.*\| `([\w/]+\.py)` \|$",
        (ROOT / "docs/glossary.md").read_text(), re.M,
    )  # fmt: skip
    assert len(rows) > 100
    for names, path in rows:
        for name in re.findall(r"\w+", names):
            pattern = rf"^(?:class|def) {name}\b|^{name}\b.* = "
            assert re.search(pattern, (PACKAGE / path).read_text(), re.M), (name, path)


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*$", _prose(page), re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there), target
