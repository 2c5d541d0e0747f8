"""The files of the live page: files of others are unchanged, and the page fetches nothing from other hosts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "src" / "transfer_queue" / "live" / "page"
VENDOR = PAGE / "vendor"
LONGEST = 300  # lines of a module
AXE_SHA256 = "cda5e4385d9437c1fd009f2ff76f7e4049af354d2d6522da2a905c2a69ede4ec"  # axe-core 4.14.1 of npm, packed


def own(*suffixes: str) -> list[Path]:
    """Return the files that were written for this page."""
    return sorted(path for path in PAGE.rglob("*") if path.suffix in suffixes and VENDOR not in path.parents)


def test_each_vendored_file_is_recorded_and_unchanged() -> None:
    versions = json.loads((VENDOR / "versions.json").read_text("utf-8"))
    names = {path.name for path in VENDOR.iterdir()} - {"versions.json"}
    assert names == set(versions)
    assert {name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in names} == {
        name: entry["sha256"] for name, entry in versions.items()
    }
    libraries = [entry for entry in versions.values() if "package" in entry]
    assert {entry["license_file"] for entry in libraries} <= names
    assert all(entry["version"] and entry["license"] in ("MIT", "Apache-2.0") for entry in libraries)


def test_the_checker_of_accessibility_is_unchanged() -> None:
    packed = (ROOT / "tests" / "live" / "browser" / "axe.min.js.gz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == AXE_SHA256


def test_no_file_names_another_host() -> None:
    allowed = "http://www.w3.org/2000/svg"  # the name of a format
    pattern = re.compile(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<>)]*")
    found = {path.name: set(pattern.findall(path.read_text("utf-8"))) for path in own(".js", ".css", ".html", ".svg")}
    assert {name: urls for name, urls in found.items() if urls - {allowed}} == {}


def test_the_document_has_no_script_and_no_style_of_its_own() -> None:
    document = (PAGE / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", document) == []


def test_no_module_makes_html_of_text() -> None:
    pattern = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|\beval\(|new Function"
    assert [path.name for path in own(".js") if re.search(pattern, path.read_text("utf-8"))] == []


def test_no_module_is_too_long_to_read() -> None:
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in own(".js")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def test_every_import_of_a_module_is_there() -> None:
    missing = []
    for path in own(".js"):
        for name in re.findall(r'from "(\.[^"]+)"', path.read_text("utf-8")):
            if not (path.parent / name).is_file():
                missing.append(f"{path.name}: {name}")
    assert missing == []
