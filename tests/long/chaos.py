"""Producers, consumers, controller and storage unit as real processes, of which random ones are killed and stopped.

    python tests/long/chaos.py [--seconds 240] [--faults 250] [--seed 0]

Every row has a checksum over its own bytes and its number. Producers and consumers write into files what they are
about to do and what has come of it, line by line, so that the files of one that was killed still tell. The ledger at
the end: every row whose put has succeeded was acknowledged once, or is there still; none was acknowledged twice; no
group was split; no row read was another's. Rows that were acknowledged are cleared on the way, so that space is used
again all the time.

After each fault it looks at all servers from outside: memory of their own, descriptors, threads, and the files and
bytes in the folders of the system. It fails where one of them is more in the last quarter than it was in the second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import growth
import numpy as np
import psutil
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import ConnectionLostError, TransferQueueError, WaitTimeoutError

PARTITION, TASK = "chaos", "train"
END_SECONDS = 60.0  # for all to finish after the last fault
GROUP, GROUPS = 2, 4  # rows of a group, groups of a put
WIDTH = 1024  # numbers in a row
LEASE = 2.0  # seconds
CALL = 40.0  # seconds for one call: longer than any fault
SAMPLING = {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": GROUP}
ROLES = {"producer": 2, "consumer": 2}


# ------------------------------------------------------------ rows


def rows_of(uids: Iterable[int]) -> torch.Tensor:
    """i8 [rows, WIDTH]: number, checksum, filling."""
    rows = np.array([[uid, 0, *range(uid, uid + WIDTH - 2)] for uid in uids], "i8")
    rows[:, 1] = [_checksum(row) for row in rows]
    return torch.from_numpy(rows)


def _checksum(row: np.ndarray) -> int:
    return zlib.crc32(row[2:].tobytes(), int(row[0]) & 0xFFFFFFFF)


def uids_of(rows: torch.Tensor) -> list[int]:
    """The numbers of these rows; SystemExit with words where a row is not its own."""
    for row in rows.numpy():
        if int(row[1]) != _checksum(row) or int(row[0]) != int(row[2]):
            raise SystemExit(f"foreign bytes: {row[:8].tolist()}")
    return [int(uid) for uid in rows[:, 0]]


class Lines:
    """A file of lines, each of which is there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, **said: Iterable[int]) -> None:
        """Lines of a word and numbers, all of them or none."""
        lines = [f"{what} {' '.join(map(str, numbers))}\n" for what, numbers in said.items()]
        os.write(self._file, "".join(lines).encode())


# ------------------------------------------------------------ roles


