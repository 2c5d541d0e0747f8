"""TLS contexts that import `ssl` only if a system uses TLS, because `ssl` is slow to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


def client_context(files: Mapping[str, str] | None) -> ssl.SSLContext | None:
    """Return the context for processes that connect, see `tls.make_contexts`; None without files."""
    if files is None:
        return None
    from transfer_queue.net.tls import make_contexts

    made = make_contexts(files)
    return None if made is None else made.client


def server_context(files: Mapping[str, str] | None) -> ssl.SSLContext | None:
    """Return the context for processes that listen, see `tls.make_contexts`; None without files."""
    if files is None:
        return None
    from transfer_queue.net.tls import make_contexts

    made = make_contexts(files)
    return None if made is None else made.server
