"""The clients that docs/http.md shows run, and say what it says they do."""

from __future__ import annotations

import re

from tests.server.conftest import API_KEY, ROOT


def test_the_clients_of_the_page_run(server, capsys):
    page = (ROOT / "docs" / "http.md").read_text()
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    mine = {"http://localhost:8000": server.url, "secret": API_KEY, "toyworld/model": "toyworld"}
    for code, shown in blocks:
        for theirs, ours in mine.items():
            code = code.replace(theirs, ours)
        exec(compile(code, "docs/http.md", "exec"), {})
        printed = capsys.readouterr().out.splitlines()[0]
        # What follows the sweep is the same with curl.
        assert printed == shown.splitlines()[0] or shown.startswith("$ curl")
