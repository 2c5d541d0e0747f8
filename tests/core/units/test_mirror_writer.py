"""The mirror gets every block, the oldest first; replies wait for it; what only it has is copied back into memory."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from harness import Harness, column, rows_of, schema_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit_standin import BYTES, Units

from differential import stateful
from transfer_queue.core.configuration import MaxLag
from transfer_queue.core.events.effects import Send
from transfer_queue.core.units import migration_planner, mirror_writer
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.unit_handlers import lose_missing_mirrors
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import MIRROR, BlockLocation, NewBlock
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import ClearRows, Publish, Reserve
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, ExtentsFreedReport, Move, RegisterUnit
from transfer_queue.messages.system import Drain, NodeGone

LENGTH = 1 << 20  # of every extent that clients write
SYNC = MaxLag(-1, 0.0)
ASYNC = MaxLag(3 * BYTES, 5.0)
PLACES = ("memory-0", "memory-1", "mirror")


@pytest.fixture(autouse=True)
def _little_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)
    monkeypatch.setattr(mirror_writer, "ORDER_BYTES", 4 * BYTES)


class Mirrored:
    """A controller with two units in memory and a mirror, whose arenas can be lost.

    number: the present number of each unit by its name. values: row -> field -> what was put last.
    """

    def __init__(self, lag: MaxLag) -> None:
        self.h = Harness(max_lag=lag)
        self.units = Units()
        self.number: dict[str, int] = {}
        self.arenas: dict[str, int] = dict.fromkeys(PLACES, 0)
        self.term = 1
        self.boots: dict[str, str] = {}  # of retired mirrors, by name
        self.open: dict[str, int] = {}
        self.values: dict[int, dict[str, int]] = {}
        self.lost: set[tuple[int, str]] = set()
        self.waiting: dict[int, dict[int, dict[str, int]]] = {}
        self.next_value = 0
        self.freed = 0
        self.h.disconnect("unit-0")
        for name in PLACES:
            self.register(name)

    @property
    def writer(self) -> mirror_writer.MirrorWriter:
        return self.h.controller.context.services[MirrorWriter]

    def register(self, name: str) -> None:
        """A unit registers; its arena is a new one if the one before was lost."""
        tier = MIRROR if name == "mirror" else "memory"
        arena = self.arenas[name]
        known = self.number.get(name)
        extents = [extent for unit, extent in self.units.held if unit == known] if arena >= 0 else []
        request = RegisterUnit(
            name, f"/{name}.{arena}", f"boot-{name}-{arena}", self.unit_name(name), "now", column(extents), 1 << 30,
            tier=tier,
        )  # fmt: skip
        self.h.freed.clear()  # it is told again what it has not confirmed
        self.freed = 0
        self.number[name] = self.h.ask(request, name).value

    def unit_name(self, name: str) -> str:
        """The name of a unit; that of the mirror has the number of the term."""
        return f"mirror-{self.term}" if name == "mirror" else name

    def take_over(self) -> None:
        """A further term begins, with an empty mirror. The one of before is retired."""
        self.note_removed()
        self.forget()
        number, arena = self.number.pop("mirror"), self.arenas["mirror"]
        retired = f"mirror-{self.term}"
        self.h.disconnect("mirror")
        self.boots[retired] = f"boot-mirror-{arena}"
        self.number[retired] = number
        self.term += 1
        self.arenas["mirror"] += 1
        self.register_retired(retired)
        self.h.connect("mirror")
        self.register("mirror")

    def register_retired(self, name: str) -> None:
        """The unit of a retired mirror registers, in any place."""
        known = self.number[name]
        extents = [extent for unit, extent in self.units.held if unit == known]
        request = RegisterUnit(
            name, f"/elsewhere/{name}", self.boots[name], name, "now", column(extents), 1 << 30, tier=MIRROR,
            retired=True,
        )  # fmt: skip
        self.h.freed.clear()
        self.freed = 0
        self.number[name] = self.h.ask(request, name).value
        self.note_removed()

    def note_removed(self) -> None:
        """Retired mirrors that the controller ordered to remove their arenas do not exist any more."""
        for peer in self.h.removed:
            (name,) = (name for name in self.boots if self.h.clients[name].peer == peer)
            number = self.number.pop(name)
            assert number not in self.h.state.units
            self.units.held = {place: held for place, held in self.units.held.items() if place[0] != number}
            del self.boots[name]
            self.h.disconnect(name)
        self.h.removed.clear()

    def confirm(self) -> None:
        """The units of retired mirrors confirm what they were to free."""
        self.note_removed()
        self.forget()
        for name in list(self.boots):
            number = self.number[name]
            extents = sorted({extent for unit, extent in self.h.told if unit == number})
            self.h.ask(ExtentsFreedReport(number, column(extents)), name)
            self.note_removed()

    def lose(self, name: str) -> None:
        """The arena of a unit is gone, and the unit begins with a new one."""
        self.forget()
        self.h.disconnect(name)
        self.h.connect(name)
        self.units.held = {place: held for place, held in self.units.held.items() if place[0] != self.number[name]}
        self.open.pop(name, None)
        self.arenas[name] += 1
        del self.number[name]
        self.register(name)

    def put(self, rows: list[int] | int, fields: list[str], name: str, close: bool) -> None:
        """Put values; what is put is known when it is published, whenever the reply comes."""
        count = rows if isinstance(rows, int) else len(rows)
        content = {each: list(range(self.next_value, self.next_value + count)) for each in fields}
        self.next_value += count
        unit = self.number[name]
        if name not in self.open:
            self.open[name] = self.units.open(unit)
        extent = self.open[name]
        schema, dims = schema_of(fields, count)
        offset = self.units.write(unit, extent, content)
        block = NewBlock(unit, extent, offset, 1, BYTES, count, schema, dims, LENGTH)
        closes = [(unit, self.open.pop(name))] if close else []
        first = self.h.state.next_index
        target = None if isinstance(rows, int) else column(rows)
        sequence = self.h.send(Publish("p", count, target, block=block, closes=closes, pre_allocate=0))
        there = list(range(first, first + count)) if isinstance(rows, int) else rows
        made = {row: {each: content[each][at] for each in fields} for at, row in enumerate(there)}
        for row, values in made.items():
            self.values.setdefault(row, {}).update(values)
            self.lost -= {(row, each) for each in fields}
        self.waiting[sequence] = made
        self.take_replies()

    def take_replies(self) -> None:
        """Note which puts were acknowledged."""
        for sequence, made in list(self.waiting.items()):
            reply = self.h.reply(sequence)
            if reply is not None:
                assert rows_of(reply) == list(made)
                del self.waiting[sequence]

    def forget(self) -> None:
        """Overwrite freed extents."""
        for place in self.h.freed[self.freed :]:
            self.units.held.pop(place, None)
        self.freed = len(self.h.freed)

    def carry_out(self, how: str = "done", gone: set[int] | None = None, place: str | None = None) -> bool:
        """Carry out the oldest order, of all units or of this one; returns whether there was one."""
        self.forget()
        orders = [(unit, order) for unit, order in self.h.orders if isinstance(order, Move)]
        found = next((each for each in orders if place is None or each[0] == self.number[place]), None)
        if found is None:
            return False
        self.h.orders.remove(found)
        unit, order = found
        name = next((name for name, number in self.number.items() if number == unit), None)
        if name is None:  # the unit was lost
            return True
        if how == "full":
            reply = BlocksMovedReport(order.number, unit, 0, 0, 0, b"", [])
        else:
            reply = self.units.carry_out(unit, order, self.units.missing(order) | (gone or set()))
        assert self.h.ask(reply, name) == Done()
        self.take_replies()
        return True

    def read(self) -> None:
        """Every row that was not lost has its values."""
        self.forget()
        for field in ("x", "y"):
            rows = [row for row, values in self.values.items() if field in values and (row, field) not in self.lost]
            if rows:
                reply = self.h.look(Lookup("p", column(rows), fields=[field]))
                assert self.units.values(reply, field) == [self.values[row][field] for row in rows]

    def note_lost(self) -> set[tuple[int, str]]:
        """Note which values the controller names as lost; returns those that are new."""
        found = {(row, each) for row, values in self.values.items() for each in values if not self.block(row, each)}
        new, self.lost = found - self.lost, found
        counts = self.h.state.partitions["p"].losses.counts if found else {}
        assert sum(counts.values()) == len(found)
        return new

    def block(self, row: int, field: str) -> int:
        """The number of the block that has a value; 0 if the value is lost."""
        rows = self.h.state.partitions["p"].rows
        for _, chunk, at, _ in rows.split(rows.positions_of(np.array([row]))):
            return int(chunk.field_columns(field)[0][at][0])
        raise AssertionError(f"row {row} does not exist")

    def settle(self) -> None:
        """With time and units that carry out orders everything settles."""
        for _ in range(600):
            if not self.carry_out():
                self.confirm()
                context = self.h.controller.context
                services = context.services[MigrationPlanner], context.services[MirrorWriter]
                if all(service.next_due() is None for service in services):
                    return
                self.h.tick(self.h.now + 10.0)
                self.take_replies()
        raise AssertionError("orders never end")


class Life(RuleBasedStateMachine):
    """Puts, clears, lost arenas and restarts in any order."""

    @initialize(lag=st.sampled_from([SYNC, ASYNC]))
    def start(self, lag: MaxLag) -> None:
        self.m = Mirrored(lag)

    @rule(
        count=st.sampled_from([1, 2, 8]),
        fields=st.sampled_from([["x"], ["x", "y"]]),
        place=st.sampled_from(PLACES[:2]),
        close=st.booleans(),
    )
    def put_new(self, count: int, fields: list[str], place: str, close: bool) -> None:
        self.m.put(count, fields, place, close)

    @precondition(lambda self: self.m.values)
    @rule(data=st.data(), place=st.sampled_from(PLACES[:2]), close=st.booleans())
    def replace(self, data: st.DataObject, place: str, close: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.m.values)), min_size=1, unique=True, max_size=4))
        self.m.put(rows, ["x"], place, close)

    @precondition(lambda self: self.m.values)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.m.values)), min_size=1, unique=True))
        self.m.h.ask(ClearRows("p", column(rows)))
        for row in rows:
            del self.m.values[row]
        self.m.lost = {(row, each) for row, each in self.m.lost if row in self.m.values}
        self.m.take_replies()

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]), ticks=st.integers(1, 5))
    def time(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.m.h.tick(self.m.h.now + seconds)
        self.m.take_replies()

    @rule(place=st.sampled_from(PLACES[:2]), undo=st.booleans())
    def drain(self, place: str, undo: bool) -> None:
        self.m.h.send(Drain(self.m.number[place], undo))

    @rule(
        data=st.data(),
        how=st.sampled_from(["done", "done", "done", "gone", "full"]),
        place=st.sampled_from([None, *PLACES]),
    )
    def carry_out(self, data: st.DataObject, how: str, place: str | None) -> None:
        gone = data.draw(st.sets(st.integers(0, 3))) if how == "gone" else set()
        self.m.carry_out(how, gone, place)

    @rule(place=st.sampled_from(PLACES[:2]))
    def memory_is_lost(self, place: str) -> None:
        """Only what no mirror had and nobody was told of may be lost; it is named."""
        m = self.m
        unit = m.number[place]
        known = m.h.state.blocks
        alone = {number for number, _, places, _ in known.live_blocks() if [place.unit for place in places] == [unit]}
        before = {(row, field): m.block(row, field) for row, values in m.values.items() for field in values}
        m.lose(place)
        lost = m.note_lost()
        assert lost == {value for value, block in before.items() if block in alone}
        if m.h.core["max_lag"] is SYNC and not m.arenas["mirror"]:
            waiting = [entry for made in m.waiting.values() for entry in made.items()]
            assert lost <= {(row, field) for row, values in waiting for field in values}

    @rule()
    def the_mirror_is_lost(self) -> None:
        self.m.lose("mirror")
        assert not self.m.note_lost() - self.m.lost

    @rule()
    def another_node_takes_over(self) -> None:
        self.m.take_over()
        assert not self.m.note_lost() - self.m.lost

    @precondition(lambda self: self.m.boots)
    @rule(data=st.data())
    def a_retired_mirror_comes_back(self, data: st.DataObject) -> None:
        self.m.note_removed()
        if not self.m.boots:
            return
        name = data.draw(st.sampled_from(sorted(self.m.boots)))
        self.m.h.disconnect(name)
        self.m.h.connect(name)
        self.m.register_retired(name)

    @rule()
    def retired_mirrors_confirm(self) -> None:
        self.m.confirm()

    @rule()
    def the_mirror_comes_back(self) -> None:
        self.m.h.disconnect("mirror")
        self.m.h.connect("mirror")
        self.m.register("mirror")

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "m"):
            self.m.read()
            self.m.writer.check()

    @invariant()
    def acknowledged_puts_are_within_the_lag(self) -> None:
        if not hasattr(self, "m") or self.m.h.core["max_lag"] is not ASYNC or self.m.arenas["mirror"]:
            return
        answered = self.m.writer.behind_bytes - BYTES * len(self.m.waiting)
        assert answered <= ASYNC.nbytes

    def teardown(self) -> None:
        if not hasattr(self, "m"):
            return
        m = self.m
        m.settle()
        m.read()
        assert not m.waiting
        assert m.writer.behind_bytes == 0
        assert not m.boots, "retired mirrors are empty and removed"
        for _, _, places, _ in m.h.state.blocks.live_blocks():
            assert any(place.unit == m.number["mirror"] for place in places)
            assert len(places) == 2, "everything is in memory again"


TestLife = stateful(Life, 15, 25)


# ---------------------------------------------------------------- what is behind


def sparse(lag: MaxLag, *, mirrored: bool) -> Mirrored:
    """A sparse block is to be repacked. The mirror has it, or carries out the order to copy it.

    The repacked rows stay in memory-0. Their values are in rows 0 and 1.
    """
    m = Mirrored(lag)
    m.put(8, ["x"], "memory-0", False)
    m.h.tick(m.h.now + 10.0)
    if mirrored:
        m.carry_out(place="mirror")
    m.h.ask(ClearRows("p", column(range(2, 8))))
    for row in range(2, 8):
        del m.values[row]
    m.put(1, ["x"], "memory-0", True)
    return m


def repacks_of(m: Mirrored) -> list[Move]:
    return [order for _, order in m.h.orders if isinstance(order, Move) and order.repacks]


def test_a_block_repacked_while_the_mirror_is_lost_is_copied_to_the_next_mirror() -> None:
    m = sparse(ASYNC, mirrored=True)
    for _ in range(2):
        m.h.tick(m.h.now + 10.0)
    assert repacks_of(m)
    m.lose("mirror")
    for _ in range(4):
        m.h.tick(m.h.now)
        m.carry_out()
        m.writer.check()
    m.settle()
    m.writer.check()
    for _, _, places, _ in m.h.state.blocks.live_blocks():
        assert m.number["mirror"] in [place.unit for place in places]
    m.lose("memory-0")
    m.lose("memory-1")
    assert not m.note_lost()


@pytest.mark.parametrize("reports", [["memory-0"], ["memory-0", "mirror"], ["mirror", "memory-0"]])
def test_values_of_acknowledged_puts_stay_in_the_mirror_when_their_block_becomes_sparse(reports: list[str]) -> None:
    """The plan may free the space of the block before or after the mirror has copied it."""
    m = sparse(SYNC, mirrored=False)
    for place in reports:
        for _ in range(2):
            m.h.tick(m.h.now + 10.0)
        assert m.carry_out(place=place)
        m.writer.check()
    waiting = {row for made in m.waiting.values() for row in made}
    m.lose("memory-0")
    assert {row for row, _ in m.note_lost()} <= waiting


def test_a_block_that_is_cleared_while_it_is_copied_is_not_behind_any_more() -> None:
    m = Mirrored(ASYNC)
    m.put(1, ["x"], "memory-0", False)
    m.put(1, ["x"], "memory-0", False)
    m.h.tick(m.h.now + 10.0)
    m.h.ask(ClearRows("p", column([0])))
    del m.values[0]
    m.carry_out(place="mirror")
    assert m.writer.behind_bytes == 0


@pytest.mark.parametrize("others", [False, True])
def test_the_mirror_takes_the_place_of_a_second_copy_outside_it(others: bool) -> None:
    """Such blocks may come from a system that had `replicas: 2` before, or from a journal of an earlier version."""
    m = Mirrored(ASYNC)
    if others:
        m.put(1, ["x"], "memory-1", False)
    schema, dims = schema_of(["x"], 1)
    units = m.number["memory-0"], m.number["memory-1"]
    extents = [m.units.open(unit) for unit in units]
    offsets = [m.units.write(unit, extent, {"x": [7]}) for unit, extent in zip(units, extents, strict=True)]
    copy = BlockLocation(units[1], extents[1], offsets[1], 1, LENGTH)
    block = NewBlock(units[0], extents[0], offsets[0], 1, BYTES, 1, schema, dims, LENGTH, copies=[copy])
    (row,) = rows_of(m.h.ask(Publish("p", 1, None, block=block, pre_allocate=0)))
    m.values[row] = {"x": 7}
    m.settle()
    m.writer.check()
    assert m.writer.behind_bytes == 0
    for _, _, places, _ in m.h.state.blocks.live_blocks():
        assert [place.unit in units for place in places] == [True, False]
    m.read()


def test_a_report_of_the_mirror_that_overwrites_its_own_extents_leaves_nothing_wrongly_behind() -> None:
    """The record that an extent is lost makes the writer look again before the copies are recorded."""
    m = Mirrored(ASYNC)
    m.put(1, ["x"], "memory-0", False)
    m.settle()
    m.h.tick(m.h.now)
    m.put(1, ["x"], "memory-0", False)
    m.h.tick(m.h.now + 10.0)
    ((unit, order),) = [(unit, order) for unit, order in m.h.orders if isinstance(order, Move)]
    m.h.orders.clear()
    (_, second), *_ = [
        (place.extent, place.offset)
        for _, _, places, _ in m.h.state.blocks.live_blocks()
        for place in places
        if place.unit == unit
    ]
    extent = m.units.open(unit)
    reply = BlocksMovedReport(order.number, unit, extent, 16 * BYTES, 1, np.array([second], "<i8").tobytes(), [])
    assert m.h.ask(reply, "mirror") == Done()
    m.writer.check()
    assert m.writer.behind_bytes == BYTES, "the first block is in no mirror any more, the second one is"


# ---------------------------------------------------------------- retired mirrors


def taken_over(count: int = 3) -> Mirrored:
    """What was put before a takeover is in the retired mirror only, because the memory of its node is lost."""
    m = Mirrored(SYNC)
    for _ in range(count):
        m.put(1, ["x"], "memory-0", True)
    m.settle()
    m.take_over()
    m.lose("memory-0")
    assert not m.note_lost()
    return m


def test_values_of_a_retired_mirror_are_on_disk_so_that_no_put_waits_for_their_copies() -> None:
    m = taken_over()
    m.read()
    assert m.writer.behind_bytes == 0
    progress = m.writer.progress()
    assert progress is not None
    assert progress.retired == progress.stored == 3 * BYTES
    m.put(1, ["x"], "memory-1", True)
    m.h.tick(m.h.now)
    orders = [order for unit, order in m.h.orders if unit == m.number["mirror"] and isinstance(order, Move)]
    assert len(np.frombuffer(orders[0].blocks.unit, "<i4")) == 1, "the put is copied first"
    m.carry_out()
    assert not m.waiting


def test_a_put_does_not_wait_until_a_retired_mirror_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that empties it and the orders for new puts take turns."""
    monkeypatch.setattr(migration_planner, "ORDER_BLOCKS", 1)
    m = taken_over(8)
    mirror = m.number["mirror"]
    m.h.tick(m.h.now + 10)
    m.put(1, ["x"], "memory-1", True)
    for _ in range(3):
        m.h.tick(m.h.now)
        assert m.carry_out()
    assert not m.waiting
    assert m.writer.progress().retired > 0  # type: ignore[union-attr]
    m.settle()
    assert not m.boots
    for _, _, places, _ in m.h.state.blocks.live_blocks():
        assert mirror in [place.unit for place in places]


