"""Addresses of hosts, over IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

ANY = {"0.0.0.0": ["192.0.2.1"], "::": ["2001:db8::1", "192.0.2.1"]}
"""An address that stands for all of this machine -> hosts to which a route leads if this machine has a network.

The hosts are those that RFC 5737 and RFC 3849 reserve for documentation; nothing is sent to them.
"""


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return the families and socket addresses of a host name or address, IPv4 first.

    Raises:
        OSError: The name is unknown.
    """
    pairs = [(family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return sorted(pairs, key=lambda each: each[0] != socket.AF_INET)


def source_address(host: str, port: int = 9) -> str | None:
    """Return the address of this machine from which it reaches a host; None if no route leads there."""
    with contextlib.suppress(OSError):
        for family, address in resolve(host, port):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def public_host(host: str) -> str:
    """Return the host under which other machines reach a server, as it is written in a URL.

    Args:
        host: The host on which the server listens. If it stands for all addresses of this machine, an address from
            which this machine reaches others is returned, or one of its name.
    """
    if host in ANY:
        host = next(filter(None, map(source_address, ANY[host])), None) or _address_of_name(host)
    return f"[{host}]" if ":" in host else host


def _address_of_name(host: str) -> str:
    """Return an address of this machine's name that other machines may reach; the loopback address if it has none."""
    with contextlib.suppress(OSError):
        for family, (address, *_) in resolve(socket.gethostname(), 0):
            is_served = host == "::" or family == socket.AF_INET
            if is_served and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return str(address)
    return "::1" if host == "::" else "127.0.0.1"
