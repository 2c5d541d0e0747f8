"""Where bytes live: arenas, their extents, who owns them, and the storage unit that leases them."""
