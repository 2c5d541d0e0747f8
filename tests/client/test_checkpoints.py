"""Checkpoints in the simulation: one moment is saved while everything goes on, and what is loaded is that moment."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_lost_units import lose

from simulated import await_result, numbers, table
from transfer_queue import interface
from transfer_queue.client.checkpoint import checkpoint_data
from transfer_queue.client.checkpoint.checkpoint_folder import MANIFEST, STATE, STORAGE
from transfer_queue.core.checkpoints import Checkpoints
from transfer_queue.core.jobs import Jobs
from transfer_queue.errors import (
    CapacityError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    SamplerError,
    StaleMetadataError,
    StorageKeyNotFoundError,
    UncarriableValueError,
    UnitLostError,
)
from transfer_queue.journal import state_file
from transfer_queue.messages.base import Done
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, EndCheckpoint, LoadState
from transfer_queue.metadata.batch_meta import BatchMeta
from transfer_queue.sampler import BaseSampler
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20


def save(
    client: Client, folder: Path, meanwhile: Callable[[], object] = lambda: None, previous: Path | None = None
) -> Path:
    """What `tq.save_checkpoint` does, but for the swap of folders. meanwhile: between the cut and the copy."""
    cut = client.begin_checkpoint()
    meanwhile()
    client.save_storage_checkpoint(folder, cut=cut, previous=previous)
    client.save_controller_checkpoint(folder / STATE, cut=cut)
    assert client.end_checkpoint(cut)
    return folder


def load(client: Client, folder: Path) -> None:
    """What `tq.load_checkpoint` does after its checks."""
    client.load_storage_checkpoint(folder)
    client.load_controller_checkpoint(folder / STATE)


def values(client: Client, keys: list[str], partition: str = "p", field: str = "x") -> list[int]:
    return client.kv_batch_get(keys, partition, field)[field].tolist()


def files(folder: Path) -> dict[str, int]:
    """Inode of each file of blocks."""
    return {path.name: path.stat().st_ino for path in (folder / STORAGE).iterdir() if path.name != MANIFEST}


def leased(cluster: Cluster) -> int:
    cluster.run()
    return sum(unit.table.leased for unit in cluster.units)


@pytest.fixture
def put(a):
    """put(keys, start=0): keyed rows of partition p."""

    def made(keys: str, start: int = 0, partition: str = "p") -> None:
        a.kv_batch_put(list(keys), partition, numbers(len(keys), start), tags=[{"of": key} for key in keys])

    return made


class TestRoundTrip:
    def test_an_empty_system(self, start, tmp_path):
        """A system without anything is saved, and replaces one that has something."""
        save(start(seed=1).client("a"), tmp_path / "ck")
        client = start(seed=2).client("a")
        client.put(numbers(3), partition_id="p")
        load(client, tmp_path / "ck")
        assert client.get_partition_list() == []

    def test_counters_never_go_back(self, cluster, a, put, tmp_path):
        """Indexes and blocks go on where the higher of both was, the epoch with every load."""
        put("ab")
        save(a, tmp_path / "ck")
        put("cdef")
        block = cluster.controller.state.next_block
        for epoch in (1, 2):
            load(a, tmp_path / "ck")
            assert cluster.controller.state.epoch == epoch
            assert cluster.controller.state.next_block >= block
            put("z", partition=f"later{epoch}")
            (index,) = a.kv_retrieve_meta("z", f"later{epoch}").global_indexes
            assert index == 5 + epoch

    def test_indexes_taken_since_the_save_are_not_taken_again(self, cluster, a, tmp_path, monkeypatch):
        """What was pre-allocated at the save may have been given to samples since: a load gives it to no others."""
        monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "3")
        a.create_partition("p")
        save(a, tmp_path / "ck")
        before = a.put(numbers(2), partition_id="p").global_indexes
        load(a, tmp_path / "ck")
        after = a.put(numbers(4), partition_id="p").global_indexes
        assert before == [0, 1]
        assert not set(before) & set(after)
        cluster.check()

    def test_many_small_blocks(self, start, tmp_path):
        """A thousand puts of one row, out of an arena in which many are gone."""
        client = start(seed=3).client("a")
        keys = [str(i) for i in range(1000)]
        for i, key in enumerate(keys):
            client.kv_put(key, "p", {"x": torch.tensor(i)})
        client.kv_clear(keys[::3], "p")
        left = [key for i, key in enumerate(keys) if i % 3]
        other = start(seed=4).client("b")
        load(other, save(client, tmp_path / "ck"))
        assert values(other, left) == [int(key) for key in left]


class TestUnits:
    @pytest.mark.parametrize("into", [{}, {"num_data_storage_units": 3}, {"num_data_storage_units": 2, "replicas": 2}])
    @pytest.mark.parametrize("out_of", [{"num_data_storage_units": 2}, {"num_data_storage_units": 3, "replicas": 2}])
    def test_other_numbers_of_units(self, start, tmp_path, out_of, into):
        """A checkpoint of so many units, with or without copies, loads into any other number."""
        one = start(seed=1, conf={"backend": {"SimpleStorage": out_of}})
        other = start(seed=2, conf={"backend": {"SimpleStorage": into}})
        for i, name in enumerate("abcd"):
            one.client(name).kv_put(name, "p", {"x": torch.full((1000,), i)})
        assert len({extent[0] for extent in one.controller.state.blocks.extents}) > 1
        reader = other.client("r")
        load(reader, save(one.client("s"), tmp_path))
        for i, name in enumerate("abcd"):
            assert reader.kv_batch_get([name], "p", layout="dense")["x"].unique().tolist() == [i]
        copies = [len(places) for _, _, places, _ in other.controller.state.blocks.live_blocks()]
        assert copies == [into.get("replicas", 1)] * 4


class TestTheCut:
    def test_space_is_held(self, start, tmp_path):
        """Cleared space is not used again before the copy is made, however short it is; then it is."""
        cluster = start(seed=5, arena_bytes=4 * MIB)
        client = cluster.client("a")
        client.kv_put("old", "p", {"x": torch.full((400_000,), 7, dtype=torch.int64)})

        def meanwhile() -> None:
            client.kv_clear(["old"], "p")
            with pytest.raises(CapacityError):
                client.kv_put("new", "p", {"x": torch.full((400_000,), 8, dtype=torch.int64)})

        save(client, tmp_path / "ck", meanwhile)
        client.kv_put("new", "p", {"x": torch.full((400_000,), 8, dtype=torch.int64)})
        client.clear_partition("p")
        load(client, tmp_path / "ck")
        assert client.kv_batch_get(["old"], "p")["x"].values().unique().tolist() == [7]

    @pytest.mark.parametrize("how", ["close", "die", "give up"])
    def test_space_is_let_go(self, cluster, a, b, how):
        """A saver that ends, or does not go on, holds no space."""
        a.kv_put("old", "p", {"x": torch.zeros(400_000)})
        before = leased(cluster)
        cut = b.begin_checkpoint()
        a.kv_clear(["old"], "p")
        assert leased(cluster) == before
        if how == "give up":
            b.end_checkpoint(cut)
        else:
            getattr(b, how)()
        assert leased(cluster) < before
        assert not cut.state.exists()

    @pytest.mark.parametrize("by_folder", [False, True])
    def test_two_savers(self, a, b, put, tmp_path, by_folder):
        """Each has a moment of its own. Saves into a folder are of the cut that was begun for it, until that ends."""
        one, other = tmp_path / "one", tmp_path / "other"
        put("a")
        cuts = [a.begin_checkpoint(one) if by_folder else a.begin_checkpoint()]
        put("b", start=1)
        cuts.append(a.begin_checkpoint(other, one) if by_folder else b.begin_checkpoint())
        put("ab", start=10)
        for client, cut, folder in zip((a, a if by_folder else b), cuts, (one, other), strict=True):
            client.save_storage_checkpoint(folder, cut=None if by_folder else cut)
            client.save_controller_checkpoint(folder / STATE, cut=None if by_folder else cut)
            assert client.end_checkpoint(cut)
        load(a, other)
        assert values(a, ["a", "b"]) == [0, 1]
        load(a, one)
        assert list(a.kv_list("p")["p"]) == ["a"]

    def test_lost_with_the_controller(self, cluster, a, put, tmp_path):
        """A controller that knows nothing of the cut any more says so, and nothing is left of the save."""
        put("ab")
        cut = a.begin_checkpoint()
        cluster.controller.context.services[Checkpoints].saves.clear()
        assert a.end_checkpoint(cut) is False

    def test_on_its_own(self, cluster, a, put, tmp_path):
        """Each half can be saved alone, and loaded one after the other."""
        put("ab")
        a.save_controller_checkpoint(tmp_path / "deep" / "state")
        a.save_storage_checkpoint(tmp_path / "data")
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state"]
        assert [path.name for path in (tmp_path / "data").iterdir()] == [STORAGE]
        a.kv_clear(["a", "b"], "p")
        with pytest.raises(CheckpointError, match="load_storage_checkpoint"):
            a.load_controller_checkpoint(tmp_path / "deep" / "state")
        a.load_storage_checkpoint(tmp_path / "data")
        assert a.kv_list("p") == {"p": {}}  # nothing is visible yet
        a.load_controller_checkpoint(tmp_path / "deep" / "state")
        assert values(a, ["a", "b"]) == [0, 1]
        assert not cluster.controller.context.services[Checkpoints].saves

    def test_the_same_request_twice(self, cluster, a, put, tmp_path):
        """Begin and load that come again on a new connection have the effect of once."""
        put("ab")
        task = a.start(a.operations.begin_checkpoint())
        while not cluster.controller.context.services[Checkpoints].saves:
            assert cluster.network.deliver()
        a.reconnect()
        cluster.wait(lambda: task.done)
        cut = task.result()
        assert list(cluster.controller.context.services[Checkpoints].saves) == [cut.name]
        a.save_storage_checkpoint(tmp_path, cut=cut)
        a.save_controller_checkpoint(tmp_path / STATE, cut=cut)
        a.end_checkpoint(cut)
        a.load_storage_checkpoint(tmp_path)
        loading = a.start(a.operations.load_controller_checkpoint(tmp_path / STATE))
        while not cluster.controller.context.services[Jobs]:
            assert cluster.network.deliver()
        a.reconnect()
        cluster.wait(lambda: loading.done)
        loading.result()
        assert cluster.controller.state.epoch == 1

    @pytest.mark.parametrize("name", ["", "../../etc/passwd", "/tmp/x", "a" * 31, "A" * 32, "a" * 32 + "\n", "x" * 32])
    @pytest.mark.parametrize("kind", [BeginCheckpoint, EndCheckpoint, LoadState])
    def test_names_are_no_paths(self, cluster, a, kind, name):
        """A request names a file by 32 hex digits, and nothing else gets as far as a file system."""
        with pytest.raises(InvalidArgumentError, match="32 hex digits"):
            a.call(a.state.ask(kind(name), Done, None))

    def test_names_are_their_clients(self, cluster, a, b):
        """Nobody saves under another's name, nor ends another's save."""
        cut = a.begin_checkpoint()
        with pytest.raises(InvalidArgumentError, match="another client uses"):
            b.call(b.state.ask(BeginCheckpoint(cut.name), BeginCheckpointReply, None))
        assert not b.end_checkpoint(cut)
        assert a.end_checkpoint(cut)


class TestIncremental:
    def test_the_second_save_writes_what_changed(self, cluster, a, put, tmp_path):
        """Files that still hold enough are linked to; only what is new is written."""
        put("abcdefgh")
        cluster_state = cluster.controller.state
        save(a, tmp_path / "one")
        before = files(tmp_path / "one")
        put("i", start=50)
        save(a, tmp_path / "two", previous=tmp_path / "one")
        after = files(tmp_path / "two")
        assert before.items() < after.items()
        assert len(after) == 2
        manifest = json.loads((tmp_path / "two" / STORAGE / MANIFEST).read_text())
        assert sum(entry["blocks"] for entry in manifest) == len(list(cluster_state.blocks.live_blocks()))
        assert min(entry["blocks"] for entry in manifest) == 1
        load(a, tmp_path / "two")
        assert values(a, list("abcdefghi")) == [*range(8), 50]

    def test_after_loads(self, a, put, tmp_path):
        """What was loaded is in the files that it came out of; numbers that were given since are other blocks."""
        for key in "abcd":
            put(key)
        save(a, tmp_path / "one")
        (first,) = files(tmp_path / "one").items()
        put("z")  # a block that is not in the checkpoint, whose number must not be taken for one of it
        load(a, tmp_path / "one")
        put("e", start=70)
        save(a, tmp_path / "two", previous=tmp_path / "one")
        after = files(tmp_path / "two")
        assert first in after.items()
        assert len(after) == 2
        load(a, tmp_path / "two")
        save(a, tmp_path / "two")
        assert files(tmp_path / "two") == after, "of one load after the other"
        load(a, tmp_path / "two")
        assert values(a, list("abcde")) == [0, 0, 0, 0, 70]

    def test_in_place(self, a, put, tmp_path):
        """A save over an older checkpoint shares its files, too; nothing stays of those that are needed no more."""
        for key in "abcd":
            put(key)
        save(a, tmp_path)
        (first,) = files(tmp_path).items()
        a.kv_clear(["a"], "p")
        save(a, tmp_path)
        assert list(files(tmp_path).items()) == [first]
        a.kv_clear(["b", "c"], "p")
        save(a, tmp_path)  # less than half of it is needed
        (second,) = files(tmp_path).items()
        assert second[0] != first[0]
        load(a, tmp_path)
        assert values(a, ["d"]) == [0]

    def test_numbers_of_another_system(self, cluster, a, put, tmp_path):
        """Its blocks may have the same numbers: nothing is shared with them."""
        put("a")
        before = files(save(a, tmp_path))
        units = cluster.controller.state.units
        known, units[0] = units[0], msgspec.structs.replace(units[0], boot_id="another")
        assert not set(before) & set(files(save(a, tmp_path)))
        units[0] = known

    def test_blocks_of_another_system_in_a_shared_file_are_not_loaded(self, start, a, put, tmp_path):
        """Earlier releases shared such files: the right blocks are loaded from their checkpoints.

        The other system goes on from the older checkpoint, and gives numbers of the newer one to blocks of its own.
        """
        for key in "abcd":
            put(key)
        older = save(a, tmp_path / "older")
        put("e", start=50)
        newer = save(a, tmp_path / "newer") / STORAGE
        other = start(seed=2).client("other")
        load(other, older)
        other.kv_batch_put(["f"], "p", numbers(1, start=70))
        resumed = save(other, tmp_path / "resumed") / STORAGE
        (shared,) = json.loads((newer / MANIFEST).read_text())
        (own,) = json.loads((resumed / MANIFEST).read_text())
        (resumed / shared["file"]).hardlink_to(newer / shared["file"])
        (resumed / MANIFEST).write_text(json.dumps([shared, {**own, "position": 1}]))
        load(other, resumed.parent)
        assert values(other, list("abcdf")) == [0, 0, 0, 0, 70]

    def test_a_controller_that_was_started_again(self, cluster, a, put, tmp_path):
        """Its numbers go on: what was saved before is shared."""
        put("ab")
        before = files(save(a, tmp_path))
        context = cluster.controller.context
        context.config = dataclasses.replace(context.config, boot="another")
        assert files(save(a, tmp_path)) == before

    @pytest.mark.parametrize("content", [b"", b"x" * 200])
    def test_damaged_files_are_not_shared(self, a, put, tmp_path, content):
        """What cannot be read is written anew."""
        put("ab")
        save(a, tmp_path)
        (name,) = files(tmp_path)
        (tmp_path / STORAGE / name).write_bytes(content)
        save(a, tmp_path)
        load(a, tmp_path)
        assert values(a, ["a", "b"]) == [0, 1]

    def test_without_links(self, a, put, tmp_path, monkeypatch):
        """Where the file system has no links everything is written."""

        def refused(*arguments: object, **keywords: object) -> None:
            raise PermissionError("no links here")

        put("ab")
        save(a, tmp_path)
        monkeypatch.setattr(checkpoint_data.os, "link", refused)
        save(a, tmp_path)
        load(a, tmp_path)
        assert values(a, ["a", "b"]) == [0, 1]


class TestRefusing:
    def test_a_damaged_file(self, cluster, a, put, tmp_path):
        """Nothing changes, and nothing stays leased, where a byte of the data is not what it was."""
        put("ab")
        save(a, tmp_path)
        (name,) = files(tmp_path)
        path = tmp_path / STORAGE / name
        content = bytearray(path.read_bytes())
        content[70] ^= 1
        path.write_bytes(content)
        put("ab", start=5)
        before = leased(cluster)
        with pytest.raises(CheckpointError, match="damaged"):
            load(a, tmp_path)
        assert leased(cluster) == before
        assert values(a, ["a", "b"]) == [5, 6]
        assert cluster.controller.state.epoch == 0

    @pytest.mark.parametrize("content", [b"", b"\x80\x04\x95", b"x" * 5000])
    def test_a_foreign_state(self, cluster, a, put, tmp_path, content):
        """Another program's state is told by its name, and is never unpickled."""
        put("ab")
        save(a, tmp_path)
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(CheckpointError, match=STATE):
            load(a, tmp_path)
        assert cluster.controller.state.epoch == 0

    def test_pickles(self, cluster, a, put, tmp_path):
        """A pickle that would do something does nothing."""

        class Evil:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "done",))

        put("a")
        save(a, tmp_path / "ck")
        (tmp_path / "ck" / STATE).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError):
            load(a, tmp_path / "ck")
        assert not (tmp_path / "done").exists()

    def test_nothing_there(self, a, tmp_path):
        """What is missing is named."""
        with pytest.raises(CheckpointNotFoundError, match=MANIFEST):
            a.load_storage_checkpoint(tmp_path)
        with pytest.raises(CheckpointNotFoundError, match="nowhere"):
            a.load_controller_checkpoint(tmp_path / "nowhere")

    def test_no_space(self, start, tmp_path):
        """There must be space for the loaded samples beside those of the system; if there is none, nothing changes."""
        big, small = start(seed=1), start(seed=2, arena_bytes=8 * MIB)
        one, other = big.client("a"), small.client("b")
        for key in "abc":
            one.kv_put(key, "p", {"x": torch.zeros(400_000)})
        save(one, tmp_path)
        other.kv_put("mine", "q", {"x": torch.ones(1_200_000)})
        with pytest.raises(CapacityError):
            load(other, tmp_path)
        assert list(other.kv_list()) == ["q"]
        other.clear_partition("q")
        load(other, tmp_path)
        assert list(other.kv_list()) == ["p"]

    def test_data_of_another_checkpoint(self, a, put, tmp_path):
        """A state whose blocks are not in the data beside it is refused."""
        put("ab")
        save(a, tmp_path / "one")
        put("cd")
        save(a, tmp_path / "two")
        (tmp_path / "one" / STATE).write_bytes((tmp_path / "two" / STATE).read_bytes())
        with pytest.raises(CheckpointError, match="are not in any file of data"):
            a.load_storage_checkpoint(tmp_path / "one")

    def test_a_state_that_the_controller_refuses(self, cluster, a, put, tmp_path):
        """What it cannot take over changes nothing."""
        put("ab")
        save(a, tmp_path)
        name = "0" * 32
        for tree in ({}, {"format": 99}, [1], {"format": 1, "time": 0.0, "sampler": None, "state": {}}):
            state_file.write(cluster.states.path(name), tree)
            with pytest.raises(CheckpointError):
                await_result(cluster, a.start(a.state.ask(LoadState(name), Done, None)))
        with pytest.raises(CheckpointError):
            await_result(cluster, a.start(a.state.ask(LoadState("1" * 32), Done, None)))
        assert cluster.controller.state.epoch == 0
        assert values(a, ["a", "b"]) == [0, 1]


