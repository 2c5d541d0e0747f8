"""What every handler of the core works with: clients' connections, waiting requests, what changed."""
