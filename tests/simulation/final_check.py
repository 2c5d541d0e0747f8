"""The end of a run with faults: deals all remaining samples, reads all values, and compares the ledger."""

from __future__ import annotations

import numpy as np

from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.hand_over_actors import SEEN
from tests.simulation.ledger import FIELDS, Ledger, LedgerError, read
from tests.simulation.rank_actors import TASK
from tests.simulation.retrying_client import RetryingClient
from tests.simulation.run_features import EQUAL, MAIN, MOVED, TASKS, Features, fields_of
from transfer_queue.core.claims.row_leases import POISON
from transfer_queue.core.events.records import ExtentsLost
from transfer_queue.core.state.partition import Partition
from transfer_queue.errors import TransferQueueError
from transfer_queue.metadata import BatchMeta

LEASE = 5.0  # seconds, of the samples that are dealt at the end


class Settling:
    """The final check of one run, in which no faults happen any more."""

    def __init__(self, cluster: FaultyCluster, features: Features, ledger: Ledger) -> None:
        self.cluster = cluster
        self.features = features
        self.ledger = ledger

    def _partition(self) -> Partition:
        return self.cluster.controller.state.partitions[MAIN]

    # ------------------------------------------------------------ remaining samples

    def drain(self) -> None:
        """Deal all samples that were not acknowledged, except those that lack fields or a complete group."""
        client = self.cluster.client("drainer")
        for task in TASKS:
            self._drain_task(client, task)
        client.close()

    def _drain_task(self, client: RetryingClient, task: str) -> None:
        partition = self._partition()
        size = self.features.group if self.features.scenario == "groups" else 1
        fields = fields_of(task)
        while True:
            meta, _ = client.await_batch(fields, size, MAIN, task, lease=LEASE, timeout=0.0)
            if not len(meta):
                break
            self._acknowledge(client, meta, task)
        positions = np.setdiff1d(partition.rows.live_positions(), partition.waiting)
        whole = np.all([partition.blocks_of(field, positions)[0] != 0 for field in fields], axis=0)
        left = positions[whole & (partition.consumed_flags(task, positions) == 0)]
        if len(left) and size == 1:
            raise LedgerError(f"{partition.rows.indexes_of(left).tolist()} are not dealt to {task!r}")

    def _acknowledge(self, client: RetryingClient, meta: BatchMeta, task: str) -> None:
        numbers = self.ledger.seen(meta.global_indexes, client.get_data(meta, layout="dense"))
        epoch = self.ledger.maybe_acked(task, numbers)
        if not client.ack(meta):
            raise LedgerError(f"an acknowledgement of {numbers} in time had no effect")
        self.ledger.acked(task, numbers, epoch)

    def drain_ranks(self) -> None:
        """Fetch every dealt batch that is not acknowledged under its key; a rank never receives another batch."""
        client = self.cluster.client("drainer")
        partition = self._partition()
        dealt = partition.dealt.get(TASK)
        for rank, number in sorted(dealt.by_key) if dealt is not None else ():
            batch = dealt.find(rank, number) if dealt is not None else None
            assert batch is not None
            positions = partition.rows.positions_of(batch.rows)
            if (positions < 0).any():
                continue  # rows of it were cleared, and the reply names them
            while not (partition.consumed_flags(TASK, positions) != 0).all():
                try:
                    meta = client.get_meta(
                        ["x"], batch.batch_size, MAIN, task_name=TASK,
                        sampling_config={"dp_rank": rank, "batch_index": number}, lease=LEASE,
                        replicas=self.features.acks, timeout=0.0,
                    )  # fmt: skip
                except TransferQueueError as error:
                    raise LedgerError(f"batch {number} of rank {rank} is not dealt: {error}") from error
                self.ledger.dealt((MAIN, TASK, rank, number), meta.global_indexes, self.ledger.epoch)
                self._acknowledge(client, meta, TASK)
        client.close()

    # ------------------------------------------------------------ the books

    def settle(self) -> None:
        """Compare the ledger with the contents of the system, which a separate client reads."""
        cluster, ledger = self.cluster, self.ledger
        if any(
            isinstance(record, ExtentsLost) and record.unit not in cluster.store_units() for record in cluster.records
        ):
            raise LedgerError("needed extents were free at their unit, and its arena was not lost")
        client = cluster.client("auditor")
        there: dict[str, set[int]] = {}
        consumed: dict[tuple[str, str], set[int]] = {}
        for name, partition in list(cluster.controller.state.partitions.items()):
            positions = np.setdiff1d(partition.rows.live_positions(), partition.waiting)
            if name == EQUAL:
                self._read_equal(client, partition, positions)
            elif len(positions) and not name.startswith(MOVED):  # `maintenance_actors.mover` has checked those
                numbers = self._read(client, partition, positions)
                there[name] = set(numbers.values())
                tasks = partition.tasks if self.features.leased or self.features.scenario != "ranks" else ()
                for task in set(tasks) - {SEEN}:  # `HandOvers.settle` has checked it
                    consumed[name, task] = self._consumed(partition, task, positions, numbers)
        ledger.settle(there, consumed)
        client.close()

    def _read(self, client: RetryingClient, partition: Partition, positions: np.ndarray) -> dict[int, int]:
        """Read all samples; return the number of each sample by its global index."""
        name = partition.name
        indexes = partition.rows.indexes_of(positions)
        numbers: dict[int, int] = {}
        for field in FIELDS:
            has = partition.blocks_of(field, positions)[0] != 0
            lost = partition.losses.events_of(field, positions) != 0
            if name == MAIN and lost.any():
                raise LedgerError(f"{field!r} of {indexes[lost].tolist()} was lost, and the loss was not reported")
            if field == "x" and not (has | lost).all():
                raise LedgerError(f"rows {indexes[~has].tolist()} of {name} have no value, and were put with one")
            if has.any():
                all_of_it = client.get_meta([field], None, name, mode="force_fetch")
                meta = all_of_it.select_samples(np.flatnonzero(np.isin(all_of_it.global_indexes, indexes[has])))
                read = self.ledger.seen(meta.global_indexes, client.get_data(meta, layout="dense"))
                numbers.update(zip(meta.global_indexes, read, strict=True))
        return numbers

    def _read_equal(self, client: RetryingClient, partition: Partition, positions: np.ndarray) -> None:
        """Read the partition of equal values, whose samples the ledger does not have."""
        has = partition.blocks_of("x", positions)[0] != 0
        if has.any():
            all_of_it = client.get_meta(["x"], None, EQUAL, mode="force_fetch")
            wanted = partition.rows.indexes_of(positions[has])
            meta = all_of_it.select_samples(np.flatnonzero(np.isin(all_of_it.global_indexes, wanted)))
            read("x", client.get_data(meta, layout="dense")["x"])

    def _consumed(self, partition: Partition, task: str, positions: np.ndarray, numbers: dict[int, int]) -> set[int]:
        """Return the numbers of the samples that a task has consumed, without skipped ones."""
        done = positions[partition.consumed_flags(task, positions) != 0]
        aside = [partition.passed.reason(task, position) == POISON for position in done.tolist()]
        indexes = partition.rows.indexes_of(done[~np.array(aside, bool)])
        return {numbers[index] for index in indexes.tolist() if index in numbers}

    # ------------------------------------------------------------ space

    def nothing_leaks(self) -> None:
        """Check that only extents with needed blocks are leased, and none after everything is cleared."""
        cluster = self.cluster
        cluster.advance(5.0)
        needed = set(cluster.controller.state.blocks.extents)
        leased = {(unit.number, extent.number) for unit in cluster.units for extent in unit.table.leased_extents()}
        if leased != needed:
            raise LedgerError(f"extents {sorted(leased - needed)} are leased, but have no needed blocks")
        last = cluster.client("last")
        for name in list(cluster.controller.state.partitions):
            last.clear_partition(name)
        last.close()
        cluster.advance(5.0)
        cluster.check()
        if cluster.world is not None and cluster.world.blocks:
            raise LedgerError(f"{sorted(cluster.world.blocks)} are left in the store after everything was cleared")
        left = sum(unit.table.leased for unit in cluster.units)
        if left:
            raise LedgerError(f"{left} bytes are leased after everything was cleared and all clients have ended")
