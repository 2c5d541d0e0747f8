"""`make fuzz`: feeds the decoders with new inputs for a while, and keeps in the corpus what fails."""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import logging
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutations
from decoders import DECODERS, generate

CORPUS = Path(__file__).parent / "corpus"
SLOW = 2.0  # seconds that an input may take


def main() -> int:
    """0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all decoders together")
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("--lives", type=int, default=200, help="of a controller that gets changed requests")
    parser.add_argument("decoders", nargs="*", choices=[*DECODERS, []])
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    failures: collections.Counter[str] = collections.Counter()
    names = asked.decoders or list(DECODERS)
    print(f"seed {asked.seed}")
    importlib.import_module("transfer_queue.wire.blocks.gather")  # takes seconds, which no input is to be blamed for
    for name in names:
        until = time.monotonic() + asked.seconds / len(names)
        count = 0
        while time.monotonic() < until:
            data = generate(name, random.Random(f"{asked.seed}-{name}-{count}"))
            count += 1
            where = failed(name, data)
            if where is not None:
                failures[where[0]] += 1
                if failures[where[0]] == 1:
                    print(f"{name}: {': '.join(where)}: kept as {keep(name, data)}", flush=True)
        print(f"{name}: {count} inputs", flush=True)
    for number in range(0 if asked.decoders else asked.lives):
        life = f"{asked.seed}-{number}"
        try:
            mutations.run(life, 150)
        except Exception as error:
            failures["mutations"] += 1
            print(f"mutations: mutations.run({life!r}, 150): {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


def failed(name: str, data: bytes) -> tuple[str, str] | None:
    """Where the decoder fails at this input, and with which words; None where it does not."""
    began = time.process_time()
    try:
        DECODERS[name](data)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = error.__cause__ if error.__cause__ is not None and type(error).__name__ == "Bug" else error
        place = traceback.extract_tb(cause.__traceback__)[-1]
        return f"{type(cause).__name__} in {Path(place.filename).name}:{place.lineno}", f"{cause!s:.150}"
    took = time.process_time() - began
    return ("slow", f"it took {took:.1f} s") if took > SLOW else None


def keep(name: str, data: bytes) -> Path:
    """Saves an input in the corpus."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.exit(main())
