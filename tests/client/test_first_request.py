"""What the import of a client prepares, so that the first request of its process need not."""

import subprocess
import sys

DECODERS = """
from transfer_queue.net.session import reply_decoder
print(reply_decoder.cache_info().currsize)
"""


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_what_is_no_client_makes_no_decoder_of_replies() -> None:
    code = "import transfer_queue.client.control_client, transfer_queue.node.unit.unit_process"
    assert printed(f"{code}\n{DECODERS}") == "0"


def test_the_import_of_a_client_makes_the_decoder_of_replies_and_imports_what_jagged_tensors_need() -> None:
    code = f"""
import sys
import transfer_queue.client.client
{DECODERS}
before = set(sys.modules)
import numpy as np, torch
from transfer_queue.wire.buffers.jagged import offsets_of_lengths
offsets = offsets_of_lengths(np.array([1, 2]).tobytes())
for _ in range(3):
    jagged = offsets.make_jagged(torch.arange(3), 1)
    jagged + jagged
print(*(name for name in sys.modules if name.startswith("torch.nested") and name not in before))
"""
    assert printed(code) == "1"
