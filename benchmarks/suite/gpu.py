"""What do values on a GPU cost: puts of them, gets to it, and a get during a computation?

256 MiB in one dense field, beside copies of as many bytes by cudaMemcpy from and to pinned and pageable memory of the
host. All are measured in turn, from the call until the device is done, in each of several rounds.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness.machine import Memcpy, clocked
from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.systems import system
from transfer_queue import interface as tq
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.metadata import BatchMeta

QUESTION = "What do values on a GPU cost?"
NOTE = (
    "256 MiB each. `more` has the rate in GB/s. Measured on a machine with a GPU, so these figures do not compare with "
    "those of the other benchmarks. Registered small pages: memory of the process in pages of 4 KiB, as the arena "
    'has them, that was registered with the driver by `cudaHostRegister`; "pinned" is memory that the driver has '
    "allocated itself."
)
ROWS, WIDTH = 1024, 64 * 1024  # of float32
PUTS = 64  # into which the same rows are divided, so that a get must gather them
BATCH = 64  # rows of a batch of the loader: 16 MiB
STEP = 4  # computations after each batch of the loader
SHORT = 4096  # elements of short rows: 16 KiB, which are gathered on the host

Acts = dict[str, Callable[[], object]]


def missing() -> str | None:
    """Return why this benchmark cannot run here; None if it can."""
    return None if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is false in this process"


def run(scale: Scale) -> list[Row]:
    """Measure copies, puts, gets, a loader, and a get beside a computation."""
    rows = scale.pick(ROWS, 64)
    with system():
        first, times = _times(scale.pick(15, 2), rows)
    ms = {what: statistics.median(seconds) * 1e3 for what, seconds in times.items()}
    nbytes = rows * WIDTH * 4

    def row(what: str, reference: str) -> Row:
        return against(what, "ms", ms[what], ms[reference], reference, more=_rate(ms[what], nbytes))

    pinned, pageable = "cudaMemcpy to the GPU, registered small pages", "cudaMemcpy to the GPU, pageable"
    apart = ms["get to the GPU"] + ms["computation"]
    return [
        *(Row(what, ms[what], "ms", more=_rate(ms[what], nbytes)) for what in ms if what.startswith("cudaMemcpy")),
        *(
            Row(f"first {what}, which registers the pages", seconds * 1e3, "ms", more=_rate(seconds * 1e3, nbytes))
            for what, seconds in first.items()
        ),
        row("get to the GPU", pinned),
        row(f"get to the GPU of rows of {PUTS} puts", pinned),
        row("get to the GPU of shuffled rows of 16 KiB", pinned),
        row("get to the host, then to the GPU", pageable),
        row("get into a pinned tensor", "memcpy"),
        row("loader with device=", pinned),
        against(
            "loader with device=, and a computation for each batch",
            "ms",
            ms["loader and computations"],
            ms["computations"],
            "the computations alone, each awaited",
            more={"added_ms": ms["loader and computations"] - ms["computations"]},
        ),
        row("loader's views, then to the GPU", pageable),
        row("loader that pins, then to the GPU", pinned),
        row("put from the GPU", "cudaMemcpy from the GPU, registered small pages"),
        against(
            "a computation, with a get to the GPU on another stream",
            "ms",
            ms["both"],
            ms["computation"],
            "the computation alone",
            more={"one_after_the_other_ms": apart},
        ),
    ]


def _rate(ms: float, nbytes: int) -> dict[str, float]:
    return {"GB/s": nbytes / ms / 1e6}


def _times(rounds: int, rows: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the seconds of the first put and get, and those of every case in each round."""
    client = tq.get_client()
    value = torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH)
    meta = client.put(TensorDict({"x": value}, batch_size=rows), partition_id="p")
    parts = BatchMeta.concat([
        client.put(TensorDict({"x": part}, batch_size=len(part)), partition_id="parts") for part in value.chunk(PUTS)
    ])  # fmt: skip
    short = client.put(TensorDict({"x": value.view(-1, SHORT)}, batch_size=rows * WIDTH // SHORT), partition_id="short")
    shuffled = short.select_samples(torch.randperm(len(short)).tolist())
    there, pinned, target = value.cuda(), value.clone().pin_memory(), torch.empty(rows, WIDTH, device="cuda")
    expected = there.clone()

    def get(of: Any = meta) -> torch.Tensor:
        got: torch.Tensor = client.get_data(of, layout="dense", device="cuda")["x"]
        return got

    put = _until_done(lambda: client.put(TensorDict({"x": there}, batch_size=rows), partition_id="first"))
    first = _until_done(get)
    if not all(torch.equal(got, expected) for got in (get(), get(parts))):
        raise AssertionError("the values on the GPU differ from those that were put")
    weights, side = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def compute() -> None:
        torch.mm(weights, weights)

    def step() -> None:
        """A training step that is longer than the fetch of a batch, and ends with a value on the host."""
        for _ in range(STEP):
            compute()
        torch.cuda.synchronize()

    def steps() -> None:
        for _ in range(rows // BATCH):
            step()

    def both() -> None:
        compute()
        with torch.cuda.stream(side):
            get()

    memcpy = Memcpy(rows * WIDTH * 4)
    pages = _registered(rows * WIDTH * 4).view(torch.float32).view(rows, WIDTH)
    acts: Acts = {
        "cudaMemcpy to the GPU, pinned": lambda: target.copy_(pinned, non_blocking=True),
        "cudaMemcpy to the GPU, registered small pages": lambda: target.copy_(pages, non_blocking=True),
        "cudaMemcpy to the GPU, pageable": lambda: target.copy_(value),
        "cudaMemcpy from the GPU, pinned": lambda: pinned.copy_(there, non_blocking=True),
        "cudaMemcpy from the GPU, registered small pages": lambda: pages.copy_(there, non_blocking=True),
        "cudaMemcpy from the GPU, pageable": lambda: value.copy_(there),
        "memcpy": memcpy.seconds,
        "get to the GPU": get,
        f"get to the GPU of rows of {PUTS} puts": lambda: get(parts),
        "get to the GPU of shuffled rows of 16 KiB": lambda: get(shuffled),
        "get to the host, then to the GPU": lambda: client.get_data(meta, layout="dense")["x"].cuda(),
        "get into a pinned tensor": lambda: client.get_data(meta, out={"x": pinned}),
        "computation": compute,
        "computations": steps,
        "both": both,
    }
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        took = {what: _until_done(act) for what, act in acts.items()}
        took["loader with device="] = _loaded(f"device{number}", rows, {"device": "cuda"}, {})
        took["loader and computations"] = _loaded(f"step{number}", rows, {"device": "cuda"}, {}, step)
        took["loader's views, then to the GPU"] = _loaded(f"views{number}", rows, {"copy": False}, {})
        took["loader that pins, then to the GPU"] = _loaded(f"pin{number}", rows, {}, {"pin_memory": True})
        took["put from the GPU"] = _put(there)
        for what, seconds in took.items() if number else ():  # the first round registers pages and makes kernels
            times.setdefault(what, []).append(seconds)
    return {"put from the GPU": put, "get to the GPU": first}, times


def _registered(nbytes: int) -> torch.Tensor:
    """Return memory in small pages that is registered with the driver until the process ends."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.from_numpy(np.frombuffer(memory, np.uint8))
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)):
        raise RuntimeError("the driver does not register memory of this process")
    return tensor


def _until_done(act: Callable[[], object]) -> float:
    """Return the seconds of a call until the device has done all of its work."""
    torch.cuda.synchronize()

    def work() -> None:
        act()
        torch.cuda.synchronize()

    return clocked(work)


def _put(value: torch.Tensor) -> float:
    """Return the seconds of a put of a tensor on the GPU, whose samples are then cleared."""
    client, put = tq.get_client(), []
    data = TensorDict({"x": value}, batch_size=len(value))
    seconds = _until_done(lambda: put.append(client.put(data, partition_id="q")))
    client.clear_samples(put[0])
    return seconds


def _loaded(
    task: str,
    rows: int,
    of_dataset: dict[str, Any],
    of_loader: dict[str, Any],
    step: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds in which a loader brings all rows to the GPU, in batches, with a step after each."""
    tq.get_client().seal("p")
    dataset = StreamingDataset(None, BATCH, BATCH, ["x"], "p", task, 0, keep_batches=0, **of_dataset)
    seen: list[int] = []

    def work() -> None:
        for data, _ in StreamingDataLoader(dataset, **of_loader):
            seen.append(len(data["x"].to("cuda", non_blocking=True)))
            step()

    seconds = _until_done(work)
    if sum(seen) != rows:
        raise AssertionError("the loader did not bring all rows")
    return seconds
