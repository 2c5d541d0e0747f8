"""Generate the blocking and the awaitable methods of the client, and the KV functions, from the operations.

    python tools/generate_surface.py           writes the generated modules
    python tools/generate_surface.py --check   exits with 1 if they are not up to date

Signatures and docstrings are written once, at the operations. In the docstring of an awaitable method the examples
await their calls. The generated modules are committed, so that readers and type checkers see plain methods.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from generated_files import ROOT, write_or_check

PACKAGE = ROOT / "src" / "transfer_queue"
TOPICS = ("fetch", "sample", "partition", "status", "kv", "update", "lease", "checkpoint")
SOURCES = tuple(PACKAGE / "client" / "operations" / f"{topic}_operations.py" for topic in TOPICS)
WITH_FILES = SOURCES[-1]  # its operations read and write files
KV_FUNCTIONS = (
    *("kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear", "kv_update"),
    "kv_lock_list",
)

JOINING = ("kv_put", "kv_batch_get", "kv_batch_get_by_meta", "ack")
"""The operations that may travel together with others."""

CLIENT_HEAD = '''"""The methods of TransferQueueClient. tools/generate_surface.py generates them from the operations."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.checkpoint.checkpoint_data import CheckpointReport, CheckpointSave
from transfer_queue.client.conversion.arguments import Columns, ConsumedBy, DataParser, Fence, Tags
from transfer_queue.client.conversion.change_events import PartitionChange
from transfer_queue.client.operations.fetch_operations import Readiness
from transfer_queue.client.operations.operations import Operations
from transfer_queue.messages.locks import LockEntry
from transfer_queue.messages.queries import Backlog
from transfer_queue.messages.reports.samples import SampleReport, StuckReport
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.net.calls import Operation

T = TypeVar("T")


class GeneratedMethods(ABC):
    """Each operation as a blocking method, and as an awaitable one with the prefix `async_`."""

    @property
    @abstractmethod
    def _operations(self) -> Operations:
        """The operations of this process's client."""

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T:
        """Run an operation in this thread."""

    @abstractmethod
    async def _run_async(self, operation: Operation[T]) -> T:
        """Run an operation in this event loop."""

    def _run_aside(self, operation: Operation[T]) -> Future[T]:
        """Run an operation in a thread of its own; at once if this client has no threads."""
        future: Future[T] = Future()
        future.set_result(self._run(operation))
        return future

    async def _run_joining(self, operation: Operation[T]) -> T:
        """Run an operation that may travel together with others of this event loop."""
        return await self._run_async(operation)

    async def _run_threaded(self, operation: Operation[T]) -> T:
        """Run an operation that reads or writes files: its calls in this event loop, its own work in a thread."""
        return await self._run_async(operation)
'''

KV_HEAD = '''"""The KV functions of the package. tools/generate_surface.py generates them from the KV operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.attachment import current_client
from transfer_queue.client.conversion.arguments import Columns, DataParser, Fence, Tags
from transfer_queue.messages.locks import LockEntry
from transfer_queue.metadata import KVBatchMeta
'''


def operations(sources: tuple[Path, ...] = SOURCES) -> list[ast.FunctionDef]:
    """Return the public operations, in the order of the sources."""
    classes = [node for path in sources for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    owners = [node for node in classes if node.name.endswith("Operations")]
    found = [node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
    return [node for node in found if not node.name.startswith("_")]


def _result(function: ast.FunctionDef) -> str:
    assert isinstance(function.returns, ast.Subscript)
    return ast.unparse(function.returns.slice)


def _call(function: ast.FunctionDef) -> str:
    """Return the arguments as the generated method passes them on."""
    given = [argument.arg for argument in function.args.args if argument.arg != "self"]
    given += [f"{argument.arg}={argument.arg}" for argument in function.args.kwonlyargs]
    return ", ".join(given)


def _signature(function: ast.FunctionDef, method: bool) -> str:
    arguments = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if not method:
        arguments.args.args = arguments.args.args[1:]
    return ast.unparse(arguments.args)


class _Calls(ast.NodeVisitor):
    """The calls of the client in a statement, each with whether it needs parentheses when it is awaited."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.Attribute, ast.Call, bool]] = []

    def generic_visit(self, node: ast.AST) -> None:
        binds_tighter = isinstance(node, (ast.Attribute, ast.Subscript, ast.BinOp, ast.Compare))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                owner = child.func.value
                if isinstance(owner, ast.Name) and owner.id == "client":
                    self.found.append((child.func, child, binds_tighter))
        super().generic_visit(node)


