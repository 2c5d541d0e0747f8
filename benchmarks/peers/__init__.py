"""Programs that measure other systems, each run in an environment of its own (`tools/make_peers`)."""
