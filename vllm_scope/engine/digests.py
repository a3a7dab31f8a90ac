"""Compares the symbols of the installed vLLM with releases that the authors have read.

Owns:  digests.json (the digests of each symbol's source, by release of vLLM), and `compare`.
Runs:  in `vllm-scope doctor`; as a script, which adds a release to digests.json:
       python -m vllm_scope.engine.digests 0.32.0=.venv/lib/python3.11/site-packages/vllm
From:  seams.CONTRACT. The source files of vLLM are parsed, and no module of vLLM is imported.

The authors of this package have read a release if they have checked its source. digests.json has
the digests of these releases.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_scope.engine.seams import CONTRACT, Seam

FILE = Path(__file__).with_name("digests.json")


@dataclass(frozen=True)
class Change:
    """A symbol of the installed vLLM that differs from the same symbol of the compared release.

    Attributes:
        symbol: the full name, such as "vllm.v1.core.block_pool.BlockPool.get_new_blocks".
        wrapped: True if vllm-scope replaces the symbol.
        exists: False if the installed vLLM lacks the symbol.
    """

    symbol: str
    wrapped: bool
    exists: bool


@dataclass(frozen=True)
class Comparison:
    """The differences between an installed vLLM and one release in digests.json.

    Attributes:
        version: the version of the installed vLLM.
        release: the release in digests.json that is compared with the installed vLLM: the last
            release that is not newer than `version`. If all releases are newer, it is the first
            release. If `version` is not a valid version, it is the last release.
        is_new: True if digests.json does not contain the installed version.
    """

    version: str
    release: str
    is_new: bool
    changes: tuple[Change, ...]


def compare(root: Path, version: str) -> Comparison:
    """Compare the symbols of CONTRACT in the installed vLLM with digests.json.

    Args:
        root: vLLM's package folder.
        version: the text of `vllm.__version__`.
    """
    from packaging.version import InvalidVersion, Version

    known = json.loads(FILE.read_text())
    releases = sorted({r for digests in known.values() for r in digests}, key=Version)
    release, is_new = releases[-1], True
    with suppress(InvalidVersion):  # the version of a private build can be "dev", for example
        installed = Version(version)
        is_new = installed.public not in releases
        release = [releases[0], *(r for r in releases if Version(r) <= installed)][-1]
    changes = []
    for seam in CONTRACT:
        found = digest(root, seam)
        if found != known[_key(seam)].get(release):
            symbol = f"{seam.module}.{seam.name}"
            changes.append(Change(symbol, seam.wrapped, found is not None))
    return Comparison(version, release, is_new, tuple(changes))


def digest(root: Path, seam: Seam) -> str | None:
    """A hash of a symbol's source, as 16 hex digits. None if this vLLM does not have the symbol.

    The hash of a function is computed from the function's source. The hash of a class is computed
    from the first line of the class and the definitions of the attributes in `reads`. The names
    that `missing` returns also change the hash.
    """
    node, text = _symbol(root, seam)
    if node is None:
        return None
    lines = text.splitlines()
    parts = [f"no {name}" for name in missing(root, seam)]
    if isinstance(node, ast.ClassDef):
        parts.append(lines[node.lineno - 1])
        parts += (_source(lines, each) for each in node.body if _defined(each) & {*seam.reads})
    else:
        parts.append(_source(lines, node))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def missing(root: Path, seam: Seam) -> list[str]:
    """The names that a seam needs and that this vLLM lacks: names in `reads` that are not in the
    symbol's module, and names in `parameters` that the function does not have."""
    node, text = _symbol(root, seam)
    arguments = None if node is None or isinstance(node, ast.ClassDef) else node.args
    taken = set() if arguments is None else {each.arg for each in _parameters(arguments)}
    lost = [name for name in seam.reads if not re.search(rf"\b{name}\b", text)]
    return lost + [name for name in seam.parameters if name not in taken]


Symbol = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _symbol(root: Path, seam: Seam) -> tuple[Symbol | None, str]:
    """The definition of a seam's symbol (None if it is missing), and the text of its module."""
    below = root.joinpath(*seam.module.split(".")[1:])
    files = [path for path in (below.with_suffix(".py"), below / "__init__.py") if path.is_file()]
    if not files:
        return None, ""
    text, body = _parsed(files[0])
    node = None
    for name in seam.name.split("."):
        node = _find(body, name)
        if node is None:
            break
        body = node.body
    return node, text


@cache
def _parsed(path: Path) -> tuple[str, list[ast.stmt]]:
    text = path.read_text()
    return text, ast.parse(text).body


def _find(body: Iterable[ast.stmt], name: str) -> Symbol | None:
    """The last definition of a name. Earlier definitions can be overloads for type checkers."""
    found = None
    for node in body:
        if isinstance(node, Symbol) and node.name == name:
            found = node
        elif isinstance(node, ast.If | ast.Try):
            found = _find([*node.body, *node.orelse], name) or found
    return found


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _defined(statement: ast.stmt) -> set[str]:
    """The names of the attributes that one statement in the body of a class defines."""
    if isinstance(statement, Symbol):
        return {statement.name}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _source(lines: list[str], node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min(each.lineno for each in (node, *decorators))
    return "\n".join(lines[first - 1 : node.end_lineno])


def _key(seam: Seam) -> str:
    return f"{seam.module}:{seam.name}"


def main(releases: dict[str, Path]) -> None:
    """Add releases to digests.json. `releases` maps each version of vLLM to its package folder."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    digests = {_key(seam): dict(known.get(_key(seam), {})) for seam in CONTRACT}
    for seam in CONTRACT:
        digests[_key(seam)] |= {r: digest(root, seam) for r, root in releases.items()}
        if not any(digests[_key(seam)].values()):
            raise SystemExit(f"no release has {_key(seam)}; correct seams.CONTRACT.")
    lines = (f"{json.dumps(key)}: {json.dumps(digests[key])}" for key in sorted(digests))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main({version: Path(root) for version, root in (arg.split("=") for arg in sys.argv[1:])})
