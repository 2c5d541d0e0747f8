"""The controller's state on disk."""
