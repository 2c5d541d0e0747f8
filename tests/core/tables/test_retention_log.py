"""Samples that are dropped for a reason, and reserved samples whose producer is gone."""

from __future__ import annotations

import pytest
from harness import Harness, column

from transfer_queue.core.tables import windows
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.puts import Drop, Publish, Reserve
from transfer_queue.messages.queries import Explain, Lookup
from transfer_queue.messages.system import Status
from transfer_queue.sampler import GRPOGroupNSampler


def dropped(h: Harness) -> dict[str, int]:
    return h.look(Status()).partitions[0].dropped


def groups(*names: str) -> list[str]:
    return [name for name in names for _ in range(2)]


class TestDrop:
    def test_complete_groups_are_dropped_and_counted(self):
        h = Harness(GRPOGroupNSampler(2))
        rows = h.put(6, groups=groups("a", "b", "c"))
        assert h.ask(Drop("p", "all alike", groups=["b", "unknown"])).value == 2
        assert h.ask(Drop("p", "all alike", groups=["b"])).value == 0
        assert h.ask(Drop("p", "too long", rows=column(rows[4:5]))).value == 1
        assert dropped(h) == {"all alike": 2, "too long": 1}
        assert h.dealt(2) == rows[:2]
        assert h.dealt(2) == []

    def test_a_lookup_of_a_dropped_row_says_why(self):
        h = Harness()
        rows = h.put(2)
        h.ask(Drop("p", "all alike", rows=column(rows[:1])))
        with pytest.raises(StorageKeyNotFoundError, match="sample 0 was dropped: all alike"):
            h.ask(Lookup("p", column(rows), fields=["x"]))
        assert "it was dropped: all alike" in h.look(Explain("p", row=0)).value
        assert "Dropped so far: 1 (all alike)" in h.look(Explain("p", task="t", fields=["z"])).value

    def test_wrong_drops_are_refused(self):
        h = Harness()
        h.put(1)
        with pytest.raises(InvalidArgumentError, match="reason must not be empty"):
            h.ask(Drop("p", "", groups=["a"]))
        assert h.ask(Drop("q", "why", groups=["a"])).value == 0

    def test_the_number_of_remembered_reasons_is_bounded(self, monkeypatch):
        monkeypatch.setattr(windows, "REMEMBERED", 10)
        h = Harness()
        for _ in range(10):
            rows = h.put(4)
            h.ask(Drop("p", "why", rows=column(rows)))
        assert dropped(h) == {"why": 40}
        kept = h.state.partitions["p"].drops
        assert sum(len(rows) for rows, _ in kept.latest) <= 10
        assert kept.reason(39) == "why"
        assert kept.reason(0) is None


class TestNeverPut:
    """Reserved rows may still be published after a seal, or expire when their client is gone."""

    @pytest.mark.design("reserved rows expire with their owner")
    def test_they_expire_when_their_client_is_gone(self):
        h = Harness()
        h.put(2)
        h.ask(Reserve("p", 3, None, 0), "gone")
        waits = h.claim(4, wait=100.0)
        h.ask(Seal("p"))
        assert h.parked(waits)
        h.disconnect("gone")
        assert h.got(waits) == [0, 1]
        assert dropped(h) == {"reserved by a client that is gone": 3}

    def test_they_expire_at_the_seal_if_their_client_is_already_gone(self):
        h = Harness()
        h.put(1)
        h.ask(Reserve("p", 3, None, 0), "gone")
        h.disconnect("gone")
        assert dropped(h) == {}, "before the seal another process may put them"
        h.ask(Seal("p"))
        assert dropped(h) == {"reserved by a client that is gone": 3}

    def test_written_rows_remain(self):
        h = Harness()
        h.ask(Reserve("p", 2, None, 0), "gone")
        h.put(1, ["x"], name="gone", rows=[0])
        h.ask(Publish("p", 1, column([1]), tags=[{"a": 1}]), "gone")
        h.disconnect("gone")
        h.ask(Seal("p"))
        assert dropped(h) == {}

    @pytest.mark.design("reserved rows may still be published")
    def test_a_connected_client_may_still_publish(self):
        h = Harness()
        h.ask(Reserve("p", 2, None, 0), "alive")
        h.ask(Seal("p"))
        waits = h.claim(2, wait=100.0)
        h.put(2, ["x"], name="alive", rows=[0, 1])
        assert h.got(waits) == [0, 1]


class TestSpanningGroups:
    """A group by order of reservation that contains rows of several clients causes one warning."""

    def test_it_warns_once(self):
        h = Harness(GRPOGroupNSampler(2))
        for name in ("a", "b", "a", "b"):
            h.put(1, name=name)
        first = h.result(h.claim(2), "r")
        assert "reserved by several clients" in first.warning or "several clients reserve" in first.warning
        assert "[0, 1]" in first.warning
        assert h.result(h.claim(2), "r").warning is None

    def test_explain_names_it(self):
        h = Harness(GRPOGroupNSampler(2))
        h.put(1, name="a")
        h.put(1, name="b")
        assert "reserved by 2 clients: put samples with group_ids=" in h.look(Explain("p", row=0)).value

    def test_groups_of_one_client_and_declared_groups_do_not_warn(self):
        h = Harness(GRPOGroupNSampler(2))
        h.put(2, name="a")
        h.put(2, name="b")
        assert h.result(h.claim(4), "r").warning is None
        g = Harness(GRPOGroupNSampler(2))
        g.put(1, name="a", groups=["one"])
        g.put(1, name="b", groups=["one"])
        assert g.result(g.claim(2), "r").warning is None
