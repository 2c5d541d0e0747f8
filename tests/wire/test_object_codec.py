"""Objects to bytes and back: every type as it was, and nothing but errors of the tree from hostile bytes."""

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch
from carried_values import TORCH_DTYPES, Point, jagged, objects, pattern, same
from hypothesis import given, settings
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from transfer_queue.errors import ProtocolError, TransferQueueError, UncarriableValueError
from transfer_queue.wire.objects import extensions as codes
from transfer_queue.wire.objects.extensions import OUT_OF_BAND
from transfer_queue.wire.objects.object_encoder import MAX_DEPTH
from transfer_queue.wire.objects.object_values import decode_object, encode_object


def there_and_back(value, **options):
    return decode_object(encode_object(value, **options), **options)


@given(objects)
@settings(max_examples=200, deadline=None)
def test_every_object_comes_back(value):
    assert same(there_and_back(value), value)


def test_without_pickle():
    """Everything with a code of its own needs no pickle."""
    value = {"a": [1, (2**70, {3}), b"x", np.arange(3), torch.ones(2), np.float32(1)], 2: {None: 1 + 2j}}
    assert same(there_and_back(value, allow_pickle=False), value)


def test_pickle_is_refused_at_both_ends():
    with pytest.raises(UncarriableValueError, match=r"Point.*pickle"):
        encode_object([Point(1)], allow_pickle=False)
    with pytest.raises(UncarriableValueError, match="pickle"):
        decode_object(encode_object([Point(1)]), allow_pickle=False)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype):
    value = [pattern(dtype, (2, 3)), pattern(dtype, ()), pattern(dtype, (0, 2)), pattern(dtype, (200, 500))]
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", [
    TensorDict({"x": torch.arange(3), "in": TensorDict({"y": torch.ones(3, 2)}, [3])}, [3]),
    TensorDict({"s": ["a", "b"], "d": NonTensorData({"k": 1}), "j": jagged([torch.arange(2), torch.arange(3)])}, [2]),
    TensorDict({}, []),
    NonTensorData([1, (2,)]),
    NonTensorData("a", batch_size=[2]),
    NonTensorStack("a", {"b": None}, [1]),
    jagged([torch.arange(2.0), torch.arange(3.0)]),
    jagged([torch.arange(2.0).reshape(1, 2), torch.arange(3.0).reshape(1, 3)], ragged=2),
    torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 4)]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_tables_inside_objects(value):
    assert same(there_and_back(value), value)
    assert same(there_and_back({"inside": [value]})["inside"][0], value)


def test_lazy_stack_inside_an_object():
    value = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}, []), TensorDict({"x": torch.ones(3)}, []))
    back = there_and_back([value])[0]
    assert type(back) is LazyStackedTensorDict
    assert [row["x"].tolist() for row in back.unbind(0)] == [[1, 1], [1, 1, 1]]


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: Point(v)], ids=["alone", "listed", "pickled"])
def test_views_stay_small(wrap):
    """Neither a tensor's whole storage nor an array's base travels."""
    assert len(encode_object(wrap(torch.zeros(1 << 20)[5:8]))) < 1000
    assert len(encode_object(wrap(np.zeros(1 << 20)[5:8]))) < 1000


def test_gradients_stay_behind():
    graph = torch.ones(2, requires_grad=True) * 3
    for back in (there_and_back([graph])[0], there_and_back(Point(graph)).x):
        assert back.tolist() == [3, 3]
        assert not back.requires_grad


def test_parameter_and_module():
    module = torch.nn.Linear(2, 3)
    back = there_and_back(module)
    assert type(back.weight) is torch.nn.Parameter
    assert torch.equal(back.weight, module.weight)
    assert [name for name, _ in back.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("value", [
    np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(10)[::-2], np.broadcast_to(np.arange(3), (2, 3)),
    np.array([1, 2], ">i4"), np.array(["a", "bcd"]), np.array([b"a", b""]), np.array(["2020"], "datetime64[D]"),
    np.zeros(2, [("a", ">i4"), ("b", "f8", (2,))]), np.zeros(2, np.dtype([("a", "i1"), ("b", "i8")], align=True)),
    np.array([None, [1, 2], np.arange(2)], dtype=object), np.empty((2, 0), object), np.array(5), np.zeros(3, "V5"),
    np.zeros((0, 3)), np.zeros((300, 300)), np.array({"a": 1}, dtype=object),
    np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
], ids=lambda a: f"{type(a).__name__}-{a.dtype}-{a.shape}")  # fmt: skip
def test_arrays_of_every_kind(value):
    assert same(there_and_back([value])[0], value)


@pytest.mark.parametrize("size", [10, OUT_OF_BAND, 3 * OUT_OF_BAND])
def test_what_comes_back_is_writable_and_independent(size):
    value = [np.zeros(size), torch.zeros(size), bytearray(size)]
    encoded = bytearray(encode_object(value))
    back = decode_object(encoded)
    for part in back:
        part[0] = 1
    assert same(decode_object(encoded), value)
    encoded[:] = bytes(len(encoded))
    assert [float(part[0]) for part in back] == [1, 1, 1]


def test_large_parts_are_not_copied_into_the_message():
    value = {"b": bytes(1 << 20), "s": "ä" * (1 << 20), "p": Point(np.ones(1 << 18)), "a": bytearray(1 << 20)}
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", [
    threading.Lock(), [threading.Lock()], {"a": (threading.Lock(),)}, Point(threading.Lock()), (i for i in "a"),
    lambda: 0, memoryview(b"a"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_cannot_be_carried(value):
    with pytest.raises(UncarriableValueError, match="type"):
        encode_object(value)


def test_what_contains_itself():
    value = []
    value.append(value)
    with pytest.raises(UncarriableValueError, match="list"):
        encode_object(value)


def test_deep_structures():
    """What can be put can be got; what is too deep is refused at the put."""
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v, "b": 2}):
        value = 1
        for _ in range(MAX_DEPTH):
            value = wrap(value)
        assert same(there_and_back(value), value)
        with pytest.raises(UncarriableValueError, match="deeper"):
            encode_object(wrap(wrap(value)))


