"""The end of a store server: its units check what is published, also what is published later."""

import json

import numpy as np
import pytest
from harness import BYTES, Harness, column, schema_of

from transfer_queue.errors import ProtocolError, StorageKeyNotFoundError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.store_reports import (
    AwaitFirstStoreServer,
    CheckExtents,
    CheckStore,
    ReportStoreServer,
    StoreChanged,
    describe_trouble,
)
from transfer_queue.messages.reports.unit_reports import ExtentsGone, RegisterUnit
from transfer_queue.messages.system import NodeGone, Status, Topology

KIND = "MooncakeStore"


@pytest.fixture
def unit(h: Harness) -> int:
    store = json.dumps({"kind": KIND, "options": {}})
    return int(h.ask(RegisterUnit("b.sock", "/names", "boot", "unit-1", store=store), "unit-1").value)


def report(h: Harness, node: str = "n2", life: str = "first", process: int = 71, host: str = "10.0.0.2") -> None:
    h.ask(ReportStoreServer(KIND, node, host, life, process), f"store-{node}-{life}")


def put(h: Harness, unit: int, extent: int) -> None:
    schema, dims = schema_of(("x",), 1)
    block = NewBlock(unit, extent, extent << 16, 1, BYTES, 1, schema, dims, BYTES)
    h.ask(Publish("p", 1, block=block, pre_allocate=0))


def taken(h: Harness) -> list[object]:
    """The orders since the last call: what each is about."""
    orders, h.orders = h.orders, []
    return [
        np.frombuffer(order.extents, "<i8").tolist() if isinstance(order, CheckExtents) else type(order)
        for _, order in orders
    ]


def test_the_end_of_a_server_lets_the_unit_check_what_is_published(h: Harness, unit: int) -> None:
    report(h)
    put(h, unit, 1)
    put(h, unit, 2)
    assert taken(h) == []
    h.disconnect("store-n2-first")
    assert taken(h) == [CheckStore]
    h.ask(StoreChanged(unit, 4), "unit-1")
    assert taken(h) == [[1, 2]]


def test_a_block_that_was_written_before_the_end_is_checked_when_it_is_published(h: Harness, unit: int) -> None:
    h.ask(StoreChanged(unit, 4), "unit-1")
    assert taken(h) == []  # nothing is published
    put(h, unit, 3)
    assert taken(h) == [[3]]
    put(h, unit, 4)  # leased after the check
    assert taken(h) == []


def test_a_server_with_another_life_has_replaced_one_whose_end_was_not_noticed(h: Harness, unit: int) -> None:
    report(h)
    report(h)  # again, after its connection broke
    assert taken(h) == []
    report(h, life="second", process=72)
    assert set(taken(h)) == {CheckStore}
    (server,) = h.ask(Status()).stores
    assert (server.up, server.ends, server.process) == (True, 1, 72)
    h.disconnect("store-n2-first")  # which is not its connection any more
    assert h.ask(Status()).stores[0].up


def test_a_loss_names_the_server_that_has_ended(h: Harness, unit: int) -> None:
    report(h)
    put(h, unit, 1)
    h.now += 5
    h.disconnect("store-n2-first")
    h.now += 2
    h.ask(ExtentsGone(unit, column([1]), "at noon"), "unit-1")
    with pytest.raises(StorageKeyNotFoundError) as caught:
        h.ask(Lookup("p", column([0]), ["x"]))
    expected = f"(at noon: the {KIND} server on node 10.0.0.2 (n2, process 71) had ended 2.0 s before)"
    assert f"lost with storage unit {unit} {expected}" in str(caught.value)
    assert "put the field again" in str(caught.value)


def test_the_status_and_the_topology_tell_which_servers_run(h: Harness, unit: int) -> None:
    report(h)
    report(h, "n3", host="10.0.0.3")
    h.now += 4
    h.disconnect("store-n2-first")
    h.now += 1
    down, up = h.ask(Status()).stores
    assert (down.node, down.up, down.seconds, down.ends) == ("n2", False, 1.0, 1)
    assert (up.node, up.up, up.seconds, up.ends) == ("n3", True, 5.0, 0)
    said = describe_trouble(h.ask(Topology()).stores, KIND)
    assert said.startswith(f"the {KIND} server on node 10.0.0.2 (n2, process 71) has been down for 1.0 s. ")
    assert "10.0.0.3" not in said
    assert describe_trouble(h.ask(Topology()).stores, "Yuanrong") == ""
    report(h, life="second", process=72)
    assert "(n2, process 72) was started 0.0 s ago" in describe_trouble(h.ask(Topology()).stores, KIND)


