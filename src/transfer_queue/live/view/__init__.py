"""Makes views out of what was read: the parts that the page shows."""
