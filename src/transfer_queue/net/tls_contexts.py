"""TLS where a system asks for it. Most need none, and `ssl` is slow to import: it is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


def client_context(files: Mapping[str, str] | None) -> ssl.SSLContext | None:
    """For who connects, see `tls.contexts`; None without files."""
    if files is None:
        return None
    from transfer_queue.net.tls import contexts

    made = contexts(files)
    return None if made is None else made.client


def server_context(files: Mapping[str, str] | None) -> ssl.SSLContext | None:
    """For who listens, see `tls.contexts`; None without files."""
    if files is None:
        return None
    from transfer_queue.net.tls import contexts

    made = contexts(files)
    return None if made is None else made.server
