"""The tree drawn at the top of errors.py is the tree of classes."""

from __future__ import annotations

import inspect
import queue
import re

import pytest

from transfer_queue import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.TransferQueueError)
}


def drawn() -> dict[str, tuple[str | None, list[str]]]:
    """Name -> (parent as drawn, built-in bases as drawn)."""
    found: dict[str, tuple[str | None, list[str]]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([|` -]*)(\w+Error)\b(?:\s+\(([^)]*)\))?", line)
        if match is None:
            continue
        depth, name, bases = len(match[1]), match[2], match[3]
        above = [(d, n) for d, n in above if d < depth]
        found[name] = (
            above[-1][1] if above else None,
            [base.rpartition(".")[2] for base in re.findall(r"[\w.]+", bases or "")],
        )
        above.append((depth, name))
    return found


def test_every_class_is_drawn():
    """All and only the classes of the module are in the drawing."""
    assert sorted(drawn()) == sorted(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_bases(name):
    """A class has the parent and the built-in bases that are drawn for it."""
    parent, built_in = drawn()[name]
    found = CLASSES[name]
    ours = [base.__name__ for base in found.__bases__ if base in CLASSES.values()]
    assert ours == ([] if parent is None else [parent]) + [base for base in built_in if base in CLASSES]
    known = {**vars(__import__("builtins")), **vars(queue), "ShutDown": errors._ShutDown, **CLASSES}
    assert [base for base in built_in if not issubclass(found, known[base])] == []
    # What else it is caught as must be drawn, too: ValueError of a child is its parent's.
    others = {base.__name__.lstrip("_") for base in found.__bases__ if base not in CLASSES.values()} - {"Exception"}
    assert others <= set(built_in)


@pytest.mark.parametrize("name", CLASSES)
def test_by_name(name):
    """An error that came over the wire by name is its class again."""
    error = errors.by_name(name)("what was wanted, what was there")
    assert type(error) is CLASSES[name]
    assert str(error) == "what was wanted, what was there"


@pytest.mark.parametrize("name", ["", "NoSuchError", "annotations", "by_name"])
def test_by_unknown_name(name):
    """A name of a newer release is the base of the tree."""
    assert errors.by_name(name) is errors.TransferQueueError
