"""The nearest known name of one that is not known, for messages about typing errors."""

from __future__ import annotations

from collections.abc import Iterable

MOST_COMPARED = 200  # of the latest names: the controller answers nobody else meanwhile
LONGEST_COMPARED = 200  # characters


def nearest(name: str, known: Iterable[str], most: int = 1, least: float = 0.6) -> list[str]:
    """Return the known names that resemble `name`, the most similar first.

    Args:
        name: The name that is not known.
        known: The names that are.
        most: How many to return at most.
        least: How similar they are at least, from 0 to 1 (equal).
    """
    import difflib  # only for an unknown name: servers keep no memory for it

    candidates = [each for each in list(dict.fromkeys(known))[-MOST_COMPARED:] if len(each) <= LONGEST_COMPARED]
    if len(name) > LONGEST_COMPARED:
        return []
    return difflib.get_close_matches(name, candidates, n=most, cutoff=least)


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return "; did you mean 'x'?" with the nearest known names, or "" if none resembles `name`."""
    found = nearest(name, known, most)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
