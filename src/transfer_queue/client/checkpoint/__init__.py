"""Writes and reads the files of a checkpoint."""
