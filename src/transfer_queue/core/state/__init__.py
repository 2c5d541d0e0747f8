"""The state of the controller as data, and how it is saved and checked."""
