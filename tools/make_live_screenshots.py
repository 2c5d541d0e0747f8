"""Write the screenshots of the live page in docs/assets/live, from the invented data of its tests.

    python tools/make_live_screenshots.py           writes them as WebP, as the pages of the documentation show them
    python tools/make_live_screenshots.py FOLDER    writes every state at each width and theme as PNG, to look at

Needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

from chromium import Page, chromium  # noqa: E402  (in tests/)
from tests.live.browser import invented  # noqa: E402
from tests.live.browser.canned_server import CannedServer, canned_server  # noqa: E402

DOCS = ROOT / "docs" / "assets" / "live"
WIDE, PHONE = (1440, 900), (390, 844)
STATES = ("slow", "stopped", "flowing", "idle", "empty", "restarting", "ended", "sample", "hostile", "large")

# Name of a picture in the documentation -> state, size, dark, whether it shows the complete page.
PICTURES = {
    "live-light": ("slow", WIDE, False, True),
    "live-dark": ("slow", WIDE, True, True),
    "live-stopped": ("stopped", WIDE, False, False),
    "live-sample": ("sample", WIDE, False, False),
    "live-empty": ("empty", (1440, 620), False, False),
}


def show(page: Page, server: CannedServer, state: str) -> None:
    """Open the page in a state, with all that it fetches."""
    server.full, server.matrices = invented.slow(), invented.matrices()
    if state in ("restarting", "ended"):
        server.full.update(getattr(invented, state)(server.full))
    elif state in ("hostile", "large"):
        server.full, server.matrices = getattr(invented, state)()
    elif state != "sample":
        server.full = getattr(invented, state)()
    page.open(server.url)
    page.wait_for("!!document.querySelector('main')")
    if state != "empty":
        page.wait_for("!document.querySelector('#matrix').hidden")
    if state == "sample":
        server.samples["107168"] = invented.sample()
        page.evaluate("document.querySelector('.waits [data-index]').click()")
        page.wait_for("!!document.querySelector('dialog .history')")
        page.evaluate("document.activeElement.blur()")


def main(arguments: list[str]) -> None:
    """Write the pictures."""
    with chromium() as browser, canned_server() as server:
        page = browser.page()
        if not arguments:
            DOCS.mkdir(parents=True, exist_ok=True)
            for name, (state, size, dark, whole) in PICTURES.items():
                page.show_as(size, dark)
                show(page, server, state)
                page.screenshot(DOCS / f"{name}.webp", whole)
            return
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        for state in STATES:
            for size in (WIDE, PHONE):
                for dark in (False, True):
                    page.show_as(size, dark)
                    show(page, server, state)
                    name = f"{state}-{size[0]}-{'dark' if dark else 'light'}.png"
                    page.screenshot(folder / name, whole=state != "sample")


if __name__ == "__main__":
    main(sys.argv[1:])
