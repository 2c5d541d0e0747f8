"""Values of every kind that can be carried, and when two of them are the same."""

import collections
import datetime
import enum
import fractions
import struct

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.wire.buffers.tensors import DTYPES

# what torch itself can make and compare; the sub-byte dtypes are shells around bytes
TORCH_DTYPES = sorted(DTYPES.values(), key=str)
# a few of each size from 1 to 16 bytes
DTYPES_OF_EACH_SIZE = [
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.int32, torch.float32,
    torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


class Word(str):
    """A str that is more than a str."""


Pair = collections.namedtuple("Pair", "one other")


class Point:
    """A class of the user's own."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and same(self.x, other.x)

    __hash__ = None

    def __repr__(self):
        return f"Point({self.x})"


def bits(tensor):
    """The bytes of a tensor in C order."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().resolve_conj().resolve_neg()
    # torch has few operations for its rarer dtypes, but all for integers of the same width
    return plain.view(integers.get(tensor.dtype.itemsize, tensor.dtype)).numpy().tobytes()


def same_tensor(one, other):
    """Same dtype, shape and bits, and for nested tensors the same rows and layout."""
    if one.is_nested or other.is_nested:
        if (one.is_nested, one.layout) != (other.is_nested, other.layout) or one.size(0) != other.size(0):
            return False
        return all(map(same_tensor, one.unbind(0), other.unbind(0)))
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def same(one, other):
    """Exactly the same type and value, NaN payloads included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and type(one) is type(other) and same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and type(one) is float:
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex) and type(one) is complex:
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.hasobject:
            return all(map(same, one.ravel().tolist(), other.ravel().tolist()))
        return one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, TensorDict):
        if one.batch_size != other.batch_size or set(one.keys()) != set(other.keys()):
            return False
        return all(same(one.get(key), other.get(key)) for key in list(one.keys()))
    if isinstance(one, NonTensorData):
        return one.batch_size == other.batch_size and same(one.data, other.data)
    if isinstance(one, NonTensorStack):
        return one.batch_size == other.batch_size and same(one.tolist(), other.tolist())
    return bool(one == other)


def pattern(dtype, shape, seed=0):
    """A tensor of this dtype with arbitrary bits (0 and 1 for bool)."""
    shape = tuple(shape)
    count = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * dtype.itemsize, dtype=np.uint8)
    flat = torch.from_numpy(raw) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def jagged(rows, ragged=1):
    """A jagged tensor of these rows, ragged in dimension `ragged`."""
    if ragged == 1:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    return torch.nested.nested_tensor([r.transpose(0, 1).contiguous() for r in rows], layout=torch.jagged).transpose(
        1, 2
    )


dtypes = st.sampled_from(TORCH_DTYPES)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.builds(pattern, dtypes, shapes, st.integers(0, 99))

array_dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=4),
    hnp.byte_string_dtypes(min_len=1, max_len=4),
    hnp.array_dtypes(allow_subarrays=True, max_size=3),
)
arrays = array_dtypes.flatmap(
    lambda dtype: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).map(
        lambda shape: _random_array(shape, dtype)
    )
)


def _random_array(shape, dtype):
    if dtype.hasobject or "U" in str(dtype):  # arbitrary bytes are no text
        return np.full(shape, "aä", dtype) if dtype.kind == "U" else np.zeros(shape, dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(count).integers(0, 2, count, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape).copy() if count else np.zeros(shape, dtype)


def _object_array(items):
    result = np.empty(len(items), object)
    for position, item in enumerate(items):
        result[position] = item
    return result


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**63 - 2, 2**65),
    st.integers(-(2**65), -(2**63) + 2),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters()),
    st.just("\ud800 alone"),
    st.binary(),
    st.binary().map(bytearray),
    st.sampled_from([np.float64(1.5), np.int8(-3), np.bool_(True), np.str_(""), np.str_("ä"), np.bytes_(b"a")]),
    st.sampled_from([np.datetime64("2020-01-01"), np.timedelta64(3, "s"), np.complex64(1 + 2j), np.longdouble(0.5)]),
    st.sampled_from([Colour.RED, Word("word"), Pair(1, [2]), Point((1, "a")), fractions.Fraction(1, 3), range(3)]),
    st.sampled_from([datetime.datetime(2020, 1, 1), collections.OrderedDict(b=1, a=2), ..., ValueError, len]),
    arrays,
    tensors,
)
hashable = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers()))
objects = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
        st.lists(inner, max_size=3).map(_object_array),
        inner.map(Point),
        inner.map(lambda value: Pair(value, None)),
    ),
    max_leaves=12,
)
