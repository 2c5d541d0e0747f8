"""What the doctor finds, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from transfer_queue.errors import TransferQueueError

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    name: what was looked at. level: "ok", "warning" (it works, but ...) or "problem" (it does not). words: what is
    there. advice: what to do; "" where nothing is. values: the same for scripts.
    """

    name: str
    level: str
    words: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> str:
        """As people read it."""
        text = f"  {self.level:<8} {self.name}: {self.words}"
        return f"{text}\n           -> {self.advice}" if self.advice else text

    def as_json(self, topic: str) -> dict[str, Any]:
        """As scripts read it."""
        return {"topic": topic, **asdict(self)}


Check = Callable[[], Iterable[Finding]]


def findings_of(name: str, check: Check) -> Generator[Finding, None, None]:
    """What a check finds; one that the machine does not let look is itself a finding."""
    try:
        yield from check()
    except (TransferQueueError, OSError) as error:
        yield Finding(name, PROBLEM, str(error), "see what the message says; the checks after this one go on")


def mebibytes(nbytes: float) -> str:
    """A size as people read it."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
