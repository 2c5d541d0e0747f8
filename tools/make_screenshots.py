"""Write docs/assets/tq-top.svg: what `tq top` shows of a real system with a simulated pipeline.

    python tools/make_screenshots.py                    writes it (a minute)
    python tools/make_screenshots.py --folder FOLDER    writes every screen, light and dark, in three sizes

The pipeline is that of tools/simulated_pipeline.py. Each run shows other numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_pipeline import SimulatedPipeline

from transfer_queue.cli.top.app import TopApp
from transfer_queue.cli.top.follower import Follower
from transfer_queue.config.settings import Settings
from transfer_queue.node.system.launcher import RunningSystem, start_local

PAGE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "tq-top.svg"
NAME = "screenshots"
SECONDS = 55.0  # how long the pipeline runs before the picture
DYING = 20.0  # seconds after which two ranks of reward end
SIZES = ((80, 24), (120, 40), (200, 60))
KEYS = {
    "overview": (), "partitions": ("3",), "memory": ("4",), "controller": ("5",), "task": ("1", "enter"),
    "slowest": ("1", "down", "enter"), "wait": ("2", "enter"), "partition": ("3", "end", "up", "enter"),
    "sample": ("3", "end", "up", "enter", "3", "enter"), "filter": ("3", "slash", "1"), "sort": ("1", "s", "s"),
    "help": ("question_mark",),
}  # fmt: skip
"""Name of a picture -> the keys that lead to it."""


async def take(system: RunningSystem, size: tuple[int, int], light: bool, keys: tuple[str, ...]) -> str:
    """Return a picture of a screen as SVG."""
    app = TopApp(Follower(NAME, system, 1.0), 1.0, light)
    async with app.run_test(size=size) as pilot:
        while app.state.shown is None:
            await pilot.pause(0.1)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.pause(1.0)
        return app.export_screenshot(title=f"tq top, {size[0]} x {size[1]}")


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
    """Run the pipeline, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="write every screen into this folder")
    options = parser.parse_args()
    system = start_local(NAME, {"settings": Settings.from_config(None).to_json()})
    try:
        with SimulatedPipeline(system, DYING):
            time.sleep(SECONDS)
            if options.folder is None:
                PAGE.write_text(smaller(asyncio.run(take(system, (120, 36), False, ("1", "down")))))
                return
            options.folder.mkdir(parents=True, exist_ok=True)
            for size in SIZES:
                for name, keys in KEYS.items():
                    for light in (False, True):
                        path = options.folder / f"{name}-{size[0]}x{size[1]}-{'light' if light else 'dark'}.svg"
                        path.write_text(smaller(asyncio.run(take(system, size, light, keys))))
    finally:
        system.stop()


if __name__ == "__main__":
    main()
