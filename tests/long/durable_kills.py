"""A durable system of which all processes are killed at once, again and again: `make durable`.

    python tests/long/durable_kills.py [--kills 200] [--seed 0] [--machine]

Each round kills the supervisor, all servers, the process that started the system, and a random part of the producers
and consumers, at a random moment. Then another process starts the system again with the same `durability.folder`, by
`init` or as `tq start` does. This process is a client of before: it attached once, and reads after each round every
row, whose checksum covers its bytes and its number. Clients that were not killed continue by themselves, and
acknowledge what they had leased before the kill. The ledger is that of `chaos.py`, after every round.

With `--machine` each round is a failure of the machine: all producers and consumers are killed, too, and everything
that the system had in memory is removed. Puts wait for the disk (`durability.values: machine`, `mode: sync`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import chaos
import psutil
import torch

import transfer_queue as tq
from transfer_queue.client.control_client import still_runs
from transfer_queue.config.settings import Settings
from transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError, WaitTimeoutError
from transfer_queue.node.system.durable_folder import SHARED_MEMORY, DurableFolder, known_folders
from transfer_queue.node.system.launcher import start_local

START_SECONDS = 60.0
NAME = "durable"
BACKLOG = 64  # rows


class Kills(chaos.Chaos):
    """The run: `chaos.Chaos` with another fault, and a system that other processes start."""

    def __init__(self, folder: Path, seed: int, machine: bool = False) -> None:
        super().__init__(folder, seed)
        self.machine = machine
        self.durable = DurableFolder(folder / "kept")
        self.conf: dict[str, Any] = {
            "system": {"name": NAME},
            "durability": {
                "values": "machine" if machine else "processes",
                "mode": "sync" if machine else "async",
                "folder": str(self.durable.folder),
            },
            "backend": {"SimpleStorage": {"num_data_storage_units": self.draw.choice([1, 2])}},
        }
        self.starter = 0
        self.rows = 0

    def begin(self) -> None:
        """Start the system in another process, and attach to it."""
        self.start_system()
        tq.init({"system": {"name": NAME}}, attach="require")
        tq.get_client().create_partition(chaos.PARTITION, group_size=chaos.GROUP)
        for role, count in chaos.ROLES.items():
            for _ in range(count):
                self.start(role)

    def start_system(self) -> None:
        """Start the system: as a process that calls `init` and waits, or detached as `tq start` does."""
        detached = self.draw.random() < 0.3
        self.faults["tq start" if detached else "init"] += 1
        ready, say = os.pipe()
        pid = os.fork()
        if not pid:
            self._run_starter(detached, say)
        os.close(say)
        with open(ready, "rb") as pipe:
            if not select.select([pipe], [], [], START_SECONDS)[0] or pipe.read(1) != b"+":
                raise SystemExit("the system did not start again; the log of the starter is below")
        self.starter = 0 if detached else pid
        if detached:
            os.waitpid(pid, 0)

    def _run_starter(self, detached: bool, say: int) -> None:
        """Be the starter. Never returns."""
        code = 1
        try:
            log = os.open(self.folder / "starter.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.pop("TQ_ADDRESS", None)
            if detached:
                plain = {"settings": Settings.from_config(self.conf).to_json(), "conf": {}}
                while not still_runs(start_local(NAME, plain, detached=True, timeout=START_SECONDS)):
                    pass
                os.write(say, b"+")
            else:
                tq.init(self.conf)
                os.write(say, b"+")
                signal.pause()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill_all(self) -> None:
        """Kill every process of the system, its starter and some of the clients, in random order."""
        processes = self.servers()
        if self.starter:
            processes.append(self.starter)
        processes += [pid for pid in self.roles.values() if self.machine or self.draw.random() < 0.6]
        self.draw.shuffle(processes)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.faults["processes killed"] += len(processes)
        if self.starter:
            os.waitpid(self.starter, 0)
            self.starter = 0

    def servers(self) -> list[int]:
        """Return the processes of the system: those that were started with its supervisor's program."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("TQ_RUNTIME_DIR") == os.environ["TQ_RUNTIME_DIR"]
                if mine and "transfer_queue.node.supervisor" in process.cmdline():
                    found.append(process.pid)
        return found

    def round(self) -> None:
        """Kill all, start again, and compare the ledger with what is there."""
        time.sleep(self.draw.choice([0.0, self.draw.uniform(0, 0.1), self.draw.uniform(0, 0.5)]))
        self.kill_all()
        if self.machine:
            identity = self.durable.identity()
            assert identity is not None
            shutil.rmtree(identity.arenas)
        time.sleep(self.draw.choice([0.0, self.draw.uniform(0, 0.3)]))
        self.start_system()
        self.look()
        self.check_all()
        self.consume_backlog()
        self.clear(tq.get_client())

    def consume_backlog(self) -> None:
        """Take what the consumers, which are killed all the time, have not taken, like one of them."""
        client, lines = tq.get_client(), chaos.Lines(self.folder / "consumer-0")
        while True:
            try:
                meta = client.get_meta(
                    ["x"], BACKLOG, chaos.PARTITION, task_name=chaos.TASK, sampling_config=chaos.SAMPLING,
                    lease=chaos.LEASE, timeout=0.0,
                )  # fmt: skip
            except WaitTimeoutError:
                return
            uids = chaos.uids_of(client.get_data(meta, layout="dense", timeout=chaos.CALL)["x"])
            lines.say(tried=uids)
            if client.ack(meta, timeout=chaos.CALL):
                lines.say(index=meta.global_indexes, ack=uids)

    def check_all(self) -> None:
        """Read every row. Each put that was acknowledged before this must be there, unless it was cleared."""
        put = set(self.said("producer", "put"))
        cleared = self.cleared_uids()
        client = tq.get_client()
        meta = client.get_meta(["x"], None, chaos.PARTITION, mode="force_fetch", timeout=chaos.CALL)
        there = self.read(client, meta) if len(meta) else set()
        self.rows += len(there)
        if lost := sorted(put - there - cleared):
            raise SystemExit(f"{len(lost)} rows of acknowledged puts are not there: {lost[:8]}")
        status = client.status()
        # with `machine`, the values of puts that were not acknowledged are lost with the memory
        if not self.machine and any(field.lost for partition in status.partitions for field in partition.fields):
            raise SystemExit(f"values are reported as lost: {status}")

    def read(self, client: Any, meta: Any) -> set[int]:
        """Return the numbers of the rows whose values are there. Those that were lost are cleared."""
        try:
            return set(chaos.uids_of(client.get_data(meta, layout="dense")["x"]))
        except StorageKeyNotFoundError:
            if not self.machine:
                raise
        there: set[int] = set()
        for row in meta.chunk(len(meta)):
            try:
                there |= set(chaos.uids_of(client.get_data(row, layout="dense")["x"]))
            except StorageKeyNotFoundError:
                self.faults["unacknowledged rows lost"] += 1
                client.clear_samples(row)
        return there

    def cleared_uids(self) -> set[int]:
        """Return the numbers of the rows that were acknowledged by a consumer: they may be cleared."""
        return set(self.said("consumer", "ack"))

    def end(self) -> None:
        """End the clients and the system, and remove what it keeps."""
        for pid in self.roles.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        system = tq.attachment.CURRENT.system
        with contextlib.suppress(TransferQueueError):
            found = tq.attachment.find(NAME)
            if found is not None:
                found.stop()
        if self.starter:
            os.kill(self.starter, signal.SIGKILL)
            os.waitpid(self.starter, 0)
        assert system is None or not system.is_alive()
        tq.close()
        self.durable.discard()


