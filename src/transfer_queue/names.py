"""Finds the known name that is nearest to an unknown one, for messages about typing errors."""

from __future__ import annotations

from collections.abc import Iterable

MAX_COMPARED = 200  # of the latest names, because the controller answers no other request meanwhile
LONGEST_COMPARED = 200  # characters


def nearest(name: str, known: Iterable[str], most: int = 1, least: float = 0.6) -> list[str]:
    """Return the known names that resemble `name`, the most similar first.

    Args:
        name: The unknown name.
        known: The known names.
        most: Largest number of names to return.
        least: Least similarity of a returned name, from 0 to 1 (equal).
    """
    import difflib  # imported only for an unknown name, so that servers need no memory for it

    candidates = [each for each in list(dict.fromkeys(known))[-MAX_COMPARED:] if len(each) <= LONGEST_COMPARED]
    if len(name) > LONGEST_COMPARED:
        return []
    return difflib.get_close_matches(name, candidates, n=most, cutoff=least)


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return "; did you mean 'x'?" with the nearest known names, or "" if none resembles `name`."""
    similar = nearest(name, known, most)
    return f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
