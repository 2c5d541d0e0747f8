"""Starts, finds and stops a system on this machine, and runs its processes."""
