"""A put, a claim and a get run no line of a feature that the system does not use.

A feature costs those who do not use it nothing: it registers itself, and no gate of it stands in the way of others.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.core import absent_clients, activity, locks, wakeups
from transfer_queue.core.claims import claim_handler, consumption_handlers, deal_jobs, final_rounds, plan
from transfer_queue.core.context import Context
from transfer_queue.core.controller import Controller
from transfer_queue.core.puts import decide, group_decisions
from transfer_queue.core.queries import lookups
from transfer_queue.core.samplers import remote_calls
from transfer_queue.core.samplers.calls import HostedRunner, InlineRunner, UserSampler
from transfer_queue.core.services import FEATURES, SERVICES
from transfer_queue.core.tables.changes import LostValues
from transfer_queue.core.tables.complete_groups import (
    CompleteDeclaredGroups,
    CompleteGroups,
    CompleteOrderedGroups,
    Ranking,
)
from transfer_queue.core.tables.dealt import DealtBatches, SkippedRows
from transfer_queue.core.tables.groups import GroupTable
from transfer_queue.core.tables.leases import LeaseTable, LockTable
from transfer_queue.core.tables.windows import DropLog, RowAges, RowRefcounts
from transfer_queue.core.timeline import recorder
from transfer_queue.testing import Client, Cluster

USED = {
    absent_clients,  # notes who holds a batch that is not handed over
    activity,  # notes who produces and who consumes
    claim_handler,
    consumption_handlers,  # takes the hand-over of a batch
    decide,
    plan,
    recorder,  # the timeline is on by default
    lookups,
    wakeups,
}
"""The features that a put, a claim and a get are made of. A new feature does not belong here."""

OF_FEATURES: list[ModuleType | type] = [
    locks, LockTable,
    LeaseTable,
    GroupTable, group_decisions, CompleteGroups, CompleteOrderedGroups, CompleteDeclaredGroups,
    DealtBatches, final_rounds, SkippedRows,
    Ranking, deal_jobs,
    remote_calls, UserSampler, InlineRunner, HostedRunner,
    RowAges, DropLog, RowRefcounts, LostValues,
]  # fmt: skip
"""What belongs to features that are not used, beside the modules of `FEATURES`."""


def is_part_of(code: CodeType, owner: ModuleType | type) -> bool:
    """Return whether a function was defined in a module or a class."""
    if code.co_filename != inspect.getsourcefile(owner):
        return False
    if isinstance(owner, ModuleType):
        return True
    lines, first = inspect.getsourcelines(owner)
    return first <= code.co_firstlineno < first + len(lines)


def functions_of(operation: Callable[[], Any]) -> set[CodeType]:
    """Return the functions that an operation passes through."""
    passed: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            passed.add(frame.f_code)

    gc.disable()  # a collection may call finalizers
    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
        gc.enable()
    return passed


def passed_features(cluster: Cluster, client: Client) -> set[str]:
    """Return the functions of unused features that a put, a claim and a get pass through."""

    def run() -> None:
        rows = TensorDict({"x": torch.rand(4, 8), "y": torch.rand(4)}, batch_size=4)
        client.put(rows, partition_id="p")
        client.get_data(client.get_meta(["x", "y"], 4, partition_id="p", task_name="t"))

    for _ in range(3):
        run()
    passed = functions_of(run)
    assert any(is_part_of(code, Context) for code in passed), "the controller was not traced"
    idle = [kind for kind in SERVICES if kind not in cluster.controller.context.services]
    owners = [*idle, *(module for module in FEATURES if module not in USED), *OF_FEATURES]
    assert len(idle) > 5
    assert len(owners) > 35
    found = {(owner.__name__, code.co_name) for code in passed for owner in owners if is_part_of(code, owner)}
    return {f"{owner}: {name}" for owner, name in found}


def test_a_put_a_claim_and_a_get_pass_no_feature_that_is_not_used(tmp_path: Path) -> None:
    with Cluster(tmp_path, seed=1) as cluster:
        assert passed_features(cluster, cluster.client("a")) == set()


def test_a_gate_of_a_feature_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = Controller.change

    def with_gates(controller: Controller, *request: Any) -> Any:
        state = controller.state
        assert not locks.release_all(state, "a")
        return change(controller, *request)

    monkeypatch.setattr(Controller, "change", with_gates)
    with Cluster(tmp_path, seed=1) as cluster:
        found = passed_features(cluster, cluster.client("a"))
    assert found == {"transfer_queue.core.locks: release_all", "LockTable: locks_of"} | {
        name for name in found if name.endswith("<listcomp>")
    }
