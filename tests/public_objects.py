"""The public classes, functions, methods and properties of the package, for the tests of their documentation."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transfer_queue import errors

MODULES: dict[str, list[str] | None] = {
    "transfer_queue": None,
    "transfer_queue.client": None,
    "transfer_queue.client.checkpoint.checkpoint_data": ["CheckpointReport"],
    "transfer_queue.controller": None,
    "transfer_queue.dataloader.streaming_dataset": None,
    "transfer_queue.dataloader.streaming_dataloader": ["StreamingDataLoader"],
    "transfer_queue.errors": [name for name in dir(errors) if name.endswith("Error")],
    "transfer_queue.interface": None,
    "transfer_queue.messages.reports.samples": ["SampleReport", "StuckReport"],
    "transfer_queue.messages.system": ["SystemStatus"],
    "transfer_queue.metadata": None,
    "transfer_queue.queues": None,
    "transfer_queue.sampler": None,
    "transfer_queue.sampler.balance": None,
    "transfer_queue.sampler.base": ["BaseSampler", "Deal", "RankConsistentSampler", "ReadyIndexes"],
    "transfer_queue.storage.stores.base": ["Piece", "Store", "StoreAddress", "Forks", "connect", "retry_attempt"],
    "transfer_queue.testing": None,
    "transfer_queue.testing.conformance": ["StoreConformance"],
    "transfer_queue.utils.logging_utils": ["get_logger"],
}
"""The modules of the public surface, each with its public names; None for `__all__`."""


@dataclass(frozen=True)
class PublicObject:
    """A documented object.

    Attributes:
        name: The qualified name, with the module in which the object is defined.
        module: The module in which it is defined.
        value: The class or function; of a property, the function that computes it.
        kind: "class", "function" or "property".
        owner: The class of a method or property.
    """

    name: str
    module: str
    value: Any
    kind: str
    owner: type | None = None

    @property
    def docstring(self) -> str:
        """The docstring without its indentation; "" if there is none."""
        return inspect.cleandoc(self.value.__doc__ or "")


def public_names(module: Any) -> list[str]:
    """Return the listed names of a module, its `__all__`, or the names without an underscore that it defines."""
    listed = MODULES[module.__name__] or getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def _members(owner: type) -> Iterator[PublicObject]:
    seen = set()
    for base in owner.__mro__:
        if not base.__module__.startswith("transfer_queue"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            kind = "function"
            if isinstance(value, property):
                value, kind = value.fget, "property"
            elif isinstance(value, cached_property):
                value, kind = value.func, "property"
            elif isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            if inspect.isfunction(value):
                yield PublicObject(f"{base.__module__}.{base.__name__}.{name}", base.__module__, value, kind, base)


def public_objects() -> dict[str, PublicObject]:
    """Return every public object by its name, each once."""
    found: dict[str, PublicObject] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("transfer_queue"):
                top = PublicObject(f"{value.__module__}.{value.__name__}", value.__module__, value, "class")
                found[top.name] = top
                found.update({each.name: each for each in _members(value)})
            elif inspect.isfunction(value):
                each = PublicObject(f"{value.__module__}.{value.__name__}", value.__module__, value, "function")
                found[each.name] = each
    return found
