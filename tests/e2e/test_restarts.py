"""Servers that are killed in the middle of everything: nothing is lost, nothing comes twice, clients notice a pause."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from server_processes import living_server, started, until
from simulated import numbers
from transfer_queue.config.settings import Settings
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import ConnectionLostError
from transfer_queue.interface import CURRENT
from transfer_queue.journal.journal import recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.node.system import launcher

SECONDS = 60


def kill(name: str = "controller") -> None:
    """Kills a server once it is up."""
    until(lambda: living_server(name)).kill()


def in_thread(target: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a function in a thread; its outcome, or exception, is put into the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(target())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_a_stream_goes_on_over_kills_of_the_controller(durability: str) -> None:
    """Puts, claims that wait, keys and lists, while the controller is killed again and again."""
    with started("stream", controller={"journal": {"durability": durability}}):
        client, count, size = tq.get_client(), 240, 4
        client.create_partition("p")

        def produce() -> int:
            for i in range(count):
                tq.kv_put(f"k{i}", "p", {"x": torch.tensor(i)}, tag={"i": i})
            client.seal("p")
            return count

        def consume() -> list[int]:
            seen: list[int] = []
            while len(seen) < count:
                meta = client.get_meta(["x"], size, "p", task_name="t", timeout=SECONDS)
                seen += client.get_data(meta)["x"].tolist()
            return seen

        async def listen() -> int:
            while len(await tq.async_kv_list("p")) == 0 or len((await tq.async_kv_list("p"))["p"]) < count:
                await asyncio.sleep(0.01)
            return len((await tq.async_kv_list("p"))["p"])

        threads = [in_thread(target) for target in (produce, consume, lambda: asyncio.run(listen()))]
        for _ in range(3):
            kill()
            time.sleep(0.1)  # of work
        for thread, _ in threads:
            thread.join(SECONDS)
        made, seen, listed = [found for _, found in threads]
        assert made == [count]
        assert listed == [count]
        (rows,) = seen
        assert sorted(rows) == list(range(count)), "each once"
        assert {key: tag["i"] for key, tag in tq.kv_list("p")["p"].items()} == {f"k{i}": i for i in range(count)}
        indexes = client.kv_retrieve_meta([f"k{i}" for i in range(count)], "p").global_indexes
        assert indexes == list(range(indexes[0], indexes[0] + count))
        assert client.check_consumption_status("t", "p")


SAVED = [f"k{n}" for n in range(5000)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has these keys in partition p."""
    folder = tmp_path_factory.mktemp("saved") / "ck"
    with started("saving"):
        tq.kv_batch_put(SAVED, "p", numbers(len(SAVED)))
        tq.save_checkpoint(folder)
    return folder


@pytest.mark.parametrize(
    ("moment", "durability"),
    [("the request", "async"), ("the copy", "sync"), ("the record", "async"), ("the record", "sync")],
)
def test_a_controller_that_is_killed_while_it_loads_a_checkpoint_loads_it_once(
    saved: Path, tmp_path: Path, moment: str, durability: str
) -> None:
    """Whenever it dies, its client is answered by the next one; what was not loaded leaves nothing."""
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o700)
    with started("loading", controller={"journal": {"folder": str(journal), "durability": durability}}):
        tq.kv_put("old", "p", {"x": torch.tensor(1)})
        system, process = CURRENT.system, living_server("controller")
        before = recorded(journal)
        reached = {
            "the request": lambda: any(system.states.iterdir()),
            "the copy": lambda: any(journal.glob("load-*")),
            "the record": lambda: recorded(journal) > before and any(journal.glob("load-*")),
        }[moment]
        thread, found = in_thread(lambda: tq.load_checkpoint(saved))
        while not reached() and thread.is_alive():
            pass
        process.kill()
        thread.join(SECONDS)
        assert not any(isinstance(outcome, BaseException) for outcome in found), found
        assert sorted(tq.kv_list("p")["p"]) == sorted(SAVED)
    kept = list(journal.glob("load-*"))
    recovered = recover(journal, ClockIdentity.now())
    assert recovered.state.epoch == 1, "it was loaded once"
    assert [path.name for path in kept] == list(recovered.loaded)


