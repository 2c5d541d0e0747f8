"""How a user's sampler object gets from the process that starts a system into its controller.

It is pickled and goes over the launcher's private pipe, never over the network. What is defined in a
script lives in a module called `__main__`, which in the controller is something else: there the script is
run once more under the name `__mp_main__`, as multiprocessing does for spawned processes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any

import msgspec

from transfer_queue.errors import StartError

# Whether this process is running its starter's script to find a sampler: it must not start systems then.
_loading = False


class PickledSampler(msgspec.Struct, frozen=True):
    """A pickled sampler, or class of one.

    path: the starter's sys.path. main: what its `__main__` was, as `{"init_main_from_name" | "init_main_from_path":
    ...}`, empty where the pickle does not need it.
    """

    pickled: bytes
    path: list[str]
    main: dict[str, str]


def dump(sampler: object, alone: bool = False) -> PickledSampler:
    """The sampler, ready to travel. StartError, saying what to do, if it cannot be pickled.

    alone: this process's script is not there where it is unpickled; what is defined in it travels by value.
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
    """How another process can make this one's `__main__`; as `multiprocessing.spawn.get_preparation_data` sees it."""
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        return {}
    return {"init_main_from_path": os.path.abspath(file)}


def load(sampler: PickledSampler) -> Any:
    """The sampler, in the controller. Raises whatever the user's code raises."""
    global _loading
    # behind our own entries: the starter's must not shadow what this process imports
    sys.path += [entry for entry in sampler.path if entry not in sys.path]
    _loading = True
    try:
        if sampler.main:
            from multiprocessing import spawn  # with subprocess a megabyte of each server

            spawn.prepare(dict(sampler.main))
        return pickle.loads(sampler.pickled)
    finally:
        _loading = False


def refuse_while_loading() -> None:
    """StartError if this process runs its starter's script only to find a sampler in it."""
    if _loading:
        raise StartError(
            "transfer_queue.init() was called while the controller imports this script to find its sampler; put the "
            "script's work under `if __name__ == '__main__':`, or define the sampler in a module of its own"
        )
