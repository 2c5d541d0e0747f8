"""The state of the controller as data: how records change it, and how it is saved, restored and checked."""
