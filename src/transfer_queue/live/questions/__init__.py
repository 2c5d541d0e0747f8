"""Answers the questions of the page about one partition or one sample."""
