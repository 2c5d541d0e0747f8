"""Write docs/assets/tq-top.svg: what `tq top` shows of a real system with a simulated pipeline.

    python tools/make_screenshots.py    writes it (a minute)

The pipeline is that of tools/simulated_pipeline.py. Each run shows other numbers.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from simulated_pipeline import SimulatedPipeline, new_system

from transfer_queue.cli.top.app import TopApp
from transfer_queue.cli.top.follower import Follower
from transfer_queue.node.system.launcher import RunningSystem

PAGE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "tq-top.svg"
NAME = "screenshots"
SECONDS = 55.0  # how long the pipeline runs before the picture
DYING = 20.0  # seconds after which two ranks of reward end
SIZE = (120, 36)
KEYS = ("1", "down")
"""The keys that lead to the screen."""


async def take(system: RunningSystem) -> str:
    """Return a picture of the screen as SVG."""
    app = TopApp(Follower(NAME, system, 1.0), 1.0, False)
    async with app.run_test(size=SIZE) as pilot:
        while app.state.shown is None:
            await pilot.pause(0.1)
        for key in KEYS:
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.pause(1.0)
        return app.export_screenshot(title=f"tq top, {SIZE[0]} x {SIZE[1]}")


def smaller(picture: str) -> str:
    """Return a picture that loads no fonts from other hosts, without invisible elements."""
    picture = re.sub(r"@font-face\s*{[^}]*}", "", picture)
    picture = picture.replace("font-family: Fira Code, monospace", "font-family: monospace")
    picture = re.sub(r"<text [^>]*>(&#160;|\s)*</text>", "", picture)
    picture = re.sub(r'(<text [^>]*?) clip-path="[^"]*"', r"\1", picture)
    picture = re.sub(r'<clipPath id="[^"]*-line-\d+">.*?</clipPath>', "", picture, flags=re.DOTALL)
    # One rectangle is the background of everything that has no other one.
    most = max(found := re.findall(r'<rect fill="(#\w+)" x="[^>]*crispEdges"/>', picture), key=found.count)
    picture = re.sub(rf'<rect fill="{most}" x="[^>]*crispEdges"/>', "", picture)
    inside = re.search(r'<clipPath id="[^"]*-clip-terminal">\s*(<rect [^>]*?)\s*/>', picture)
    assert inside is not None
    picture = re.sub(r'(<g transform="[^"]*" clip-path="[^"]*">)', rf'\1{inside[1]} fill="{most}"/>', picture, count=1)
    picture = re.sub(r"terminal-\d+-", "t-", picture)
    return re.sub(r"\n\s*", "\n", picture).rstrip() + "\n"


def main() -> None:
    """Run the pipeline, and write the picture."""
    with new_system(NAME) as system, SimulatedPipeline(system, DYING):
        time.sleep(SECONDS)
        PAGE.write_text(smaller(asyncio.run(take(system))))


if __name__ == "__main__":
    main()
