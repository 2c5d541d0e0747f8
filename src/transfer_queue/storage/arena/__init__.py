"""The arena of a storage unit: its memory, its leased parts and their writers, and access from other nodes."""
