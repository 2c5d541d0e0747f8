"""Blocks: encode columns into them, and gather rows out of them."""
