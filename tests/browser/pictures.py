"""The pictures of docs/views.md, from the pages that examples/views.py writes, and monitors.html,
which `vllm-scope monitor --page` writes of a server with monitors.

python -m tests.browser.pictures demo-output/views docs [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.browser import browsing

#: Page -> the keys that are pressed before its picture is taken.
PAGES = {
    "strip": ["Tab", *["ArrowRight"] * 9],
    "side": ["Tab"],
    "map": ["Tab", "ArrowDown", *["ArrowRight"] * 8],
    "lens": ["Tab", "Control+End", "ArrowUp", "ArrowLeft"],
    "attention": ["Tab", "ArrowDown", "Tab", "Control+End", *["ArrowLeft"] * 8],
    "features": ["Tab", *["ArrowDown"] * 8],
    "result": ["Tab"],
    "monitors": [],
}


def main(pages: Path, out: Path, *names: str) -> None:
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as browser:
        for name in names or PAGES:
            browser.forget()
            browser.set_theme("light")
            browser.open((pages / f"{name}.html").resolve())
            browser.press(*PAGES[name])
            (out / f"views-{name}.png").write_bytes(browser.picture("main"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
