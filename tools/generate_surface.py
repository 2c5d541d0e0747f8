"""Writes the blocking and awaitable surfaces out of the operations in `client`: `SOURCES`.

    python tools/generate_surface.py           writes them
    python tools/generate_surface.py --check   exit 1 where they are not what it would write

Signatures and docstrings stand once, at the operations; the surfaces are committed, so that readers and type
checkers see plain methods.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "transfer_queue"
NAMES = ("operations", "fetch_operations", "kv_operations", "lease_operations", "checkpoint_operations")
WITH_FILES = "checkpoint_operations"  # these read and write them
SOURCES = tuple(PACKAGE / "client" / f"{name}.py" for name in NAMES)
KV_FUNCTIONS = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear")


CLIENT_HEAD = '''"""TransferQueueClient's methods. Made by tools/generate_surface.py out of the client's operations."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.arguments import Columns, DataParser, Tags
from transfer_queue.client.changes import PartitionChange
from transfer_queue.client.checkpoint_data import Cut
from transfer_queue.client.operations import Operations, Readiness
from transfer_queue.client.transfers import Operation
from transfer_queue.conditions import ConsumedBy
from transfer_queue.messages import SystemStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta

T = TypeVar("T")


class Surface(ABC):
    """Each operation twice: blocking, and awaitable as `async_...`."""

    @property
    @abstractmethod
    def _operations(self) -> Operations:
        """The operations of this process's client."""

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T:
        """Runs an operation in this thread."""

    @abstractmethod
    async def _run_async(self, operation: Operation[T]) -> T:
        """Runs an operation in this event loop."""

    async def _run_threaded(self, operation: Operation[T]) -> T:
        """Runs an operation that reads or writes files: its calls in this event loop, its own work in a thread."""
        return await self._run_async(operation)
'''

KV_HEAD = '''"""The KV functions of the package. Made by tools/generate_surface.py out of client/kv_operations.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.client.arguments import Columns, DataParser, Tags
from transfer_queue.current import current_client
from transfer_queue.metadata import KVBatchMeta
'''


def operations(sources: tuple[Path, ...] = SOURCES) -> list[ast.FunctionDef]:
    """The public operations, in the order of the sources."""
    classes = [node for path in sources for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    owners = [node for node in classes if node.name.endswith("Operations")]
    found = [node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
    return [node for node in found if not node.name.startswith("_")]


def _result(function: ast.FunctionDef) -> str:
    assert isinstance(function.returns, ast.Subscript)
    return ast.unparse(function.returns.slice)


def _call(function: ast.FunctionDef) -> str:
    """The arguments as the surface passes them on."""
    given = [argument.arg for argument in function.args.args if argument.arg != "self"]
    given += [f"{argument.arg}={argument.arg}" for argument in function.args.kwonlyargs]
    return ", ".join(given)


def _signature(function: ast.FunctionDef, method: bool) -> str:
    arguments = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if not method:
        arguments.args.args = arguments.args.args[1:]
    return ast.unparse(arguments.args)


def _docstring(function: ast.FunctionDef, indent: str) -> str:
    lines = (ast.get_docstring(function) or "").splitlines()
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""'
    body = [f"{indent}{line}" if line else "" for line in lines[1:]]
    return "\n".join([f'{indent}"""{lines[0]}', *body, f'{indent}"""'])


def _method(function: ast.FunctionDef, files: bool) -> str:
    """files: it reads or writes them."""
    run = "_run_threaded" if files else "_run_async"
    signature, result, given = _signature(function, True), _result(function), _call(function)
    doc = _docstring(function, " " * 8)
    return (
        f"    def {function.name}({signature}) -> {result}:\n{doc}\n"
        f"        return self._run(self._operations.{function.name}({given}))\n\n"
        f"    async def async_{function.name}({signature}) -> {result}:\n{doc}\n"
        f"        return await self.{run}(self._operations.{function.name}({given}))\n"
    )


def _function(function: ast.FunctionDef) -> str:
    signature, result, given = _signature(function, False), _result(function), _call(function)
    doc = _docstring(function, " " * 4)
    return (
        f"\n\ndef {function.name}({signature}) -> {result}:\n{doc}\n"
        f"    return current_client().{function.name}({given})\n"
        f"\n\nasync def async_{function.name}({signature}) -> {result}:\n{doc}\n"
        f"    return await current_client().async_{function.name}({given})\n"
    )


def _formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    """Writes, or checks with --check."""
    found = operations()
    files_of = {function.name for function in operations((PACKAGE / "client" / f"{WITH_FILES}.py",))}
    methods = [_method(function, function.name in files_of) for function in found]
    files = {
        PACKAGE / "client" / "surface.py": CLIENT_HEAD + "".join("\n" + method for method in methods),
        PACKAGE / "kv.py": KV_HEAD + "".join(_function(f) for f in found if f.name in KV_FUNCTIONS),
    }
    stale = []
    for path, source in files.items():
        wanted = _formatted(source)
        if not path.exists() or path.read_text() != wanted:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(wanted)
    if stale and "--check" in arguments:
        print(f"not up to date: {', '.join(stale)}; run python tools/generate_surface.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
