"""The colors of `tq top`, suitable for people who cannot distinguish red and green, on dark and light backgrounds.

They are the colors of Okabe and Ito, made lighter or darker to fit the background. Without colors (NO_COLOR), the
cursor is reversed, and shapes and fills show the states.
"""

from __future__ import annotations

from rich.style import Style
from rich.theme import Theme as RichTheme
from textual.theme import Theme

_DARK = {
    "works": "#56b4e9", "waits": "#f0a830", "held": "#d792b8", "gone": "#ff7b54", "idle": "#8793a0",
    "good": "#3fc39b", "dim": "#8b98a5", "faint": "#3d4854", "head": "#8b98a5", "strong": "#ffffff", "key": "#56b4e9",
    "background": "#10151a", "panel": "#1b232b", "cursor": "#28455c", "text": "#d5dde5",
}  # fmt: skip
_LIGHT = {
    "works": "#0067a3", "waits": "#a65e00", "held": "#9a4a78", "gone": "#b93a00", "idle": "#5f6b76",
    "good": "#00735a", "dim": "#586571", "faint": "#c3ccd4", "head": "#586571", "strong": "#000000", "key": "#0067a3",
    "background": "#fbfcfd", "panel": "#e6ebf0", "cursor": "#c5def0", "text": "#1f2a33",
}  # fmt: skip
_BOLD = {"strong", "slowest", "gone", "stopped", "slow", "key"}
_SAME = {
    "slowest": "gone", "stopped": "gone", "slow": "waits", "flowing": "good", "ended": "idle", "early": "idle",
    "starting": "idle",
}  # fmt: skip
"""Roles with the color of another role."""
DARK, LIGHT = "tq-dark", "tq-light"


def make_themes() -> list[Theme]:
    """Return the dark and the light theme."""
    return [
        Theme(
            name=name, dark=name == DARK, primary=colors["works"], secondary=colors["held"],
            warning=colors["waits"], error=colors["gone"], success=colors["good"], accent=colors["works"],
            foreground=colors["text"], background=colors["background"], surface=colors["background"],
            panel=colors["panel"],
            variables={
                "footer-background": colors["panel"], "footer-key-foreground": colors["key"],
                "footer-description-foreground": colors["text"], "dim": colors["dim"], "faint": colors["faint"],
                "scrollbar": colors["faint"], "scrollbar-background": colors["background"],
            },
        )
        for name, colors in ((DARK, _DARK), (LIGHT, _LIGHT))
    ]  # fmt: skip


def make_styles(name: str, colorless: bool) -> RichTheme:
    """Return the style of each role in one of the two themes, with bold and dim text instead of colors if wanted."""
    colors = _LIGHT if name == LIGHT else _DARK
    cursor = Style(reverse=True) if colorless else Style(bgcolor=colors["cursor"])
    title = Style(underline=colorless) if colorless else Style(bgcolor=colors["panel"])
    styles = {
        role: Style(
            color=None if colorless else colors[_SAME.get(role, role)], bold=role in _BOLD,
            dim=colorless and role in ("dim", "faint"),
        )
        for role in (*colors, *_SAME)
    }  # fmt: skip
    return RichTheme({**styles, "cursor": cursor, "title": title, "title focused": title + cursor})
