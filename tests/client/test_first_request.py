"""What the import of a client prepares, so that the first request of its process need not."""

import subprocess
import sys

import pytest


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("module", "made"), [("client.client", 1), ("client.control_client", 0), ("node.unit.unit_process", 0)]
)
def test_only_the_import_of_a_client_makes_the_decoder_of_replies(module: str, made: int) -> None:
    code = f"""
import transfer_queue.{module}
from transfer_queue.net.session import reply_decoder
print(reply_decoder.cache_info().currsize)
"""
    assert printed(code) == str(made)


def test_the_first_jagged_tensors_of_a_process_import_nothing() -> None:
    code = """
import sys
import transfer_queue.client.client
before = set(sys.modules)
import numpy as np, torch
from transfer_queue.wire.buffers.jagged import offsets_of_lengths
offsets = offsets_of_lengths(np.array([1, 2]).tobytes())
for _ in range(3):
    jagged = offsets.make_jagged(torch.arange(3), 1)
    jagged + jagged
print(*(name for name in sys.modules if name.startswith("torch.nested") and name not in before))
"""
    assert printed(code) == ""
