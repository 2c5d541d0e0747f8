"""Two distributions with files of one import name are reported; the compatibility distribution does no harm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from transfer_queue.cli.doctor import software
from transfer_queue.utils import installations

ROOT = Path(__file__).resolve().parents[2]
FILES = ("transfer_queue/__init__.py", "transfer_queue/client.py")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that puts the metadata of a distribution on the path, as pip does, and returns the folder."""

    def put(name: str, version: str, *files: str) -> Path:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        record = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in record))
        return tmp_path

    monkeypatch.syspath_prepend(str(tmp_path))
    return put


def finding() -> tuple[str, str, str]:
    found = next(each for each in software.check() if each.name == "installation")
    return found.level, found.words, found.advice


def test_one_installation_alone_is_fine() -> None:
    assert installations.overlaid() == []
    assert finding()[0] == "ok"


def test_the_pypi_package_beside_this_one_is_named_with_its_files(install: Callable[..., Path]) -> None:
    folder = install("TransferQueue", "0.1.11", *FILES)
    (found,) = installations.overlaid()
    assert str(found) == f"TransferQueue 0.1.11 (2 files in {folder / 'transfer_queue'})"
    level, words, advice = finding()
    assert level == "problem"
    assert str(found) in words
    assert str(installations.own_folder()) in words
    assert "pip uninstall TransferQueue" in advice
    assert "--force-reinstall" not in advice  # its files are in another folder


def test_if_both_are_in_one_folder_the_advice_is_to_install_this_package_again(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("TransferQueue", "0.1.11", *FILES)
    monkeypatch.setattr(installations, "own_folder", lambda: folder / "transfer_queue")
    assert "pip install --force-reinstall --no-deps" in installations.advice(installations.overlaid())


def test_the_doctor_finds_any_other_distribution_with_files_of_the_import_name(install: Callable[..., Path]) -> None:
    install("a_fork_of_it", "3.0", *FILES)
    assert installations.overlaid() == []
    assert "a_fork_of_it 3.0 (2 files" in finding()[1]


def test_a_distribution_of_that_name_without_files_is_fine(install: Callable[..., Path]) -> None:
    install("TransferQueue", "0.1.11")
    assert installations.overlaid() == []
    assert finding()[0] == "ok"


def test_the_compat_wheel_meets_requirements_of_the_pypi_package(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_compat_wheel"), str(tmp_path / "dist")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    assert str(wheel) in build.stdout
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], timeout=120, check=True)
    (installed,) = metadata.distributions(path=[str(target)])
    assert installed.metadata["Name"] == "TransferQueue"
    for requirement in ("TransferQueue>=0.1.10", "transferqueue==0.1.11", "TransferQueue<0.2"):
        assert Requirement(requirement).specifier.contains(installed.version), requirement
    (needed,) = map(Requirement, installed.requires or ())
    assert canonicalize_name(needed.name) == canonicalize_name("transfer_queue") != canonicalize_name("TransferQueue")
    assert needed.specifier.contains(metadata.version("transfer_queue"))
    assert {str(file).split("/")[0].endswith(".dist-info") for file in installed.files or ()} == {True}
