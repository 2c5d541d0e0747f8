"""Recorded streams of a controller's events: the build that recorded them answers equally, and faults are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.simulation.streams import stream_runs as program
from tests.simulation.streams.controller_driver import ControllerDriver
from tests.simulation.streams.stream_recorder import RUNS
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a seed of each kind."""
    file = tmp_path_factory.mktemp("streams") / "streams.xz"
    assert program.main(["record", str(file), "--seeds", "1..2"]) == 0
    return file


def replayed(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = program.main(["replay", str(file), *options])
    return code, capsys.readouterr().out


def test_the_build_that_recorded_streams_answers_equally(streams: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = replayed(streams, capsys)
    assert code == 0, text
    assert text == f"5 streams are answered equally ({dict.fromkeys(RUNS, 1)}), 0 are not\n"


def change_requests(monkeypatch: pytest.MonkeyPatch, kind: type, change: Any) -> None:
    """Let the driver give the controller other requests of this kind than the recorded ones."""
    handle = ControllerDriver._handle

    def changed(self: ControllerDriver, client: str, peer: int, request: bytes) -> None:
        envelope = msgspec.msgpack.decode(request, type=RequestEnvelope)
        if isinstance(envelope.body, kind):
            envelope = msgspec.structs.replace(envelope, body=change(envelope.body))
        handle(self, client, peer, msgspec.msgpack.encode(envelope))

    monkeypatch.setattr(ControllerDriver, "_handle", changed)


def test_a_lost_tag_is_found_and_named(
    streams: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_requests(monkeypatch, Publish, lambda put: msgspec.structs.replace(put, tags=None) if put.tags else put)
    code, text = replayed(streams, capsys)
    assert code == 1
    assert "tags" in text
    assert "recorded: " in text


def test_a_longer_lease_is_found_and_named(
    streams: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(claim: Claim) -> Claim:
        return msgspec.structs.replace(claim, lease=claim.lease + 0.01) if claim.lease else claim

    change_requests(monkeypatch, Claim, longer)
    code, text = replayed(streams, capsys, "--differences", "10")
    assert code == 1
    assert "differ" in text


def test_another_build_runs_in_a_process_of_its_own(streams: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = program.main(["replay", str(streams), "--build", "src", "--kinds", "locks"]), capfd.readouterr().out
    assert code == 0
    assert text == "1 streams are answered equally ({'locks': 1}), 0 are not\n"
