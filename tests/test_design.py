"""Every statement of the design about samplers, batches and ends has a test that names it.

A test names one by `@pytest.mark.design("...")`. The statements are those of the design's sections 1 (control plane)
and 4 (the ends of things).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent

STATEMENTS = {
    # 1. Control plane
    "a claim that cannot be met is parked with its deadline and answered by the publish that completes it",
    "nobody sleeps or polls, one waiting consumer holds up no one",
    "parked claims are served first come, first served per (partition, task)",
    "a large parked claim does not starve smaller ones",
    "a parked claim whose connection ended is cancelled before it can be met",
    "the same request id on a new connection re-attaches to it",
    "every request gets exactly one reply, and a retry the same answer",
    "balancing runs off the loop as an effect whose result comes back as an event",
    "a user's sampler is timed, and named in the metrics",
    "least-recently-used ready sets are dropped and rebuilt",
    "a claim costs what its batch costs",
    "built-in samplers work on a lazy sequence of ready indexes",
    "a user's sampler that wants a list gets one",
    "global indexes are never reused",
    "a Dealt record carries the outcome; replay never calls a sampler",
    "a dealt batch is kept until all its rows are cleared or its partition is dropped",
    "a later ask for a batch that is gone is an error and never fresh rows",
    "issued batch indexes are kept as intervals",
    "_states on a sampler is a view of the dealt batches for old subclasses",
    "a balanced deal takes all ranks' shares out of the ready set at once",
    "the same key asked with another batch_size is a ValueError",
    "a sampler that raises fails its caller; nothing is dealt",
    "a sampler that returns rows it was not offered fails its caller; nothing is dealt",
    # 4. The ends of things
    "seal forbids new rows, not new fields",
    "producers=N seals after N seals",
    "never-reserved pre-allocated rows vanish",
    "reserved rows may still be published",
    "reserved rows expire with their owner",
    "an orphaned group is reported, explained, ignored for the end",
    "a loader ends when its partition is sealed and no dealt batch for it remains",
    "a loader ends in finite mode when the partition is wholly consumed",
    "a replica that lags still gets its last batch",
    "after a seal every dp_rank gets the same number of batches",
    "the remainder is dealt over dp_size",
    "the remainder is dropped and reported where dp_size is unknown or drop_last is set",
    "replacing a value does not un-consume its row",
    "clearing part of a dealt batch: later callers get StorageKeyNotFoundError naming the rows",
    "reset_consumption forgets that task's dealt batches",
    "when every put waits for space and every claim for rows, the puts fail at once, with the cycle in words",
    "free_when=consumed_by[tasks] per partition frees rows by themselves",
}


def named(path: Path) -> Iterator[str]:
    """The statements that tests of a file name."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test"):
            continue
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.design":
                for argument in mark.args:
                    yield ast.literal_eval(argument)


def test_every_statement_has_a_test_that_names_it():
    found = {statement for path in TESTS.rglob("test_*.py") for statement in named(path)}
    assert sorted(STATEMENTS - found) == [], "no test names these"
    assert sorted(found - STATEMENTS) == [], "tests name what is no statement"
