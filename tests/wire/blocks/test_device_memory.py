"""Blocks that are put together on a device and taken apart there. The host's memory stands for a device's."""

import numpy as np
import pytest
import torch
from carried_values import TORCH_DTYPES, pattern
from codec_arenas import Arenas
from test_codec import TENSOR_COLUMNS, same_rows

from simulated import rows_of
from transfer_queue.wire.blocks import encode
from transfer_queue.wire.blocks.device_memory import DeviceBlock, ReceivedArena, allocate_on_device, flat_on_device
from transfer_queue.wire.blocks.encode import encode_columns, encode_row
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.remote_ranges import find_remote
from transfer_queue.wire.buffers.jagged import offsets_of_lengths
from transfer_queue.wire.buffers.tensors import synchronize

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def on_device(block):
    """The block, put together on a device, as bytes."""
    memory = allocate_on_device(CPU, block.nbytes + 64)
    memory[:] = 0xA5
    block.write_on(memory)
    assert (memory[block.nbytes :] == 0xA5).all()
    return memory[: block.nbytes].numpy()


def landed(arenas, reply, layout="jagged"):
    """The rows of a lookup, gathered on a device on which only their pieces are."""
    units = range(len(arenas.memories))
    found = find_remote(reply, units)
    columns = {}
    for each in found.pieces(arenas.memory):
        # a landing is of one unit
        packed = DeviceBlock(each)
        memory = allocate_on_device(CPU, packed.nbytes)
        memory[:] = 0xA5
        for start, length, at in zip(
            each.starts.tolist(), each.lengths.tolist(), packed.packed_places(each.at).tolist(), strict=True
        ):
            memory[at : at + length] = torch.from_numpy(arenas.memory(each.unit)[start : start + length])
        table = gather(found.reply, ReceivedArena(memory, found.nbytes, packed), layout)
        memory[:] = 0x5A  # what was gathered is a copy
        columns.update(table.items())
    return columns


@pytest.mark.parametrize("name", TENSOR_COLUMNS)
def test_a_block_is_the_same_on_a_device(name):
    """Columns of tensors, beside columns that come from the host."""
    column, _ = TENSOR_COLUMNS[name]
    rows = 2 if name == "jagged gradient" else 3
    if name == "strided view":
        rows = column.size(0)
    objects, numbers = [f"{row}" * 5000 for row in range(rows)], np.arange(rows)[::-1]
    fields = {"o": objects, "x": column, "n": numbers, "empty": torch.ones(rows, 0), "last": objects}
    block = encode_columns(fields, rows)
    assert block.device_of_kind("cpu") == CPU
    assert block.device_of_kind("cuda") is None
    arenas = Arenas()
    arenas.write(block)
    arenas.memories[0][: block.nbytes] = on_device(block)
    table = gather(arenas.reply(), arenas.memory)
    assert same_rows(table.get("x"), rows_of(gather_on_host(fields, rows).get("x")))
    assert table.get("o").tolist() == table.get("last").tolist() == objects
    assert rows_of(table.get("n")) == rows_of(torch.from_numpy(numbers.copy()))


def gather_on_host(fields, rows):
    arenas = Arenas()
    arenas.write(encode_columns(fields, rows))
    return gather(arenas.reply(), arenas.memory)


def test_a_block_without_tensors_needs_no_device():
    block = encode_columns({"o": ["a", "b"], "n": np.arange(2)}, 2)
    assert block.device_of_kind("cpu") is None
    assert encode_row({"x": torch.ones(2)}).device_of_kind("cpu") == CPU


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_tensors_of_a_device_are_written_to_the_host(monkeypatch, dtype, strided):
    """As they are where their block is put together on the host; every dtype."""
    tensor = pattern(dtype, (4, 5, 3), seed=1)
    tensor = tensor.permute(1, 2, 0)[1:] if strided else tensor
    wanted = np.zeros(encode_row({"x": tensor}).nbytes, np.uint8)
    encode_row({"x": tensor}).write_into(wanted)
    monkeypatch.setattr(encode, "_dense", encode.DeviceColumn)
    found = np.zeros_like(wanted)
    encode_row({"x": tensor}).write_into(found)
    assert np.array_equal(found, wanted)
    encode_row({"x": tensor[:0]}).write_into(found)


def test_only_what_is_wanted_takes_memory():
    """Of a large block a field, and rows of it that lie far from each other."""
    arenas = Arenas(size=8 << 20)
    fields = {"small": torch.arange(64), "large": torch.arange(64 * 16384).reshape(64, 16384)}
    arenas.write(encode_columns(fields, 64))
    (pieces,) = find_remote(arenas.reply(fields=["small"]), (0,)).pieces(arenas.memory)
    assert DeviceBlock(pieces).nbytes == 512
    reply = arenas.reply([(0, 60), (0, 3)], ["large"])
    (pieces,) = find_remote(reply, (0,)).pieces(arenas.memory)
    assert DeviceBlock(pieces).nbytes == 2 * 16384 * 8
    assert same_rows(landed(arenas, reply, "dense")["large"], [fields["large"][60], fields["large"][3]])


def test_jagged_tensors_have_their_offsets_on_their_device():
    """A device that has shapes and no values is enough to see it."""
    lengths = np.array([3, 1, 4], np.int64).tobytes()
    made = offsets_of_lengths(lengths).to_device(torch.device("meta")).make_jagged(torch.empty(8, 2, device="meta"), 1)
    assert made.is_nested
    assert made.shape[0] == 3
    assert made.offsets().device.type == made.values().device.type == "meta"
    assert offsets_of_lengths(lengths).make_jagged(torch.zeros(8, 2), 1).offsets().tolist() == [0, 3, 4, 8]


def test_memory_that_cannot_be_had():
    assert allocate_on_device(CPU, 1 << 60) is None
    synchronize(CPU)
    assert flat_on_device(torch.arange(6).reshape(2, 3).t()).numel() == 48
