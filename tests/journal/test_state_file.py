"""Trees in files: they are read as they were written, and a file that was changed is an error."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import CheckpointError
from transfer_queue.journal import state_file

PREAMBLE, CRC = struct.Struct("<8sIIQQI"), struct.Struct("<I")
"""The beginning of a file, and the checksum after it."""

TREE = {
    "name": "p",
    "numbers": [1, -1, 1.5, None, True, b"\0bytes"],
    "columns": {3: np.arange(5, dtype="i8"), 4: np.zeros(0, "u1"), 5: np.array([1, 2, 3], "u2")},
    "more": [np.array([0.5, np.nan]), np.array([-7], "i4")],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def test_a_tree_is_read_as_it_was_written(path: Path) -> None:
    state_file.write(path, TREE)
    assert same(TREE, state_file.read(path))
    assert os.listdir(path.parent) == ["state"]
    assert path.stat().st_mode & 0o777 == 0o600


COLUMNS = st.builds(
    lambda kind, size: np.arange(size).astype(kind), st.sampled_from(["i1", "u1", "u2", "i4", "i8", "f8"]),
    st.integers(0, 100),
)  # fmt: skip
SIMPLE = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    SIMPLE | st.binary() | COLUMNS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
)


@given(tree=TREES)
def test_any_tree_is_read_as_it_was_written(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "tree"
    state_file.write(path, tree, sync=False)
    assert same(tree, state_file.read(path))


def test_arrays_are_aligned_and_private(path: Path) -> None:
    """They are writable, and writes change neither the file nor another tree that was read from it."""
    state_file.write(path, TREE)
    one, other = state_file.read(path), state_file.read(path)
    before = path.read_bytes()
    for column in [*one["columns"].values(), *one["more"]]:
        assert column.ctypes.data % state_file.ALIGNMENT == 0
    one["columns"][3][:] = 9
    assert other["columns"][3].tolist() == [0, 1, 2, 3, 4]
    assert path.read_bytes() == before


def test_a_file_may_be_replaced_and_removed_while_in_use(path: Path) -> None:
    """A new file replaces one that is mapped, and the columns of the old one do not change."""
    state_file.write(path, TREE)
    old = state_file.read(path)
    state_file.write(path, {"columns": np.ones(1000)})
    assert state_file.read(path)["columns"].sum() == 1000
    path.unlink()
    assert same(TREE, old)


def test_scattered_columns_are_written(path: Path) -> None:
    state_file.write(path, np.arange(10)[::3])
    assert state_file.read(path).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "value", [np.zeros((2, 2)), np.array(["a"]), np.array([None]), np.arange(2, dtype=">i8"), np.int64(3), object()]
)
def test_other_types_are_refused(path: Path, value: Any) -> None:
    """The old file stays."""
    state_file.write(path, TREE)
    with pytest.raises(TypeError, match="can contain plain values"):
        state_file.write(path, [value])
    assert os.listdir(path.parent) == ["state"]
    assert same(TREE, state_file.read(path))


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    """A limit of the file size simulates the full disk."""
    state_file.write(path, TREE)
    script = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np\n"
        "from transfer_queue.journal import state_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: state_file.write(Path(sys.argv[1]), np.zeros(1 << 20))\n"
        "except OSError as error: print(error.strerror)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout == "File too large\n"
    assert os.listdir(path.parent) == ["state"]
    assert same(TREE, state_file.read(path))


def test_a_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state_file.read(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "state"
    state_file.write(path, TREE)
    return path.read_bytes()


def read_bytes(data: bytes, folder: Path) -> Any:
    path = folder / "mutated"
    path.write_bytes(data)
    return state_file.read(path)


@given(data=st.data())
def test_a_truncated_file_is_an_error(written: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    size = data.draw(st.integers(0, len(written) - 1))
    with pytest.raises(CheckpointError, match="not a state that this release can load"):
        read_bytes(written[:size], tmp_path_factory.getbasetemp())


@given(data=st.data())
def test_a_damaged_file_is_an_error(written: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Every change is detected, except of the padding after the preamble."""
    changed = bytearray(written)
    for at, value in data.draw(st.dictionaries(st.integers(0, len(written) - 1), st.integers(0, 255))).items():
        changed[at] = value
    filling = slice(PREAMBLE.size + CRC.size, state_file.ALIGNMENT)
    changed[filling] = written[filling]
    if changed == written:
        assert same(TREE, read_bytes(bytes(changed), tmp_path_factory.getbasetemp()))
        return
    with pytest.raises(CheckpointError, match="not a state that this release can load"):
        read_bytes(bytes(changed), tmp_path_factory.getbasetemp())


@given(data=st.binary(max_size=200))
def test_a_foreign_file_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a state that this release can load"):
        read_bytes(data, tmp_path_factory.getbasetemp())


def sealed(head: bytes, rest: bytes = b"", version: int = state_file.VERSION) -> bytes:
    """Return a file with valid checksums."""
    fixed = PREAMBLE.pack(state_file.MAGIC, version, zlib.crc32(head), len(head), len(rest), zlib.crc32(rest))
    fixed += CRC.pack(zlib.crc32(fixed))
    return fixed.ljust(state_file.ALIGNMENT, b"\0") + head + rest


def test_a_file_of_another_version_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is of version 7, and this release reads version 1"):
        read_bytes(sealed(b"\xc0", version=7), tmp_path)


EXTENSIONS = st.builds(
    lambda code, kind, count, start: msgspec.msgpack.Ext(code, struct.pack("<3sQQ", kind, count, start)),
    st.sampled_from([state_file.ARRAY_CODE, state_file.ARRAY_CODE, 5]),
    st.sampled_from([b"<i8", b"|u1", b"|O8", b"<U1"]),
    st.integers(0, 9) | st.integers(0, (1 << 64) - 1),
    st.sampled_from([0, 64, 1, 1 << 63]),
)
HEADS = st.binary(max_size=40) | st.lists(EXTENSIONS | SIMPLE, max_size=3).map(msgspec.msgpack.encode)


@given(head=HEADS | st.just(b"\x91" * 5000), rest=st.binary(max_size=200))
def test_random_content_with_valid_checksums_is_a_tree_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, head: bytes, rest: bytes
) -> None:
    """The result is any tree, or an error of this package."""
    gap = bytes(-len(head) % state_file.ALIGNMENT)
    try:
        read_bytes(sealed(head, gap + rest), tmp_path_factory.getbasetemp())
    except CheckpointError as error:
        assert "its head cannot be decoded" in str(error)  # noqa: PT017
