"""docs/models.md is what `make matrix` wrote from the lines that it kept."""

from __future__ import annotations

from tests.matrix.__main__ import read_lines
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
    lines = [line for line in read_lines() if line["status"] == "verified"]
    rows = page(lines).splitlines()
    for line in lines:
        (row,) = (row for row in rows if row.startswith(f"| `{line['architecture']}` "))
        assert ("warm cache" in row) == (line["cached_tokens"] > 0)
