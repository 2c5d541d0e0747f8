"""The tables of a partition and of the system.

- Rows, their tags, fields and groups, and what is derived from them: which rows a task could be dealt now.
- What tasks and clients hold of them: leases, locks, dealt batches, references; and what is remembered of changes.
- The blocks that contain the values: where they are, which rows need them, and which values are equal.
"""
