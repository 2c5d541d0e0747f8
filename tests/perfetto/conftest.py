"""The user interface of Perfetto, which starts once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.perfetto.perfetto_ui import PerfettoUi, perfetto_ui


@pytest.fixture(scope="session")
def ui() -> Iterator[PerfettoUi]:
    with perfetto_ui() as found:
        yield found
