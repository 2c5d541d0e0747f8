"""The fault simulation with several controllers, each with its own partitions, journal and units (decision 0033).

A prototype: the package has one controller. `python -m tests.simulation.many_controllers --seeds 0..200
--controllers 1..4`, in the root of a checkout.
"""
