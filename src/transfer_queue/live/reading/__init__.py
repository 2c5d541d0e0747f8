"""Reads one system after the other, as a client that reads and writes no samples."""
