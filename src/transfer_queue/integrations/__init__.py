"""Adapters for trainers: each subpackage is imported only where it is used, and needs the extra of its name."""
