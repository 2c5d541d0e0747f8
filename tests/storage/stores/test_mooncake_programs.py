"""The programs of Mooncake's library are found next to its module, whether that is a file or a package of its own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from transfer_queue.storage.stores.mooncake_server import folder_of_programs


@pytest.mark.parametrize("store", ["store.py", "store/__init__.py"])  # of 0.3.13, and of 0.3.14
def test_the_folder_of_the_programs(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "library_of_stores"
    (package / store).parent.mkdir(parents=True, exist_ok=True)
    for file in (package / "__init__.py", package / store):
        file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("library_of_stores")]:
        monkeypatch.delitem(sys.modules, name)  # of the other case
    assert folder_of_programs(importlib.import_module("library_of_stores.store")) == package
