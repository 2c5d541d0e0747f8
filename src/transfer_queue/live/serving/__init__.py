"""Serves the page: who may see it, the streams of the viewers, files and answers."""
