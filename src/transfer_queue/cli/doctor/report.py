"""The findings of `tq doctor`, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from transfer_queue.cli.shell.terminal import Styles
from transfer_queue.errors import TransferQueueError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    name: str
    """What was checked."""
    level: str
    """"ok", "warning" (it works, but ...) or "problem" (it does not work)."""
    words: str
    """What was found."""
    advice: str = ""
    """What to do; "" if nothing."""
    values: dict[str, Any] = field(default_factory=dict)
    """The result for scripts."""

    def lines(self, style: Styles | None = None) -> str:
        """Return the finding as text. style: adds colors; default: none."""
        level = f"{self.level:<8}" if style is None else style(f"{self.level:<8}", COLORS[self.level])
        text = f"  {level} {self.name}: {self.words}"
        return f"{text}\n           -> {self.advice}" if self.advice else text

    def as_json(self, topic: str) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {"topic": topic, **asdict(self)}


Check = Callable[[], Iterable[Finding]]


def findings_of(name: str, check: Check) -> Generator[Finding, None, None]:
    """Yield the findings of a check. An OSError or an error of this package becomes a finding, too."""
    try:
        yield from check()
    except (TransferQueueError, OSError) as error:
        yield Finding(name, PROBLEM, str(error), "follow the message; the checks after this one continue")
