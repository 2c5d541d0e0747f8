"""Checks that HTML for notebooks is harmless, and hostile values to show in it."""

from __future__ import annotations

import html.parser
from typing import Any

HOSTILE = [
    '<script>alert("x")</script>', "'\"><img src=x onerror=alert(1)>", "</table></div>", "&lt;", "javascript:alert(1)",
    "\x1b[2J\r\n\t\0", "\u202ereversed", "\ud800", "x" * 100_000, "",
]  # fmt: skip
ALLOWED = {"div", "table", "tr", "th", "td", "span", "b"}
ATTRIBUTES = {"style", "colspan", "scope", "role"}


class Reader(html.parser.HTMLParser):
    """Collects the elements and the text, and checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open.append(tag)
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_html(text: str) -> Reader:
    """Check that HTML is harmless and can be sent to a notebook, and return what it contains."""
    read = Reader(text)
    assert read.names <= ALLOWED
    assert read.attributes <= ATTRIBUTES
    assert "url(" not in text
    assert text.encode()
    return read


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError("broken")
