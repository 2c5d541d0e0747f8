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
WARN = "from transfer_queue.utils.installations import warn_of_other_installations as warn; warn()"
"""What `init` does before it starts or finds a system; it needs no torch."""


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
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(self._python)]
        options = ["--no-compile"] if "install" in command.split() else []
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        subprocess.run(
            [*pip, *command.split()[1:], *options, *map(str, arguments)], env=environment, timeout=120, check=True
        )

    def run(self, *arguments: str, source: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        return subprocess.run(
            [str(self._python), *arguments], env=environment, capture_output=True, text=True, timeout=120
        )

    def warning(self, source: Path | None = None) -> str:
        """Return what a program writes to stderr that looks for other installations as `init` does."""
        done = self.run("-W", "ignore", "-c", WARN, source=source)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def doctor(self, source: Path | None = None) -> tuple[str, str, str]:
        """Return what `tq doctor` says of the installation: level, words and advice."""
        done = self.run("-W", "ignore", "-m", "transfer_queue.cli", "doctor", "--no-test", "--json", source=source)
        (found,) = (each for each in json.loads(done.stdout)["findings"] if each["name"] == "installation")
        return found["level"], found["words"], found["advice"]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.mark.parametrize("is_last", [True, False], ids=["ours last", "theirs last"])
def test_what_the_advice_says_repairs_two_packages_in_one_folder(
    environment: Environment, ours: Path, theirs: Path, is_last: bool
) -> None:
    for path in (theirs, ours) if is_last else (ours, theirs):
        environment.pip("pip install --no-deps", path)
    other = f"TransferQueue 0.1.11 (2 files in {environment.folder})"
    level, words, advice = environment.doctor()
    assert level == "problem"
    assert words.endswith(f"{other}; this package is in {environment.folder}")
    warning = environment.warning()
    assert other in warning
    assert f"this package is in {environment.folder}," in warning
    assert advice in warning

    remove, again = re.findall(r"`(pip [^`]*)`", advice)
    assert (remove, again) == ("pip uninstall TransferQueue", f"{AGAIN} .")
    environment.pip(f"{remove} -y")
    assert not (environment.folder / "py.typed").exists()  # a file of this package
    gone = f"{environment.folder} lacks 1 file of this package, for example transfer_queue/py.typed"
    assert environment.doctor() == ("problem", gone, f"run `{AGAIN} .` in a clone of the repository of this package")
    environment.pip(again.removesuffix(" ."), ours)
    assert (environment.folder / "py.typed").read_bytes() == b""
    assert environment.doctor()[0] == "ok"
    assert environment.warning() == ""


def test_a_package_in_another_folder_is_only_uninstalled(environment: Environment, theirs: Path) -> None:
    environment.pip("pip install --no-deps", theirs)
    level, words, advice = environment.doctor(ROOT / "src")
    assert level == "problem"
    assert words.endswith(f"(2 files in {environment.folder}); this package is in {ROOT / 'src' / 'transfer_queue'}")
    assert re.findall(r"`(pip [^`]*)`", advice) == ["pip uninstall TransferQueue"]
    assert advice in environment.warning(ROOT / "src")


def test_a_distribution_of_any_name_is_reported(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.pip("pip install --no-deps", wheel(tmp_path, "a_fork_of_it", "3.0", THEIRS))
    reported = f"a_fork_of_it 3.0 (2 files in {environment.folder})"
    assert reported in environment.doctor(ROOT / "src")[1]
    monkeypatch.setattr(sys, "path", [*sys.path, str(environment.folder.parent)])
    with pytest.raises(tq.AttachError):
        tq.init({"system": {"name": "of-no-system"}}, attach="require")
    assert reported in caplog.text


def test_a_requirement_of_a_version_leaves_the_compatibility_distribution(
    environment: Environment, ours: Path, compat: Path, theirs: Path, tmp_path: Path
) -> None:
    environment.pip("pip install --no-deps", ours, compat)
    framework = wheel(tmp_path, "framework", "1.0", {"framework.py": ""}, "TransferQueue>=0.1.10")
    environment.pip(f"pip install --find-links {theirs.parent}", framework)
    assert environment.doctor()[0] == "ok"
    assert environment.warning() == ""


def test_after_a_requirement_by_url_the_commands_of_the_page_install_this_package_again(
    environment: Environment, ours: Path, compat: Path, theirs: Path, tmp_path: Path
) -> None:
    environment.pip("pip install --no-deps", ours, compat)
    framework = wheel(tmp_path, "framework", "1.0", {"framework.py": ""}, f"TransferQueue @ {theirs.as_uri()}")
    environment.pip("pip install", framework)
    assert environment.doctor()[0] == "problem"
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
    assert environment.doctor()[0] == "ok"
    assert environment.warning() == ""


def test_the_compat_wheel_meets_requirements_of_the_pypi_package(compat: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(compat)], timeout=120, check=True)
    (installed,) = metadata.distributions(path=[str(target)])
    assert installed.metadata["Name"] == "TransferQueue"
    for requirement in ("TransferQueue>=0.1.10", "transferqueue==0.1.11", "TransferQueue<0.2"):
        assert Requirement(requirement).specifier.contains(installed.version), requirement
    (needed,) = map(Requirement, installed.requires or ())
    assert canonicalize_name(needed.name) == canonicalize_name("transfer_queue") != canonicalize_name("TransferQueue")
    assert needed.specifier.contains(metadata.version("transfer_queue"))
    assert {str(file).split("/")[0].endswith(".dist-info") for file in installed.files or ()} == {True}
