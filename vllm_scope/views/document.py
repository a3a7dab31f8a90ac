"""What all views share: the style, escaped text, and how a notebook and a file get the HTML.

To:    strip, page, feature_page.

Promise: no script and no address. A text never becomes markup, and its control characters are seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from os import PathLike
from pathlib import Path
from typing import Final

#: Blue and orange differ for every kind of colour vision. The text keeps a contrast of at least 4.5
#: on both and on their mixtures with the middle. Notebooks set their own theme, whatever the
#: system's is: JupyterLab by an attribute, VS Code by a class.
STYLE: Final = """
.vllm-scope {
  color-scheme: light dark;
  --ink: light-dark(#1b1f24, #eef1f4); --muted: light-dark(#59636e, #a2abb6);
  --paper: light-dark(#ffffff, #121519); --line: light-dark(#d5d9df, #353c45);
  --low: light-dark(#5aa2e0, #1d6cb8); --mid: light-dark(#eceef1, #2a2f37);
  --high: light-dark(#f28e2b, #a65100);
  background: var(--paper); color: var(--ink); padding: .5rem;
  font: 1rem/1.6 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;

  h1 { font-size: 1.8rem; line-height: 1.2; }
  h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
  p { max-width: 46rem; margin: .4rem 0; }
  figure { position: relative; margin: .8rem 0; padding: .6rem .9rem; border-radius: .5rem;
           border: 1px solid var(--line); }
  figcaption, .legend { font-size: .875rem; color: var(--muted); overflow-wrap: anywhere; }
  .legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; align-items: center; }
  .scale { display: inline-block; width: 9rem; height: .8rem; margin: 0 .5rem;
           vertical-align: middle; border: 1px solid var(--line); print-color-adjust: exact;
           background: linear-gradient(in oklab to right, var(--low), var(--mid), var(--high)); }
  .tokens { line-height: 2.1; white-space: pre-wrap; overflow-wrap: anywhere; }
  .t { margin-right: 2px; padding: .15em 0; color: var(--ink); print-color-adjust: exact; }
  .scored { background: color-mix(in oklab, var(--high) calc(max(0, var(--p)) * 100%),
            color-mix(in oklab, var(--low) calc(max(0, -1 * var(--p)) * 100%), var(--mid))); }
  .unscored { border-bottom: 1px dotted var(--muted); }
  .above { border-bottom: 3px solid var(--ink); }
  .verdict { border: 2px solid var(--ink); border-bottom-width: 3px; border-radius: .2em;
             padding: .15em .2em; }
  .flag { user-select: none; }
  .t:focus { outline: 3px solid var(--ink); outline-offset: 1px; }
  .value { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
           white-space: nowrap; user-select: none; }
  .t:focus .value { left: .9rem; width: auto; height: auto; margin-top: 2.2em; padding: 0 .6em;
           clip-path: none; white-space: normal; z-index: 1; font-size: .875rem;
           border-radius: .3em; background: var(--ink); color: var(--paper); }
  .feature { border-top: 1px solid var(--line); padding: .4rem 0; }
  .feature summary { cursor: pointer; overflow-wrap: anywhere; }
  .feature summary:focus-visible { outline: 3px solid var(--ink); }
  .facts { color: var(--muted); font-size: .875rem; }
  .bars svg { display: block; max-width: 100%; height: auto;
              border-bottom: 1px solid var(--muted); }
  .bars rect { fill: var(--high); }
}
body.vllm-scope { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
[data-jp-theme-light="true"] .vllm-scope, .vscode-light .vllm-scope { color-scheme: light; }
[data-jp-theme-light="false"] .vllm-scope, .vscode-dark .vllm-scope { color-scheme: dark; }
"""

# Should a text become markup all the same, the browser neither runs nor loads it.
_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""


def visible(text: str) -> str:
    """The text with a sign for each character that is not printed, such as `⏎` or `\\u202e`.

    A line still ends behind its `⏎`. An empty text is `∅`.
    """
    shown = (c if c.isprintable() else "⏎\n" if c == "\n" else _escaped(c) for c in text)
    return "".join(shown) or "∅"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def safe(text: str) -> str:
    """HTML that shows the text, between tags."""
    return escape(visible(text))


class View(ABC):
    """Something that a notebook shows, and that can be saved."""

    @abstractmethod
    def body(self) -> str:
        """The HTML between its title and its end."""

    @abstractmethod
    def heading(self) -> str:
        """The title of its file, as plain text."""

    def _repr_html_(self) -> str:
        return f'<div class="vllm-scope"><style>{STYLE}</style>\n{self.body()}\n</div>'

    def page(self) -> str:
        """The HTML of a whole page."""
        title = safe(self.heading())
        return f"""{_HEAD}<title>{title}</title>
<style>{STYLE}</style>
</head>
<body class="vllm-scope">
<h1>{title}</h1>
{self.body()}
</body>
</html>
"""

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a whole page, in UTF-8. A file that is there is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.page(), encoding="utf-8")
