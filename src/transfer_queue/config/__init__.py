"""The configuration: the settings with their defaults and constraints, how a caller's conf is read, the environment."""
