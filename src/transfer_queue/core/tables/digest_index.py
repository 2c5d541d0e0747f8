"""The index of hashes: where the blocks of a partition have the values with known digests.

A value is in it from the put that wrote it until its block is freed. It may outlive the rows that had it, if other rows
need the block. A digest that is written twice, because two clients did not know of each other, is listed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from transfer_queue.core.columns.schema import I8, Count, Persisted, array_of, list_form, tuple_form, value_of
from transfer_queue.messages.descriptors import DIGEST

Key = tuple[int, str]
"""The number of a partition, and a field."""
Place = tuple[int, int]
"""The number of a block, and the row in it."""


def _save(fields: dict[Key, dict[bytes, Place]]) -> list[tuple[int, str, np.ndarray, np.ndarray, np.ndarray]]:
    saved = []
    for (owner, name), known in fields.items():
        places = np.array(list(known.values()), "i8").reshape(-1, 2)
        digests = np.frombuffer(b"".join(known), "u1")
        saved.append((owner, name, places[:, 0].copy(), places[:, 1].astype("i4"), digests))
    return saved


def _load(saved: list[Any]) -> dict[Key, dict[bytes, Place]]:
    fields: dict[Key, dict[bytes, Place]] = {}
    for owner, name, blocks, slots, digests in saved:
        if len(digests) != DIGEST * len(blocks) or len(slots) != len(blocks):
            raise ValueError(f"the hashes of field {name!r} have columns of different lengths")
        cut = [digests[at : at + DIGEST].tobytes() for at in range(0, len(digests), DIGEST)]
        fields[owner, name] = dict(zip(cut, zip(blocks.tolist(), slots.tolist(), strict=True), strict=True))
    return fields


class DigestIndex(Persisted, bare=True):
    """The places of values by their digests, for each field of each partition."""

    fields: dict[Key, dict[bytes, Place]] = value_of(
        list_form(tuple_form((Count, str, I8, array_of("<i4"), array_of("|u1")))), dict, _save, _load
    )

    def __init__(self) -> None:
        super().__init__()
        self.of_block: dict[int, set[tuple[Key, bytes]]] = {}
        """Block -> what it has of `fields`. Derived."""

    def derive(self) -> None:
        """Compute what is derived from the columns."""
        self.of_block = {}
        for key, known in self.fields.items():
            for digest, (block, _) in known.items():
                self.of_block.setdefault(block, set()).add((key, digest))

    def find(self, owner: int, name: str, digests: Iterable[bytes]) -> list[Place | None]:
        """Return where the partition has values with these digests; None for an unknown one."""
        known = self.fields.get((owner, name), {})
        return [known.get(digest) for digest in digests]

    def add(self, owner: int, name: str, values: Mapping[bytes, Place]) -> None:
        """Add the values of a put. A digest that is known already stays where it is."""
        known = self.fields.setdefault((owner, name), {})
        for digest, place in values.items():
            if known.setdefault(digest, place) is place:
                self.of_block.setdefault(place[0], set()).add(((owner, name), digest))

    def forget_block(self, block: int) -> None:
        """Forget the values of a block that is freed."""
        for key, digest in self.of_block.pop(block, ()):
            known = self.fields[key]
            del known[digest]
            if not known:
                del self.fields[key]

    def forget_field(self, owner: int, name: str) -> None:
        """Forget the values of a field of which no row has a value any more."""
        for digest, (block, _) in self.fields.pop((owner, name), {}).items():
            self.of_block[block].remove(((owner, name), digest))
            if not self.of_block[block]:
                del self.of_block[block]

    def move(self, owner: int, name: str, moved: Mapping[Place, Place]) -> None:
        """Record that values of a field were copied to other places."""
        key = owner, name
        for block in {block for block, _ in moved} & self.of_block.keys():
            entries = self.of_block.pop(block)
            for entry in entries:
                place = self.fields[entry[0]][entry[1]]
                to = moved.get(place, place) if entry[0] == key else place
                self.fields[entry[0]][entry[1]] = to
                self.of_block.setdefault(to[0], set()).add(entry)

    def absorb(self, other: DigestIndex, owners: Mapping[int, int], shift: int) -> None:
        """Take over the values of another table, whose block numbers grow by `shift`."""
        for (owner, name), known in other.fields.items():
            values = {digest: (block + shift, slot) for digest, (block, slot) in known.items()}
            self.add(owners[owner], name, values)
