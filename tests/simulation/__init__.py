"""The fault simulation: runs of the whole system in one process, with faults drawn by a seed.

`chaos` is the command: `python -m tests.simulation.chaos --seed N`, in the root of a checkout.
"""
