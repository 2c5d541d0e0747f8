"""What of the controller's state is on disk."""
