"""Which rows a task could be dealt now."""
