"""A view's HTML as a browser reads it, and the data in a saved page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

EMPTY = {"meta"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def marks(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def below(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.below()

    def tagged(self, tag: str) -> list[Element]:
        return [each for each in self.below() if each.tag == tag]

    def marked(self, mark: str) -> list[Element]:
        return [each for each in self.below() if mark in each.marks]

    def tokens(self) -> list[Element]:
        """The tokens of all strips; not the samples of the legend."""
        return [each for each in self.below() if each.attributes.get("role") == "listitem"]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), attrs
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in EMPTY:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read_html(html: str) -> Element:
    """The elements of some HTML, in which each one ends before the one around it."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    (root,) = reader.open
    return root


def read_page(page: str) -> Element:
    """The elements of a whole page."""
    return read_html(page.removeprefix("<!doctype html>"))


def data_of(page: str) -> dict[str, Any]:
    """The JSON from which a page draws."""
    (found,) = read_page(page).marked("vllm-scope-data")
    return json.loads(found.text)