class TestStaleMetadata:
    @pytest.fixture
    def old(self, cluster, a, put, tmp_path):
        """Metadata of rows that live before and after a load."""
        put("abcd")
        meta = a.get_meta("x", None, "p", mode="force_fetch")
        load(a, save(a, tmp_path))
        return meta

    @pytest.mark.parametrize("cut", [
        lambda meta: meta,
        lambda meta: meta[1:3],
        lambda meta: meta.select_samples([2]),
        lambda meta: meta.chunk(2)[1],
        lambda meta: meta.copy(),
        lambda meta: meta.select_fields("x"),
        lambda meta: pickle.loads(pickle.dumps(meta)),
        lambda meta: BatchMeta.concat([meta[:1], meta[2:]]),
        lambda meta: meta.union(meta),
    ])  # fmt: skip
    def test_reads(self, a, old, cut):
        """However it was cut, it is refused, as a row that is gone would be."""
        with pytest.raises(StaleMetadataError, match="a checkpoint was loaded"):
            a.get_data(cut(old))
        assert issubclass(StaleMetadataError, StorageKeyNotFoundError)

    def test_changes(self, cluster, a, old):
        """Nothing is written, tagged, dropped or cleared by it."""
        before = cluster.controller.state.snapshot()["partitions"]
        old.update_custom_meta([{"new": 1}] * 4)
        for refused in (
            lambda: a.put(numbers(4, 50), old),
            lambda: a.set_custom_meta(old),
            lambda: a.clear_samples(old),
            lambda: a.drop("p", metadata=old, reason="old"),
            lambda: a.finish(old, "t"),
        ):
            with pytest.raises(StaleMetadataError):
                refused()
        assert cluster.controller.state.snapshot()["partitions"] == before

    def test_made_by_hand(self, a, old):
        """Metadata that nobody fetched names rows by index, whatever the epoch."""
        meta = BatchMeta(old.global_indexes, ["p"] * 4, {"x": {"dtype": torch.int64, "shape": ()}})
        assert a.get_data(meta)["x"].tolist() == [0, 1, 2, 3]

    def test_new_metadata(self, a, old):
        """What is fetched after the load is of now."""
        meta = a.get_meta("x", None, "p", mode="force_fetch")
        assert a.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
        a.put(numbers(4, 10, "y"), meta)
        with pytest.raises(StaleMetadataError):
            a.get_data(BatchMeta.concat([meta[:2], old[2:]], validate=False))
        inserted = a.put(numbers(2), partition_id="q")
        assert a.get_data(inserted)["x"].tolist() == [0, 1]

    def test_a_put_that_waits(self, start, tmp_path):
        """A put that waits for capacity through a load is refused, too, where it names rows."""
        cluster = start(seed=1, conf={"backend": {"SimpleStorage": {"total_storage_size": 4}}})
        client, other = cluster.client("a"), cluster.client("b")
        client.put(numbers(4), partition_id="p")
        folder = save(client, tmp_path)
        waiting = other.start(other.operations.put(numbers(2, 10), partition_id="p", timeout=100))
        cluster.run()
        assert not waiting.done
        load(client, folder)
        cluster.run()
        assert not waiting.done  # there is no more space than before
        client.clear_partition("p")
        cluster.wait(lambda: waiting.done)
        assert other.get_data(waiting.result())["x"].tolist() == [10, 11]