def recorded(journal: Path) -> int:
    """Bytes of the records in a journal."""
    return sum(path.stat().st_size for path in journal.glob("segment-*"))


def test_a_detached_system_and_a_folder_that_is_kept(tmp_path: Path) -> None:
    """No other system may write there; a later one goes on, though what the units held is gone."""
    tq.close()
    settings = Settings.from_config({"controller": {"journal": {"folder": str(tmp_path / "kept")}}})
    config = {"settings": settings.to_json(), "conf": {}}
    for turn in range(2):
        system = launcher.start_local("kept", config, detached=True)
        try:
            tq.init({"system": {"name": "kept"}})
            client = tq.get_client()
            assert client.get_partition_list() == (["p"] if turn else [])
            first = client.put(numbers(3), partition_id="p").global_indexes
            kill()
            second = client.put(numbers(3), partition_id="p").global_indexes
            assert first + second == list(range(6 * turn, 6 * turn + 6)), "indexes go on"
            with pytest.raises(tq.StartError, match=r"kept \(durability\.folder\) is used by a running system"):
                launcher.start_local("other", config, detached=True)
        finally:
            tq.close()
            system.stop()
    assert recover(tmp_path / "kept", ClockIdentity.now()).state.next_index == 12


def test_what_cannot_come_up_again_ends_the_system_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with started("damaged", timeouts={"restart": 1}):
        system = CURRENT.system
        for key in "abc":
            tq.kv_put(key, "p", {"x": torch.tensor(1)})
        segment = Path(system.folder) / "journal" / "segment-000000000001"
        process = living_server("controller")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        process.kill()
        with pytest.raises(ConnectionLostError):
            tq.kv_put("d", "p", {"x": torch.tensor(1)})
        log = Path(system.log_of(("controller", 0)))
        until(lambda: not system.is_alive())
        assert "is damaged at byte" in log.read_text()
        found = re.search(
            r"could not be started for ([\d.]+) s.*restart: 1", (system.logs / "supervisor.log").read_text()
        )
        assert float(found[1]) >= 1
    assert "is damaged at byte" in caplog.text, "told at the close"


def test_a_supervisor_that_is_killed_takes_a_controller_that_restarts_along() -> None:
    """The lifeline of a controller that was forked anew is the same."""
    with started("orphans"):
        system = CURRENT.system
        kill()
        tq.kv_put("a", "p", {"x": torch.tensor(1)})
        controller = until(lambda: living_server("controller"))
        os.kill(system.description.pid, signal.SIGKILL)
        until(lambda: not system.is_alive())
        assert psutil.wait_procs([controller], timeout=SECONDS)[0], "the controller goes on without its supervisor"
        with pytest.raises(ConnectionLostError) as lost:
            tq.kv_list("p")
        assert "its log" not in str(lost.value), "it goes with the servers"
        until(lambda: not Path(system.folder).exists())


# ---------------------------------------------------------------- a system for several tests


@pytest.fixture(scope="module")
def system() -> Iterator[None]:
    """A system for tests that kill its servers, and leave it with all of them."""
    with started("restarts"):
        yield


