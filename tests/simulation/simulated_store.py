"""An external store of a simulated cluster: two servers that share the blocks, and fail in the middle of a put or get.

A server that is killed takes its blocks with it. The store as a whole works while one of them runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from transfer_queue.errors import ConnectionLostError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store, StoreAddress

KIND = f"{__name__}:SimulatedStore"
SERVERS = 2


class StoreWorld:
    """The servers of one store.

    up: Whether each server runs.
    lives: How often each server was started.
    blocks: Name -> the server that has the block, and its content.
    fails_at: What the next "write" or "read" ends in the middle of: a server dies then.
    on_killed: Called with the number of a server that has died.
    """

    worlds: ClassVar[dict[str, StoreWorld]] = {}

    def __init__(self, name: str, draw: random.Random) -> None:
        self.name = name
        self.draw = draw
        self.up = [True] * SERVERS
        self.lives = [1] * SERVERS
        self.blocks: dict[str, tuple[int, Bytes]] = {}
        self.fails_at: str | None = None
        self.losses = 0
        self.on_killed: Callable[[int], object] = lambda server: None
        StoreWorld.worlds[name] = self

    @property
    def address(self) -> StoreAddress:
        """The address of the store."""
        return StoreAddress(KIND, {"world": self.name})

    def close(self) -> None:
        """Forget the store."""
        del StoreWorld.worlds[self.name]

    def kill(self, server: int) -> None:
        """End a server, with its blocks."""
        if self.up[server]:
            self.up[server] = False
            self.blocks = {key: block for key, block in self.blocks.items() if block[0] != server}
            self.on_killed(server)

    def restart(self, server: int) -> None:
        """Start a server, which has no block."""
        if not self.up[server]:
            self.up[server] = True
            self.lives[server] += 1

    def lose_some(self) -> None:
        """Lose some blocks, as a store that evicts values and says so."""
        self.losses += 1
        for key in self.draw.sample(sorted(self.blocks), len(self.blocks) // 2):
            del self.blocks[key]

    def servers(self) -> list[int]:
        """The servers that run. Raises ConnectionLostError if none does."""
        found = [server for server, up in enumerate(self.up) if up]
        if not found:
            raise ConnectionLostError("no server of the simulated store runs; wait for its restart")
        return found

    def fails(self, at: str) -> int | None:
        """Whether a server dies in the middle of this call: which one."""
        if self.fails_at != at:
            return None
        self.fails_at = None
        return self.draw.choice(self.servers())


class SimulatedStore(Store):
    """A connection to a `StoreWorld`."""

    def __init__(self, world: str) -> None:
        self._world = StoreWorld.worlds[world]

    def write(self, key: str, data: Bytes, within: float) -> None:
        """See `Store.write`. If a server dies, the block may be on it, on the other one, or on none."""
        world = self._world
        to, dying = world.draw.choice(world.servers()), world.fails("write")
        if dying is None:
            world.blocks[key] = to, data.copy()
            return
        if world.draw.random() < 0.7:
            world.blocks[key] = to, data.copy()
        world.kill(dying)
        if key not in world.blocks or world.draw.random() < 0.5:  # in the other half of the cases the reply arrived
            raise ConnectionLostError("a server of the simulated store died in the middle of a put; try again")

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        """See `Store.read`. What a dead server had is missing, also if a part of it was read before."""
        world = self._world
        world.servers()
        dying = world.fails("read")
        missing: dict[str, None] = {}
        cut = world.draw.randint(0, len(pieces)) if dying is not None else -1
        for number, (key, start, length, at) in enumerate(pieces):
            if number == cut and dying is not None:
                world.kill(dying)
            found = world.blocks.get(key)
            if found is None or start + length > len(found[1]):
                missing[key] = None
                into[at : at + length] = 0x5A  # bytes that belong to no value
            else:
                into[at : at + length] = found[1][start : start + length]
        if dying is not None:
            world.kill(dying)
        return list(missing)

    def remove(self, keys: Sequence[str]) -> None:
        """See `Store.remove`."""
        self._world.servers()
        for key in keys:
            self._world.blocks.pop(key, None)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """See `Store.missing`."""
        self._world.servers()
        return [key for key in keys if key not in self._world.blocks]

    def life(self) -> str:
        """See `Store.life`: changes with losses that no end of a server shows."""
        return str(self._world.losses)
