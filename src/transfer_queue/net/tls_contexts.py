"""TLS contexts that import `ssl` only if a system uses TLS, because `ssl` is slow to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


def tls_context(files: Mapping[str, str] | None, *, server: bool) -> ssl.SSLContext | None:
    """Return the context of one side, see `tls.make_context`; None without files."""
    if files is None:
        return None
    from transfer_queue.net.tls import make_context

    return make_context(files, server=server)
