"""Who may see the page, what it refuses, and that no request makes it fail."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transfer_queue as tq
from tests.live.live_system import Page, client_of, served
from transfer_queue.config.settings import Settings
from transfer_queue.live.serving.guard import new_token
from transfer_queue.live.serving.live_server import LiveOptions, address_of

PATHS = ["/", "/static/main.js", "/api/live", "/api/matrix", "/api/sample", "/api/lanes", "/api/explain", "/elsewhere"]
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


@pytest.fixture
def stranger(page: Page) -> Any:
    with client_of(page.base) as client:
        yield client


def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(page: Page, stranger: httpx.Client) -> None:
    found = stranger.get(page.address)
    assert (found.status_code, found.headers["location"], found.content) == (303, "/", b"")
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    token = page.address.partition("token=")[2]
    assert len(token) >= 43
    assert token not in cookie
    assert stranger.get("/").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_without_the_cookie_nothing_is_served(stranger: httpx.Client, path: str) -> None:
    found = stranger.get(path)
    assert found.status_code == 401
    assert "transfer_queue" not in found.text.replace("<title>transfer_queue</title>", "")
    assert stranger.get(path, headers={"cookie": "tq_live=1; tq_live_000000000000=x"}).status_code == 401


@pytest.mark.parametrize("token", ["", "wrong", "x" * 43, "ä", "%00"])
def test_a_wrong_token_is_refused(stranger: httpx.Client, token: str) -> None:
    found = stranger.get(f"/?token={quote(token)}")
    assert found.status_code == 401
    assert "set-cookie" not in found.headers


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_security_headers(page: Page, stranger: httpx.Client, path: str) -> None:
    with page.browser() as browser:
        with browser.stream("GET", path) as response:
            answers = [response]
        answers += [stranger.get(path), browser.post(path), browser.get(path, headers={"host": "evil.example"})]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith(POLICY)
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "a b", "127.0.0.1@evil.example", "[::1"]
)
def test_another_name_of_this_machine_is_refused(page: Page, host: str) -> None:
    with page.browser() as browser:
        assert browser.get("/", headers={"host": host}).status_code in (400, 421)
        assert browser.get("/api/sample", headers={"host": host}).status_code in (400, 421)


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:1"])
def test_a_forwarded_port_is_accepted(page: Page, host: str) -> None:
    with page.browser() as browser:
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        assert httpx.get(page.base, headers={"host": host, "cookie": cookie}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
    ],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused(page: Page, headers: dict[str, str]) -> None:
    with page.browser() as browser:
        assert browser.get("/api/explain?partition=p&index=1", headers=headers).status_code == 403
        own = {"origin": page.base, "sec-fetch-site": "same-origin"}
        assert browser.get("/api/explain?partition=p&index=1", headers=own).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
def test_only_get_is_answered(page: Page, method: str) -> None:
    with page.browser() as browser:
        for path in PATHS:
            assert browser.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["..%2fpayload.py", "../payload.py", "%2e%2e/payload.py", "/etc/passwd", "x\0", "%00", "vendor", "__init__.py"],
)
def test_only_the_files_of_the_page_are_served(page: Page, path: str) -> None:
    with page.browser() as browser, contextlib.suppress(httpx.InvalidURL):
        assert browser.get(f"/static/{path}").status_code in (401, 404)


NAMES = st.sampled_from(["partition", "index", "key", "from", "to", "columns", "task", "count", "after", "token", "x"])
VALUES = st.one_of(
    st.sampled_from(
        ["train_0", "0", "-1", "1e9", "٣", "9" * 30, "18446744073709551616", "%", "%ff", "\0", "x" * 3000, ""]
    ),
    st.text(max_size=20),
    st.integers().map(str),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS[3:7]), query=st.lists(st.tuples(NAMES, VALUES), max_size=5), raw=st.booleans())
def test_no_query_makes_the_server_fail(hostile: httpx.Client, path: str, query: list[Any], raw: bool) -> None:
    parts = [f"{name}={quote(value.encode('utf-8', 'replace'), safe='%' if raw else '')}" for name, value in query]
    found = hostile.get(f"{path}?{'&'.join(parts)}")
    assert found.status_code in (200, 400, 404), (found.status_code, found.text)
    if found.status_code != 200:
        assert found.json()["error"]


@pytest.fixture(scope="module")
def hostile(page: Page) -> Any:
    with page.browser() as browser:
        yield browser


def test_hostile_names_are_data(page: Page, client: tq.TransferQueueClient) -> None:
    name = "<script>alert(1)</script>\"'&\n\u2028"
    client.kv_put("</script>", name, {"<b>": "x"}, tag={"<i>": "</i>"})
    view = page.view_when(lambda view: any(each["name"] == name for each in view.get("partitions", {}).get("list", [])))
    assert view["partitions"]["count"] >= 2
    with page.browser() as browser:
        found = browser.get("/api/sample", params={"partition": name, "key": "</script>"})
        assert found.headers["content-type"] == "application/json"
        assert found.json()["partition"] == name
        assert browser.get("/api/matrix", params={"partition": name}).json()["rows"] == 1
    client.clear_partition(name)


def test_an_address_that_others_reach_needs_tls_or_consent() -> None:
    for host in ("0.0.0.0", "10.1.2.3", "example.org", "::"):
        options = LiveOptions("/tmp/x", "token", host)
        with pytest.raises(tq.InvalidArgumentError, match=re.escape(f"live.host is {host}")):
            options.check()
        LiveOptions("/tmp/x", "token", host, insecure=True).check()
        with pytest.raises(tq.InvalidArgumentError, match=r"live\.host"):
            Settings.from_config({"live": {"enabled": True, "host": host}})
        Settings.from_config({"live": {"enabled": True, "host": host, "insecure": True}})
    LiveOptions("/tmp/x", "token", "localhost").check()
    files = {"certificate": "/c", "private_key": "/k", "authority": "/a"}
    secure = LiveOptions("/tmp/x", "secret", "10.1.2.3", tls=files)
    secure.check()
    assert address_of(secure, 80) == "https://10.1.2.3:80/?token=secret"
    assert not LiveOptions("/tmp/x", "secret", "127.0.0.1", tls=files).secure


def test_tokens_are_random() -> None:
    assert len({new_token() for _ in range(100)}) == 100


def test_a_websocket_is_not_answered(page: Page) -> None:
    with page.browser() as browser:
        headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        found = browser.get("/api/explain?partition=p", headers={**headers, "sec-websocket-key": "x" * 24})
    assert found.status_code == 200


def test_a_page_on_all_addresses_uses_tls_and_is_reached_by_addresses_only(client: tq.TransferQueueClient) -> None:
    folder = Path(__file__).parent.parent / "net" / "certificates"
    files = {"certificate": str(folder / "member.crt"), "private_key": str(folder / "member.key"), "authority": ""}
    with served(host="0.0.0.0", tls=files) as page:
        port = page.base.rpartition(":")[2]
        assert page.address.startswith("https://")
        with client_of(f"https://127.0.0.1:{port}") as browser:
            found = browser.get(f"/?token={page.address.partition('token=')[2]}")
            assert "Secure" in found.headers["set-cookie"]
            assert browser.get("/").status_code == 200
            assert browser.get("/", headers={"host": "10.0.0.1"}).status_code == 200
            assert browser.get("/", headers={"host": "evil.example"}).status_code == 421