def produce(folder: Path, number: int) -> None:
    """Puts groups until told to end. number: of this process, never used again."""
    client, lines, n = tq.get_client(), Lines(folder / f"producer-{number}"), 0
    while not (folder / "end").exists():
        uids = [(number << 24) + n + i for i in range(GROUP * GROUPS)]
        n += len(uids)
        groups = [str(uid // GROUP) for uid in uids]
        lines.say(tried=uids)
        try:
            data = TensorDict({"x": rows_of(uids)}, [len(uids)])
            client.put(data, partition_id=PARTITION, group_ids=groups, timeout=CALL)
        except ConnectionLostError:
            raise  # there is no system any more
        except TransferQueueError as error:
            print(f"producer {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        lines.say(put=uids)
        time.sleep(0.02)


def consume(folder: Path, number: int) -> None:
    """Takes batches under a lease, looks at them and acknowledges them, until nothing comes any more."""
    client, lines = tq.get_client(), Lines(folder / f"consumer-{number}")
    while True:
        ending = (folder / "end").exists() and not list(folder.glob("running-producer-*"))
        try:
            meta = client.get_meta(
                ["x"], GROUP * 2, PARTITION, task_name=TASK, sampling_config=SAMPLING, lease=LEASE,
                timeout=LEASE + 1.0,
            )  # fmt: skip
        except WaitTimeoutError:
            if ending:
                return
            continue
        except ConnectionLostError:
            raise  # there is no system any more
        except TransferQueueError as error:
            print(f"consumer {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        try:
            uids = uids_of(client.get_data(meta, layout="dense", timeout=CALL)["x"])
            if any(uid ^ 1 not in uids for uid in uids):
                raise SystemExit(f"a group was split: {uids}")
            lines.say(tried=uids)
            counts = client.ack(meta, timeout=CALL)
        except ConnectionLostError:
            raise  # there is no system any more
        except TransferQueueError as error:
            print(f"consumer {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        if counts:
            lines.say(index=meta.global_indexes, ack=uids)
        else:
            lines.say(refused=uids)


# ------------------------------------------------------------ the run


class Chaos:
    """faults: how many of each kind there were. seconds: at least so long; faults: at least so many."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.roles: dict[str, int] = {}  # name -> process
        self.born = 0
        self.cleared: set[int] = set()
        self.errors: list[str] = []
        self.own: list[Path] = []  # folders of the system
        self.samples: list[growth.Sizes] = []

    def run(self, seconds: float, faults: int) -> None:
        """Begins a system, and has things go wrong."""
        conf = tq.init({"controller": {"sampler": "SequentialSampler"}, "client": {"call_timeout": CALL}})
        folder = Path(conf["system"]["folder"])
        self.own = [folder, Path(os.path.realpath(folder / "arena"))]
        client = tq.get_client()
        client.create_partition(PARTITION, group_size=GROUP)
        for role, count in ROLES.items():
            for _ in range(count):
                self.start(role)
        end = time.monotonic() + seconds
        while time.monotonic() < end or sum(self.faults.values()) < faults:
            self.fault()
            time.sleep(self.draw.uniform(0.05, 0.4))
            self.look()
            self.clear(client)
            self.samples.append(growth.measure(growth.servers(), self.own))
        (self.folder / "end").touch()
        for role in ("producer", "consumer"):
            self.outlast(role)
        self.clear(client)

    def start(self, role: str) -> None:
        """A process of this role: a fork, as importing torch takes longer than most of them live."""
        self.born += 1
        name = f"{role}-{self.born}"
        (self.folder / f"running-{name}").touch()
        pid = os.fork()
        if pid:
            self.roles[name] = pid
            return
        code = 1
        try:
            log = os.open(self.folder / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            (produce if role == "producer" else consume)(self.folder, self.born)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def fault(self) -> None:
        """One process is killed, or stopped for a while."""
        there = {name: one.pid for name, one in growth.servers().items() if name != "supervisor"}
        processes = {**there, **self.roles}
        name = self.draw.choice(sorted(processes))
        kind = self.draw.choice(["kill", "stop"])
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(processes[name], signal.SIGKILL)
            else:
                os.kill(processes[name], signal.SIGSTOP)
                time.sleep(self.draw.choice([0.05, 0.2, 0.5]) if self.draw.random() < 0.9 else LEASE + 1.0)
                os.kill(processes[name], signal.SIGCONT)
            self.faults[f"{kind} {name.split('-')[0]}"] += 1

    def look(self) -> None:
        """Has those that were killed followed by others. One that ended by itself has found something."""
        for name, pid in list(self.roles.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self.gone(name)
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                self.errors.append(f"{name} ended by itself; its log is below")
            self.start(name.split("-")[0])
        if self.errors:
            raise SystemExit("; ".join(self.errors))

    def outlast(self, role: str) -> None:
        """Waits until all of a role have ended."""
        limit = time.monotonic() + END_SECONDS
        while names := [name for name in self.roles if name.startswith(role)]:
            for name in names:
                ended, status = os.waitpid(self.roles[name], os.WNOHANG)
                if ended:
                    self.gone(name)
                if ended and os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
                    raise SystemExit(f"{name} ended by itself; its log is below")
            if time.monotonic() > limit:
                raise SystemExit(f"{names} wait for ever; their logs are below")
            time.sleep(0.05)

    def gone(self, name: str) -> None:
        """A process has ended."""
        del self.roles[name]
        (self.folder / f"running-{name}").unlink()

    def said(self, role: str, what: str) -> list[int]:
        """All numbers that processes of this role have said under a word."""
        numbers: list[int] = []
        for path in sorted(self.folder.glob(f"{role}-*")):
            for line in path.read_text().splitlines():
                word, _, rest = line.partition(" ")
                if word == what:
                    numbers += map(int, rest.split())
        return numbers

    def clear(self, client: tq.TransferQueueClient) -> None:
        """Clears what was acknowledged."""
        fresh = sorted(set(self.said("consumer", "index")) - self.cleared)
        if fresh:
            client.clear_samples(tq.BatchMeta(fresh, [PARTITION] * len(fresh)), timeout=CALL)
            self.cleared.update(fresh)

    def settle(self) -> dict[str, int]:
        """The ledger; SystemExit where it does not hold."""
        client = tq.get_client()
        put, tried = set(self.said("producer", "put")), set(self.said("producer", "tried"))
        acked, acks = self.said("consumer", "ack"), set(self.said("consumer", "tried"))
        twice = [uid for uid, times in Counter(acked).items() if times > 1]
        meta = client.get_meta(["x"], None, PARTITION, mode="force_fetch")
        there: set[int] = set()
        consumed: set[int] = set()
        if len(meta):
            uids = uids_of(client.get_data(meta, layout="dense")["x"])
            indexes, status = client.get_consumption_status(TASK, PARTITION)
            done = dict(zip(indexes.tolist(), status.tolist(), strict=True))
            there = set(uids)
            consumed = {uid for uid, index in zip(uids, meta.global_indexes, strict=True) if done[index]}
        wrong = {
            "acknowledged twice": twice,
            "lost": sorted(put - there - set(acked)),
            "never put": sorted((there | set(acked)) - tried),
            "acknowledged and not consumed": sorted((set(acked) & there) - consumed),
            "consumed and never acknowledged": sorted(consumed - acks),
            "handed to nobody in the end": sorted((there & put) - consumed),
        }
        broken = {words: uids[:8] for words, uids in wrong.items() if uids}
        if broken:
            raise SystemExit(f"the ledger does not hold: {broken}")
        return {"put": len(put), "tried": len(tried), "acknowledged": len(acked), "there": len(there)}

    def end(self) -> None:
        """Ends the processes and the system."""
        for pid in self.roles.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        tq.close()


def left_behind(own: list[Path]) -> list[str]:
    """Folders of the system and processes that are still there."""
    return [str(path) for path in own if path.exists()] + [
        str(child) for child in psutil.Process().children(recursive=True)
    ]


def main() -> int:
    """The exit code: 1 where the ledger does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--faults", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tq-chaos-") as folder:
        chaos = Chaos(Path(folder), given.seed)
        try:
            chaos.run(given.seconds, given.faults)
            print(f"faults: {dict(sorted(chaos.faults.items()))}, {sum(chaos.faults.values())} in all")
            print(f"the ledger holds: {chaos.settle()}")
            print("\n".join(growth.table(chaos.samples)))
            if more := growth.grown(chaos.samples):
                raise SystemExit(f"it has grown: {', '.join(more)}")
            print("nothing grew")
        finally:
            chaos.end()
            for log in sorted(Path(folder).glob("*.log")):
                sys.stdout.write(f"{log.name}:\n{log.read_text()[-2000:]}\n")
    left = left_behind(chaos.own)
    print(f"left behind: {left}" if left else "nothing was left behind")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
