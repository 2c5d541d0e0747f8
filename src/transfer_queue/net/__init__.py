"""Sockets: the servers' loop, the handshake, and the clients' two drivers."""
