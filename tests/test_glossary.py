"""docs/glossary.md: the terms are unique and in alphabetical order, and each entry defines one shortly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"


def entries() -> dict[str, str]:
    """Return the text of each entry by its term; fails if a term has two entries."""
    found: dict[str, str] = {}
    for part in PAGE.read_text("utf-8").split("\n### ")[1:]:
        term, _, body = part.partition("\n")
        assert term not in found, f"the term {term!r} has two entries"
        found[term] = " ".join(body.split())
    return found


def test_terms_are_in_alphabetical_order():
    terms = list(entries())
    assert len(terms) > 80
    assert terms == sorted(terms, key=str.casefold)


def test_another_form_of_a_term_has_no_entry_of_its_own():
    """A word in italics is a form of the entry's term, or a term that the reader is to look up (after "See also")."""
    terms = {re.sub(r" \(.*\)", "", term) for term in entries()}
    forms = {form for text in entries().values() for form in re.findall(r"(?<!See also )\*([^*]+)\*", text)}
    referred = {term for text in entries().values() for term in re.findall(r"See also \*([^*]+)\*", text)}
    assert len(forms) > 5
    assert forms & terms == set()
    assert referred <= terms


@pytest.mark.parametrize(("term", "definition"), entries().items(), ids=list(entries()))
def test_an_entry_is_a_short_definition_that_does_not_depend_on_the_place_of_the_code(term, definition):
    assert definition.endswith((".", ".)"))
    # Short, so that a reader looks a term up without reading a page.
    assert len(definition.split()) <= 45
    assert not re.search(r"\w/\w+\.py", definition)
