"""What clients observe of systems that resumed from the files of `golden_records`, and how these systems go on.

The generator runs this with the release that has made the files, the tests run it with later releases. So the steps
must not change as long as there are files of a release that has taken them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from golden_description import batch, change, described
from golden_systems import loaded, numbers, resume, rows, save, working_in

from transfer_queue.errors import TransferQueueError


def observe_resumed(files: Path, journal: str, facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Observe a system that resumes from the journal of this name. Makes a folder and works in it.

    facts: the result of `golden_records.make_files`. At the end the system saves a checkpoint, and another system that
    loads it has the same samples.
    """
    with working_in(folder):
        cluster = resume(files, journal, facts["seconds"])
        try:
            found = observe(cluster.client("later"), facts["since"], cluster.advance)
            save(cluster.client("saver"), Path("saved"))
        finally:
            cluster.close()
        with loaded(Path("saved"), Path("again")) as (client, _):
            again = described(client)
    assert samples(again) == samples(found["then"])
    return found


def observe_loaded(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Observe a new system that has loaded the checkpoint. folder: for its files."""
    with loaded(checkpoint, folder) as (client, cluster):
        return observe(client, {}, cluster.advance)


def samples(description: dict[str, Any]) -> dict[str, Any]:
    """The samples of all partitions in a description."""
    return {name: partition["samples"] for name, partition in description["partitions"].items()}


def observe(client: Any, since: dict[str, int], advance: Callable[[float], None]) -> dict[str, Any]:
    """Describe a system, take the steps, and describe it again.

    since: for some partitions the version after which changes are read. advance: lets virtual time pass.
    """
    changes = {name: change(client.wait_for_change(name, version, timeout=0)) for name, version in since.items()}
    return {
        "now": described(client),
        "changes": changes,
        "steps": [[words, result] for words, result in _steps(client, advance)],
        "then": described(client),
    }


def outcome(function: Callable[[], Any]) -> Any:
    """The result of a call, or the name of the error that it raises."""
    try:
        return function()
    except TransferQueueError as error:
        return {"raises": type(error).__name__}


def _steps(client: Any, advance: Callable[[float], None]) -> Iterator[tuple[str, Any]]:
    """Use every partition: what each step does, and its result."""
    yield from _claims(client)
    yield from _puts(client)
    advance(2000.0)
    for rank, number in ((4, 0), (0, 0), (7, 0), (8, 0)):
        given = _claim(client, "leased", "train", 2, 1000.0, dp_rank=rank, batch_index=number)
        yield f"rank {rank} claims batch {number} after all leases have ended", given
    again = {"dp_rank": 8, "batch_index": 0}
    meta, _ = client.await_batch(["x"], 2, "leased", "train", again, lease=9.0, timeout=0)
    yield "rank 8 acknowledges its batch", [meta.global_indexes, client.ack(meta)]


def _claim(client: Any, partition: str, task: str, size: int, lease: float | None = None, **config: int) -> Any:
    fields = ["y"] if partition == "kinds" else ["x"]
    return outcome(
        lambda: batch(client.await_batch(fields, size, partition, task, config or None, lease=lease, timeout=0))
    )


def _claims(client: Any) -> Iterator[tuple[str, Any]]:
    for partition, task, size in (
        ("held", "use", 1), ("kinds", "train", 3), ("groups", "judge", 2), ("groups", "fresh", 2),
        ("awaited", "train", 1), ("begun again", "train", 4), ("begun again", "train", 3), ("freed", "one", 1),
        ("freed", "two", 3), ("few", "train", 3), ("leased", "look", 3), ("sealed", "fresh", 5),
    ):  # fmt: skip
        yield f"{task} claims {size} of {partition}", _claim(client, partition, task, size)
    for partition, rank, number in (
        ("sealed", 0, 0), ("sealed", 1, 1), ("sealed", 0, 2), ("groups", 0, 0), ("groups", 1, 0), ("read twice", 0, 0),
        ("leased", 0, 0), ("leased", 1, 0), ("leased", 1, 1), ("leased", 3, 0),
    ):  # fmt: skip
        lease = 1000.0 if partition == "leased" else None
        given = _claim(client, partition, "train", 2, lease, dp_rank=rank, batch_index=number)
        yield f"rank {rank} claims batch {number} of {partition}", given
    yield "missing groups", client.wanted("groups", "train")


def _puts(client: Any) -> Iterator[tuple[str, Any]]:
    def put(partition: str, count: int, start: int = 0, **more: Any) -> Any:
        return outcome(lambda: client.put(numbers(count, start), partition_id=partition, **more).global_indexes)

    yield "a late member of a dropped group", put("groups", 2, 500, group_ids=["g1", "g9"])
    yield "missing groups", client.wanted("groups", "train")
    yield "too many rows for the policy", put("policy", 2)
    yield "as many rows as the policy allows", put("policy", 1)
    yield "more rows than are kept", put("few", 2, 70)
    yield "more bytes than are kept", put("small", 2, 80)
    yield "rows for a sealed partition", put("sealed", 1)
    existing = client.kv_retrieve_meta(["k0", "k3"], "kinds")
    client.put(rows(number=torch.tensor([100, 103])), metadata=existing)
    client.kv_batch_put(["k2", "k9"], "kinds", rows(number=torch.tensor([102, 109])), tags=[{"new": 1}, {"new": 2}])
    client.kv_clear("k1", "kinds")
    client.clear_partition("not loaded")
    client.create_partition("new", group_size=2)
    yield "rows of a new partition", put("new", 4, group_ids=["a", "b", "a", "b"])
    yield "train claims 2 of new", _claim(client, "new", "train", 2)
    client.seal("begun again")
    yield "train claims 1 of begun again after the seal", _claim(client, "begun again", "train", 1)
