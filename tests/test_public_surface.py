"""The package's public names: complete, lazy, plain attributes after their first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transfer_queue
from transfer_queue import errors

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "tensordict", "omegaconf", "numpy", "msgspec"]
STANDARD = ["asyncio", "importlib.resources", "multiprocessing", "ssl", "subprocess", "tempfile"]
"""Of the standard library: a megabyte or more of every server."""


def in_fresh_process(code: str) -> str:
    """What the code prints in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_after(statement: str, modules: list[str] = HEAVY) -> list[str]:
    """Which of the heavy packages, or of these modules, are loaded after the statement, in a fresh process."""
    return in_fresh_process(f"{statement}\nimport sys\nprint(*[m for m in {modules} if m in sys.modules])").split()


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import transfer_queue", []),
        ("import transfer_queue.config.settings, transfer_queue.config.loading", ["msgspec"]),
        ("import transfer_queue.utils.logging_utils", ["msgspec"]),
        ("import transfer_queue; transfer_queue.StorageKeyNotFoundError; transfer_queue.__version__", []),
    ],
)
def test_light_imports(statement: str, loaded: list[str]) -> None:
    """None of these loads anything heavy. Settings are checked by msgspec."""
    assert loaded_after(statement) == loaded


def test_servers_load_no_torch():
    """The core and the storage load numpy and msgspec alone."""
    modules = ["core.controller", "storage.unit.storage_unit", "net.server.server_loop"]
    assert set(loaded_after("; ".join(f"import transfer_queue.{m}" for m in modules))) == {"numpy", "msgspec"}


def test_servers_are_small():
    """What they all are forked from loads nothing that few systems need."""
    assert loaded_after("import transfer_queue.node.supervisor", HEAVY + STANDARD) == ["numpy", "msgspec"]


def test_commands_load_no_torch():
    """Commands that search a system answer immediately: torch alone takes seconds."""
    modules = ["cli.start_stop", "cli.watch", "cli.explain", "client.control_client", "node.system.launcher"]
    search = "import transfer_queue.cli.options as c; c.find_system('of-no-system')"
    imports = "; ".join(f"import transfer_queue.{m}" for m in modules)
    tried = f"{imports}\ntry:\n    {search}\nexcept transfer_queue.errors.AttachError:\n    pass"
    assert "torch" not in loaded_after(tried)


@pytest.mark.parametrize("name", transfer_queue.__all__)
def test_name_resolves(name):
    """Every public name is found, and stays in the module as a plain attribute."""
    value = getattr(transfer_queue, name)
    assert vars(transfer_queue)[name] is value


@pytest.mark.parametrize("name", ["client", "dataloader", "errors", "interface", "metadata", "sampler", "utils"])
def test_modules_are_attributes(name, monkeypatch):
    """Modules are found as attributes, without an import of their own."""
    loaded = importlib.import_module(f"transfer_queue.{name}")
    monkeypatch.delattr(transfer_queue, name)  # as if it were the first to be used
    assert getattr(transfer_queue, name) is loaded


def test_unknown_name():
    """An unknown name is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = transfer_queue.no_such_name


def test_all_is_what_type_checkers_see():
    """The imports for type checkers are the names of `__all__`, from where they really live."""
    tree = ast.parse(Path(transfer_queue.__file__ or "").read_text("utf-8"))
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transfer_queue"):
            seen.update({alias.name: node.module for alias in node.names})
    assert sorted([*seen, "__version__"]) == sorted(transfer_queue.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(transfer_queue, name), name


def test_every_error_is_public():
    """Users catch errors by name: each class of the tree is a name of the package."""
    classes = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, errors.TransferQueueError)}
    assert [name for name in classes if getattr(transfer_queue, name) is not getattr(errors, name)] == []


def test_dir_lists_the_public_names():
    """`dir()` shows names that were not used yet."""
    shown = in_fresh_process("import transfer_queue; print(*dir(transfer_queue))").split()
    assert set(transfer_queue.__all__) <= set(shown)


def documented_names() -> list[str]:
    """Return the names of the package and of the client that the pages of the reference show."""
    folder = ROOT / "docs" / "reference" / "api"
    text = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.md")))
    of_client = re.findall(r"^    options: .*members: \[(.*)\]", text, re.MULTILINE)
    names = re.findall(r"^::: transfer_queue\.(?:TransferQueueClient\.)?(\w+)$", text, re.MULTILINE)
    return names + [name for names in of_client for name in names.split(", ")]


def shown_names() -> set[str]:
    """Return what `dir()` shows of the package and of a client, without the awaitable twins and without exceptions."""
    of_client = transfer_queue.TransferQueueClient.__dir__(object.__new__(transfer_queue.TransferQueueClient))
    shown = {*dir(transfer_queue), *of_client} - {"errors"}
    return {name for name in shown if not name.startswith(("_", "async_")) and not name.endswith("Error")}


def test_the_reference_shows_what_dir_shows_and_each_name_once():
    of_both = ["close"]  # a function and a method, which are not the same
    assert sorted(documented_names()) == sorted([*shown_names(), *of_both])


def test_dir_shows_the_contract_and_no_internals():
    shown = {*dir(transfer_queue), *shown_names()}
    assert shown >= {"save_checkpoint", "kv_retrieve_keys"}
    assert shown.isdisjoint({"CapacityError", "consumed_by", "AsyncTransferQueueClient", "begin_checkpoint"})
    assert len([name for name in dir(transfer_queue) if not name.startswith("_")]) < 60


@pytest.mark.parametrize("name", ["CapacityError", "consumed_by", "AsyncTransferQueueClient"])
def test_a_name_that_is_not_shown_works(name):
    assert getattr(transfer_queue, name) is not None


@pytest.mark.parametrize("name", ["begin_checkpoint", "async_load_samples", "await_ready"])
def test_a_method_that_is_not_shown_works(name):
    assert name not in shown_names()
    assert callable(getattr(transfer_queue.TransferQueueClient, name))


def test_the_version_is_known_without_an_installation():
    """`__version__` is defined in the package, and pyproject.toml reads it there: a source tree needs no metadata."""
    root = Path(transfer_queue.__file__).resolve().parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import transfer_queue; print(transfer_queue.__version__)"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == transfer_queue.__version__
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8")
    assert 'version = { attr = "transfer_queue.__version__" }' in text


def test_there_is_no_metrics_endpoint_and_no_page_without_a_system(tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(tmp_path))
    assert transfer_queue.get_metrics_endpoint() is None
    assert transfer_queue.get_live_address() is None


def test_replacing_a_name(monkeypatch):
    """Code sets names and puts them back."""
    original = transfer_queue.BatchMeta
    with monkeypatch.context() as patch:
        patch.setattr(transfer_queue, "BatchMeta", 5)
        assert transfer_queue.BatchMeta == 5
    assert transfer_queue.BatchMeta is original
