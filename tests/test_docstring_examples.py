"""The examples of the public docstrings run and print what they show.

The examples of a module share one running system, whose partitions are removed between them. They see the names that
the docstring of `TransferQueueClient` lists, run in an empty folder, and may await at the top level, as in an
interactive session of `python -m asyncio`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from public_objects import PublicObject, public_objects
from transfer_queue.client.conversion.arguments import ConsumedBy
from transfer_queue.config.environment import EnvironmentVariable
from transfer_queue.config.settings import Settings
from transfer_queue.config.validators import Validator

PARSER = doctest.DocTestParser()
CHECKER = doctest.OutputChecker()
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CONF = {"system": {"name": "examples"}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
INTERNAL = [
    PublicObject(each.__qualname__, each.__module__, each, "class")
    for each in (ConsumedBy, EnvironmentVariable, Settings, Validator)
]
"""Internal classes that explain themselves with an example."""
WITH_EXAMPLES = [each for each in [*public_objects().values(), *INTERNAL] if ">>> " in each.docstring]
# Sorted by module, so that a module's examples follow one another.
WITH_EXAMPLES.sort(key=lambda each: each.module)


@pytest.fixture(scope="module", autouse=True)
def no_system_is_left() -> Iterator[None]:
    yield
    tq.close()


def run_statement(source: str, names: dict[str, Any], loop: asyncio.AbstractEventLoop) -> str:
    """Run one statement as an interactive session does, and return what it prints."""
    code = compile(source, "<example>", "single", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = eval(code, names)
        if inspect.iscoroutine(result):
            loop.run_until_complete(result)
    return printed.getvalue()


def run_docstring(docstring: str, names: dict[str, Any]) -> None:
    """Run the examples of a docstring in order, and compare what they print with what they show."""
    loop = asyncio.new_event_loop()
    try:
        for example in PARSER.get_examples(docstring):
            if example.exc_msg is None:
                got, wanted = run_statement(example.source, names, loop), example.want
            else:
                with pytest.raises(Exception) as raised:  # the docstring says which
                    run_statement(example.source, names, loop)
                got = f"{type(raised.value).__name__}: {raised.value}\n"
                wanted = re.sub(r"^[\w.]+\.(\w+:)", r"\1", example.exc_msg)
            assert CHECKER.check_output(wanted, got, OPTIONS), f"{example.source}shows:\n{wanted}\nprints:\n{got}"
    finally:
        loop.close()


def names_of_examples() -> dict[str, Any]:
    """Return the names that every example may use, over a running system without partitions."""
    tq.init(CONF)
    client = tq.get_client()
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    return {"__name__": "__main__", "tq": tq, "torch": torch, "np": np, "TensorDict": TensorDict, "client": client}


@pytest.mark.parametrize("module", sorted({each.module for each in WITH_EXAMPLES}))
def test_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = []
    for number, each in enumerate(each for each in WITH_EXAMPLES if each.module == module):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            run_docstring(each.docstring, names_of_examples())
        except Exception as error:
            failed.append(f"{each.name}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
