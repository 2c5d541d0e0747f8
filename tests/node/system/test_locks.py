"""A start lock that cannot be opened is an error of this package."""

from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.system_folder.liveness import StartLock


def test_the_error_names_a_link_instead_of_a_start_lock(tmp_path: Path) -> None:
    path = tmp_path / ".system.lock"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StartError, match=r"system\.lock cannot be opened"), StartLock(path, 1.0):
        pass
    assert path.is_symlink()
