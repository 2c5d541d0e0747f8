"""The folder through which a client sends a sampler to a running system, and where a restarted controller finds it.

A request contains the name of the file and no code. Only the system's user can write there: the folder is private.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import msgspec

from transfer_queue.errors import InvalidArgumentError, SamplerError
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.node.samplers.sampler_loading import INLINE, AnyMade, SamplerLoading
from transfer_queue.node.system.paths import no_link
from transfer_queue.node.system.sampler_transfer import PickledSampler

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
