"""Writes values into storage and reads them."""
