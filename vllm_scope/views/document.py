"""The base class of all views, which shows the parts of a view in a notebook and in a file.

Owns:  View, Picture (a view of given parts), `live_page` (a page that draws a server's data).
To:    every view; server.pages.

Promise: a saved page contains no link, and scope.js is its only script. The page's content security
policy allows only this script, by its hash, and does not allow the page to load anything from an
address. A live page also contains live.js, and can send requests only to its own server.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_scope.errors import SpecError, shown
from vllm_scope.views.parts import Part, visible
from vllm_scope.views.static import html_of

if TYPE_CHECKING:
    from vllm_scope.views.widget import ScopeWidget

#: The script and the style of all views, and the second script of a live page.
MODULE, STYLE, LIVE = map(Path(__file__).with_name, ("scope.js", "scope.css", "live.js"))

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="vllm-scope">
<h1>{title}</h1>
<noscript>This page needs JavaScript; the script is in the page.</noscript>
<script type="application/json" class="vllm-scope-data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


@cache
def _script(live: bool) -> tuple[str, str]:
    """The script of a page, and the base64 of the script's SHA-256."""
    modules = [MODULE, LIVE] if live else [MODULE]
    texts = [path.read_text(encoding="utf-8") for path in modules]
    script = "\n".join(["", *texts, "drawLivePage();\n" if live else "drawPage();\n"])
    return script, b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _page(title: str, data: Mapping[str, object], live: bool = False) -> str:
    """The HTML of a page that draws the data."""
    # Each "<" is escaped, so that the data cannot end the script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(visible(title)), style=STYLE.read_text(encoding="utf-8"), data=text,
        script=_script(live)[0], policy=_policy(live),
    )  # fmt: skip


def _policy(live: bool) -> str:
    """A page's content security policy. A live page can send requests to its own server."""
    own = "; connect-src 'self'; form-action 'none'; base-uri 'none'" if live else ""
    digest = _script(live)[1]
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'{own}"


def live_page(
    title: str, address: str, every_s: float, timeout_s: float
) -> tuple[str, dict[str, str]]:
    """A page that repeatedly gets a view's data from the server, and draws the data. The page first
    asks the reader for the API key and the operator's key. The HTML contains no data.

    Args:
        address: the address of the data, relative to the address of the page.
        every_s: the seconds between an answer of the server and the next request.
        timeout_s: the timeout of a request in seconds.

    Returns:
        The HTML, and the HTTP headers of the answer that sends the HTML.
    """
    headers = {
        "Content-Security-Policy": f"{_policy(live=True)}; frame-ancestors 'none'",
        "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }  # fmt: skip
    data = {"live": address, "every_s": every_s, "timeout_s": timeout_s}
    return _page(title, data, live=True), headers


class View(ABC):
    """A display for notebooks, which can be saved as a page."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """The parts of the view, from top to bottom."""

    @abstractmethod
    def heading(self) -> str:
        """The title of the page, as plain text."""

    def data(self) -> dict[str, Any]:
        """The JSON from which scope.js draws the view."""
        return {"parts": self.parts()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heading()})"

    def _repr_html_(self) -> str:
        style = STYLE.read_text(encoding="utf-8")
        return f'<div class="vllm-scope"><style>{style}</style>\n{html_of(self.parts())}\n</div>'

    def widget(self) -> ScopeWidget:
        """The view as a notebook's widget, with keyboard control and choice lists. The widget's
        `.show(view)` replaces the view by another view, such as a view of the same answer with more
        tokens.

        Raises:
            ConfigError: anywidget is not installed.
        """
        from vllm_scope.views.widget import ScopeWidget

        return ScopeWidget(self)

    def page(self) -> str:
        """The view as the HTML of a page."""
        return _page(self.heading(), self.data())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the view as an HTML page in UTF-8. An existing file is replaced.

        Raises:
            SpecError: the path does not end in .html or .htm.
            OSError: the file cannot be written.
        """
        if Path(path).suffix not in (".html", ".htm"):
            raise SpecError(
                f"the path is {shown(str(path))}; a page's name must end in .html or .htm."
            )
        Path(path).write_text(self.page(), encoding="utf-8")


@dataclass(frozen=True, repr=False)
class Picture(View):
    """A view that consists only of the parts that the caller gave."""

    title: str
    content: Sequence[Part]

    def parts(self) -> list[Part]:
        return list(self.content)

    def heading(self) -> str:
        return self.title
