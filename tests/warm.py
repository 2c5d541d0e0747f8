"""Processes of tests that begin with torch and the package already imported, which takes seconds.

They are forked from a process that has imported these and done nothing else, so they share as little with the test as
spawned ones do: arguments travel pickled, no descriptor, lock or attached system comes along.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["pytest", "transfer_queue.interface", "transfer_queue.dataloader.streaming_dataloader"]


def context() -> Any:
    """Of multiprocessing. Its processes have the environment of the first one's start; see `process`."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver")


def stop() -> None:
    """End the process from which the others are forked, and wait for its end."""
    forkserver._forkserver._stop()


def process(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> Any:
    """A process, not yet started, that will run the target in the environment that this one has now.

    daemon: it ends with this process, and can have no workers.
    """
    return context().Process(target=_run, args=(dict(os.environ), target, arguments), daemon=daemon)


def reporting(
    target: Callable[..., None], *arguments: Any, duplex: bool = False, daemon: bool = True
) -> tuple[Any, Connection[Any, Any]]:
    """A process that runs the target with the arguments and one end of a pipe, and the other end.

    The end of the process is that of the pipe.
    """
    ours, theirs = multiprocessing.Pipe(duplex)
    made = process(target, *arguments, theirs, daemon=daemon)
    made.start()
    theirs.close()
    return made, ours


def run_program(main: Callable[[], int], *words: str) -> subprocess.CompletedProcess[str]:
    """What running a program with these words gives. main: a function of a module, which reads the words itself."""
    with tempfile.TemporaryDirectory(prefix="tq-program-") as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        program = process(_run_program, main, words, [str(path) for path in outputs], daemon=False)
        program.start()
        program.join()
        return subprocess.CompletedProcess(words, program.exitcode, *(path.read_text("utf-8") for path in outputs))


def _run_program(main: Callable[[], int], words: tuple[str, ...], outputs: list[str]) -> None:
    for number, path in enumerate(outputs, start=1):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, number)
        os.close(output)
    sys.argv[1:] = words
    sys.exit(main())


def _run(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked up in the environment
    target(*arguments)
