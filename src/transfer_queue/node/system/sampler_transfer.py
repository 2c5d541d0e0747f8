"""Carries a user's sampler object from the process that starts a system into its controller.

The sampler is pickled and sent over the launcher's private pipe, never over the network. Objects that a script defines
belong to the module `__main__`, which is another module in the controller. So the controller runs the script again
under the name `__mp_main__`, as multiprocessing does for spawned processes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from transfer_queue.errors import StartError

_loading = False
"""Whether this process is running its starter's script to find a sampler. It must not start systems then."""


class PickledSampler(msgspec.Struct, frozen=True):
    """A pickled sampler, or a pickled class of a sampler."""

    pickled: bytes
    path: list[str]
    """The starter's sys.path."""
    main: dict[str, str]
    """Where the starter's `__main__` comes from: {"init_main_from_name" | "init_main_from_path": ...}.

    Empty if the pickle does not need it.
    """


def dump(sampler: object, alone: bool = False) -> PickledSampler:
    """Pickle a sampler. Raises StartError if it cannot be pickled.

    If `alone` is set, the process that unpickles it does not have this process's script, so objects of the script are
    pickled by value.
    """
    main = {} if alone else _main()
    try:
        pickled = pickle.dumps(sampler)
        # a class of an interactive session is pickled by a name that no other process knows
        by_value = b"__main__" in pickled and not main
    except Exception as error:
        pickled = _by_value(sampler, error)
        main = {}
    else:
        if by_value:
            pickled = _by_value(sampler, None)
    return PickledSampler(pickled, [entry for entry in sys.path if entry], main if b"__main__" in pickled else {})


def dump_all(samplers: Mapping[str, object], alone: bool = False) -> dict[str, PickledSampler]:
    """Pickle those of these samplers that are not pickled yet. See `dump`."""
    return {
        name: sampler if isinstance(sampler, PickledSampler) else dump(sampler, alone)
        for name, sampler in samplers.items()
    }


def _by_value(sampler: object, cause: Exception | None) -> bytes:
    try:
        dumps = importlib.import_module("cloudpickle").dumps
        return bytes(dumps(sampler))
    except Exception as error:
        raise StartError(
            f"the sampler {sampler!r} cannot be sent to the controller ({cause or error}); define its class at the top "
            "level of a module that can be imported, and keep what cannot be pickled out of it"
        ) from (cause or error)


def _main() -> dict[str, str]:
    """Return how another process can import this one's `__main__`, as `multiprocessing.spawn.get_preparation_data`."""
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        return {}
    return {"init_main_from_path": os.path.abspath(file)}


def load(sampler: PickledSampler) -> Any:
    """Return the sampler, in the controller. Raises any error of the user's code."""
    global _loading
    # appended, so that the starter's entries do not shadow what this process imports
    sys.path += [entry for entry in sampler.path if entry not in sys.path]
    _loading = True
    try:
        if sampler.main:
            from multiprocessing import spawn  # imported here: with subprocess it takes a megabyte of each server

            spawn.prepare(dict(sampler.main))
        return pickle.loads(sampler.pickled)
    finally:
        _loading = False


def refuse_while_loading() -> None:
    """Raise StartError if this process runs its starter's script only to find a sampler in it."""
    if _loading:
        raise StartError(
            "transfer_queue.init() was called while the controller imports this script to find its sampler; put the "
            "script's work under `if __name__ == '__main__':`, or define the sampler in a module of its own"
        )
