"""The Grafana dashboards of the PyPI package `rl-insight`, which query the metrics of this interface."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REQUIREMENT = "rl-insight==0.3.0"
FILE = "rl_insight-0.3.0-py3-none-any.whl"
SHA256 = "485d25fb0e78f42c8a8ff82809340d138b802b61bf4412fb01c20625426165a6"


class Query(NamedTuple):
    """A query of a panel."""

    dashboard: str
    panel: str
    source: str
    """The kind of the data source, for example "prometheus"."""
    expression: str
    legend: str


class Choice(NamedTuple):
    """A variable, which the reader of a dashboard chooses above its panels."""

    name: str
    query: str
    """`label_values(...)`, or the values."""
    all: str
    """The value that stands for all of them."""


def wheel() -> Path:
    """The package's wheel, which the first test run downloads. It is not installed, because it requires Ray.

    Without the file and without a package index the tests that need it fail.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transfer_queue-tests"
    path = folder / FILE
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
                   "--retries", "1", "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not path.exists():
            pytest.fail(
                f"pip could not download {REQUIREMENT}, whose dashboards this test checks: {result.stderr[-500:]}\n"
                f"Run the tests with a package index, or copy {FILE} into {folder}.",
                pytrace=False,
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == SHA256, f"{path} has the hash {found}; remove the file, and look at what {REQUIREMENT} is now"
    return path


@functools.cache
def dashboards() -> dict[str, dict[str, Any]]:
    """Name -> dashboard."""
    with zipfile.ZipFile(wheel()) as archive:
        documents = {Path(name).stem: json.loads(archive.read(name)) for name in archive.namelist() if is_json(name)}
    return {name: document["spec"] for name, document in documents.items() if document.get("kind") == "Dashboard"}


def is_json(name: str) -> bool:
    return name.endswith(".json")


def queries(name: str, dashboard: dict[str, Any]) -> list[Query]:
    """All queries of the panels of a dashboard."""
    found = []
    for element in dashboard["elements"].values():
        panel = element["spec"]
        for each in panel.get("data", {}).get("spec", {}).get("queries", []):
            query = each["spec"]["query"]
            words = query["spec"]
            text, legend = words.get("expr", words.get("query")), words.get("legendFormat", "")
            found.append(Query(name, panel["title"], query["group"], text, legend))
    return found


def choices(dashboard: dict[str, Any]) -> dict[str, Choice]:
    """The variables of a dashboard by name."""
    found = {}
    for variable in dashboard["variables"]:
        spec = variable["spec"]
        query = spec.get("query")
        text = query if isinstance(query, str) else (query or {}).get("spec", {}).get("query", "")
        found[spec["name"]] = Choice(spec["name"], text, spec.get("allValue") or ".*")
    return found
