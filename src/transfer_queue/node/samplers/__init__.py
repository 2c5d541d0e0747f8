"""The processes of users' samplers."""
