"""The Ray runtime: an actor with a known name holds the system, and every process of the cluster finds it there.

Ray is imported at its first use. The servers import no module of this folder.
"""
