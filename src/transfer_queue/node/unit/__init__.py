"""The process of a storage unit."""
