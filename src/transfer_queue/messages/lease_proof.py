"""The proof that a storage unit has leased an extent to a client, which the client sends with what it publishes there.

Only the unit knows its leases, and only the controller knows what is published. The proof is a hash with the key of the
system, so the controller can check it without the unit, also while the unit is down and after a restart of either.
"""

from __future__ import annotations

import hashlib


def lease_proof(key: bytes, unit: int, writer: str, extent: int, begin: int, length: int, generation: int) -> int:
    """Return the proof of a lease.

    Args:
        key: The key of the system.
        unit: The number of the unit.
        writer: The owner of the writer slot (`messages.storage.OpenSlot.writer`).
        extent: The number of the extent.
        begin: The offset of its first byte.
        length: Its length in bytes.
        generation: Its generation.
    """
    lease = f"{unit} {extent} {begin} {length} {generation} {writer}"
    return int.from_bytes(hashlib.blake2b(lease.encode(), digest_size=8, key=key).digest(), "little") >> 1
