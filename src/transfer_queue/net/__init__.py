"""The network: frames, handshake, TLS, the loop of the servers, and the drivers of the clients."""
