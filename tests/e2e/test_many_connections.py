"""Two thousand connections to one controller, with work going on between them."""

import os
import resource
import time
from pathlib import Path

import msgspec

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.net.framing import pack_frame
from transfer_queue.net.server.server_loop import ServerLoop
from transfer_queue.net.session import Session
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import SequentialSampler

KEY = bytes(range(32))
CONNECTIONS = 2000
SPARE = 200  # files that this process and its libraries have open besides

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ReplyEnvelope).decode


class Peer:
    """One client with one connection."""

    def __init__(self, address: str, name: str, role: str = "client") -> None:
        self.connection = Connection(address)
        try:
            self.connection.connect(Session(name, KEY, lambda target: address, role=role), limit())
        except OSError:
            self.connection.close()
            raise
        self.sequence = 0

    def send(self, request: AnyRequest) -> None:
        self.sequence += 1
        envelope = RequestEnvelope(self.sequence, self.sequence - 1, request)
        self.connection.send(pack_frame(encode(envelope)), limit())

    def receive(self) -> AnyReply:
        answer = decode(self.connection.receive_reply(limit(), limit()))
        assert answer.sequence == self.sequence
        return answer.body

    def ask(self, request: AnyRequest) -> AnyReply:
        self.send(request)
        return self.receive()


def limit() -> float:
    return time.monotonic() + 60


def put(extent: int) -> Publish:
    """One row, as a client publishes it; its bytes are nobody's concern here."""
    block = NewBlock(
        0, extent, 64 * extent, 1, 64, 1, [FieldSpec("x", "tensor", "float32", 1, False)], (4).to_bytes(8, "little")
    )
    return Publish("p", 1, block=block, pre_allocate=0)


def serve(address: str) -> None:
    service = ControllerService(Controller(CoreConfig(SequentialSampler())), StateFiles(Path("/nonexistent")))
    server = ServerLoop(service, KEY, max_payload=0)
    service.attach(server.call_soon)
    server.listen(address)
    server.run()


def test_two_thousand_connections_with_work_going_on(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + SPARE
    assert hard == resource.RLIM_INFINITY or hard >= wanted, f"this test needs `ulimit -Hn` of {wanted}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted) if hard != resource.RLIM_INFINITY else wanted, hard))
    address = str(tmp_path / "s.sock")
    pid = os.fork()
    if not pid:
        try:
            serve(address)
        finally:
            os._exit(1)
    connections: list[Peer] = []
    try:
        while not os.path.exists(address):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        _connect_and_work(address, connections)
    finally:
        for connection in connections:
            connection.connection.close()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _connect_and_work(address: str, connections: list[Peer]) -> None:
    connections.append(_listening(address))
    assert connections[0].ask(RegisterUnit("unit.sock", "/arena")) == Done(0)
    connections.append(Peer(address, "first"))
    first = connections[1]
    assert first.ask(CreatePartition("p", 0)) == Done(True)
    while len(connections) < CONNECTIONS:
        connections.append(Peer(address, f"c{len(connections)}"))
        if len(connections) % 200 == 0:  # work goes on while others connect
            assert isinstance(first.ask(put(len(connections))), PublishReply)
    # half of them wait for rows, the other half puts them; every one gets its one answer
    waiting, putting = connections[2::2], connections[1::2]
    for connection in waiting:
        connection.send(Claim("p", "t", ["x"], 1, wait=60.0))
    for extent, connection in enumerate(putting, CONNECTIONS + 1):
        connection.send(put(extent))
    rows = set()
    for connection in putting:
        assert isinstance(connection.receive(), PublishReply)
    for connection in waiting:
        reply = connection.receive()
        assert isinstance(reply, ClaimReply), reply
        rows.add(reply.rows)
    assert len(rows) == len(waiting)  # nobody got what another has


def _listening(address: str) -> Peer:
    while True:
        try:
            return Peer(address, "unit-0", role="unit")
        except (ConnectionRefusedError, FileNotFoundError):
            continue  # bound, and not listening yet
