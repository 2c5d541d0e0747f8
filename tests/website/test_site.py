"""The documentation site, built as `make site` builds it, works in a browser that has no network and no server."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import DESKTOP, PHONE, Page, chromium

ROOT = Path(__file__).resolve().parent.parent.parent

QUESTIONS = {
    "how do I size memory": "guides/sizing-memory.html",
    "which sampler for GRPO": "guides/choosing-a-sampler.html",
    "a worker dies": "reliability.html",
    "three nodes with Ray": "guides/many-nodes.html",
    "migrate from the PyPI package": "migrate.html",
    "use it from verl": "guides/verl.html",
    "use it from TRL": "guides/trl.html",
    "backpressure": "guides/sizing-memory.html",
    "compare with Ray": "performance.html",
    "which stage is slow": "guides/find-the-bottleneck.html",
    "resume after a crash": "reliability.html",
    "write my own sampler": "tutorials/05-your-own-sampler.html",
}
"""What users ask, and the page that answers it."""
NOT_SEARCHED = ("benchmarks", "changelog", "contributing", "decisions/", "howto/", "plans")
"""The pages of contributors."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built by `make site`: the same command, so that both fail at the same warnings."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(["make", "site", f"ARGS=--site-dir {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.page()


@pytest.fixture
def page(tab: Page) -> Page:
    """A tab that has requested nothing and reported nothing."""
    tab.show_as(DESKTOP)
    tab.errors.clear()
    tab.requests.clear()
    return tab


def pages_of(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def title_of(page: Page) -> str:
    """The page's first heading, without the sign of its link."""
    return str(page.evaluate("document.querySelector('h1').innerText")).rstrip("\N{PILCROW SIGN}")


def assert_clean(page: Page) -> None:
    """No script reported an error, and nothing came from anywhere but the site's folder."""
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file://", "data:"))] == []


def test_the_home_page_shows_what_the_system_is(site: Path, page: Page) -> None:
    page.open((site / "index.html").as_uri())
    assert title_of(page) == "TransferQueue"
    assert page.evaluate("document.querySelector('figure.diagram svg').getBoundingClientRect().height") > 100
    assert_clean(page)


def test_the_navigation_leads_to_every_section(site: Path, page: Page) -> None:
    page.open((site / "index.html").as_uri())
    count = page.evaluate("document.querySelectorAll('.md-tabs__link').length")
    titles = [title_of(page)]
    for number in range(1, count):
        page.evaluate(f"document.querySelectorAll('.md-tabs__link')[{number}].click()")
        is_open = f"document.querySelectorAll('.md-tabs__item')[{number}]?.matches('.md-tabs__item--active')"
        page.wait_for(f"document.readyState == 'complete' && {is_open}")
        titles.append(title_of(page))
    assert count >= 5
    assert len(set(titles)) == count
    assert_clean(page)


def test_the_search_finds_a_method_without_a_server(site: Path, page: Page) -> None:
    page.open((site / "index.html").as_uri())
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.type("seal")
    page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
    found = page.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any(link.endswith("#transfer_queue.TransferQueueClient.seal") for link in found)
    page.evaluate("document.querySelector('.md-search-result__link').click()")
    page.wait_for("!location.href.includes('index.html') && document.readyState == 'complete'")
    assert "seal" in page.evaluate("document.querySelector('article').innerText.toLowerCase()")
    assert_clean(page)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_leads_to_its_page(site: Path, page: Page, question: str) -> None:
    """The page is one of the first three hits of the search, and a link of the home page leads to it."""
    page.open((site / "index.html").as_uri())
    links = page.evaluate("[...document.querySelectorAll('article a')].map(link => link.href.split('#')[0])")
    assert (site / QUESTIONS[question]).as_uri() in links
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.type(question)
    page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
    first = "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
    hits = page.evaluate(f"{first}.map(hit => hit.querySelector('a').href.split(/[?#]/)[0])")
    assert (site / QUESTIONS[question]).as_uri() in hits


def test_the_search_does_not_show_pages_of_contributors(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert "guides/which-call.html" in found
    assert [name for name in found if name.startswith(NOT_SEARCHED)] == []


def test_the_main_diagram_fits_a_phone(site: Path, page: Page) -> None:
    page.show_as(PHONE)
    page.open((site / "index.html").as_uri())
    shown = "[...document.querySelectorAll('figure.diagram svg')].filter(svg => svg.getBoundingClientRect().width > 0)"
    assert page.evaluate(f"{shown}.map(svg => svg.getAttribute('class'))") == ["narrow"]
    assert page.evaluate(f"{shown}[0].getBoundingClientRect().right <= innerWidth")


def test_every_page_loads_cleanly_and_fits_a_phone(site: Path, page: Page) -> None:
    page.show_as(PHONE)
    too_wide = []
    for path in pages_of(site):
        page.open(path.as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(path.relative_to(site).as_posix())
    assert too_wide == []
    assert_clean(page)


def test_every_diagram_takes_the_colors_of_its_page(site: Path) -> None:
    """A diagram that is an image, and not a part of the page, would not."""
    images = [
        path.name for path in pages_of(site) if re.search(r'<img[^>]*src="[^"]*diagrams/', path.read_text("utf-8"))
    ]
    assert images == []


def test_the_colors_follow_the_system(site: Path, page: Page) -> None:
    brightness = {}
    for dark in (False, True):
        page.show_as(DESKTOP, dark)
        page.open((site / "index.html").as_uri())
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[dark] = sum(map(int, color[color.index("(") + 1 : -1].split(",")[:3]))
    assert brightness[False] > 700
    assert brightness[True] < 200
