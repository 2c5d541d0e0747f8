"""`tq doctor`: check whether this machine can run a system, and print what to do about each problem."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing

from transfer_queue.cli.doctor.report import PROBLEM, WARNING, Check, Finding, findings_of
from transfer_queue.cli.options import Commands, add_conf, whole_number_type
from transfer_queue.cli.shell.terminal import Styles

SIZE = 64  # MiB that the self-test moves


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser(
        "doctor", help="check this machine, and measure the rates of put, get, claim and wake-up on it",
        description="Checks versions, processors, memory, limits and folders. Then starts a separate system, moves "
        "data between two processes, compares every byte, and measures the rates of put, get and claim and the time "
        "until a waiting consumer wakes up. The exit code is 1 if there is a problem, for example if a system on this "
        "machine does not reply. With --no-test it can be the probe of a container.",
    )  # fmt: skip
    command.add_argument("--no-test", action="store_true", help="only check, and start nothing: in less than a second")
    add_conf(command, "also check that the storage that this YAML file of settings describes fits this machine")
    command.add_argument(
        "--size", type=whole_number_type("a whole number of MiB from 1 to 1048576", 1, 1 << 20), default=SIZE,
        metavar="MIB", help=f"MiB of large rows that the self-test moves ({SIZE})",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON document, for scripts")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks and print each result at once. Return 0 if there is no problem, otherwise 1."""
    # a signal that ends this process also removes what the self-test has made
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        results = _run_checks(options)
    finally:
        signal.signal(signal.SIGTERM, before)
    levels = [finding.level for _, finding in results]
    problems, warnings = levels.count(PROBLEM), levels.count(WARNING)
    if options.json:
        findings = [finding.as_json(topic) for topic, finding in results]
        print(json.dumps({"ok": not problems, "problems": problems, "warnings": warnings, "findings": findings}))
    else:
        print(f"\n{_number(problems, 'problem')}, {_number(warnings, 'warning')}")
    return 1 if problems else 0


def _run_checks(options: argparse.Namespace) -> list[tuple[str, Finding]]:
    results: list[tuple[str, Finding]] = []
    style = Styles()
    todo = checks()
    if options.conf is not None:
        from transfer_queue.cli.doctor import machine

        todo.append(("storage settings", lambda: machine.check_storage_settings(options.conf)))
    if not options.no_test:
        todo.append(("self-test", lambda: _selftest(options.size)))
    for topic, check in todo:
        if not options.json:
            print(style(topic, "bold"), flush=True)
        with closing(findings_of(topic, check)) as findings:  # an interrupt ends what a check has started
            for finding in findings:
                results.append((topic, finding))
                if not options.json:
                    print(finding.lines(style), flush=True)
    return results


def _selftest(mebibytes: int) -> Iterator[Finding]:
    from transfer_queue.cli.doctor.selftest import selftest

    return selftest(mebibytes << 20)


def checks() -> list[tuple[str, Check]]:
    """Return all checks by topic, in the order in which they run."""
    from transfer_queue.cli.doctor import machine, runtime, software

    return [
        ("software", software.check),
        ("processors and memory", machine.check_machine),
        ("shared memory", machine.check_shared_memory),
        ("limits", machine.check_limits),
        ("runtime folder", runtime.check_folder),
        ("systems", runtime.check_systems),
        ("environment", runtime.check_environment),
    ]


def _number(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"
