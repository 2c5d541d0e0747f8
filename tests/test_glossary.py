"""docs/glossary.md: the terms are unique and in alphabetical order, and each entry defines one and names its module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transfer_queue

PACKAGE = Path(transfer_queue.__file__).parent
PAGE = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"


ORDINARY = {"reference (a consumer has not finished the row)", "reply", "reported to, returned to", "skipped"}
"""Words of the table that have their usual meaning and need no entry."""


def entries() -> dict[str, str]:
    """Return the text of each entry by its term; fails if a term has two entries."""
    text = PAGE.read_text("utf-8").partition("\n## ")[0]
    found: dict[str, str] = {}
    for part in text.split("\n### ")[1:]:
        term, _, body = part.partition("\n")
        assert term not in found, f"the term {term!r} has two entries"
        found[term] = body.strip()
    return found


def test_terms_are_in_alphabetical_order():
    terms = list(entries())
    assert len(terms) > 80
    assert terms == sorted(terms, key=str.casefold)


def test_former_terms_are_not_terms():
    """A word that the page translates into a term is not a term itself, so that one thing has one name."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    former = {word.strip() for old, _ in rows[1:] for word in re.sub(r"\(.*?\)", "", old).split(",")}
    terms = {re.sub(r" \(.*\)", "", term) for term in entries()}
    assert len(former) > 10
    assert former & terms == set()


def test_former_terms_lead_to_terms():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    terms = {re.sub(r" \(.*\)", "", term) for term in entries()}
    now = {new for _, new in rows[1:]} - ORDINARY
    assert now - terms == set()


@pytest.mark.parametrize(("term", "body"), entries().items(), ids=list(entries()))
def test_an_entry_is_a_definition_and_a_module(term, body):
    lines = body.splitlines()
    definition = " ".join(lines[:-1])
    assert definition.endswith((".", ".)"))
    # Short, so that a reader looks a term up without reading a page.
    assert len(definition.split()) <= 60
    assert re.fullmatch(r"Module: `[\w/]+\.py`", lines[-1])
    module = re.fullmatch(r"Module: `(.+)`", lines[-1])[1]
    assert (PACKAGE / module).is_file(), f"{term}: {module} is not a module of the package"
