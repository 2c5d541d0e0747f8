"""A system on one node: its folder, locks and processes, and how it is started."""
