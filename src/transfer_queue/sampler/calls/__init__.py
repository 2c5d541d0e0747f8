"""Calls of a user's sampler: their messages, their execution, and what the sampler reads during a call."""
