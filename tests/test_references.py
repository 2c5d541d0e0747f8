"""Docstrings, comments and messages of the package name modules, classes and attributes that exist.

A reference is a dotted name in backticks that begins with a class of the package (`Controller.handle`), or with a
folder or module of it (`core.state.state`, `extent_pool.ExtentPool`).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "transfer_queue"
REFERENCE = re.compile(r"`((?:transfer_queue\.)?[A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
# Names of settings, files and variables that look like references.
NOT_REFERENCES = re.compile(r".*\.(py|yaml|json|sock|md)$|(metadata|controller|live|metrics|system)\.[a-z_]+$")


@cache
def defined_names(owner: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names of functions, classes, variables and attributes that are defined anywhere in a body."""
    found = set()
    for node in ast.walk(ast.Module(owner.body, [])):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the package, by its name without that of the package."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in SOURCE.rglob("*.py")
    }


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return every class of the package by its name."""
    return {node.name: node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@cache
def folders() -> set[str]:
    """Return every folder of the package as a dotted name."""
    return {".".join(name.split(".")[:end]) for name in trees() for end in range(1, name.count(".") + 1)}


def has_attribute(name: str, attribute: str) -> bool:
    """Return whether a class or one of its bases defines an attribute. A base from outside may define any."""
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in classes()[name].bases]
    outside = [base for base in bases if base not in classes() and base not in {"ABC", "Protocol", "Generic"}]
    known = attribute in defined_names(classes()[name]) or attribute.startswith("__") or bool(outside)
    return known or any(base in classes() and has_attribute(base, attribute) for base in bases)


def exists_in(module: str, names: list[str]) -> bool:
    """Return whether a module defines the first of these names, and that the second one."""
    if not names:
        return True
    if module not in trees() or names[0] not in defined_names(trees()[module]):
        return False
    return len(names) == 1 or names[0] not in classes() or has_attribute(names[0], names[1])


def is_stale(reference: str) -> bool:
    """Return whether a reference names a part of the package that does not exist."""
    names = reference.removeprefix("transfer_queue.").split(".")
    if names[0] in classes():
        return len(names) > 1 and not has_attribute(names[0], names[1])
    for end in range(len(names), 0, -1):
        path = ".".join(names[:end])
        modules = [each for each in trees().keys() | folders() if f".{each}".endswith(f".{path}")]
        if modules:
            return not any(exists_in(module, names[end:]) for module in modules)
    return False


def test_references_are_found() -> None:
    assert is_stale("Controller.no_such_method")
    assert is_stale("core.state.no_such_module")
    assert is_stale("transfer_queue.core.state.state.NoSuchClass")
    assert not is_stale("Controller.handle")
    assert not is_stale("core.state.state")
    assert not is_stale("torch.nested")


def test_the_source_names_what_exists() -> None:
    stale = [
        f"{path.relative_to(SOURCE)}: {reference}"
        for path in sorted(SOURCE.rglob("*.py"))
        for reference in REFERENCE.findall(path.read_text())
        if not NOT_REFERENCES.match(reference) and is_stale(reference)
    ]
    assert stale == []
