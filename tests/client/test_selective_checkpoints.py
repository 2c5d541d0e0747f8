"""Checkpoints of some partitions or samples, and their load into a running system, in the simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints import save, values
from test_lost_units import lose

from simulated import Start, numbers, ragged, rows_of, same, table
from transfer_queue.client.checkpoint.checkpoint_data import CheckpointReport, warn_of_losses
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, STATE, write_json
from transfer_queue.client.conversion.arguments import consumed_by
from transfer_queue.core.checkpoints import Checkpoints
from transfer_queue.errors import (
    CapacityError,
    DuplicateError,
    FieldTypeError,
    InvalidArgumentError,
    SealedError,
    StorageKeyNotFoundError,
    UnknownPartitionError,
)
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Client, Cluster


def save_some(client: Client, folder: Path, partitions: Any, keys: Any = None) -> CheckpointReport:
    """What `tq.save_checkpoint(..., partitions=, keys=)` does, but for the replacement of the folder."""
    cut = client.begin_checkpoint(partitions=partitions, keys=keys)
    folder.mkdir(parents=True)
    client.save_storage_checkpoint(folder, cut=cut)
    client.save_controller_checkpoint(folder / STATE, cut=cut)
    assert client.end_checkpoint(cut)
    write_json(folder / METADATA, {"storage_saved": True, "user_metadata": {}, "partitions": list(cut.report.samples)})
    return cut.report


@pytest.fixture
def client(start: Start) -> Client:
    """A client of the system whose partition p is saved."""
    return start(seed=1).client("a")


@pytest.fixture
def loaded(start: Start, client: Client, tmp_path: Path) -> Callable[..., Client]:
    """loaded(...): a client of another system, into which partition p of the first one was loaded."""

    def load(**options: Any) -> Client:
        save_some(client, tmp_path / "ck", "p")
        other = start(seed=2, **options).client("b")
        other.load_samples(tmp_path / "ck", "p")
        return other

    return load


def row(client: Client, key: str, partition: str = "p") -> dict[str, Any]:
    found = client.kv_batch_get([key], partition, layout="list")
    return {name: rows_of(found.get(name))[0] for name in sorted(found.keys())}


@pytest.fixture
def full(start: Start) -> Cluster:
    """A system with samples of every kind of value in p, and other samples in q."""
    cluster = start(seed=1)
    client = cluster.client("writer")
    client.kv_batch_put(["q0", "q1"], "q", numbers(2, start=70))
    columns = table(
        x=torch.arange(5),
        half=torch.randn(5, 3, dtype=torch.bfloat16),
        ragged=ragged(1, 5, 2, 4, 3),
        words=["a", "", None, {"b": [1, 2]}, b"\0x"],
    )
    client.kv_batch_put(list("abcde"), "p", columns, tags=[{"i": i, "t": (1, i)} for i in range(5)])
    client.kv_batch_put(["a", "c"], "p", table(more=torch.zeros(2, 1000)))
    client.kv_batch_put(["b"], "p", table(x=torch.tensor([100])))
    return cluster


class TestWhatIsAdded:
    def test_values_of_every_kind_into_a_system_with_other_units(self, full, start, tmp_path):
        """The other system has more units, with copies, and samples of its own, which stay."""
        writer = full.client("reader")
        report = save_some(writer, tmp_path / "ck", "p")
        assert report == CheckpointReport({"p": 5}, {})
        other = start(seed=2, conf={"backend": {"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2}}})
        client = other.client("c")
        mine = client.put(numbers(3, start=500), partition_id="mine")
        assert client.load_samples(tmp_path / "ck", "p") == report
        assert client.kv_list("p") == writer.kv_list("p")
        for key in "abcde":
            before, after = row(writer, key), row(client, key)
            assert same(before, after), key
        assert client.get_data(mine)["x"].tolist() == [500, 501, 502]
        assert "q" not in client.get_partition_list()
        copies = [len(places) for _, _, places, _ in other.controller.state.blocks.live_blocks()]
        assert set(copies) == {2}

    def test_chosen_keys(self, full, start, tmp_path):
        report = save_some(full.client("s"), tmp_path / "ck", "p", ["d", "b"])
        assert report.samples == {"p": 2}
        client = start(seed=2).client("c")
        client.load_samples(tmp_path / "ck", "p")
        assert list(client.kv_list("p")["p"]) == ["b", "d"]
        assert values(client, ["b", "d"]) == [100, 3]

    def test_keys_are_chosen_again_by_the_load(self, full, start, tmp_path):
        save(full.client("s"), tmp_path / "ck")
        write_json(tmp_path / "ck" / METADATA, {"storage_saved": True, "user_metadata": {}})
        client = start(seed=2).client("c")
        assert client.load_samples(tmp_path / "ck", "p", keys="e").samples == {"p": 1}
        assert client.load_samples(tmp_path / "ck", ["q"]).samples == {"q": 2}
        assert client.kv_list() == {"p": {"e": {"i": 4, "t": (1, 4)}}, "q": {"q0": {}, "q1": {}}}

    def test_a_checkpoint_of_some_is_smaller(self, full, tmp_path):
        client = full.client("s")
        client.kv_put("big", "q", {"x": torch.zeros(100_000)})
        save_some(client, tmp_path / "some", "p")
        save(client, tmp_path / "all")

        def size(folder: Path) -> int:
            return sum(path.stat().st_size for path in folder.glob("simple_storage/*.blocks"))

        assert size(tmp_path / "some") * 10 < size(tmp_path / "all")

    def test_a_second_load_after_a_restart(self, start, tmp_path):
        """What a load has added is in the journal, and is saved and loaded again."""
        cluster = start(seed=3)
        client = cluster.client("a")
        client.kv_batch_put(list("abc"), "p", numbers(3), tags=[{"n": i} for i in range(3)])
        save_some(client, tmp_path / "ck", "p")
        client.kv_clear(["a", "b"], "p")
        client.load_samples(tmp_path / "ck", "p", keys=["a", "b"])
        client.kv_put("d", "p", {"x": torch.tensor(9)})
        cluster.check()
        save_some(client, tmp_path / "again", "p")
        other = start(seed=4).client("b")
        other.load_samples(tmp_path / "again", "p")
        assert other.kv_list("p") == {"p": {"c": {"n": 2}, "a": {"n": 0}, "b": {"n": 1}, "d": {}}}
        assert values(other, list("abcd")) == [0, 1, 2, 9]


class TestProgress:
    def test_consumption_and_skipped_samples(self, client, loaded):
        client.kv_batch_put(list("abcdef"), "p", numbers(6))
        taken = client.get_meta("x", 2, "p", task_name="train")
        other = loaded()
        left = other.get_meta("x", 4, "p", task_name="train")
        assert other.get_data(left)["x"].tolist() == [2, 3, 4, 5]
        assert taken.size == 2
        assert other.get_data(other.get_meta("x", 6, "p", task_name="log"))["x"].tolist() == list(range(6))
        other.reset_consumption("p", "train")
        assert other.get_meta("x", 6, "p", task_name="train").size == 6

    def test_a_lease_ends(self, client, loaded):
        client.kv_batch_put(list("ab"), "p", numbers(2))
        client.get_meta("x", 1, "p", task_name="train", lease=1000)
        assert loaded().get_meta("x", 2, "p", task_name="train").size == 2

    def test_a_claim_that_waits_gets_the_samples(self, start, client, tmp_path):
        client.kv_batch_put(list("abcd"), "p", numbers(4))
        save_some(client, tmp_path / "ck", "p")
        other = start(seed=2)
        waiting = other.client("w")
        task = waiting.start(waiting.operations.get_meta("x", 4, "p", task_name="t", timeout=100))
        other.run()
        other.client("b").load_samples(tmp_path / "ck", "p")
        other.run()
        assert task.result().size == 4

    @pytest.mark.parametrize("declared", [True, False])
    def test_groups(self, client, loaded, declared):
        """Groups stay together, also those by order of reservation in which a member was cleared."""
        groups = [0, 0, 1, 1, 2, 2, 3, 3]
        meta = client.put(numbers(8), partition_id="p", **({"group_ids": groups} if declared else {}))
        client.clear_samples(meta.select_samples([0, 1, 3]))
        other = loaded(sampler=GRPOGroupNSampler(2))
        batch = other.get_meta("x", 4, "p", task_name="t")
        assert other.get_data(batch)["x"].tolist() == [4, 5, 6, 7]

    def test_members_of_a_group_that_are_loaded_one_after_the_other_complete_it(self, start, client, tmp_path):
        client.kv_batch_put(list("abcd"), "p", numbers(4), group_ids=["g", "g", "h", "h"])
        save_some(client, tmp_path / "ck", "p")
        other = start(seed=2, sampler=GRPOGroupNSampler(2), conf={"controller": {"polling_mode": True}}).client("b")
        other.load_samples(tmp_path / "ck", "p", keys=["a", "c"])
        assert other.get_meta("x", 2, "p", task_name="t").size == 0
        other.load_samples(tmp_path / "ck", "p", keys=["b"])
        assert other.get_data(other.get_meta("x", 2, "p", task_name="t"))["x"].tolist() == [0, 1]

    def test_settings_seals_and_the_policy_version(self, start, client, tmp_path):
        client.create_partition("p", max_staleness=1, rows_per_version=2, producers=2)
        client.set_policy_version("p", 3)
        client.kv_batch_put(["a", "b"], "p", numbers(2))
        client.seal("p")
        save_some(client, tmp_path / "ck", "p")
        cluster = start(seed=2)
        other = cluster.client("b")
        other.load_samples(tmp_path / "ck", "p")
        assert other.create_partition("p", max_staleness=1, rows_per_version=2, producers=2) is False
        partition = cluster.controller.state.partitions["p"]
        assert (partition.policy_version, partition.seals, partition.admitted) == (3, 1, 2)
        other.seal("p")
        assert other.get_meta("x", 2, "p", task_name="t").size == 2
        with pytest.raises(SealedError):
            other.kv_put("c", "p", {"x": torch.tensor(1)})

    def test_settings_that_differ_are_named(self, start, client, tmp_path):
        client.create_partition("p", free_when=consumed_by["train"], max_rows=5)
        client.kv_put("a", "p", numbers(1))
        save_some(client, tmp_path / "ck", "p")
        other = start(seed=2).client("b")
        other.create_partition("p", free_when=consumed_by["train"], group_size=2)
        words = r"than it was saved with: group_size is 2, but was None, max_rows is None, but was 5; nothing was"
        with pytest.raises(InvalidArgumentError, match=words):
            other.load_samples(tmp_path / "ck", "p")

    def test_samples_that_no_task_needs_are_not_kept(self, client, loaded):
        """Under free_when they were only there because a client still referred to them."""
        client.create_partition("p", free_when=consumed_by["train"])
        client.kv_batch_put(list("abc"), "p", numbers(3))
        client.get_meta("x", 1, "p", task_name="train")
        assert len(client.kv_list("p")["p"]) == 3
        assert list(loaded().kv_list("p")["p"]) == ["b", "c"]


class TestAnExistingPartition:
    def test_samples_are_added_to_it(self, full, start, tmp_path):
        save_some(full.client("s"), tmp_path / "ck", "p")
        other = start(seed=2).client("c")
        other.kv_batch_put(["own"], "p", table(x=torch.tensor([1], dtype=torch.int32)), tags=[{"mine": True}])
        other.load_samples(tmp_path / "ck", ["p"])
        assert list(other.kv_list("p")["p"]) == ["own", *"abcde"]
        assert values(other, ["own", "a", "e"]) == [1, 0, 4]
        assert row(other, "d")["words"] == {"b": [1, 2]}

    def test_samples_without_keys_are_always_added(self, client, tmp_path):
        client.put(numbers(3), partition_id="p")
        save_some(client, tmp_path / "ck", "p")
        client.load_samples(tmp_path / "ck", "p")
        client.load_samples(tmp_path / "ck", "p")
        assert client.get_data(client.get_meta("x", 9, "p", task_name="t"))["x"].tolist() == [0, 1, 2] * 3

    @pytest.mark.parametrize(
        ("prepare", "error", "words"),
        [
            (lambda c: c.kv_put("b", "p", {"x": torch.tensor(1)}), DuplicateError, r"already has .* keys \['b'\]"),
            (lambda c: c.create_partition("p", group_size=2), InvalidArgumentError, "group_size"),
            (lambda c: c.seal("p", create=True), SealedError, "'p' is sealed"),
            (lambda c: c.kv_put("o", "p", {"x": "text"}), FieldTypeError, "'x'"),
        ],
    )
    def test_what_does_not_fit_changes_nothing(self, full, start, tmp_path, prepare, error, words):
        save_some(full.client("s"), tmp_path / "ck", "p")
        cluster = start(seed=2)
        other = cluster.client("c")
        prepare(other)
        before = (other.kv_list(), cluster.controller.state.next_index)
        with pytest.raises(error, match=words):
            other.load_samples(tmp_path / "ck", "p")
        assert (other.kv_list(), cluster.controller.state.next_index) == before

    def test_the_capacity(self, full, start, tmp_path):
        save_some(full.client("s"), tmp_path / "ck", "p")
        other = start(seed=2, conf={"backend": {"SimpleStorage": {"total_storage_size": 6}}}).client("c")
        other.put(numbers(2), partition_id="q")
        with pytest.raises(CapacityError, match="the checkpoint adds 5"):
            other.load_samples(tmp_path / "ck", "p")
        other.clear_partition("q")
        assert other.load_samples(tmp_path / "ck", "p").samples == {"p": 5}


class TestNames:
    @pytest.mark.parametrize(
        ("partitions", "keys", "error", "words"),
        [
            (["p", "nowhere"], None, UnknownPartitionError, r"partition 'nowhere' does not exist .* Name only"),
            (
                "p",
                ["a", "nope", "none"],
                StorageKeyNotFoundError,
                r"'p' has no samples with the keys \['nope', 'none'\]",
            ),
            (["p", "q"], ["a"], InvalidArgumentError, "a single partition"),
            ([], None, InvalidArgumentError, "at least one partition"),
            (None, ["a"], InvalidArgumentError, "keys needs partitions"),
            ("p", [], InvalidArgumentError, "at least one sample, got none"),
            (["p", 3], None, InvalidArgumentError, "partitions must be a str, got 3"),
        ],
    )
    def test_wrong_names_are_errors_of_save_and_load(self, full, tmp_path, partitions, keys, error, words):
        client = full.client("s")
        with pytest.raises(error, match=words):
            client.begin_checkpoint(partitions=partitions, keys=keys)
        assert not full.controller.context.services[Checkpoints].saves
        assert not list(full.states.folder.iterdir())
        if partitions:
            save(client, tmp_path / "ck")
            write_json(tmp_path / "ck" / METADATA, {"storage_saved": True, "user_metadata": {}})
            with pytest.raises(error, match=words):
                client.load_samples(tmp_path / "ck", partitions, keys=keys)


class TestLostValues:
    def test_they_are_reported_by_key(self, start, tmp_path, caplog):
        cluster = start(seed=1)
        client = cluster.client("a")
        client.kv_batch_put(["k1", "k2"], "p", numbers(2, name="gone"), tags=[{"n": 1}, {"n": 2}])
        first = client.put(numbers(1, name="gone"), partition_id="p").global_indexes[0]
        lose(cluster)
        client = cluster.client("b")
        client.kv_batch_put(["k1", "k3"], "p", numbers(2, start=5))
        lost = {"p": {"k1": ["gone"], "k2": ["gone"], first: ["gone"]}}
        report = save_some(client, tmp_path / "ck", "p")
        assert report == CheckpointReport({"p": 4}, lost)
        warn_of_losses(report)
        assert "'k1' (gone), 'k2' (gone)" in caplog.text
        other = start(seed=2).client("c")
        assert other.load_samples(tmp_path / "ck", "p") == report
        assert values(other, ["k1", "k3"]) == [5, 6]
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 0"):
            other.get_data(other.kv_retrieve_meta(["k2"], "p").add_fields(numbers(1, name="gone")))
        other.kv_batch_put(["k1", "k2"], "p", numbers(2, start=8, name="gone"))
        assert values(other, ["k1", "k2"], field="gone") == [8, 9]
        assert save_some(other, tmp_path / "later", "p", ["k1", "k2"]).lost == {}
