"""Dividing lengths over parts of nearly equal load, and packing them into few bins under a cap of tokens.

Knows nothing of samples, tags or ranks: lengths come in, lists of positions come out. Everything is deterministic.

- `balance`: over a given number of parts; equal or free counts, any cost of a length, a cap of tokens for a part.
- `pack`: into as few parts as a cap of tokens needs.
- `linear`, `quadratic`: costs of a length. `imbalance`: how good a division is.
- `get_seqlen_balanced_partitions`, `karmarkar_karp`: the refined and the plain method under their usual names.

From lengths to lists: `checks` refuses bad input, `differencing` and `greedy` make starts, `refine` improves one by
exchanges, `spread` chooses among them; `caps` does it under a cap, `packing` finds how few parts do.
"""

from transfer_queue.sampler.balance.costs import Cost, Quadratic, linear, quadratic
from transfer_queue.sampler.balance.front import balance, get_seqlen_balanced_partitions, imbalance, karmarkar_karp
from transfer_queue.sampler.balance.packing import pack

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
