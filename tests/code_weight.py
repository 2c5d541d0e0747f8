"""Measures the package: lines of code, modules, imports, private names that tests use, functions of an operation.

The measures of operations must be taken in a new process, because caches that other code has filled would change them.
"""

from __future__ import annotations

import ast
import gc
import io
import sys
import tempfile
import tokenize
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "transfer_queue"
NAMES_OF_PYTHON = {"_asdict", "_replace"}
"""Public methods of named tuples, whose names only look private."""
KEYS, FIELDS = 4, ["prompt", "reward"]
WARM_UPS = 5


@cache
def lines_of_code(text: str) -> int:
    """Return the number of lines that are not blank, a comment or a part of a docstring.

    `../shared/measure/weight.py` counts one line less in each module.
    """
    lines = text.splitlines()
    left_out = {number for number, line in enumerate(lines, 1) if not line.strip()}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            left_out.add(token.start[0])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines) - len(left_out)


def lines_in(folder: Path) -> int:
    """Return the lines of code of all modules in a folder."""
    return sum(lines_of_code(path.read_text()) for path in folder.rglob("*.py"))


def imported_modules(path: Path, root: Path) -> set[str]:
    """Return the modules of the package that a module imports. root: The folder with the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name.split(".")[0] == PACKAGE}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            for each in node.names:
                inner = root / f"{node.module}.{each.name}".replace(".", "/")
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                found.add(f"{node.module}.{each.name}" if is_module else node.module)
    return found


def private_names(folder: Path) -> set[str]:
    """Return the names with one leading underscore that the modules of a folder define."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if _is_private(name)} - NAMES_OF_PYTHON


def private_uses(path: Path, names: set[str]) -> int:
    """Return how often a module reaches one of these names in an object that is not its own, or imports one."""
    text, uses = path.read_text(), 0
    if "._" not in text and "import _" not in text:
        return 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            uses += ast.unparse(node.value) not in ("self", "cls", "super()")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            uses += sum(_is_private(each.name) for each in node.names)
    return uses


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def functions_of_operations() -> dict[str, tuple[int, int]]:
    """Return the functions and the files of the package that each operation passes through in a warm simulated system.

    The simulation itself does not count. Lambdas and comprehensions do.
    """
    import torch
    from tensordict import TensorDict

    from transfer_queue.testing import Cluster

    def rows() -> TensorDict:
        return TensorDict({"prompt": torch.rand(KEYS, 8), "reward": torch.rand(KEYS)}, batch_size=KEYS)

    def keys(number: int) -> list[str]:
        return [f"{number}_{row}" for row in range(KEYS)]

    found: dict[str, tuple[int, int]] = {}
    tags = [{"status": "done", "turn": 1}] * KEYS
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), seed=1) as cluster:
        client = cluster.client("a")
        for number in range(WARM_UPS):
            client.put(rows(), partition_id="p")
            client.get_data(client.get_meta(FIELDS, KEYS, partition_id="p", task_name="t"))
            client.kv_batch_put(keys(number), "k", rows(), tags=tags)
            client.kv_batch_get(keys(number), "k")
        found["put"] = _passed(lambda: client.put(rows(), partition_id="p"))[1]
        meta, found["get_meta"] = _passed(lambda: client.get_meta(FIELDS, KEYS, partition_id="p", task_name="t"))
        found["get_data"] = _passed(lambda: client.get_data(meta))[1]
        found["kv_batch_put"] = _passed(lambda: client.kv_batch_put(keys(WARM_UPS), "k", rows(), tags=tags))[1]
        found["kv_batch_get"] = _passed(lambda: client.kv_batch_get(keys(WARM_UPS), "k"))[1]
    return found


def _passed(operation: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """Return what an operation returns, and the numbers of functions and files that it passes through."""
    import transfer_queue

    root, seen = str(Path(transfer_queue.__file__).parent), set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code, name = frame.f_code, frame.f_code.co_filename
        in_package = name.startswith(root) and "/testing/" not in name
        is_generated = name.startswith("<") and not name.startswith("<frozen")
        if event == "call" and (in_package or is_generated):
            seen.add((name, code.co_firstlineno, code.co_name))

    gc.disable()  # a collection may call finalizers of the package
    sys.setprofile(note)
    try:
        value = operation()
    finally:
        sys.setprofile(None)
        gc.enable()
    return value, (len(seen), len({name for name, _, _ in seen}))


def report_functions(results: Connection[Any, Any]) -> None:
    """Send the measures of operations through a pipe."""
    results.send(functions_of_operations())