def test_a_retired_mirror_stays_while_the_disk_has_no_space_for_another_copy() -> None:
    m = taken_over()
    for _ in range(4):
        m.h.tick(m.h.now + 10)
        m.carry_out("full")
    m.read()
    assert len(m.boots) == 1
    m.h.ask(ClearRows("p", column(sorted(m.values))))
    m.values.clear()
    m.settle()
    assert not m.boots, "what was cleared needs no copy"


def test_an_empty_mirror_is_removed_when_it_registers_as_retired() -> None:
    m = Mirrored(SYNC)
    m.take_over()
    assert not m.boots
    assert list(m.h.state.mirrors) == [m.number["mirror"]]


def test_a_mirror_that_the_state_does_not_know_any_more_is_removed_again() -> None:
    """The order to remove it was lost with its controller."""
    m = taken_over(1)
    name, boot = next(iter(m.boots.items()))
    m.settle()
    assert not m.boots
    m.h.connect(name)
    m.boots[name], m.number[name] = boot, -1
    m.register_retired(name)
    assert not m.boots
    assert list(m.h.state.mirrors) == [m.number["mirror"]]


def test_the_mirror_is_not_lost_with_the_node_of_its_controller() -> None:
    m = Mirrored(SYNC)
    h = m.h
    m.put(1, ["x"], "memory-0", True)
    m.settle()
    for name in PLACES:
        known = h.state.units[m.number[name]]
        h.ask(RegisterUnit("s", known.arena, known.boot_id, known.name, "now", None, node="a", tier=known.tier), name)
    assert h.ask(NodeGone("a", "now")) == Done(2)
    assert not m.note_lost()
    assert [name for name in PLACES if m.number[name] in h.state.units] == ["mirror"]


