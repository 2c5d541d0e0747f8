"""A browser for all tests of the live page, and a server whose answers each test decides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chromium import DESKTOP, Page, chromium
from tests.live.browser import invented
from tests.live.browser.canned_server import CannedServer, canned_server


@pytest.fixture(scope="session")
def tab() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.page()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """A tab that has requested nothing, reported nothing and keeps nothing of an earlier test."""
    tab.show_as(DESKTOP)
    tab.errors.clear()
    tab.requests.clear()
    yield tab
    tab.open("about:blank")


@pytest.fixture
def server() -> Iterator[CannedServer]:
    """A server of a system in which the reward is slow."""
    with canned_server() as server:
        server.full = invented.slow()
        server.matrices = invented.matrices()
        yield server
