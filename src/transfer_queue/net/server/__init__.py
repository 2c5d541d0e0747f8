"""The server's side of the network: one selector loop and its connections."""
