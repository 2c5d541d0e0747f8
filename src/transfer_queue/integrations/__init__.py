"""Integrations with trainers. Each is imported only where it is used."""
