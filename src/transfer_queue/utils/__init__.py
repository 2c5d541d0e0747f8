"""Import paths that callers of this package rely on; nothing else lives here."""
