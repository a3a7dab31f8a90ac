"""docs/models.md is what `make matrix` wrote from the lines that it kept."""

from __future__ import annotations

import pytest

from tests.matrix import __main__ as matrix
from tests.matrix.__main__ import read_lines
from tests.matrix.architectures import FIRST
from tests.matrix.page import PAGE, page


def test_the_page_has_every_line_and_nothing_else():
    lines = read_lines()
    assert lines
    written = PAGE.read_text()
    assert written == page(lines)
    assert all(f"`{line['architecture']}`" in written for line in lines)
    keys = [(line["architecture"], line["vllm"]) for line in lines]
    assert len(set(keys)) == len(keys)


def test_a_cache_is_called_warm_only_if_tokens_came_from_it():
    every = read_lines()
    newest = max(line["vllm"] for line in every)
    lines = [line for line in every if (line["status"], line["vllm"]) == ("verified", newest)]
    rows = page(lines).partition("## Verified")[2].splitlines()
    for line in lines:
        (row,) = (row for row in rows if row.startswith(f"| `{line['architecture']}` "))
        assert ("warm cache" in row) == (line["cached_tokens"] > 0)


def line(name: str, vllm: str, status: str, *sites: str, **more: object) -> dict:
    found = {site: {"error": 1e-7, "module": "m"} for site in sites}
    return {
        "architecture": name, "vllm": vllm, "status": status, "sites": found, "why_not": {},
        "chunked": True, "logprob_gap": 0.0,
    } | more  # fmt: skip


LINES = [
    line("A", "0.9.0", "verified", "embed", "resid_post"),
    line("A", "0.10.0", "verified", "embed", "resid_post", "q"),
    line("B", "0.9.0", "cannot run", reason="ValueError: no kernel"),
    line("B", "0.10.0", "canary only", "embed", "resid_post", reason="B.forward has no loop"),
    line("C", "0.10.0", "refused", reason="C.forward returns 3 values"),
    line("D", "0.10.0", "no reference", reason="there is no D"),
]


def test_each_version_has_a_column_with_what_it_did():
    written = page(LINES)
    table = written.partition("## By version")[2].partition("The sections below")[0]
    rows = [r.strip("| ").split(" | ") for r in table.splitlines() if r.startswith("|")]
    assert rows[0] == ["architecture", "0.9.0", "0.10.0"]  # by number, not by letters
    assert rows[2:] == [
        ["`A`", "verified, without `q`", "verified"],
        ["`B`", "cannot run: ValueError: no kernel", "canary only"],
        ["`C`", "not run", "refused"],
    ]
    assert "| Verified | 1 | 1 |" in written
    assert "| Canary only | 0 | 1 |" in written
    assert "| Not run yet | 2 | 0 |" in written
    # The sections are of the newest version.
    assert "| `B` | `embed` `resid_post` | 1.0e-07 | B.forward has no loop |" in written
    assert "| `C` | C.forward returns 3 values |" in written


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(matrix, "installed", lambda: "0.9.0")
    return matrix


def test_a_run_goes_on_where_it_stopped_and_begins_with_what_most_people_run(kept, monkeypatch):
    monkeypatch.setattr(kept, "architectures", lambda: ["Z", "A", FIRST[0]])
    assert kept._pending() == ["Z", "A", FIRST[0]]
    for one in LINES[1:]:
        kept._keep(one)
    kept._keep(line(FIRST[0], "0.10.0", "verified"))
    # B is done here. The other version verified A and the first.
    assert kept._pending() == [FIRST[0], "A", "Z"]
    kept._keep(line(FIRST[0], "0.9.0", "differs"))
    kept._keep(line("A", "0.9.0", "verified"))
    assert kept._pending() == ["Z"]


def test_a_line_replaces_the_one_of_its_architecture_and_version_alone(kept):
    for one in (LINES[0], LINES[1], LINES[0] | {"status": "differs"}):
        kept._keep(one)
    found = [(one["vllm"], one["status"]) for one in kept.read_lines()]
    assert found == [("0.10.0", "verified"), ("0.9.0", "differs")]
    assert [path.name for path in kept.RESULTS.parent.iterdir()] == ["results.jsonl"]
