"""A vLLM whose sources are not those that were read: what `vllm-scope doctor` says of it."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from vllm_scope.cli.doctor import _say_changes
from vllm_scope.engine import digests
from vllm_scope.engine.digests import Change, Comparison, compare, main
from vllm_scope.engine.seams import Seam

SOURCE = """
import os

if os.name:
    def function(request, *, flag=False):
        return request

class Owner(Base):
    other: int = 0
    field: int = 0

    def __init__(self):
        self.late = 1

    @property
    def read(self):
        return 1

    def method(self, request):
        return request
"""
SEAMS = (
    Seam("vllm.one", "function", ("request", "flag"), wrapped=True),
    Seam("vllm.one", "Owner.method", ("request",), wrapped=True),
    Seam("vllm.one", "Owner", reads=("field", "read", "late")),
    Seam("vllm.later", "added"),
)


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """vLLM's package folder, as `SOURCE`; 0.32.0 and 0.33.0 were read."""
    monkeypatch.setattr(digests, "CONTRACT", SEAMS)
    monkeypatch.setattr(digests, "FILE", tmp_path / "digests.json")
    root = tmp_path / "vllm"
    (root / "later").mkdir(parents=True)
    (root / "one.py").write_text(SOURCE)
    (root / "later" / "__init__.py").write_text("def added(): ...\n")
    old = tmp_path / "old"
    old.mkdir()
    (old / "one.py").write_text(SOURCE)
    main({"0.32.0": old, "0.33.0": root})

    def change(before: str, after: str):
        assert before in SOURCE
        digests._parsed.cache_clear()
        (root / "one.py").write_text(SOURCE.replace(before, after))
        return root

    return change


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        pytest.param("other: int = 0", "other: str = ''", [], id="what-nobody-reads"),
        pytest.param("return request\n\nclass", "return 1\n\nclass", ["function"], id="a-body"),
        pytest.param("flag=False", "flag=True", ["function"], id="a-default"),
        pytest.param("method(self, request)", "method(self, r)", ["Owner.method"], id="a-name"),
        pytest.param("field: int", "field: str", ["Owner"], id="a-field"),
        pytest.param("@property", "@cached_property", ["Owner"], id="a-decorator"),
        pytest.param("self.late", "self.later", ["Owner"], id="an-attribute-of-init"),
        pytest.param("Owner(Base)", "Owner(Other)", ["Owner"], id="a-base"),
        pytest.param("def method", "def renamed", ["Owner.method"], id="gone"),
    ],
)
def test_a_change_of_what_is_used_is_found_and_no_other(vllm, before, after, changed):
    found = compare(vllm(before, after), "0.33.0")
    assert [change.symbol.removeprefix("vllm.one.") for change in found.changes] == changed
    assert not found.is_new
    assert all(change.exists == (after != "def renamed") for change in found.changes)


@pytest.mark.parametrize(
    ("version", "release", "is_new"),
    [
        ("0.33.0", "0.33.0", False),
        ("0.33.0+cpu", "0.33.0", False),
        ("0.33.0.post1", "0.33.0", True),
        ("0.33.1.dev4+gabc", "0.33.0", True),
        ("0.33.0rc1", "0.32.0", True),
        ("0.31.0", "0.32.0", True),
        ("dev", "0.33.0", True),
    ],
)
def test_a_version_is_compared_with_the_last_release_that_was_read(vllm, version, release, is_new):
    found = compare(vllm("", ""), version)
    assert (found.release, found.is_new) == (release, is_new)
    # 0.32.0 had no `later`.
    expected = ["vllm.later.added"] if release == "0.32.0" else []
    assert [change.symbol for change in found.changes] == expected


def test_a_symbol_that_no_release_has_is_not_written(vllm, monkeypatch):
    monkeypatch.setattr(digests, "CONTRACT", (*SEAMS, Seam("vllm.one", "Owner.misspelt")))
    before = json.loads(digests.FILE.read_text())
    with pytest.raises(SystemExit, match=r"no release has vllm\.one:Owner\.misspelt"):
        main({"0.33.0": vllm("", "")})
    assert json.loads(digests.FILE.read_text()) == before


CHANGES = (Change("vllm.one.function", True, True), Change("vllm.one.Owner", False, False))


@pytest.mark.parametrize(
    ("found", "words", "unsaid"),
    [
        pytest.param(Comparison("0.33.0", "0.33.0", False, ()), [], ["vLLM"], id="as-it-was-read"),
        pytest.param(
            Comparison("0.33.1", "0.33.0", True, ()),
            ["0.33.1 is a new release. What vllm-scope uses of it is as in 0.33.0."], ["│"],
            id="new-and-the-same",
        ),
        pytest.param(
            Comparison("0.33.1", "0.33.0", True, CHANGES),
            ["one.function │ replaces it │ new release", "one.Owner │ uses it │ gone",
             "new release: the source changed after 0.33.0, which"], ["differs"],
            id="new-and-not-the-same",
        ),
        pytest.param(
            Comparison("0.33.0", "0.33.0", False, CHANGES),
            ["one.function │ replaces it │ differs", "Not as in the published vLLM 0.33.0"],
            ["new release"], id="patched",
        ),
    ],
)  # fmt: skip
def test_the_doctor_says_what_is_not_as_it_was_read(found, words, unsaid):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    _say_changes(console, found)
    said = " ".join(console.export_text().split())
    for each in words:
        assert each in said
    for each in unsaid:
        assert each not in said
