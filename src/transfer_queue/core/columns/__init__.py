"""Columns of numbers and values: how tables declare, save and restore them."""
