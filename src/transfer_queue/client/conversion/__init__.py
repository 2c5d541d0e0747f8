"""Converts the arguments of users for requests, and replies to the results of operations."""
