"""Chooses the sampler of a claim, and makes the calls of users' samplers."""
