"""The colors of `tq top`, suitable for people who cannot distinguish red and green, on dark and light backgrounds.

They are the colors of Okabe and Ito, made lighter or darker to fit the background. Without colors (NO_COLOR), the
cursor is reversed, and shapes and fills show the states.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rich.style import Style
from textual.app import App
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


@lru_cache(256)
def _style(name: str, role: str, colorless: bool) -> Style:
    style = Style()
    for part in role.split():
        style += _style_of_one(_LIGHT if name == LIGHT else _DARK, part, colorless)
    return style


def _style_of_one(colors: dict[str, str], role: str, colorless: bool) -> Style:
    if role in ("cursor", "focused"):
        return Style(reverse=True) if colorless else Style(bgcolor=colors["cursor"])
    if role == "title":
        return Style(underline=colorless) if colorless else Style(bgcolor=colors["panel"])
    if role == "alarm":
        return (
            Style(reverse=True, bold=True)
            if colorless
            else Style(color=colors["background"], bgcolor=colors["gone"], bold=True)
        )
    if colorless:
        return Style(bold=role in _BOLD, dim=role in {"dim", "faint"})
    color = colors.get(_SAME.get(role, role))
    return Style(color=color, bold=role in _BOLD)


def style_of(app: App[Any], role: str) -> Style:
    """Return the style of a role in the theme of an app."""
    return _style(app.theme, role, app.no_color)