def _awaited(line: str) -> str:
    """A line of an example in which the calls of the client are awaited."""
    head, prompt, code = line.partition(">>> ")
    if not prompt:
        return line
    calls = _Calls()
    calls.visit(ast.parse(code))
    # From the end, so that the columns of the others stay right.
    for name, call, parentheses in sorted(calls.found, key=lambda each: each[1].col_offset, reverse=True):
        start, end = call.col_offset, call.end_col_offset
        awaited = f"await client.async_{name.attr}" + code[name.end_col_offset : end]
        code = code[:start] + (f"({awaited})" if parentheses else awaited) + code[end:]
    return head + prompt + code


def docstring_of(function: ast.FunctionDef, *, awaited: bool = False, owner: str = "client") -> str:
    """The docstring of an operation for a method or function.

    Args:
        function: The operation.
        awaited: Whether the examples await their calls. Default: False.
        owner: The name through which the examples call. Default: "client".
    """
    lines = (ast.get_docstring(function) or "").splitlines()
    if awaited:
        lines = [_awaited(line) for line in lines]
    lines = [re.sub(r"\bclient\.", f"{owner}.", line) if ">>> " in line else line for line in lines]
    return "\n".join(lines)


def _indented(docstring: str, indent: str) -> str:
    lines = docstring.splitlines()
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""'
    body = [f"{indent}{line}" if line else "" for line in lines[1:]]
    return "\n".join([f'{indent}"""{lines[0]}', *body, f'{indent}"""'])


def _method(function: ast.FunctionDef, files: bool) -> str:
    """Return both methods of an operation. files: whether it reads or writes files."""
    run = "_run_threaded" if files else "_run_joining" if function.name in JOINING else "_run_async"
    signature, result, given = _signature(function, True), _result(function), _call(function)
    doc, awaited = (_indented(docstring_of(function, awaited=each), " " * 8) for each in (False, True))
    return (
        f"    def {function.name}({signature}) -> {result}:\n{doc}\n"
        f"        return self._run(self._operations.{function.name}({given}))\n\n"
        f"    async def async_{function.name}({signature}) -> {result}:\n{awaited}\n"
        f"        return await self.{run}(self._operations.{function.name}({given}))\n"
    )


def _function(function: ast.FunctionDef) -> str:
    signature, result, given = _signature(function, False), _result(function), _call(function)
    doc, awaited = (_indented(docstring_of(function, awaited=each, owner="tq"), " " * 4) for each in (False, True))
    return (
        f"\n\ndef {function.name}({signature}) -> {result}:\n{doc}\n"
        f"    return current_client().{function.name}({given})\n"
        f"\n\nasync def async_{function.name}({signature}) -> {result}:\n{awaited}\n"
        f"    return await current_client().async_{function.name}({given})\n"
    )


def _formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def modules() -> dict[Path, str]:
    """Return the text of both generated modules."""
    found = operations()
    files_of = {function.name for function in operations((WITH_FILES,))}
    methods = [_method(function, function.name in files_of) for function in found]
    sources = {
        PACKAGE / "client" / "_generated_methods.py": CLIENT_HEAD + "".join("\n" + method for method in methods),
        PACKAGE / "_generated_kv.py": KV_HEAD + "".join(_function(f) for f in found if f.name in KV_FUNCTIONS),
    }
    return {path: _formatted(source) for path, source in sources.items()}


if __name__ == "__main__":
    write_or_check(modules())
