"""The generated methods and functions: up to date, and each operation has a blocking and an awaitable one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import transfer_queue
from transfer_queue import _generated_kv, interface
from transfer_queue.client import TransferQueueClient
from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.operations.operations import Operations

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = [name for name, _ in inspect.getmembers(Operations, inspect.isfunction) if not name.startswith("_")]
KV = ["kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear"]
OF_THE_CONTRACT = [
    "get_meta", "put", "get_data", "set_custom_meta", "clear_samples", "clear_partition", "get_production_status",
    "get_consumption_status", "check_production_status", "check_consumption_status", "reset_consumption",
    "get_partition_list", "kv_retrieve_meta", "kv_retrieve_keys", "seal", "kv_list", "save_controller_checkpoint",
    "load_controller_checkpoint", "save_storage_checkpoint", "load_storage_checkpoint",
]  # fmt: skip


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Name, kind and default of each, without self."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


def without_examples(function: object) -> list[str]:
    """Return the docstring of a function without the statements of its examples."""
    return [line for line in (inspect.getdoc(function) or "").splitlines() if ">>> " not in line]


def examples(function: object) -> list[str]:
    """Return the statements in the examples of a function."""
    return [line for line in (inspect.getdoc(function) or "").splitlines() if ">>> " in line]


def assert_awaits(owner: str, lines: list[str]) -> None:
    """Check that examples call the awaitable operations only, and await each call."""
    calls = [call for line in lines for call in re.findall(rf"(await )?\b{owner}\.(\w+)\(", line)]
    called = [(awaited, name) for awaited, name in calls if name.removeprefix("async_") in OPERATIONS]
    assert called
    assert [name for awaited, name in called if not (awaited and name.startswith("async_"))] == []


def test_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_surface.py"), "--check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_of_the_contract_is_an_operation() -> None:
    assert set(OF_THE_CONTRACT) <= set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_blocking_and_awaitable(name: str) -> None:
    operation, blocking, awaitable = (
        getattr(Operations, name), getattr(TransferQueueClient, name), getattr(TransferQueueClient, f"async_{name}"),
    )  # fmt: skip
    assert inspect.isgeneratorfunction(operation) or operation.__name__ == name
    assert inspect.iscoroutinefunction(awaitable)
    assert not inspect.iscoroutinefunction(blocking)
    assert parameters(operation) == parameters(blocking) == parameters(awaitable)
    hints = [function.__annotations__["return"] for function in (blocking, awaitable)]
    assert hints[0] == hints[1]
    assert operation.__annotations__["return"] == f"Operation[{hints[0]}]"
    docs = [without_examples(function) for function in (operation, blocking, awaitable)]
    assert docs[0]
    assert docs[0] == docs[1] == docs[2]
    assert examples(operation) == examples(blocking)
    assert_awaits("client", examples(awaitable))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_limit_can_be_set(name: str) -> None:
    [limit] = [p for p in parameters(getattr(Operations, name)) if p[0] == "timeout"]
    assert limit == ("timeout", inspect.Parameter.KEYWORD_ONLY, None)


def test_nothing_else_is_generated() -> None:
    generated = [name for name, value in vars(GeneratedMethods).items() if inspect.isfunction(value) and name[0] != "_"]
    assert sorted(generated) == sorted([*OPERATIONS, *(f"async_{name}" for name in OPERATIONS)])


@pytest.mark.parametrize("module", [_generated_kv, interface, transfer_queue])
@pytest.mark.parametrize("name", KV)
def test_kv_functions(module: ModuleType, name: str) -> None:
    blocking, awaitable, operation = (
        getattr(module, name), getattr(module, f"async_{name}"), getattr(Operations, name),
    )  # fmt: skip
    assert inspect.iscoroutinefunction(awaitable)
    assert parameters(blocking) == parameters(awaitable) == parameters(operation)
    docs = [without_examples(function) for function in (operation, blocking, awaitable)]
    assert docs[0] == docs[1] == docs[2]
    assert [line.replace("client.", "tq.") for line in examples(operation)] == examples(blocking)
    assert_awaits("tq", examples(awaitable))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_meta", ["data_fields", "batch_size", "partition_id", "mode", "task_name", "sampling_config"]),
        ("put", ["data", "metadata", "partition_id", "data_parser"]),
        ("get_data", ["metadata"]),
        ("kv_retrieve_meta", ["keys", "partition_id", "create"]),
        ("kv_put", ["key", "partition_id", "fields", "tag", "data_parser"]),
        ("kv_batch_put", ["keys", "partition_id", "fields", "tags", "data_parser"]),
        ("kv_batch_get", ["keys", "partition_id", "select_fields"]),
        ("kv_batch_get_by_meta", ["meta", "select_fields"]),
        ("kv_list", ["partition_id"]),
        ("kv_clear", ["keys", "partition_id"]),
        ("reset_consumption", ["partition_id", "task_name"]),
    ],
)
def test_positional_arguments_are_those_of_the_contract(name: str, arguments: list[str]) -> None:
    """What we add is keyword-only, so that nobody's positions move."""
    found = parameters(getattr(Operations, name))
    assert [p[0] for p in found if p[1] is not inspect.Parameter.KEYWORD_ONLY] == arguments


@pytest.mark.parametrize("name", ["close", "storage_manager", "client_id", "__enter__"])
def test_the_rest_of_the_client(name: str) -> None:
    assert name in vars(TransferQueueClient)
