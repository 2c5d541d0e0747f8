"""Write the screenshots of the live page in docs/assets/live: of a real system with a simulated pipeline.

    python tools/make_live_screenshots.py           writes them as WebP (eight minutes)
    python tools/make_live_screenshots.py FOLDER    writes every state at each width and theme as PNG, from the
                                                    invented data of the tests of the page, to look at

The pipeline is that of tools/simulated_pipeline.py. Each run shows other numbers; the alternative texts of the pictures
name them. Needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tools")]

from simulated_pipeline import SimulatedPipeline, new_system, write_tokenizer  # noqa: E402

from chromium import DESKTOP, PHONE, Page, chromium  # noqa: E402  (in tests/)
from tests.live.browser import invented  # noqa: E402
from tests.live.browser.canned_server import CannedServer, canned_server  # noqa: E402
from tests.live.live_system import Page as Served  # noqa: E402
from tests.live.live_system import served  # noqa: E402

DOCS = ROOT / "docs" / "assets" / "live"
WIDE = (1440, 900)
STATES = ("slow", "stopped", "flowing", "idle", "empty", "restarting", "ended", "snapshot", "ranks", "sample",
          "hostile", "large")  # fmt: skip

NAME = "grpo-math"
SECONDS = 290.0  # of the pipeline before the first pictures: the timeline covers 300
DYING = 0.6  # of these seconds, after which two ranks of reward fail
STOPPED_SECONDS = 75.0  # for which nothing was dealt before the picture of a stopped system
QUALITY = 55  # of the WebP files, so that each is smaller than 130 kB
AHEAD = 96  # samples behind the first one that lacks a field is one that lacks it for some seconds more
LIMIT = 600.0  # seconds for each condition

# Name of a picture in the documentation -> whether it shows the complete page.
PICTURES = {"live-light": True, "live-sample": False, "live-stopped": False}

View = dict[str, Any]


def wait_for(address: Served, condition: Callable[[View], bool]) -> None:
    """Wait until a condition holds for what the page shows.

    Raises:
        TimeoutError: It did not within 600 s.
    """
    limit, view = time.monotonic() + LIMIT, {}
    with address.stream() as events:
        for kind, data in events:
            view = data if kind == "full" else {**view, **data}
            if "timeline" in view and condition(view):
                return
            if time.monotonic() > limit:
                break
    raise TimeoutError(f"the page has not shown what the picture needs; its verdict is {view.get('verdict')}")


def is_slow(seconds: float) -> Callable[[View], bool]:
    """Return the condition that reward is the slowest stage, because ranks are gone, after some seconds."""

    def condition(view: View) -> bool:
        verdict = view["verdict"]
        slow = (verdict["state"], verdict["stage"]) == ("slow", "reward") and "gone" in verdict["cause"]
        lacking = any(
            each["missing"] >= 2 * AHEAD and each["sample"] is not None for each in view["partitions"]["list"]
        )
        return slow and lacking and view["timeline"]["until"] >= seconds

    return condition


def is_stopped(view: View) -> bool:
    """Whether nothing has been dealt for a while."""
    verdict = view["verdict"]
    return verdict["state"] == "stopped" and view["now"] - (verdict["since"] or view["now"]) >= STOPPED_SECONDS


def take(page: Page, address: Served, name: str) -> None:
    """Write a picture of a page."""
    page.show_as(WIDE, False)
    page.call("Page.navigate", url=address.address)
    page.wait_for("!!document.querySelector('main') && !document.querySelector('#matrix').hidden")
    if name == "live-sample":
        link = "document.querySelector('.matrix .remark [data-index]')"
        page.wait_for(f"!!{link}")
        page.evaluate(f"{link}.dataset.index = Number({link}.dataset.index) + {AHEAD}, {link}.click()")
        page.wait_for("!!document.querySelector('dialog .history')")
        page.evaluate("document.activeElement.blur()")
    page.screenshot(DOCS / f"{name}.webp", PICTURES[name], QUALITY)


def take_all(page: Page, seconds: float) -> None:
    """Write the pictures of the documentation."""
    DOCS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, new_system(NAME) as system:
        tokenizer = str(write_tokenizer(Path(folder)))
        pipeline = SimulatedPipeline(system, DYING * seconds)
        with served(values=True, tokenizer=tokenizer, system=system) as address, pipeline:
            wait_for(address, is_slow(seconds))
            for name in ("live-light", "live-sample"):
                take(page, address, name)
            pipeline.fail("reward")
            wait_for(address, is_stopped)
            take(page, address, "live-stopped")


def show(page: Page, server: CannedServer, state: str) -> None:
    """Open the page in a state, with all that it fetches."""
    server.full, server.matrices = invented.slow(), invented.matrices()
    if state in ("restarting", "ended", "snapshot"):
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


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="write every invented state into this folder")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long the pipeline runs (default: 290)")
    options = parser.parse_args()
    with chromium() as browser, canned_server() as server:
        page = browser.page()
        if options.folder is None:
            take_all(page, options.seconds)
            return
        options.folder.mkdir(parents=True, exist_ok=True)
        for state in STATES:
            for size in (DESKTOP, PHONE):
                for dark in (False, True):
                    page.show_as(size, dark)
                    show(page, server, state)
                    name = f"{state}-{size[0]}-{'dark' if dark else 'light'}.png"
                    page.screenshot(options.folder / name, whole=state != "sample")


if __name__ == "__main__":
    main()
