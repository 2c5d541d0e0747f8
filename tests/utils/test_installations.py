"""Two distributions with files of one import name are reported; the compatibility distribution does no harm.

The tests install small wheels into virtual environments, with pip and without a network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import transfer_queue as tq

ROOT = Path(__file__).resolve().parents[2]
THEIRS = {"transfer_queue/py.typed": "theirs\n", "transfer_queue/theirs.py": ""}  # one of these files is in both
AGAIN = "pip install --force-reinstall --no-deps"
LOOK = """
import sys
from transfer_queue.cli import main
from transfer_queue.utils.installations import warn_of_other_installations
warn_of_other_installations()
sys.exit(main(["doctor", "--no-test", "--json"]))
"""
"""What `init` does before it starts or finds a system, then `tq doctor`; it needs no torch."""


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str | bytes], requires: str = "") -> Path:
    """Write a wheel with these files."""
    info = f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {requires}\n" if requires else ""
    content: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    content[record] = "".join(f"{file},,\n" for file in [*content, record])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this package."""
    source = ROOT / "src"
    found = [path for path in (source / "transfer_queue").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = {str(path.relative_to(source)): path.read_bytes() for path in found}
    return wheel(tmp_path_factory.mktemp("ours"), "transfer_queue", metadata.version("transfer_queue"), files)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A wheel of another distribution, which has the name of the PyPI package."""
    return wheel(tmp_path, "TransferQueue", "0.1.11", THEIRS)


@pytest.fixture(scope="module")
def compat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the compatibility distribution."""
    folder = tmp_path_factory.mktemp("compat")
    build = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_compat_wheel"), str(folder)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (path,) = folder.iterdir()
    assert str(path) in build.stdout
    return path


class Environment:
    """A virtual environment that also finds what this one has installed, except this package."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self._python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        self.folder = packages / "transfer_queue"

    def pip(self, command: str, *arguments: Path) -> None:
        pip = [self._python, "-m", "pip", "--disable-pip-version-check", "--quiet", *command.split()[1:]]
        options = ["--no-compile"] if "install" in command.split() else []
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        subprocess.run([*pip, *options, *arguments], env=environment, timeout=120, check=True)

    def look(self, source: Path | None = None) -> tuple[tuple[str, str, str], str]:
        """Return what `tq doctor` says of the installation (level, words and advice), and what `init` warns of."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        done = subprocess.run(
            [self._python, "-W", "ignore", "-c", LOOK], env=environment, capture_output=True, text=True, timeout=120
        )
        (found,) = (each for each in json.loads(done.stdout)["findings"] if each["name"] == "installation")
        return (found["level"], found["words"], found["advice"]), done.stderr

    def assert_whole(self) -> None:
        """Assert that nothing is reported of the installation."""
        (level, _, _), warning = self.look()
        assert (level, warning) == ("ok", "")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_what_the_advice_says_repairs_two_packages_in_one_folder(
    environment: Environment, ours: Path, theirs: Path
) -> None:
    environment.pip("pip install --no-deps", theirs, ours)
    other = f"TransferQueue 0.1.11 (2 files in {environment.folder})"
    (level, words, advice), warning = environment.look()
    assert level == "problem"
    assert words.endswith(f"{other}; this package is in {environment.folder}")
    assert other in warning
    assert f"this package is in {environment.folder}," in warning
    assert advice in warning

    remove, again = re.findall(r"`(pip [^`]*)`", advice)
    assert (remove, again) == ("pip uninstall TransferQueue", f"{AGAIN} .")
    environment.pip(f"{remove} -y")
    assert not (environment.folder / "py.typed").exists()  # a file of this package
    gone = f"{environment.folder} lacks 1 file of this package, for example transfer_queue/py.typed"
    finding, _ = environment.look()
    assert finding == ("problem", gone, f"run `{AGAIN} .` in a clone of the repository of this package")
    environment.pip(again.removesuffix(" ."), ours)
    assert (environment.folder / "py.typed").read_bytes() == b""
    environment.assert_whole()


def test_packages_in_another_folder_are_only_uninstalled_whatever_their_names(
    environment: Environment,
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment.pip("pip install --no-deps", theirs, wheel(tmp_path, "a_fork_of_it", "3.0", THEIRS))
    (level, words, advice), warning = environment.look(ROOT / "src")
    assert level == "problem"
    assert words.endswith(f"; this package is in {ROOT / 'src' / 'transfer_queue'}")
    (names,) = re.findall(r"`pip uninstall ([^`]*)`", advice)
    assert sorted(names.split()) == ["TransferQueue", "a_fork_of_it"]
    assert advice.count("`pip ") == 1
    assert advice in warning
    monkeypatch.setattr(sys, "path", [*sys.path, str(environment.folder.parent)])
    with pytest.raises(tq.AttachError):
        tq.init({"system": {"name": "of-no-system"}}, attach="require")
    for reported in (
        f"{name} (2 files in {environment.folder})" for name in ("TransferQueue 0.1.11", "a_fork_of_it 3.0")
    ):
        assert reported in words
        assert reported in caplog.text


def test_the_compatibility_distribution_meets_a_requirement_of_a_version_and_not_one_by_url(
    environment: Environment, ours: Path, compat: Path, theirs: Path, tmp_path: Path
) -> None:
    """After a requirement by URL, the commands of the page install this package again."""
    environment.pip("pip install --no-deps", ours, compat)
    framework = wheel(tmp_path, "framework", "1.0", {"framework.py": ""}, "TransferQueue>=0.1.10")
    environment.pip(f"pip install --find-links {theirs.parent}", framework)
    environment.assert_whole()
    assert_harmless(environment.folder.parent)

    framework = wheel(tmp_path, "framework", "2.0", {"framework.py": ""}, f"TransferQueue @ {theirs.as_uri()}")
    environment.pip("pip install", framework)
    assert environment.look()[0][0] == "problem"
    commands = [
        command
        for block in re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "migrate.md").read_text("utf-8"), re.DOTALL)
        for command in block.splitlines()
        if "git+https" in block
    ]
    assert [command.split(" ")[1] for command in commands] == ["install", "uninstall", "install"]
    _, remove, again = commands
    environment.pip(remove)
    assert again == f"{AGAIN} . dist/transferqueue-*.whl"
    environment.pip(AGAIN, ours, compat)
    environment.assert_whole()


def assert_harmless(packages: Path) -> None:
    """Assert that the compatibility distribution in a folder stands for the PyPI package, and has no files of it."""
    (installed,) = metadata.distributions(path=[str(packages)], name="TransferQueue")
    assert installed.metadata["Name"] == "TransferQueue"
    for requirement in ("TransferQueue>=0.1.10", "transferqueue==0.1.11", "TransferQueue<0.2"):
        assert Requirement(requirement).specifier.contains(installed.version), requirement
    (needed,) = map(Requirement, installed.requires or ())
    assert canonicalize_name(needed.name) == canonicalize_name("transfer_queue") != canonicalize_name("TransferQueue")
    assert needed.specifier.contains(metadata.version("transfer_queue"))
    assert {str(file).split("/")[0].endswith(".dist-info") for file in installed.files or ()} == {True}
