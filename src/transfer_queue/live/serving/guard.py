"""Who may see the page: an ASGI layer that checks host, origin, method and cookie, and adds the security headers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response

from transfer_queue.config.validators import is_loopback
from transfer_queue.live.serving.web import problem
from transfer_queue.utils.host_addresses import ANY

TOKEN_BYTES = 32
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_token() -> str:
    """Return a secret of 32 random bytes for the address of one page. It opens nothing but this page."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Guard:
    """Passes on the requests that may be answered, and refuses all others.

    Args:
        app: The application.
        token: The secret of the address.
        host: The host on which the server listens.
        secure: Whether the server uses TLS.
    """

    def __init__(self, app: App, token: str, host: str, *, secure: bool = False) -> None:
        self._app = app
        self._token = token.encode()
        self._secure = secure
        self._hosts = {host.lower(), *(LOOPBACK if is_loopback(host) or host in ANY else ())}
        self._any_address = host in ANY
        digest = hashlib.sha256(self._token).hexdigest()
        # Browsers share cookies between the ports of a host, so that each page has a name of its own.
        self._name = f"tq_live_{digest[:12]}"
        self._cookie = hmac.new(self._token, b"cookie", "sha256").hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket is closed without an answer

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        answer: App | None = self._refusal(scope)
        given = self._token_of(scope) if answer is None else None
        if given is not None and scope["path"] == "/":
            answer = self._trade(given)
        elif answer is None:
            answer = self._app if self._has_cookie(scope) else _unknown(scope)
        await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is refused even with the cookie; None if it is not refused."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = _host_of(hosts[0]) if len(hosts) == 1 else None
        if host is None or not self._is_own(host):
            message = "this page is not served under this name; open the address that `tq live` has printed"
            return problem(421, message)
        if scope["method"] != "GET":
            return problem(405, "only GET is answered", allow="GET")
        own = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
        site = headers.get("sec-fetch-site", "none").lower()
        is_foreign = site not in ("none", "same-origin") and scope["path"] != "/"
        if is_foreign or any(origin.lower() not in own for origin in headers.getlist("origin")):
            return problem(403, "a page of another origin may not read this one")
        return None

    def _is_own(self, host: str) -> bool:
        return host in self._hosts or (self._any_address and _is_address(host))

    def _token_of(self, scope: Scope) -> str | None:
        query = scope.get("query_string", b"").decode("latin-1")
        try:
            return dict(parse_qsl(query, max_num_fields=16)).get("token")
        except ValueError:
            return None

    def _trade(self, given: str) -> Response:
        """Exchange the token for a cookie, and redirect to the address without it."""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            return problem(401, "the token is wrong; open the address that `tq live` printed")
        cookie = f"{self._name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict" + (
            "; Secure" if self._secure else ""
        )
        headers = {"location": "/", "set-cookie": cookie, "cache-control": "no-store"}
        return Response(b"", 303, headers, "text/plain")

    def _has_cookie(self, scope: Scope) -> bool:
        for line in Headers(scope=scope).getlist("cookie"):
            for part in line.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self._name and hmac.compare_digest(value.encode("latin-1"), self._cookie.encode()):
                    return True
        return False


def _host_of(value: str) -> str | None:
    """Return the name in a Host header without the port, which another one replaces behind `ssh -L`."""
    try:
        parts = urlsplit(f"//{value.encode('ascii').decode()}")
        _ = parts.port
    except ValueError:
        return None
    return None if parts.hostname is None or parts.path or parts.username is not None else parts.hostname.lower()


def _is_address(host: str) -> bool:
    """Return whether a host is an address. An attacker could let a name point to this machine."""
    import ipaddress

    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _unknown(scope: Scope) -> Response:
    """Return the answer to a request without the cookie."""
    advice = "open the address with the token that `tq live` has printed"
    if scope["path"] != "/":
        return problem(401, advice)
    # A cookie of SameSite=Strict is not sent on the way from a page of another site, but it is from this page.
    text = (
        f'<!doctype html><meta charset="utf-8"><title>transfer_queue</title><p>Please {advice}.<p><a href="/">I did</a>'
    )
    return Response(text, 401, {"cache-control": "no-store"}, "text/html")
