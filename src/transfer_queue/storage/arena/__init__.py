"""The arena of a node: its memory, who has leased which part, and access to it."""
