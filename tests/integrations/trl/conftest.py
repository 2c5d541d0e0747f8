"""A system for each test. The modules of this folder run in `.trl`, with two versions of TRL (`make trl`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

import transfer_queue as tq


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of other packages, which differ between their versions, are not errors here."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def system() -> Iterator[None]:
    torch.set_num_threads(1)
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}, attach="never")
    yield
    tq.close()
