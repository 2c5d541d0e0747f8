"""The tables of a partition and of the system: rows, blocks, groups, leases and what is remembered of them."""
