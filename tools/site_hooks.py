"""What mkdocs.yml needs beside plugins: pages from outside docs/, globs in the navigation, diagrams inside the page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

PAGES_OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/grpo/README.md": "examples/grpo.md",
    "examples/on_ray/README.md": "examples/on_ray.md",
    "examples/trl_grpo/README.md": "examples/trl_grpo.md",
    "examples/verl_cpu/README.md": "examples/verl_cpu.md",
}
"""Files of the repository that are pages of the site, and where."""

NOT_SEARCHED = ("benchmarks.md", "changelog.md", "contributing.md", "decisions/", "howto/", "one-path", "plans.md")
"""Pages and folders for contributors, which the search does not show."""
SEARCHED_LAST = ("architecture", "examples/", "reference/api/")
"""Pages that mention everything: the search shows pages that answer a question before them."""

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
DIAGRAM = re.compile(r'<p>\s*<img alt="(?P<alt>[^"]*)" src="(?P<source>[^"]*diagrams/[^"]+\.svg)" ?/?>\s*</p>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace globs in the navigation by the pages that they match."""
    named = set(_pages_of(config.nav))
    config.nav = _expanded(config.nav, named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, uri in PAGES_OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link to a file of the repository into a link within the site, or into the path of the file."""
    if page.file.src_uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(SEARCHED_LAST):
        page.meta["search"] = {"boost": 0.5}
    source = Path(page.file.abs_src_path or "")

    def replaced(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith(("mailto:", "/")):
            return link[0]
        path = Path(posixpath.normpath(posixpath.join(source.parent.as_posix(), target)))
        uri = _uri_of(path)
        if uri is None:
            return _as_path(link["text"], path)
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{link['text']}]({relative}{link['anchor'] or ''})"

    markdown = re.sub(r"\A<!--.*?-->\s*", "", markdown, flags=re.DOTALL)  # MkDocs wants the title first
    return _outside_fences(markdown, lambda text: LINK.sub(replaced, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each diagram into the page itself, so that it has the colors of the page."""

    def inlined(image: re.Match[str]) -> str:
        folder = posixpath.dirname(page.file.dest_uri)
        path = DOCS / posixpath.normpath(posixpath.join(folder, image["source"]))
        return f'<figure class="diagram">{path.read_text("utf-8").strip()}</figure>'

    return DIAGRAM.sub(inlined, html)


def _pages_of(entry: Any) -> list[str]:
    """Return all pages that a part of the navigation names."""
    if isinstance(entry, str):
        return [] if "*" in entry else [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in _pages_of(value)]


def _expanded(entries: list[Any], named: set[str]) -> list[Any]:
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(entry))
            result += [page for page in pages if page not in named]
        elif isinstance(entry, dict):
            [(title, value)] = entry.items()
            inside = _expanded(value, named) if isinstance(value, list) else value
            if inside:
                result.append({title: inside})
        else:
            result.append(entry)
    return result


def _uri_of(path: Path) -> str | None:
    """Return the URI of a file's page or asset in the site, or None if it is not in the site."""
    if path.is_dir():
        path = path / "README.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path == ROOT / "README.md":
        return "index.md"
    return PAGES_OUTSIDE.get(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else None


def _as_path(text: str, path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"a link leads to {path}, which does not exist")
    name = path.relative_to(ROOT).as_posix()
    return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"


def _outside_fences(markdown: str, change: Any) -> str:
    """Apply a change to everything but fenced blocks."""
    parts = re.split(r"(^ *```.*?^ *```\s*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))
