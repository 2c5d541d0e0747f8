"""What a client puts into an extent is believed only with the proof that the unit has leased the extent to it."""

from typing import Any

import numpy as np
import pytest
from harness import BYTES, Harness, column, rows_of, schema_of
from msgspec.structs import replace

from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import BlockLocation, NewBlock
from transfer_queue.messages.puts import CloseExtents, Publish, PublishReply
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.storage import lease_proof

KEY = b"the key of the system"
LENGTH = 4 * BYTES
BEGIN = 1 << 20
PROOF = "does not prove that unit 0 has leased"


@pytest.fixture
def h() -> Harness:
    return Harness(lease_key=KEY)


def place(extent: int = 1, begin: int = BEGIN, at: int = 0, writer: str = "w", unit: int = 0) -> BlockLocation:
    """A place for a block in an extent that the unit has leased to this writer."""
    proof = lease_proof(KEY, unit, writer, extent, begin, LENGTH, 1)
    return BlockLocation(unit, extent, begin + at * BYTES, 1, LENGTH, "", begin, proof)


def put_at(where: BlockLocation, *copies: BlockLocation, **more: Any) -> Publish:
    schema, dims = schema_of(("x",), 1)
    block = NewBlock(
        where.unit, where.extent, where.offset, where.generation, BYTES, 1, schema, dims, where.length, list(copies),
        where.session, begin=where.begin, proof=where.proof,
    )  # fmt: skip
    return Publish("p", 1, block=block, pre_allocate=0, **more)


def is_lost(h: Harness, row: int) -> bool:
    return not h.state.partitions["p"].produced_flags(["x"], np.array([row]))[0, 0]


WRONG = {
    "extent": {"extent": 2},
    "writer": {"proof": place(writer="v").proof},
    "session of another writer": {"session": "v/1", "proof": place(writer="v/1").proof},
    "begin": {"begin": BEGIN + BYTES},
    "length": {"length": 2 * LENGTH},
    "generation": {"generation": 2},
    "no proof": {"proof": 0, "begin": -1},
    "before the extent": {"offset": BEGIN - BYTES},
    "behind the extent": {"offset": BEGIN + LENGTH},
    "across the end of the extent": {"offset": BEGIN + LENGTH - BYTES + 64},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_place_without_its_proof_is_refused_and_stays_free_for_its_writer(h: Harness, wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=PROOF):
        h.ask(put_at(replace(place(), **wrong)))
    assert not h.state.blocks.extents
    h.ask(put_at(place()))
    for extent, begin in ((2, BEGIN - LENGTH), (3, BEGIN + LENGTH)):
        h.ask(put_at(place(extent, begin, at=3, writer="v")), "v")
        h.ask(put_at(place(extent, begin, writer="v")), "v")


def test_a_copy_needs_a_proof_of_its_own(h: Harness) -> None:
    assert h.ask(RegisterUnit("other.sock", "/other"), "unit-1") == Done(1)
    with pytest.raises(ProtocolError, match="unit 1 has leased extent 1"):
        h.ask(put_at(place(), replace(place(unit=1), proof=place().proof)))
    h.ask(put_at(place(), place(unit=1)))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_later_block_does_not_reach_beyond_the_extent(h: Harness, first: int, restarted: bool) -> None:
    h.ask(put_at(place(at=first)))
    if restarted:
        h.restart()
    for at in (-1, 4, 5):
        with pytest.raises(ProtocolError, match="nothing was put"):
            h.ask(put_at(place(at=at)))
    h.ask(put_at(place(at=3)))
    h.ask(put_at(place(2, BEGIN + LENGTH, writer="v")), "v")


def test_puts_that_are_decided_together_need_the_proof(h: Harness) -> None:
    h.ask(put_at(place(9, 0, writer="u")), "u")
    wrong, right = put_at(replace(place(1), proof=1)), put_at(place(1, writer="v"))
    refused, done = h.send_together([("w", wrong), ("v", right)])
    with pytest.raises(ProtocolError, match=PROOF):
        h.result(refused, "w")
    assert isinstance(h.reply(done, "v"), PublishReply)


def test_a_repeated_put_into_space_that_was_leased_again_makes_way(h: Harness) -> None:
    """The unit has freed extent 1, and then leased its bytes as extent 2. The client sends its old put once more."""
    old = put_at(place(at=2), closes=[(0, 1)])
    h.clear(rows_of(h.ask(old)))
    assert h.freed == [(0, 1)]
    h.ask(RegisterUnit("unit.sock", "/arena", extents=b""), "unit-0")  # the unit has no extent 1
    (repeated,) = rows_of(h.ask(old))
    assert not is_lost(h, repeated)
    h.ask(put_at(place(2, writer="v")), "v")
    assert not is_lost(h, repeated), "its bytes are still as they were"
    (row,) = rows_of(h.ask(put_at(place(2, at=2, writer="v")), "v"))
    assert is_lost(h, repeated)
    assert not is_lost(h, row)
    with pytest.raises(ProtocolError, match="nothing was put"):
        h.ask(old)
    h.replay()


def test_an_extent_that_the_state_has_for_another_writer_makes_way_for_its_own(h: Harness) -> None:
    """For example in a state that was saved before the proofs were checked."""
    h.state.lease_key = None
    (wrong,) = rows_of(h.ask(put_at(place(at=1)), "liar"))
    h.restart()
    h.ask(RegisterUnit("unit.sock", "/arena"), "unit-0")
    (row,) = rows_of(h.ask(put_at(place())))
    assert is_lost(h, wrong)
    assert not is_lost(h, row)


def test_a_close_in_the_put_of_the_first_block_is_carried_out(h: Harness) -> None:
    h.clear(rows_of(h.ask(put_at(place(), closes=[(0, 1)]))))
    assert h.freed == [(0, 1)]


def test_an_extent_of_a_writer_without_blocks_stays_its_own(h: Harness) -> None:
    """The controller does not know that extent 1 is leased to v, and frees nothing on w's word."""
    assert h.ask(CloseExtents([(0, 1)])) == Done([[0, 1]])
    h.ask(put_at(place(5, 0), closes=[(0, 1)]))
    assert h.freed == []
    h.ask(put_at(place(writer="v")), "v")
    assert column(rows_of(h.ask(put_at(place(at=1, writer="v")), "v"))) == column([2])
