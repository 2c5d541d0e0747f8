"""Divides lengths into parts of nearly equal load, and packs them into few bins under a cap of tokens.

This package does not depend on samples, tags or ranks: it takes lengths and returns lists of positions. All results are
deterministic.

- `balance`: division into a given number of parts, with equal or free counts, any cost of a length, a cap of tokens.
- `pack`: packing into as few bins as a cap of tokens needs.
- `linear`, `quadratic`: costs of a length. `imbalance`: the quality of a division.
- `get_seqlen_balanced_partitions`, `karmarkar_karp`: the refined and the plain method under their usual names.
"""

from transfer_queue.sampler.balance.api import balance, get_seqlen_balanced_partitions, imbalance, karmarkar_karp, pack
from transfer_queue.sampler.balance.validation import Cost, Quadratic, linear, quadratic

__all__ = [
    "Cost",
    "Quadratic",
    "balance",
    "get_seqlen_balanced_partitions",
    "imbalance",
    "karmarkar_karp",
    "linear",
    "pack",
    "quadratic",
]
