"""Programs that measure other systems, each in its own environment (`tools/make_peers`)."""