class TestWhatGoesOn:
    def test_who_waits(self, cluster, a, b, put, tmp_path):
        """A claim that waits is met by rows that a load brings; one that watches is told to look anew."""
        put("ab")
        save(a, tmp_path)
        version = a.wait_for_change("p", timeout=0).version
        a.clear_partition("p")
        claim = b.start(b.operations.get_meta("x", 2, "p", task_name="t", timeout=100))
        watch = b.start(b.operations.wait_for_change("p", version, timeout=100))
        cluster.run()
        assert not claim.done
        load(a, tmp_path)
        cluster.run()
        assert a.get_data(claim.result())["x"].tolist() == [0, 1]
        assert watch.result().dropped

    def test_ages(self, start, tmp_path):
        """Rows are as old as they were, by another clock."""
        one, other = start(seed=1), start(seed=2)
        one.advance(1000)
        client = one.client("a")
        client.create_partition("p", keep_seconds=10)
        client.put(numbers(2), partition_id="p")
        one.advance(6)
        save(client, tmp_path)
        reader = other.client("b")
        load(reader, tmp_path)
        other.advance(3)
        assert reader.get_production_status("x", "p")[0].tolist() == [0, 1]
        other.advance(2)
        assert reader.get_production_status("x", "p")[0].tolist() == []

    def test_a_deal_under_way(self, start, tmp_path):
        """Rows of before that a put names while a load is under way: either it comes first, or it is refused."""
        for seed in range(6):
            cluster = start(seed=seed)
            client, other = cluster.client("a"), cluster.client("b")
            meta = client.put(numbers(3), partition_id="p")
            folder = save(client, tmp_path / str(seed))
            client.load_storage_checkpoint(folder)
            loading = client.start(client.operations.load_controller_checkpoint(folder / STATE))
            writing = other.start(other.operations.put(numbers(3, 10, "y"), meta))
            cluster.wait(lambda: loading.done and writing.done)  # noqa: B023
            loading.result()
            if writing.error is not None:
                assert isinstance(writing.error, StaleMetadataError)
            assert "y" not in cluster.controller.state.partitions["p"].fields

    def test_reads_under_way(self, start, tmp_path):
        """A get that a load overtakes gets its rows' bytes or an error, never others'."""
        for seed in range(12):
            cluster = start(seed=seed, arena_bytes=8 * MIB)
            client, other = cluster.client("a"), cluster.client("b")
            client.kv_put("a", "p", {"x": torch.full((200_000,), 1, dtype=torch.int64)})
            folder = save(client, tmp_path / str(seed))
            client.kv_put("a", "p", {"x": torch.full((200_000,), 2, dtype=torch.int64)})
            meta = client.get_meta("x", None, "p", mode="force_fetch")
            loading = client.start(client.operations.load_controller_checkpoint(folder / STATE))
            assert isinstance(loading.error, CheckpointError)  # its data is not there
            client.load_storage_checkpoint(folder)
            loading = client.start(client.operations.load_controller_checkpoint(folder / STATE))
            reading = other.start(other.operations.get_data(meta))
            cluster.wait(lambda: loading.done and reading.done)  # noqa: B023
            loading.result()
            if reading.error is None:
                assert reading.result()["x"].values().unique().tolist() == [2]
            else:
                assert isinstance(reading.error, StaleMetadataError)

    @pytest.mark.parametrize("seed", range(8))
    def test_random_programs(self, start, tmp_path, seed):
        """Whatever was done before, between cut and copy, and after: what is loaded is the moment of the cut."""
        cluster = start(seed=seed, arena_bytes=16 * MIB)
        random = np.random.default_rng(seed)
        clients = [cluster.client(name) for name in "ab"]

        def steps(count: int) -> None:
            for _ in range(count):
                client = clients[random.integers(2)]
                keys = [str(key) for key in random.choice(12, random.integers(1, 6), replace=False)]
                kind = random.integers(4)
                if kind < 2:
                    client.kv_batch_put(keys, "p", numbers(len(keys), int(random.integers(1 << 40)), "xy"[kind]))
                elif kind == 2:
                    client.kv_clear(keys, "p")
                else:
                    client.await_batch("x", 2, "p", "t", timeout=0)

        def seen() -> Any:
            rows = {key: clients[0].kv_batch_get([key], "p").to_dict() for key in clients[0].kv_list("p").get("p", {})}
            consumed = clients[0].get_consumption_status("t", "p")
            return repr(rows), [None if column is None else column.tolist() for column in consumed]

        steps(25)
        moment = seen()
        save(clients[0], tmp_path, lambda: steps(25))
        steps(10)
        load(clients[1], tmp_path)
        assert seen() == moment
        steps(10)


