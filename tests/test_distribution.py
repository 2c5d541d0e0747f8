"""The source distribution that is built from the repository, and its metadata."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import setuptools.build_meta, sys; print(setuptools.build_meta.build_sdist(sys.argv[1]))"


def test_the_source_distribution_has_the_package_and_no_test_of_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=tree, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Deprecat" not in done.stdout + done.stderr  # such as forms that setuptools will refuse
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        content = archive.extractfile(info)
        assert content is not None
        metadata = Parser().parsestr(content.read().decode())
    assert {"src/transfer_queue/__init__.py", "src/transfer_queue/config.yaml", "LICENSE", "README.md"} <= names
    assert [name for name in names if name.startswith("tests")] == []
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License")]