def test_a_claim_that_waits_notices_nothing_but_keeps_its_deadline(system: None) -> None:
    client = tq.get_client()
    tq.kv_put("a", "claims", {"y": torch.tensor(1)})
    waits, got = in_thread(lambda: client.get_meta(["x"], 2, "claims", task_name="t", timeout=SECONDS))
    begun = time.monotonic()
    ends, error = in_thread(lambda: client.get_meta(["never"], 1, "claims", task_name="t", timeout=2.0))
    subscription = client.wait_for_change("claims", timeout=SECONDS)
    watches, change = in_thread(lambda: client.wait_for_change("claims", since=subscription.version, timeout=SECONDS))
    waiting = lambda: sum(task.waiting for p in client.status().partitions for task in p.tasks)  # noqa: E731
    until(lambda: waiting() == 2)
    kill()
    until(lambda: waiting() == 2 or bool(error))
    ends.join(SECONDS)
    assert isinstance(error[0], tq.WaitTimeoutError)
    assert 2.0 <= time.monotonic() - begun < 2.0 + 15, "the wait has begun again"
    assert "never" in str(error[0])
    client.put(numbers(2), partition_id="claims")
    for thread in (waits, watches):
        thread.join(SECONDS)
    assert got[0].size == 2
    assert change[0].changed


def test_a_unit_that_is_asked_to_free_as_soon_as_it_registers(system: None) -> None:
    """It was killed before it could free; the controller says it again together with the answer to the registration."""
    client = tq.get_client()
    large = TensorDict({"x": torch.zeros(1, 1 << 20, dtype=torch.int64)}, batch_size=[1])
    meta = client.put(large, partition_id="frees")
    unit = living_server("unit-0")
    unit.suspend()
    client.clear_samples(meta)
    unit.kill()
    until(lambda: living_server("unit-0") not in (None, unit))
    kept = client.put(large, partition_id="frees", timeout=SECONDS)
    assert client.get_data(kept)["x"].size(0) == 1
    assert "cannot start" not in (CURRENT.system.logs / "unit-0.log").read_text()


def test_kills_while_a_server_starts_do_not_end_the_system(system: None) -> None:
    client = tq.get_client()
    supervisor = psutil.Process(CURRENT.system.description.pid)
    log = CURRENT.system.logs / "supervisor.log"
    for name in ("controller", "unit-0"):
        meta = client.put(numbers(4), partition_id="starting")
        others = {child.pid for child in supervisor.children()}
        words = f"the {name}: it is up again"
        before = log.read_text().count(words)
        kill(name)
        for _ in range(3):
            (again,) = until(lambda others=others: [c for c in supervisor.children() if c.pid not in others])
            again.kill()
            others.add(again.pid)
        client.put(numbers(4), partition_id="starting")
        assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
        # A client needs no unit to write into the space that it has leased and to read its files, so the unit may
        # still be starting here.
        until(lambda words=words, before=before: log.read_text().count(words) > before)
        kill(name)
        assert client.get_data(client.put(numbers(4), partition_id="starting"))["x"].tolist() == [0, 1, 2, 3]
        until(lambda name=name: living_server(name))


@pytest.mark.parametrize(("delivery", "workers"), [("at_most_once", 0), ("at_least_once", 1)])
def test_a_loader_pauses_and_yields_every_row_once(system: None, delivery: str, workers: int) -> None:
    """The controller is killed while a batch is held, while one is fetched ahead, and after the partition is sealed."""
    client, rows, partition = tq.get_client(), 48, f"loaded {delivery}"
    client.put(numbers(rows // 2), partition_id=partition)
    dataset = StreamingDataset(
        None, 4, 2, ["x"], partition, "train", 0, delivery=delivery, lease_seconds=float(SECONDS)
    )
    seen: list[int] = []
    for count, (data, meta) in enumerate(StreamingDataLoader(dataset, num_workers=workers)):
        seen += data["x"].tolist()
        if delivery == "at_least_once":
            assert set(meta.deliveries) == {1}, "nothing was delivered before"
        if count in (2, 5, 8):
            kill()
        if count == 7:
            client.put(numbers(rows // 2, rows // 2), partition_id=partition)
            client.seal(partition)
            kill()
    assert sorted(seen) == list(range(rows))
    (progress,) = next(p.tasks for p in client.status().partitions if p.name == partition)
    assert (progress.consumed, progress.claimed, progress.consumed_ever) == (rows, 0, rows)