def test_a_mirror_whose_arena_is_gone_is_lost_when_the_controller_starts() -> None:
    m = Mirrored(SYNC)
    m.put(1, ["x"], "memory-0", True)
    m.settle()
    context = m.h.controller.context
    lose_missing_mirrors(context, {"boot-mirror-0"}, "now")
    assert m.h.state.mirrors
    lose_missing_mirrors(context, {"boot-other"}, "now")
    assert not m.h.state.mirrors
    assert m.writer.behind_bytes == BYTES
    assert not m.note_lost()


def test_a_mirror_is_known_by_its_boot_id_wherever_its_folder_is() -> None:
    m = Mirrored(SYNC)
    number = m.number["mirror"]
    moved = RegisterUnit("s", "/moved", "boot-mirror-0", "mirror-1", "now", None, tier=MIRROR)
    assert m.h.ask(moved, "mirror") == Done(number)
    assert m.h.state.units[number].arena == "/moved"


def test_a_reply_to_a_put_of_this_controller_is_repeated_although_a_state_was_merged_since() -> None:
    """Only a state that replaces that of this controller makes it unknown which blocks a kept reply belongs to."""
    m = Mirrored(SYNC)
    m.put(1, ["x"], "memory-0", close=True)
    m.settle()
    client = m.h.clients["w"]
    first, request = client.sequence, Publish("p", 1, pre_allocate=0)
    assert m.h.reply(first) is not None
    m.put(1, ["x"], "memory-0", close=True)
    other = Harness()
    other.ask(Reserve("q", 1, None, 0))
    harness.load_state(m.h, harness.saved_of(other), merge=True)
    assert "q" in m.h.state.partitions
    (again,) = m.h.controller.handle("w", client.peer, RequestEnvelope(first, 0, request), m.h.now)
    assert isinstance(again, Send)
    assert again.reply == m.h.reply(first)
    harness.made.remove(other)
