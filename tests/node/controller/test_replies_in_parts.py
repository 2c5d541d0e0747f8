"""A service hands over the replies of a long event part by part, each time that the loop has sent the last ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import Effect
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, ListPartitions, Seal
from transfer_queue.net.handshake import Hello
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import SequentialSampler

WAITING = 7


class Served:
    """A service whose controller returns two replies at a time; claims of WAITING clients wait for a partition."""

    def __init__(self, folder: Path) -> None:
        self.controller = Controller(CoreConfig(SequentialSampler(), part=2))
        self.service = ControllerService(self.controller, StateFiles(folder))
        self.sequence = 0
        for peer in range(WAITING + 1):
            self.service.on_connect(peer, Hello("client", f"c{peer}"))
        self.send(CreatePartition("p", 0))
        for peer in range(1, WAITING + 1):
            assert self.send(Claim("p", "t", ["x"], 1, wait=99.0), peer) == []

    def send(self, request: AnyRequest, peer: int = 0) -> list[int]:
        """Handle a request, and return the connections that are answered."""
        self.sequence += 1
        envelope = RequestEnvelope(self.sequence, 0, request)
        outgoing = self.service.handle(Hello("client", f"c{peer}"), peer, envelope, None, 0.0)
        return [each.peer for each in outgoing or ()]

    def continued(self) -> Iterator[list[int]]:
        """Iterate over the connections that are answered by each further call of the loop."""
        while outgoing := self.service.serve_puts():
            yield [each.peer for each in outgoing]


def test_each_call_of_the_loop_hands_over_the_next_replies(tmp_path: Path) -> None:
    served = Served(tmp_path)
    assert served.send(Seal("p")) == [0, 1, 2], "the reply to the request, and the first part"
    assert list(served.continued()) == [[3, 4], [5, 6], [7]]
    assert not served.controller.unfinished


def test_a_request_that_comes_between_is_answered_after_all_of_them(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.send(Seal("p"))
    assert served.send(ListPartitions()) == [3, 4, 5, 6, 7, 0]
    assert list(served.continued()) == []


def test_a_failure_in_a_later_part_is_logged_and_the_service_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tmp_path)
    served.send(Seal("p"))

    def fail() -> list[Effect]:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(served.controller, "settle_further", fail)
        assert served.service.serve_puts() == []
    assert "while it answered requests that waited" in caplog.text
    assert served.send(ListPartitions())[-1] == 0
