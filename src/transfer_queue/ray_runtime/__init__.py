"""The Ray runtime: an actor by a known name holds the system, and every process of the cluster finds it there.

Ray is imported where it is used; nothing here is imported by the servers.
"""