class Counting(BaseSampler):
    """A user's sampler with a state of its own."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.dealt: Any = 0 if kept is None else kept

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        self.dealt += 1
        rows = list(ready_indexes[:batch_size])
        return rows, rows

    def save_checkpoint(self) -> dict[str, Any]:
        return {"dealt": self.dealt}

    def load_checkpoint(self, state: Any) -> None:
        if state["dealt"] == 66:
            raise ValueError("not this one")
        self.dealt = state["dealt"]


class TestUserSamplers:
    def test_state(self, start, tmp_path):
        """What it keeps is saved and loaded with the system."""
        one, other = Counting(), Counting()
        client = start(seed=1, sampler=one).client("a")
        client.put(numbers(6), partition_id="p")
        for _ in range(2):
            client.get_meta("x", 2, "p", task_name="t", timeout=1)
        save(client, tmp_path)
        load(start(seed=2, sampler=other).client("b"), tmp_path)
        assert one.dealt >= 2
        assert other.dealt == one.dealt

    def test_what_cannot_be_kept(self, start, tmp_path):
        """A value that only Python knows is refused, and the error says what may be kept."""
        client = start(seed=1, sampler=Counting(kept=object())).client("a")
        with pytest.raises(SamplerError, match=r"Counting.save_checkpoint\(\) returned cannot be saved"):
            save(client, tmp_path)

    def test_one_that_refuses(self, start, tmp_path):
        """A sampler that takes its state not leaves everything as it was."""
        sampler = Counting(kept=66)
        cluster = start(seed=1, sampler=sampler)
        client = cluster.client("a")
        client.put(numbers(2), partition_id="p")
        save(client, tmp_path)
        with pytest.raises(InvalidArgumentError, match="not this one"):
            load(client, tmp_path)
        assert cluster.controller.state.epoch == 0


def test_a_state_that_the_controller_has_let_go_of_is_told(a, put, tmp_path):
    """A client that was cut off for a moment has lost its cut: the save says so, and leaves nothing."""
    put("ab")
    cut = a.begin_checkpoint()
    cut.state.unlink()
    with pytest.raises(CheckpointError, match="nothing was saved: the controller has removed its saved state"):
        a.save_controller_checkpoint(tmp_path / "ck" / STATE, cut=cut)
    assert list((tmp_path / "ck").iterdir()) == []
    a.end_checkpoint(cut)


def test_a_state_that_contradicts_itself_is_not_saved(cluster, a, put, tmp_path, monkeypatch):
    put("abc")
    monkeypatch.setattr(interface, "_checkpoint_client", lambda: a)
    interface.save_checkpoint(tmp_path / "ck")
    rows = cluster.controller.state.partitions["p"].rows
    rows.count += 1
    with pytest.raises(CheckpointError, match=r"contradicts itself.*counts 4 rows"):
        interface.save_checkpoint(tmp_path / "ck")
    rows.count -= 1
    assert not list(tmp_path.glob(".ck*"))
    put("d")
    interface.load_checkpoint(tmp_path / "ck")
    assert sorted(a.kv_list()["p"]) == ["a", "b", "c"]


class TestLostUnits:
    def test_a_client_that_only_saves_can_save_after_a_unit_was_lost(self, cluster, a, b, put, tmp_path, monkeypatch):
        monkeypatch.setattr(interface, "_checkpoint_client", lambda: b)
        put("ab")
        interface.save_checkpoint(tmp_path / "ck")
        for start in (10, 20):
            lose(cluster)
            put("cd", start)
            interface.save_checkpoint(tmp_path / "ck")
        interface.load_checkpoint(tmp_path / "ck")
        assert values(a, ["c", "d"]) == [20, 21]

    @pytest.mark.parametrize("when", ["begin_checkpoint", "save_storage_checkpoint", "save_controller_checkpoint"])
    def test_a_unit_that_is_lost_meanwhile_costs_no_save(self, cluster, a, b, put, tmp_path, monkeypatch, when):
        put("ab")
        lost = []

        class Losing:
            """Client b; a unit is lost before the first call of this name, and a puts into the next one."""

            def __getattr__(self, name):
                if name == when and not lost:
                    lost.append(name)
                    lose(cluster, kept=[b])
                    put("cd")
                return getattr(b, name)

        monkeypatch.setattr(interface, "_checkpoint_client", Losing)
        interface.save_checkpoint(tmp_path / "ck")
        interface.load_checkpoint(tmp_path / "ck")
        assert lost
        if when == "begin_checkpoint":
            assert values(a, ["c", "d"]) == [0, 1]

    def test_a_save_fails_if_units_are_lost_in_every_attempt(self, cluster, a, put, tmp_path, monkeypatch):
        put("ab")

        class Losing:
            def __getattr__(self, name):
                if name == "save_storage_checkpoint":
                    raise UnitLostError("gone again")
                return getattr(a, name)

        monkeypatch.setattr(interface, "_checkpoint_client", Losing)
        with pytest.raises(CheckpointError, match="lost at each of 3"):
            interface.save_checkpoint(tmp_path / "ck")
        assert list(tmp_path.iterdir()) == [path for path in tmp_path.iterdir() if path.name.startswith("arena")]


def test_a_put_goes_on_while_units_are_lost_one_after_the_other(cluster, a, put):
    put("a")
    losses = iter(range(3))
    write = a.state.units.arena

    def losing(unit):
        for _ in losses:
            lose(cluster)
            raise UnitLostError("the unit was just lost")
        return write(unit)

    a.state.units.arena = losing
    put("bcd")
    a.state.units.arena = write
    assert values(a, ["b", "c", "d"]) == [0, 1, 2]


RUN: list[str] = []


class Runs:
    """An object whose pickled form calls a function when it is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self):
        return note_run, (self.name,)


