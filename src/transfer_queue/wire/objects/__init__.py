"""Encodes Python objects as bytes and decodes them."""
