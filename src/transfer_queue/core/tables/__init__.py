"""The tables of a partition and of the system: rows, fields, groups, leases and what is remembered of them."""
