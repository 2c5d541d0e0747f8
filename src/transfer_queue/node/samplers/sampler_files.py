"""The folder through which a sampler comes to a system that runs already, and where its controller finds it again.

A request names the file and brings no code. Only the system's user can write there: the folder is private.
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
    """Samplers in the folder of a system. loading: how the controller makes them."""

    def __init__(self, folder: Path, loading: SamplerLoading = INLINE) -> None:
        self._folder = folder
        self._loading = loading

    def leave(self, sampler: PickledSampler) -> str:
        """Puts a sampler there for the controller; the name to tell it. OSError."""
        name = uuid.uuid4().hex
        with open(self._folder / name, "xb", opener=no_link) as file:
            file.write(msgspec.msgpack.encode(sampler))
        return name

    def take(self, name: str) -> AnyMade:
        """The sampler that somebody has left there, which becomes the current one. Raises whatever its code raises."""
        if not re.fullmatch("[0-9a-f]{32}", name):
            raise InvalidArgumentError(f"{name[:80]!r} is no name of a sampler's file, which has 32 hex digits")
        path = self._folder / name
        try:
            sampler = self._made(path)
        except FileNotFoundError:
            raise InvalidArgumentError(f"no sampler is in {path}") from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        path.replace(self._folder / _CURRENT)
        return sampler

    def current(self) -> AnyMade | None:
        """The sampler that was taken last; None where none was since the system has started."""
        try:
            return self._made(self._folder / _CURRENT)
        except FileNotFoundError:
            return None

    def _made(self, path: Path) -> AnyMade:
        with open(path, "rb", opener=no_link) as file:
            content = file.read()
        try:
            pickled = msgspec.msgpack.decode(content, type=PickledSampler)
        except UNREADABLE as error:
            raise SamplerError(f"{path} does not contain a sampler: {error}") from error
        return self._loading.from_pickle(pickled)
