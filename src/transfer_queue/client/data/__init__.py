"""How values get into storage and out of it."""
