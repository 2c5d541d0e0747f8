"""Blocks: encoding columns, and gathering rows."""