def test_class_of_main_goes_by_its_name(tmp_path):
    """A value of a class of __main__ can be read by a process whose __main__ has that class."""
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from transfer_queue.wire.objects.object_values import decode_object, encode_object\n"
        "class Mine:\n"
        "    x = 5\n"
        "if len(sys.argv) > 1:\n"
        "    print(decode_object(bytes.fromhex(sys.argv[1])).x)\n"
        "else:\n"
        "    print(encode_object(Mine()).hex())\n"
    )
    written = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.strip()
    read = subprocess.run([sys.executable, script, written], capture_output=True, text=True, check=True).stdout
    assert read.strip() == "5"
    with pytest.raises(ProtocolError, match=r"cannot be loaded in this process: .*Mine.* must be importable here"):
        decode_object(bytes.fromhex(written))


def test_torch_stays_away():
    """A process that puts and gets plain objects and arrays imports no torch."""
    program = (
        "import sys, numpy as np\n"
        "from transfer_queue.wire.objects.object_values import decode_object, encode_object, encode_tag_value\n"
        "decode_object(encode_object([1, (2,), np.arange(3)])); encode_tag_value({'a': np.int64(1), 'b': (1,)})\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# Hostile bytes; tests/fuzz has random ones.


@pytest.mark.parametrize("content", [
    ["<f8", [2**40], "C", b"12345678"], ["V0", [2**40], "C", b""], ["O", [1], "C", bytes(8)], ["<f8", [-1], "C", b""],
    ["<f8", [0, 2**62], "C", b""], ["<f8", [1], "C", 7], [[["a", "O"]], [1], "C", bytes(8)],
    ["V999999999", [], "C", b""],
    ["<f8", [1], "C", -1], ["<f8", 1, "C", bytes(8)], [["a"], [1], "C", bytes(8)],
], ids=repr)  # fmt: skip
def test_array_that_lies(content):
    packed = msgspec.msgpack.encode(msgspec.msgpack.Ext(codes.ARRAY, msgspec.msgpack.encode(content)))
    with contextlib.suppress(TransferQueueError):
        decode_object(b"\0" + packed, allow_pickle=False)


@pytest.mark.parametrize("head", [
    codes.HEAD.pack(1, 2**61, 0), codes.HEAD.pack(1, 2**64 - 1, 2**64 - 1), codes.HEAD.pack(1, 0, 2**64 - 1),
    codes.HEAD.pack(1, 1, 1) + struct.pack("<Q", 2**64 - 1) + b"\0", b"", b"\1", b"\2", bytes([1]) * 24,
])  # fmt: skip
def test_header_that_lies(head):
    with pytest.raises(ProtocolError):
        decode_object(head)


def test_nested_codes_end_in_an_error():
    data = msgspec.msgpack.encode([1])
    for _ in range(3000):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(codes.TUPLE, data))
    with pytest.raises(ProtocolError):
        decode_object(b"\0" + data)


def test_torn_pickle():
    encoded = encode_object(Point("x" * 100))
    for end in range(0, len(encoded), 7):
        with pytest.raises(ProtocolError):
            decode_object(encoded[:end])


@pytest.mark.slow
@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 15 << 30, reason="needs 15 GiB")
def test_more_than_4_gib():
    """One object beyond what msgpack's lengths can say."""
    size = (1 << 32) + 5
    value = np.zeros(size, np.uint8)
    value[-1] = 7
    back = decode_object(encode_object({"a": value}))["a"]
    assert (back.nbytes, back[-1]) == (size, 7)


def test_delete_is_one():
    from transfer_queue.wire.objects.object_values import DELETE

    assert pickle.loads(pickle.dumps(DELETE)) is DELETE
    assert repr(DELETE) == "DELETE"
    assert type(DELETE)() is DELETE
