"""A storage unit: its decisions, without sockets or files."""
