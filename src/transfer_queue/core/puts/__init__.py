"""Requests that add, replace, clear or drop samples."""
