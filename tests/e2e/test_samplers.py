"""A user's sampler in a real system: by class, instance and import path, and what the controller imports for it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import warm

# In a module that imports no torch, because each controller imports it.
CLASSES = """
from transfer_queue import BaseSampler

class Again(BaseSampler):  # deals the first ready rows, which stay ready: they are sampled and not consumed
    wants_list = True
    def sample(self, ready_indexes, batch_size, *args, fail=False, **kwargs):
        if fail:
            raise KeyError("as asked")
        rows = ready_indexes[:batch_size]
        return rows, [row for row in rows if row < 0 or isinstance(ready_indexes, list) != self.wants_list]

class Lazily(Again):
    wants_list = False
"""
SCRIPT = """
if __name__ == "__main__":
    import json, torch, transfer_queue as tq
    from tensordict import TensorDict

    samplers = {"class": Again, "instance": Lazily(), "path": "script:Lazily"}
    tq.init({"system": {"name": "again"}, "controller": {"sampler": "beside:Again", "task_samplers": samplers}})
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
    for task in (*samplers, "any other"):
        got = [client.get_meta(["x"], 2, "p", task_name=task).global_indexes for _ in range(2)]
        try:
            client.get_meta(["x"], 1, "p", task_name=task, sampling_config={"fail": True})
        except tq.SamplerError as error:
            print(json.dumps([got, str(error)]))
    tq.close()
"""


def run_script() -> int:
    """Run the script that the first argument names, as Python does."""
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    runpy.run_path(sys.argv[1], run_name="__main__")
    return 0


def test_a_users_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By class, instance and import path; a list or lazily; rows that stay ready; its error with its traceback.

    The controller finds what the script could import: the module of the script, and one beside it.
    """
    (tmp_path / "script.py").write_text(CLASSES + SCRIPT)
    (tmp_path / "beside.py").write_text(CLASSES)
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    done = warm.run_program(run_script, str(tmp_path / "script.py"))
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 4, done.stderr
    for (got, words), file in zip(said, ["script.py"] * 3 + ["beside.py"], strict=True):
        assert got == [[0, 1], [0, 1]]
        assert "KeyError: 'as asked'" in words
        assert file in words
        assert 'raise KeyError("as asked")' in words
