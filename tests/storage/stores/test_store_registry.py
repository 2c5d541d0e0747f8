"""Each built-in store has a class, options, and a server where the system starts one."""

from __future__ import annotations

import importlib

import pytest

from transfer_queue.config.store_options import STORE_OPTIONS
from transfer_queue.storage.stores.base import BUILT_IN, Store, has_server
from transfer_queue.storage.stores.store_server import StoreServer


def named(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_the_stores_with_options_are_those_with_a_class():
    assert set(BUILT_IN) == set(STORE_OPTIONS)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_paths_of_a_store_name_its_classes(name: str):
    found = named(BUILT_IN[name].path)
    assert isinstance(found, type)
    assert issubclass(found, Store)
    if BUILT_IN[name].server:
        server = named(BUILT_IN[name].server)
        assert isinstance(server, type)
        assert issubclass(server, StoreServer)


def test_the_system_starts_nothing_for_a_store_without_a_server():
    assert {name for name in BUILT_IN if has_server(name)} == {"MooncakeStore", "Yuanrong"}
    assert not has_server("my_package.my_store:MyStore")
    assert not has_server("SimpleStorage")
