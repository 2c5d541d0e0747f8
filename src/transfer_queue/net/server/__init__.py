"""The server's side of the network: a selector loop and its connections."""
