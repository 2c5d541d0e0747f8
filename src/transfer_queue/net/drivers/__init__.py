"""Drivers run the operations of a client: in the calling thread, in an event loop, or in threads beside a loop."""