def left_behind(folder: Path) -> list[str]:
    """Return what the system should have removed."""
    kept = [*folder.glob("kept/*"), *SHARED_MEMORY.glob("transfer_queue-durable-*/system")]
    mine = [path for path in kept if path.name != "system" or str(folder) in os.readlink(path)]
    return [*map(str, mine), *(known.id for known in known_folders() if str(folder) in known.folder)]


def main() -> int:
    """The exit code: 1 where the ledger does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", action="store_true", help="each kill is a failure of the machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tq-durable-") as folder:
        runtime = Path(folder) / "run"
        runtime.mkdir(mode=0o700)
        os.environ["TQ_RUNTIME_DIR"] = str(runtime)
        kills = Kills(Path(folder), given.seed, given.machine)
        try:
            begun = time.monotonic()
            kills.begin()
            for _ in range(given.kills):
                kills.round()
            (Path(folder) / "end").touch()
            kills.outlast("producer")
            kills.outlast("consumer")
            print(f"{given.kills} times all processes were killed, in {time.monotonic() - begun:.0f} s")
            print(
                f"starts and kills: {dict(sorted(kills.faults.items()))}; {kills.rows} rows read with their checksums"
            )
            print(f"the ledger holds: {kills.settle()}")
        finally:
            kills.end()
            for log in sorted(Path(folder).glob("*.log")):
                sys.stdout.write(f"{log.name}:\n{log.read_text()[-3000:]}\n")
        left = left_behind(Path(folder))
    print(f"left behind: {left}" if left else "nothing was left behind")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