def note_run(name: str) -> str:
    RUN.append(name)
    return name


class TestWithoutPickle:
    @pytest.fixture
    def saved(self, a, tmp_path, monkeypatch):
        """Objects of which some need pickle, nested and long ones, too; and such a tag."""
        monkeypatch.setattr(interface, "_checkpoint_client", lambda: a)
        objects = [{"b": [1, 2]}, Runs("one"), "word", [{"x": (Runs("two"), torch.arange(20_000))}]]
        a.kv_batch_put(
            list("abcd"), "p", table(o=objects, x=torch.arange(4)), tags=[{"t": Runs("tag")}, {"t": 2}, {}, None]
        )
        interface.save_checkpoint(tmp_path / "ck")
        RUN.clear()
        return tmp_path / "ck"

    def test_values_that_need_pickle_are_refused_by_name_and_all_others_are_loaded(self, a, b, saved):
        interface.load_checkpoint(saved, allow_pickle=False)
        assert values(b, list("abcd")) == [0, 1, 2, 3]
        assert b.kv_batch_get(["a", "c"], "p", ["o"])["o"] == [{"b": [1, 2]}, "word"]
        for key, row in (("b", 1), ("d", 3)):
            with pytest.raises(UncarriableValueError, match=f"field 'o' of row {row} of partition 'p'"):
                b.kv_batch_get([key], "p", ["o"])
        with pytest.raises(UncarriableValueError, match="tag 't' of row 0 of partition 'p'"):
            b.kv_list("p")
        assert RUN == []

    def test_refused_values_stay_refused_in_later_checkpoints(self, a, b, saved):
        interface.load_checkpoint(saved, allow_pickle=False)
        interface.save_checkpoint(saved.with_name("again"))
        interface.load_checkpoint(saved.with_name("again"))
        with pytest.raises(UncarriableValueError, match="row 1 of partition 'p'"):
            b.kv_batch_get(["b"], "p", ["o"])
        assert RUN == []

    def test_with_pickle_all_values_can_be_read(self, a, b, saved):
        interface.load_checkpoint(saved)
        assert b.kv_batch_get(["b"], "p", ["o"])["o"] == ["one"]
        assert b.kv_list("p")["p"]["a"] == {"t": "tag"}
        assert sorted(set(RUN)) == ["one", "tag"]

    @pytest.mark.parametrize("value", ["no", "false", 0, None])
    def test_what_is_no_bool_is_refused(self, a, saved, value):
        """A word that means no is true to Python, and the pickled objects would be loaded."""
        for load, path in (
            (interface.load_checkpoint, saved),
            (a.load_storage_checkpoint, saved),
            (a.load_controller_checkpoint, saved / STATE),
        ):
            with pytest.raises(InvalidArgumentError, match=f"allow_pickle is {value!r}; allowed: true or false"):
                load(path, allow_pickle=value)

    def test_samples_and_state_must_be_loaded_with_the_same_allow_pickle(self, a, saved):
        a.load_storage_checkpoint(saved)
        with pytest.raises(CheckpointError, match="must be loaded like its samples, with allow_pickle=True"):
            a.load_controller_checkpoint(saved / STATE, allow_pickle=False)


def test_the_controller_takes_over_a_state_that_was_built_before_and_keeps_nothing_else(cluster, a, put, tmp_path):
    """Its loop neither decodes nor builds a state; a replay of the record gives the same state."""
    put("ab")
    save(a, tmp_path / "ck")
    put("c")
    load(a, tmp_path / "ck")
    assert values(a, ["a", "b"]) == [0, 1]
    assert cluster.controller.state.prepared is None
