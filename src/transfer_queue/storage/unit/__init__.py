"""A storage unit: what it decides, without sockets or files."""
