"""What is in the place of a start lock is an error of the tree."""

from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.node.system.locks import StartLock


def test_a_link_in_the_place_of_a_start_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / ".system.lock"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StartError, match=r"system\.lock cannot be opened"), StartLock(path, 1.0):
        pass
    assert path.is_symlink()
