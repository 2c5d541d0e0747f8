"""Messages that nobody honest would send: values at the edges of their types, and bytes twisted afterwards."""

from __future__ import annotations

import random
import struct
import typing
from typing import Any

import msgspec
import numpy as np

from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.tag_table import EntryColumn, TagTable

REQUESTS: tuple[type, ...] = typing.get_args(AnyRequest)
REPLIES: tuple[type, ...] = typing.get_args(AnyReply)

INTS = (
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    -1,
    -2,
    63,
    64,
    255,
    2**20,
    2**28,
    2**31 - 1,
    2**31,
    2**40,
    2**48,
    2**62,
    2**63 - 1,
    -(2**63),
)
WIDE = (2**63, 2**64 - 1)
"""Integers that msgpack can carry and that do not fit into any column."""
FLOATS = (0.0, 0.5, 1.0, 60.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
NAMES = (
    "p",
    "t",
    "x",
    "q",
    "y",
    "k0",
    "k1",
    "g",
    "",
    "\0",
    "ä",
    "writer",
    "controller",
    "__class__",
    "../../etc/passwd",
)
DTYPES = ("float32", "int64", "object", "bool", "complex128", "float99", "")
TAG_KEYS = ("priority", "length", "version", "a", "")

_encode = msgspec.msgpack.Encoder().encode


class Hostile:
    """Makes values of the types that messages are declared with. Most are near what is valid."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def one(self, choices: typing.Sequence[Any]) -> Any:
        return choices[self.rng.randrange(len(choices))]

    def chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    # ------------------------------------------------------------ values by type

    def value(self, kind: Any) -> Any:
        """A value of a type as annotated."""
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if type(None) in inside:
            return (
                None if self.chance(30) else self.value(self.one([each for each in inside if each is not type(None)]))
            )
        if origin is list:
            return [self.value(inside[0]) for _ in range(self.one((0, 1, 1, 2, 2, 3, 5)))]
        if origin is tuple:
            return tuple(self.value(each) for each in inside)
        if origin is dict:
            return self.mapping(inside[1])
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(kind)
        makers = {int: self.int, float: self.float, str: self.str, bytes: self.bytes, bool: lambda: self.chance(50)}
        return makers.get(kind, self.any)()

    def struct(self, kind: type) -> Any:
        """A message of this type."""
        if kind is NewBlock and self.chance(80):
            return self.block(self.rng.randrange(1, 5))
        if kind is Publish and self.chance(80):
            return self.publish()
        if kind is Claim and self.chance(50):
            return self.claim()
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: self.value(hints[field.name]) for field in msgspec.structs.fields(kind)})

    def int(self) -> int:
        return self.rng.randrange(6) if self.chance(60) else self.one(INTS + WIDE)

    def float(self) -> float:
        return self.one(FLOATS)

    def str(self) -> str:
        if self.chance(1):
            return "long" * 20_000
        return self.one(NAMES[:6]) if self.chance(80) else self.one(NAMES)

    def bytes(self) -> bytes:
        how = self.rng.randrange(6)
        if how < 3:
            numbers = [
                self.rng.randrange(8) if self.chance(85) else self.one(INTS) for _ in range(self.rng.randrange(5))
            ]
            return np.array(numbers, "<i8").tobytes()
        if how == 3:
            return np.array([self.rng.randrange(-2, 6) for _ in range(self.rng.randrange(6))], "<i4").tobytes()
        return bytes(self.rng.randrange(256) for _ in range(self.rng.randrange(20)))

    def any(self, depth: int = 0) -> Any:
        how = self.rng.randrange(9 if depth < 3 else 6)
        if how == 0:
            return self.int()
        if how == 1:
            return self.float()
        if how == 2:
            return self.str()
        if how == 3:
            return self.one((None, True, False))
        if how == 4:
            return self.bytes()
        if how == 5:
            return msgspec.msgpack.Ext(self.one((0, 64, 65, 66, -1, 127)), self.bytes())
        if how == 6:
            return [self.any(depth + 1) for _ in range(self.rng.randrange(3))]
        return {self.one(TAG_KEYS): self.any(depth + 1) for _ in range(self.rng.randrange(3))}

    def mapping(self, kind: Any) -> dict[str, Any]:
        keys = (*TAG_KEYS, "dp_rank", "batch_index", "dp_size", "n_samples_per_prompt", "x")
        return {self.one(keys): self.value(kind) for _ in range(self.rng.randrange(4))}

    # ------------------------------------------------------------ messages near what is valid

    def block(self, rows: int) -> NewBlock:
        schema, dims = [], []
        for name in self.rng.sample(("x", "y", "q"), self.rng.randrange(1, 4)):
            dtype = self.one(DTYPES[:5]) if self.chance(90) else self.one(DTYPES)
            ndim = 1 if dtype == "object" else self.one((0, 1, 1, 2, 3, -1, 64, 65))
            ragged = dtype == "object" or ndim == -1 or self.chance(40)
            schema.append(FieldSpec(name, "object" if dtype == "object" else "tensor", dtype, ndim, ragged))
            for _ in range(rows if ragged else 1):
                rank = self.rng.randrange(3) if ndim == -1 else ndim
                dims += [rank] * (ndim == -1) + [
                    self.rng.randrange(5) if self.chance(95) else self.one(INTS) for _ in range(rank)
                ]
        data = np.array(dims, "<i8").tobytes()
        if self.chance(10):
            data = data[: self.rng.randrange(len(data) + 1)] + self.bytes()
        extent = self.rng.randrange(1, 4)
        where = [0, extent, (extent << 20) + 64 * self.rng.randrange(100), 1, 64]
        if self.chance(15):
            where[self.rng.randrange(5)] = self.one(INTS)
        parts = [self.body(schema[:1]), self.body(schema[1:])] if self.chance(10) else []
        slots = None
        if self.chance(20):
            numbers = [
                self.rng.randrange(rows) if self.chance(97) else self.one(INTS) & 0xFFFFFFFF for _ in range(rows)
            ]
            slots = np.array(numbers, "<u4").tobytes() if self.chance(90) else self.bytes()
        return NewBlock(
            *where, rows if self.chance(95) else self.int(), [] if parts and self.chance(90) else schema, data,
            parts=parts, slots=slots,
        )  # fmt: skip

    def publish(self) -> Publish:
        count = self.rng.randrange(1, 5)
        keys = [self.one(("k0", "k1", "k2", "k3", "k4")) for _ in range(count)] if self.chance(20) else None
        if keys is not None and self.chance(80):
            keys = [f"k{i}" for i in range(count)]
        rows = np.arange(count).tobytes() if keys is None and self.chance(40) else None
        block = self.block(count if self.chance(95) else self.rng.randrange(5)) if self.chance(85) else None
        tags: Any = [self.tag() for _ in range(count)] if self.chance(50) else None
        if self.chance(20):
            tags = self.tag_table(count)
        groups = [self.one(("g", "h", "")) for _ in range(count)] if self.chance(15) else None
        further = [self.block(count) for _ in range(self.rng.randrange(3))] if self.chance(20) else []
        return Publish(
            self.one(("p", "q")), count if self.chance(97) else self.int(), rows, keys, block, tags,
            self.chance(20), groups,
            self.value(list[tuple[int, int]]) if self.chance(20) else [], self.one((0, 0, 1, 3, -1, 2**40)),
            self.value(float | None), further=further,
        )  # fmt: skip

    def tag(self) -> dict[str, Any] | None:
        return None if self.chance(20) else {self.one(TAG_KEYS): self.any() for _ in range(self.rng.randrange(3))}

    def tag_table(self, count: int) -> TagTable:
        """Tags as columns, often with kinds, payloads and places that do not fit."""
        columns = []
        for name in self.rng.sample(TAG_KEYS, self.rng.randrange(3)):
            kinds = bytes(self.rng.randrange(7 if self.chance(90) else 256) for _ in range(self.one((1, count, count))))
            payload = bytes(self.rng.randrange(3) for _ in range(self.one((0, count, count))))
            if self.chance(50):
                payload = np.array([self.rng.randrange(3) for _ in range(count)], "<i8").tobytes()
            pool = [self.any() for _ in range(self.rng.randrange(4))]
            columns.append(EntryColumn(name, kinds, payload if self.chance(90) else self.bytes(), pool))
        return TagTable(count if self.chance(95) else self.int() % 100, columns)

    def claim(self) -> Claim:
        sampling = {} if self.chance(50) else self.mapping(Any)
        return Claim(
            self.one(("p", "q")), self.one(("t", "u")), self.rng.sample(("x", "y", "q"), self.rng.randrange(1, 3)),
            self.int(), sampling, self.value(float | None), self.chance(10), self.chance(10),
            self.value(int | None), self.chance(20),
        )  # fmt: skip

    # ------------------------------------------------------------ bytes

    def twisted(self, body: bytes) -> bytes:
        """The bytes with a few changes: flipped, cut, doubled, replaced by numbers at the edges."""
        data = bytearray(body)
        for _ in range(self.rng.randrange(1, 4)):
            if not data:
                return bytes(data)
            at = self.rng.randrange(len(data))
            how = self.rng.randrange(6)
            if how == 0:
                data[at] ^= 1 << self.rng.randrange(8)
            elif how == 1:
                data[at] = self.one((0, 0x80, 0x90, 0xC0, 0xC1, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF, 0xC9, 0xC7))
            elif how == 2:
                del data[at : at + self.rng.randrange(1, 9)]
            elif how == 3:
                data[at:at] = data[at : at + self.rng.randrange(1, 9)]
            elif how == 4:
                data[at:at] = struct.pack(self.one((">I", "<q", ">q")), self.one((0, 1, 2**31 - 1)))
            else:
                data[at : at + 8] = struct.pack("<q", self.one(INTS))
        return bytes(data)

    def body(self, message: Any) -> bytes:
        """An encoded message, twisted now and then."""
        encoded = _encode(message)
        return self.twisted(encoded) if self.chance(10) else encoded