def test_a_node_that_is_gone_takes_its_server_with_it(h: Harness, unit: int) -> None:
    report(h)
    put(h, unit, 1)
    assert h.ask(NodeGone("n2", "now")) == Done(0)
    assert h.ask(Status()).stores == []
    assert CheckStore in taken(h)
    h.ask(ExtentsGone(unit, column([1]), "later"), "unit-1")
    with pytest.raises(StorageKeyNotFoundError, match=r"server on node 10\.0\.0\.2"):
        h.ask(Lookup("p", column([0]), ["x"]))


def test_only_the_unit_may_say_that_its_store_has_changed(h: Harness, unit: int) -> None:
    with pytest.raises(ProtocolError, match="only the unit itself"):
        h.ask(StoreChanged(unit, 1), "somebody")


def first_reports(h: Harness, life: str) -> None:
    h.ask(ReportStoreServer(KIND, "n1", "10.0.0.1", life, 70, first=True), f"store-n1-{life}")


def test_a_server_that_joins_waits_for_that_of_the_first_node(h: Harness) -> None:
    report(h)  # of another node
    h.ask(ReportStoreServer("Yuanrong", "n1", "10.0.0.1", "of another store", 70, first=True), "store-other")
    asked = h.send(AwaitFirstStoreServer(KIND), "store-n2-first")
    first_reports(h, "a")
    assert h.result(asked, "store-n2-first") == Done("a")
    assert h.ask(AwaitFirstStoreServer(KIND), "store-n3-first") == Done("a")


def test_a_server_that_joins_learns_of_the_end_of_the_first_one_at_once(h: Harness) -> None:
    first_reports(h, "a")
    asked = h.send(AwaitFirstStoreServer(KIND, "a"), "store-n2-first")
    report(h)  # of another node
    assert h.result(asked, "store-n2-first") is None
    h.disconnect("store-n1-a")
    assert h.result(asked, "store-n2-first") == Done("")
    late = h.send(AwaitFirstStoreServer(KIND, "a"), "store-n3-first")  # it asks after the end
    assert h.result(late, "store-n3-first") == Done("")
    first_reports(h, "b")
    assert h.ask(AwaitFirstStoreServer(KIND, "a"), "store-n4-first") == Done("b")  # and after the replacement


def test_a_server_that_joins_learns_of_a_replacement_whose_end_was_not_noticed(h: Harness) -> None:
    first_reports(h, "a")
    asked = h.send(AwaitFirstStoreServer(KIND, "a"), "store-n2-first")
    first_reports(h, "a")  # again, on another connection
    assert h.result(asked, "store-n2-first") is None
    first_reports(h, "b")
    assert h.result(asked, "store-n2-first") == Done("b")


def test_a_server_that_joins_does_not_take_a_new_controller_for_the_end_of_the_first_one(h: Harness) -> None:
    asked = h.send(AwaitFirstStoreServer(KIND, "a"), "store-n2-first")  # nothing has been reported to this controller
    assert h.result(asked, "store-n2-first") is None
    first_reports(h, "a")
    assert h.result(asked, "store-n2-first") is None
    h.disconnect("store-n1-a")
    assert h.result(asked, "store-n2-first") == Done("")


def test_a_first_server_that_has_ended_is_not_joined(h: Harness) -> None:
    first_reports(h, "a")
    h.disconnect("store-n1-a")
    asked = h.send(AwaitFirstStoreServer(KIND), "store-n2-first")
    first_reports(h, "b")
    assert h.result(asked, "store-n2-first") == Done("b")


def test_a_server_that_ends_while_it_waits_gets_no_reply(h: Harness) -> None:
    asked = h.send(AwaitFirstStoreServer(KIND), "store-n2-first")
    h.disconnect("store-n2-first")
    first_reports(h, "a")
    assert h.result(asked, "store-n2-first") is None
