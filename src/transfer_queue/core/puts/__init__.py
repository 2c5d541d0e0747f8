"""Requests that add, replace or end samples."""
