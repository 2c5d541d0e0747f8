"""The process of the controller."""
