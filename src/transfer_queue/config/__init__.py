"""The configuration: settings with defaults and constraints, reading of a caller's configuration, and environment."""
