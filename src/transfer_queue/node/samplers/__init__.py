"""The processes in which users' samplers run."""
