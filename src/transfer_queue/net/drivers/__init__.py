"""Drivers of the client's operations: in the calling thread, in an event loop, in threads beside one."""
