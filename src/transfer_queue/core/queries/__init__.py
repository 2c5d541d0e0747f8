"""Requests that read the state."""
