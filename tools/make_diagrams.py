"""Write the sequence diagrams of docs/diagrams, as SVG, from the descriptions below.

    python tools/make_diagrams.py           writes them
    python tools/make_diagrams.py --check   exits with 1 if they are not what it would write

In the documentation site a diagram is a part of its page and takes the page's colors (`--tq-...` in
docs/assets/site.css). Elsewhere, as an image, it has the light colors, which are the fallback values here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from generated_files import ROOT, write_or_check

PAGES = ROOT / "docs" / "diagrams"

WIDTH = 920
MARGIN = 100  # from the edge to the first lifeline
TOP = 62  # of the first step
STEP = 46  # between two steps
LINE = 17  # between two lines of a note

COLORS = {
    "text": "#1f2933", "muted": "#52606d", "panel": "#ffffff", "surface": "#f5f7fa", "line": "#9aa5b1",
    "border": "#cbd2d9", "blue-pale": "#e3f0ff", "blue-line": "#3b82c4", "amber-pale": "#fff3dc",
    "amber-line": "#c98a1b", "purple-pale": "#f0e9fb", "purple-line": "#8157c2", "green-pale": "#e2f5e8",
    "green-line": "#2f9556", "red": "#c8402e",
}  # fmt: skip
CLIENT, SERVER, STORAGE, OTHER = "blue", "purple", "amber", "green"


@dataclass(frozen=True)
class Actor:
    """A column: its name, and the color of its kind."""

    name: str
    color: str


@dataclass(frozen=True)
class Call:
    """An arrow from one actor to another one. reply: it is dashed."""

    source: int
    target: int
    text: str
    reply: bool = False


@dataclass(frozen=True)
class Note:
    """A step of one actor; `until` is the last actor if the note covers several."""

    actor: int
    lines: Sequence[str]
    until: int | None = None


@dataclass(frozen=True)
class Death:
    """The process of an actor ends."""

    actor: int
    text: str


Step = Call | Note | Death


@dataclass(frozen=True)
class Diagram:
    """A sequence of steps, from top to bottom."""

    title: str
    actors: Sequence[Actor]
    steps: Sequence[Step]


PRODUCER, TRAINER = Actor("producer", CLIENT), Actor("trainer", OTHER)
CONTROLLER, JOURNAL = Actor("controller", SERVER), Actor("journal", SERVER)
ARENA = Actor("arena", STORAGE)

DIAGRAMS = {
    "put": Diagram(
        "A put",
        [PRODUCER, ARENA, CONTROLLER, JOURNAL],
        [
            Note(0, ["has a leased extent", "with enough space"]),
            Call(0, 1, "writes the block"),
            Call(0, 2, "Publish: rows, block, tags, groups"),
            Note(2, ["decides: makes records", "and applies them"]),
            Call(2, 3, "commits the records"),
            Call(3, 2, "written", reply=True),
            Call(2, 0, "reply: global indexes, merged tags", reply=True),
            Note(0, ["Values, tags, groups and readiness become visible at the same moment."], until=3),
        ],
    ),
    "claim": Diagram(
        "A claim that waits",
        [TRAINER, CONTROLLER, Actor("reward task", CLIENT), ARENA],
        [
            Call(0, 1, "Claim: fields, batch size"),
            Note(1, ["too few samples are ready:", "parks the claim"]),
            Call(2, 3, "writes the rewards"),
            Call(2, 1, "Publish: the field reward"),
            Note(
                1,
                [
                    "updates the ready sets,",
                    "finds that the claim can be answered,",
                    "asks the sampler, records the deal",
                ],
            ),
            Call(1, 2, "reply to the put", reply=True),
            Call(1, 0, "reply to the claim: rows", reply=True),
            Call(0, 1, "Lookup: rows, fields"),
            Call(1, 0, "locations of the values", reply=True),
            Call(0, 3, "copies the values, then checks that no extent was reused"),
        ],
    ),
    "lease": Diagram(
        "A lease that ends",
        [Actor("consumer A", CLIENT), CONTROLLER, Actor("consumer B", OTHER)],
        [
            Call(0, 1, "Claim with a lease of 30 s"),
            Call(1, 0, "rows 0-3, token 7", reply=True),
            Call(0, 1, "Renew: token 7 (in the background)"),
            Death(0, "is killed: renewals stop"),
            Call(2, 1, "Claim with a lease of 30 s"),
            Note(1, ["no other sample is ready:", "parks the claim"]),
            Note(1, ["30 s after the last renewal: ends", "lease 7, rows 0-3 are ready again"]),
            Call(1, 2, "rows 0-3, token 8, second delivery", reply=True),
            Call(2, 1, "Ack: token 8"),
            Note(1, ["The rows are consumed. An ack of", "token 7 would return False."]),
        ],
    ),
    "restart": Diagram(
        "A restart of the controller",
        [Actor("client", CLIENT), Actor("supervisor", OTHER), CONTROLLER, JOURNAL],
        [
            Call(0, 2, "request 41"),
            Call(2, 3, "commits its records"),
            Death(2, "is killed before it replies"),
            Note(1, ["detects the death; keeps", "the listening socket open"]),
            Call(1, 2, "starts a new process"),
            Call(2, 3, "reads snapshot, records"),
            Note(2, ["has the state that", "was committed"]),
            Call(0, 2, "connects again, repeats request 41"),
            Note(2, ["has handled number 41 before:", "takes the recorded reply"]),
            Call(2, 0, "the reply: the request took effect once", reply=True),
        ],
    ),
}


def svg_of(name: str, diagram: Diagram) -> str:
    """Return a diagram as SVG."""
    return _Drawing(name, diagram).document()


class _Drawing:
    """Draws the steps one below the other, and the lifelines behind them."""

    def __init__(self, name: str, diagram: Diagram) -> None:
        self.name = name
        self.diagram = diagram
        between = (WIDTH - 2 * MARGIN) / (len(diagram.actors) - 1)
        self.x = [MARGIN + between * number for number in range(len(diagram.actors))]
        self.y = float(TOP + STEP)
        self.parts: list[str] = []
        # of an actor that died: where its lifeline ends, and where it begins again
        self.gaps: dict[int, tuple[float, float]] = {}

    def document(self) -> str:
        for step in self.diagram.steps:
            if isinstance(step, Call):
                self._call(step)
            elif isinstance(step, Note):
                self._note(step)
            else:
                self._death(step)
        height = round(self.y - STEP + 30)
        description = "; ".join(self._words(step) for step in self.diagram.steps)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-desc" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="13.5">\n<title id="{self.name}-title">{escape(self.diagram.title)}</title>\n'
            f'<desc id="{self.name}-desc">{escape(description)}</desc>\n<defs><marker id="{self.name}-tip" '
            f'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 10 5 0 10z" style="{_fill("muted")}"/></marker></defs>\n'
            f'<rect class="background" width="{WIDTH}" height="{height}" rx="12" style="{_fill("panel")}"/>'
        )
        return "\n".join([head, *self._lifelines(height - 14), *self.parts, *self._heads(), "</svg>"]) + "\n"

    def _heads(self) -> list[str]:
        parts = []
        for x, actor in zip(self.x, self.diagram.actors):
            style = f"{_fill(actor.color + '-pale')};{_stroke(actor.color + '-line')}"
            parts.append(f'<rect x="{x - 84:g}" y="16" width="168" height="34" rx="8" style="{style}"/>')
            parts.append(_text(x, 38, actor.name, bold=True))
        return parts

    def _lifelines(self, bottom: float) -> list[str]:
        parts = []
        for number, x in enumerate(self.x):
            begin, end = self.gaps.get(number, (bottom, bottom))
            pieces = [(50.0, begin)] + ([(end, bottom)] if end < bottom else [])
            parts += [
                f'<path d="M{x:g} {top:g}V{low:g}" fill="none" style="{_stroke("border")}" stroke-dasharray="4 4"/>'
                for top, low in pieces
            ]
        return parts

    def _call(self, call: Call) -> None:
        start, end = self.x[call.source], self.x[call.target]
        if call.target in self.gaps and self.gaps[call.target][1] == float("inf"):  # a new process of it
            self.gaps[call.target] = (self.gaps[call.target][0], self.y)
        way = 3 if end > start else -3
        dash = ' stroke-dasharray="6 4"' if call.reply else ""
        self.parts.append(
            f'<path d="M{start + way:g} {self.y:g}H{end - way:g}" fill="none" stroke-width="1.6"{dash} '
            f'style="{_stroke("muted")}" marker-end="url(#{self.name}-tip)"/>'
        )
        self._label((start + end) / 2, self.y - 8, call.text)
        self.y += STEP

    def _label(self, x: float, y: float, text: str) -> None:
        """Text on a background, so that no lifeline runs through it."""
        width = _width(text)
        self.parts.append(
            f'<rect x="{x - width / 2 - 4:g}" y="{y - 13:g}" width="{width + 8:g}" height="18" rx="4" '
            f'style="{_fill("panel")}" class="label"/>'
        )
        self.parts.append(_text(x, y, text))

    def _note(self, note: Note) -> None:
        width = max(map(_width, note.lines)) + 28
        middle = self.x[note.actor] if note.until is None else (self.x[note.actor] + self.x[note.until]) / 2
        if note.until is not None:
            width = max(width, self.x[note.until] - self.x[note.actor] + 120)
        left = min(max(middle - width / 2, 8), WIDTH - 8 - width)
        height = LINE * len(note.lines) + 14
        top = self.y - 22
        style = f"{_fill('surface')};{_stroke('line')}"
        self.parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height}" rx="6" style="{style}"/>'
        )
        for number, line in enumerate(note.lines):
            self.parts.append(_text(left + width / 2, top + 20 + LINE * number, line, color="muted"))
        self.y = top + height + STEP - 12

    def _death(self, death: Death) -> None:
        x, y = self.x[death.actor], self.y - 6
        self.parts.append(
            f'<path d="M{x - 8:g} {y - 8:g}l16 16m0 -16l-16 16" fill="none" stroke-width="2.6" '
            f'style="{_stroke("red")}"/>'
        )
        self.parts.append(_text(x + 18, y + 5, death.text, color="red", anchor="start"))
        self.gaps[death.actor] = (y, float("inf"))
        self.y += STEP - 4

    def _words(self, step: Step) -> str:
        names = [actor.name for actor in self.diagram.actors]
        if isinstance(step, Call):
            return f"{names[step.source]} to {names[step.target]}: {step.text}"
        if isinstance(step, Note):
            return f"{names[step.actor]}: {' '.join(step.lines)}"
        return f"{names[step.actor]} {step.text}"


def _fill(color: str) -> str:
    return f"fill:var(--tq-{color},{COLORS[color]})"


def _stroke(color: str) -> str:
    return f"stroke:var(--tq-{color},{COLORS[color]})"


def _text(x: float, y: float, text: str, *, bold: bool = False, color: str = "text", anchor: str = "middle") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight} style="{_fill(color)}">{escape(text)}</text>'


def _width(text: str) -> float:
    """Return about how wide a text is; fonts differ."""
    return 7.0 * len(text)


if __name__ == "__main__":
    write_or_check({PAGES / f"{name}.svg": svg_of(name, diagram) for name, diagram in DIAGRAMS.items()})
