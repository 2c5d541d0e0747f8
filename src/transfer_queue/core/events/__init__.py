"""What goes into the core and what comes out: records of changes, and effects for the server."""
