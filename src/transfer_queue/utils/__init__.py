"""Modules whose import paths callers of this package rely on; no other code belongs here."""
