"""Makes the controller's sampler: a built-in one in this process, a user's in a process of its own."""

from __future__ import annotations

import io
import pickle
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec

from transfer_queue.config.settings import Settings
from transfer_queue.errors import InvalidArgumentError, SamplerError
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.node.controller.sampler_host import SamplerHost
from transfer_queue.node.controller.sampler_process import LoadSampler
from transfer_queue.node.system.sampler_transfer import PickledSampler, load
from transfer_queue.private_files import no_link
from transfer_queue.sampler import BUILT_IN
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.factory import sampler_from
from transfer_queue.sampler.sampler_wrapper import built_in

AnyMade = Union[BaseSampler, SamplerHost]
OURS = "transfer_queue.sampler"


class _NotOurs(Exception):
    """A pickle needs the code of another package."""


class _OursAlone(pickle.Unpickler):
    """Loads instances and classes of the built-in samplers, and runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        if module != OURS and not module.startswith(f"{OURS}."):
            raise _NotOurs
        return super().find_class(module, name)


@dataclass(frozen=True)
class SamplerLoading:
    """How samplers are made."""

    isolated: bool
    """Whether a user's sampler gets a process of its own."""
    seconds: float
    """Time limit of one call."""
    start_seconds: float
    """Time limit to load a sampler."""
    allow_pickle: bool
    log: Path | None = None
    """The log file of the sampler's process. None: it writes to the stderr of this process."""

    @classmethod
    def create(cls, settings: Settings, log: Path) -> SamplerLoading:
        """Return the loading that the settings define."""
        isolated = settings.sampler_isolation == "process"
        return cls(isolated, settings.sampler_timeout, settings.start_timeout, settings.allow_pickle, log)

    def from_settings(self, settings: Settings, pickled: Mapping[str, PickledSampler], pattern: str) -> AnyMade:
        """Return a sampler of a system that starts. Raises the error that the user's code raises.

        Args:
            settings: The settings of the system.
            pickled: The samplers that the settings do not name, by pattern.
            pattern: Which of `settings.samplers` it is.
        """
        name, args = settings.samplers[pattern]
        if pattern in pickled:
            return self.from_pickle(pickled[pattern], args)
        if name is None:
            raise SamplerError("the settings do not name a sampler, and no object was passed; pass one to the launcher")
        if self.isolated and not _names_built_in_only(name, args):
            return self._start_isolated(None, name, args)
        return _make_sampler(name, args)

    def from_pickle(self, pickled: PickledSampler, args: dict[str, Any] | None = None) -> AnyMade:
        """Return a sampler that was sent as an object or a class. Raises the error that the user's code raises."""
        if self.isolated and _names_built_in_only(None, args or {}):
            try:
                made = _make_sampler(_OursAlone(io.BytesIO(pickled.pickled)).load(), args or {})
                if built_in(made):
                    return made
            except _NotOurs:
                pass
        if self.isolated:
            return self._start_isolated(pickled, None, args or {})
        return _make_sampler(load(pickled), args or {})

    def _start_isolated(self, pickled: PickledSampler | None, name: str | None, args: dict[str, Any]) -> AnyMade:
        log = None if self.log is None else str(self.log)
        order = LoadSampler(pickled, name, args, None, self.allow_pickle, log)
        host = SamplerHost(order, self.seconds, self.start_seconds)
        if not host.facts.built_in:
            return host
        host.stop()
        return _make_sampler(name if pickled is None else load(pickled), args)


INLINE = SamplerLoading(isolated=False, seconds=30.0, start_seconds=30.0, allow_pickle=True)


def _names_built_in_only(name: str | None, args: Mapping[str, Any]) -> bool:
    """Whether all names in these settings are names of built-in samplers."""
    inner = args.get("inner")
    if isinstance(inner, Mapping):
        if not _names_built_in_only(str(inner.get("sampler")), inner.get("sampler_args") or {}):
            return False
    elif inner is not None and inner not in BUILT_IN:
        return False
    return name is None or name in BUILT_IN


def _make_sampler(value: object, args: dict[str, Any]) -> BaseSampler:
    made = sampler_from(value, args)
    assert isinstance(made, BaseSampler)  # sampler_from raises otherwise
    return made


# ---------------------------------------------------------------- samplers that clients send
# The folder through which a client sends a sampler to a running system, and where a restarted controller finds it.
#
# A request contains the name of the file and no code. Only the system's user can write there: the folder is private.


_CURRENT = "current"


class SamplerFiles:
    """The samplers in a system's folder. `loading` says how the controller makes them."""

    def __init__(self, folder: Path, loading: SamplerLoading = INLINE) -> None:
        self._folder = folder
        self._loading = loading

    def write_sampler(self, sampler: PickledSampler) -> str:
        """Write a sampler for the controller. Returns the name for the request. Raises OSError if that fails."""
        name = uuid.uuid4().hex
        with open(self._folder / name, "xb", opener=no_link) as file:
            file.write(msgspec.msgpack.encode(sampler))
        return name

    def load_sampler(self, name: str) -> AnyMade:
        """Load the sampler of this name and make it the current one. Raises any error of its code."""
        if not re.fullmatch("[0-9a-f]{32}", name):
            raise InvalidArgumentError(f"the name of a sampler's file must be 32 hex digits, got {name[:80]!r}")
        path = self._folder / name
        try:
            sampler = self._load_file(path)
        except FileNotFoundError:
            raise InvalidArgumentError(
                f"the file {path} of the sampler does not exist; send the sampler again"
            ) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        path.replace(self._folder / _CURRENT)
        return sampler

    def current(self) -> AnyMade | None:
        """Return the sampler that was taken last; None if none was taken since the system started."""
        try:
            return self._load_file(self._folder / _CURRENT)
        except FileNotFoundError:
            return None

    def _load_file(self, path: Path) -> AnyMade:
        with open(path, "rb", opener=no_link) as file:
            content = file.read()
        try:
            pickled = msgspec.msgpack.decode(content, type=PickledSampler)
        except UNREADABLE as error:
            raise SamplerError(f"{path} does not contain a sampler: {error}") from error
        return self._loading.from_pickle(pickled)
