"""The example of every part, for those who change the page, is what the declared types are."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from tests.live.example_payload import FILE, example
from transfer_queue.live import answers, payload


def test_the_example_is_up_to_date() -> None:
    assert FILE.read_bytes() == example(), "run `python -m tests.live.example_payload`"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("full", payload.LiveView), ("delta", payload.LiveView), ("matrix", answers.MatrixAnswer),
        ("sample", answers.SampleAnswer), ("explain", answers.ExplainAnswer), ("problem", answers.Problem),
    ],
)  # fmt: skip
def test_each_part_has_its_type(name: str, kind: type) -> None:
    part = json.loads(FILE.read_bytes())[name]
    decoded = msgspec.json.decode(msgspec.json.encode(part), type=kind)
    assert json.loads(payload.to_json(decoded)) == part


def test_numbers_that_json_does_not_have_are_null() -> None:
    assert payload.to_json([float("nan"), float("inf")]) == b"[null,null]"


def test_only_the_page_imports_its_server_and_it_does_not_import_torch() -> None:
    program = """
import sys
for module in ("cli", "node.supervisor", "live.serving.live_server"):
    __import__(f"transfer_queue.{module}")
    print(*(name for name in ("starlette", "torch", "uvicorn") if name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.splitlines() == ["", "", "starlette uvicorn"]
