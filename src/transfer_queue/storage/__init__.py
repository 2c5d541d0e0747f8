"""Where bytes are stored: arenas, their extents and writers, and the storage unit that leases them."""
