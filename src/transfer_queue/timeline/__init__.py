"""Evaluates the timeline of the controller: which rank waited or worked when, and what slows a training."""
