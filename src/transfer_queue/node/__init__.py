"""A system on this machine: its folder, its processes, and how it is started, found and ended."""
