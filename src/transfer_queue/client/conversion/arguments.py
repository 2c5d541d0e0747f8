"""Checks the arguments of operations, and converts them for requests and for data parsers.

Each function raises `InvalidArgumentError`, which says what the argument must be and what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from transfer_queue.display import size_text
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import LONGEST_SECONDS
from transfer_queue.messages.descriptors import SEPARATOR, PartitionOptions
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.messages.tag_table import COLUMNS_FROM, SentTags, TagTable
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_columns import rows_of_column
from transfer_queue.net.session import UNSENDABLE
from transfer_queue.wire.blocks.encode import is_nested_table
from transfer_queue.wire.blocks.gather import table_of
from transfer_queue.wire.buffers.jagged import check_lengths
from transfer_queue.wire.objects.object_values import DELETE, encode_tag_value
from transfer_queue.wire.objects.tag_rows import table_of_tags

Columns = TensorDictBase | Mapping[str, Any]
DataParser = Callable[[dict[str, Any]], dict[str, Any]]
Tags = Sequence[Mapping[str, Any]]


class HasToken(Protocol):
    """A lock, with its fencing token."""

    @property
    def token(self) -> int:
        """The token."""


Fence = HasToken | int

LONGEST_TIMEOUT = LONGEST_SECONDS
LONGEST_TASK = 1024
"""Characters of the task with which a client introduces itself."""
LARGE_TAG = 16 << 10
"""Bytes above which the value of a tag entry is better put as a field."""

_encode = msgspec.msgpack.Encoder().encode


def _as_list(values: Any, what: str) -> list[Any]:
    """Return an argument that is a list, or one str, as a list."""
    if isinstance(values, (str, list)):
        return [values] if isinstance(values, str) else list(values)
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:  # scalar tensors have `__iter__`, too
        raise InvalidArgumentError(f"{what} must be a list, got {values!r}")
    return list(values)


def validated_names(names: Sequence[str] | str, what: str, least: int = 1) -> list[str]:
    """Return field names as a list without repetitions. There must be at least `least`."""
    out: dict[str, None] = {}
    for name in _as_list(names, what):
        if isinstance(name, str):
            out[str.__str__(name)] = None
        elif isinstance(name, tuple) and len(name) > 1 and all(isinstance(part, str) for part in name):
            out[SEPARATOR.join(name)] = None  # a path of tensordict, such as ("x", "y"), to a field of a nested one
        else:
            raise InvalidArgumentError(f"{what} must be field names (a list of str, or one str), got {names!r}")
    if len(out) < least:
        raise InvalidArgumentError(f"{what} must be a list with at least one field name, got {names!r}")
    return list(out)


def validated_keys(keys: Sequence[str] | str) -> list[str]:
    """Return keys as a list."""
    out = _as_list(keys, "keys")
    if list(map(type, out)).count(str) != len(out):
        for key in out:
            if not isinstance(key, str):
                raise InvalidArgumentError(f"keys must be str, got {key!r} of type {type(key).__name__}")
        return [str.__str__(key) for key in out]
    return out


def selection(
    partitions: str | Sequence[str] | None, keys: str | Sequence[str] | None
) -> tuple[list[str], list[str] | None] | None:
    """Return the partitions and keys that a checkpoint is limited to; None if it is not."""
    if partitions is None:
        if keys is not None:
            raise InvalidArgumentError(
                f"keys needs partitions, the one partition that has these keys, got keys={keys!r}"
            )
        return None
    names = list(dict.fromkeys(validated_text(name, "partitions") for name in _as_list(partitions, "partitions")))
    if not names or (keys is not None and len(names) > 1):
        wanted = "at least one partition" if keys is None else "a single partition if keys is given"
        raise InvalidArgumentError(f"partitions must name {wanted}, got {partitions!r}")
    chosen = None if keys is None else validated_keys(keys)
    if chosen is not None and not chosen:
        raise InvalidArgumentError("keys must name at least one sample, got none; leave keys out to mean all samples")
    return names, chosen


def validated_count(value: int | None, what: str) -> int:
    """Return an int that is not negative and fits into 63 bits."""
    try:
        number = int(value.__index__())  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        raise InvalidArgumentError(f"{what} must be an int, got {value!r}") from None
    if not 0 <= number < 1 << 63:
        raise InvalidArgumentError(f"{what} must not be negative, nor 2**63 or more, got {number}")
    return number


def validated_bool(value: bool, what: str) -> bool:
    """Return a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{what} must be True or False, got {value!r}")
    return bool(value)


def validated_int(value: int | None, wanted: str) -> int | None:
    """Return an int of 64 bits, which may be negative, or None. `wanted` is the beginning of the error message."""
    if value is None:
        return None
    try:
        number = int(value.__index__())
    except (AttributeError, TypeError):
        number = None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise InvalidArgumentError(f"{wanted}, got {value!r}")
    return number


def validated_version(since: int | None) -> int | None:
    """Return the version of a partition that an earlier call has returned, or None."""
    return validated_int(since, "since must be the version that an earlier call returned")


def validated_indexes(indexes: Sequence[int] | int) -> np.ndarray[Any, Any]:
    """Return global indexes, which are a list or one int, as i8 [rows]."""
    one = hasattr(indexes, "__index__") and np.ndim(indexes) == 0
    listed: list[Any] = [indexes] if one else _as_list(indexes, "global_indexes")
    return np.array([validated_count(index, "a global index") for index in listed], "<i8")


def validated_fence(fence: Fence | None) -> int | None:
    """Return the token of a lock, which is given as the lock or as its token."""
    if fence is None:
        return None
    token: Any = getattr(fence, "token", fence)
    return validated_count(token, "fence (a lock, or its token)")


def validated_text(value: str, what: str) -> str:
    """Return a plain str."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} must be a str, got {value!r}")
    return str.__str__(value)


def validated_text_or_none(value: str | None, what: str) -> str | None:
    """Return a plain str, or None."""
    return None if value is None else validated_text(value, what)


def introduction(task: str | None, rank: int | None) -> Introduce | None:
    """Return the request that introduces a client; None if it has neither a task nor a rank."""
    name = validated_text_or_none(task, "task")
    if rank is not None:
        rank = validated_count(rank, "rank")
        if rank >= 1 << 31:
            raise InvalidArgumentError(f"rank must be less than 2**31, got {rank}")
    if name is not None and len(name) > LONGEST_TASK:
        raise InvalidArgumentError(f"task must have at most {LONGEST_TASK} characters, got {len(name)}")
    return None if name is None and rank is None else Introduce(name or "", -1 if rank is None else rank)


def task_names(free_when: ConsumedBy | Sequence[str] | None) -> list[str]:
    """Return the names of the tasks of `free_when`."""
    if free_when is None:
        return []
    listed = list(free_when.tasks) if isinstance(free_when, ConsumedBy) else _as_list(free_when, "free_when")
    if not listed or not all(isinstance(task, str) for task in listed):
        raise InvalidArgumentError(f"free_when must be a list of task names, for example ['update'], got {free_when!r}")
    return list(dict.fromkeys(listed))


def validated_options(options: PartitionOptions) -> PartitionOptions:
    """Return the options with Python's own numbers, and check that they are numbers. The controller checks ranges."""
    counts = (
        "group_size", "producers", "replicas", "max_staleness", "rows_per_version", "keep_rows", "keep_bytes",
        "max_deliveries", "max_rows",
    )  # fmt: skip
    given = {name: getattr(options, name) for name in counts}
    needed = ("producers", "replicas")
    numbers = {
        name: validated_count(value, name) for name, value in given.items() if value is not None or name in needed
    }
    return msgspec.structs.replace(
        options, **numbers, keep_seconds=validated_seconds(options.keep_seconds, "keep_seconds")
    )


def group_names(groups: Sequence[str | int] | str | int | None) -> list[str]:
    """Return group ids as str; None for no groups."""
    if groups is None:
        return []
    return [str(group) for group in ([groups] if isinstance(groups, int) else _as_list(groups, "groups"))]


def validated_seconds(timeout: float | None, what: str = "timeout") -> float | None:
    """Return a number of seconds, or None."""
    if timeout is None or (type(timeout) is float and abs(timeout) <= LONGEST_TIMEOUT):
        return timeout
    if isinstance(timeout, Real) and abs(timeout) <= LONGEST_TIMEOUT:
        return float(timeout)
    raise InvalidArgumentError(
        f"{what} must be a number of seconds, finite and at most {LONGEST_TIMEOUT:g}, or None, got {timeout!r}"
    )


def validated_device(wanted: torch.device | str) -> torch.device:
    """Return a device of this process, with its number if it has one."""
    try:
        usable = torch.empty(0, device=wanted).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise InvalidArgumentError(
            f"device {wanted!r} cannot be used: {str(error).partition(chr(10))[0]}; pass a torch device of this "
            f"process, or None for the host"
        ) from error
    if usable.type == "meta":
        raise InvalidArgumentError("device 'meta' stores no values; pass another device, or None for the host")
    return usable


def validated_out(out: Any, device: torch.device | None, copy: bool) -> dict[str, torch.Tensor]:
    """Return the caller's tensors for values by field, with the fields of nested tables by their whole names."""
    if device is not None or not copy:
        raise InvalidArgumentError("out= cannot be used with device= or copy=False; pass tensors of that device as out")
    if not isinstance(out, Mapping) and not is_tensor_collection(out):
        raise InvalidArgumentError(f"out must be a TensorDict or a dict of tensors, got a {type(out).__name__}")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in out.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the keys of out must be names of fields (str), got {name!r}")
        if isinstance(value, Mapping) or is_tensor_collection(value):
            inner = validated_out(value, None, True)
            tensors.update({name + SEPARATOR + leaf: tensor for leaf, tensor in inner.items()})
            continue
        _check_out_tensor(name, value)
        tensors[name] = value
    return tensors


def _check_out_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        kind = "nested tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgumentError(f"out[{name!r}] must be a plain tensor, got a {kind}; leave the field out of `out`")
    if value.requires_grad:
        raise InvalidArgumentError(
            f"out[{name!r}] requires a gradient, but its content is replaced; pass a detached one"
        )
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        raise InvalidArgumentError(f"out[{name!r}] must be contiguous, got strides {value.stride()} for shape "
                                   f"{list(value.shape)}; pass a tensor of its own")  # fmt: skip


def check_partition_id(name: object) -> None:
    """Check the name of a partition."""
    if not isinstance(name, str):
        raise InvalidArgumentError(f"partition_id must be a str, got {name!r}")


def rows_of(data: Columns) -> int:
    """Return the number of rows of columns."""
    if isinstance(data, TensorDictBase):
        if not data.batch_dims:
            raise InvalidArgumentError("data has no batch dimension; give the TensorDict batch_size=[rows]")
        return int(data.batch_size[0])
    if not isinstance(data, Mapping) or not data:
        raise InvalidArgumentError(f"data must be a TensorDict with a batch dimension, got a {type(data).__name__}")
    name, first = next(iter(data.items()))
    try:
        return int(first.size(0)) if isinstance(first, torch.Tensor) else len(first)
    except (TypeError, IndexError):
        raise InvalidArgumentError(f"column {name!r} of data must have one value for each row, got {first!r}") from None


def has_no_rows(data: Columns) -> bool:
    """Whether these are columns without rows. False also for a value that is not columns."""
    if isinstance(data, TensorDictBase):
        return rows_of(data) == 0
    return isinstance(data, Mapping) and (not data or rows_of(data) == 0)


def one_row(fields: Columns) -> Columns:
    """Return the fields of one sample, for example in the form for `encode_row`, as columns of one row."""
    if isinstance(fields, TensorDictBase):
        if not fields.batch_dims or fields.batch_size[0] != 1:
            raise InvalidArgumentError(
                f"kv_put needs a TensorDict of batch size 1, got batch size {list(fields.batch_size)}"
            )
        return fields
    if not isinstance(fields, Mapping):
        raise InvalidArgumentError(f"fields must be a dict or a TensorDict, got a {type(fields).__name__}")
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise InvalidArgumentError(
                f"field {name!r} must have the value of one sample, got a nested tensor; pass a dense one"
            )
        columns[name] = value.unsqueeze(0) if isinstance(value, torch.Tensor) else [value]
    return columns


def select_rows(columns: Columns, rows: int, positions: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the rows of columns at these positions."""
    return {name: _selected(column, positions) for name, column in parser_columns(columns, rows).items()}


def _selected(column: Any, positions: np.ndarray[Any, Any]) -> Any:
    if is_nested_table(column):
        chosen = {str(name): _selected(column.get(name), positions) for name in column.keys()}  # noqa: SIM118
        return table_of(chosen, len(positions))
    if isinstance(column, torch.Tensor) and column.is_nested:
        rows = column.unbind()  # torch does not index all nested tensors
        return torch.nested.as_nested_tensor([rows[p] for p in positions.tolist()], layout=column.layout)
    if isinstance(column, torch.Tensor | TensorDictBase):
        return column[torch.from_numpy(positions)]
    return column[positions] if isinstance(column, np.ndarray) else [column[p] for p in positions.tolist()]


def validated_groups(group_ids: Sequence[str | int] | None, rows: int) -> list[str] | None:
    """Return group ids as str, one for each row, or None."""
    if group_ids is None:
        return None
    groups = [str(group) for group in _as_list(group_ids, "group_ids")]
    if len(groups) != rows:
        raise InvalidArgumentError(f"group_ids must have one entry for each of the {rows} rows, got {len(groups)}")
    return groups


def validated_tags(tags: Sequence[Mapping[str, Any]] | None, rows: int, what: str = "rows") -> list[Any] | None:
    """Return tags, one for each row, or None."""
    if tags is None:
        return None
    listed = _as_list(tags, "tags")
    if len(listed) != rows:
        raise InvalidArgumentError(f"tags must have one dict for each of the {rows} {what}, got {len(listed)}")
    return listed


def encoded_tag(tag: Mapping[str, Any] | None, allow_pickle: bool) -> dict[str, Any] | None:
    """Return a tag encoded for requests, or None."""
    if tag is None:
        return None
    if type(tag) is not dict and not isinstance(tag, Mapping):
        raise InvalidArgumentError(f"a tag must be a dict, got a {type(tag).__name__}")
    encoded = {}
    for name, value in tag.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"names of tag entries must be str, got {name!r} of type {type(name).__name__}")
        encoded[name] = encode_tag_value(value, allow_pickle=allow_pickle)
    return encoded


def encoded_tags(tags: Sequence[Mapping[str, Any] | None], allow_pickle: bool) -> SentTags:
    """Return tags encoded for requests: as columns if there are many of the same names."""
    table = table_of_tags(tags, allow_pickle) if len(tags) >= COLUMNS_FROM else None
    return [encoded_tag(tag, allow_pickle) for tag in tags] if table is None else table


def large_tags(sent: SentTags) -> dict[str, str]:
    """Return a warning for each entry of encoded tags that has a value above LARGE_TAG, by the name of the entry."""
    try:
        if len(_encode(sent)) <= LARGE_TAG:
            return {}
    except UNSENDABLE:  # the request with these tags will be refused
        return {}
    largest: dict[str, int] = {}
    for name, values in _tag_values(sent):
        nbytes = max(map(_nbytes_of, values), default=0)
        largest[name] = max(nbytes, largest.get(name, 0))
    return {
        name: f"the tag entry {name!r} of a sample has a value of {size_text(nbytes)}. The controller keeps tags in "
        f"its memory and returns them with every list of keys, so values above {size_text(LARGE_TAG)} slow down the "
        f"whole system. Put such a value as a field (fields={{{name!r}: ...}}), which is stored outside the controller."
        for name, nbytes in largest.items()
        if nbytes > LARGE_TAG
    }


def _tag_values(sent: SentTags) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names and values of encoded tags. Leaves out columns that can have no large value."""
    if isinstance(sent, TagTable):
        yield from ((column.name, column.pool) for column in sent.columns if len(_encode(column.pool)) > LARGE_TAG)
        return
    for tag in sent:
        for name, value in (tag or {}).items():
            yield name, [value]


def _nbytes_of(value: Any) -> int:
    """Return the bytes of an encoded tag value; 0 for a value that is small."""
    kind = type(value)
    if kind is str or kind is bytes:
        return len(_encode(value)) if 4 * len(value) > LARGE_TAG else 0
    if kind is list or kind is dict:
        return len(_encode(value))
    return len(value.data) if kind is Ext else 0


def validated_filter(where: Mapping[str, Any] | None, allow_pickle: bool) -> dict[str, Any]:
    """Return the entries that tags must have, encoded for requests; None for no entry."""
    if where is not None and not isinstance(where, Mapping):
        raise InvalidArgumentError(f"where must be a dict of tag entries, got {where!r}")
    if where and any(value is DELETE for value in where.values()):
        raise InvalidArgumentError(f"where must contain values of tags, and DELETE is not a value, got {dict(where)!r}")
    return encoded_tag(where or {}, allow_pickle) or {}


def encoded_sampling_config(sampling_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a sampling_config encoded for requests."""
    if sampling_config is None:
        return {}
    if not isinstance(sampling_config, Mapping):
        raise InvalidArgumentError(f"sampling_config must be a dict, got {sampling_config!r}")
    return {str(name): encode_tag_value(value) for name, value in sampling_config.items()}


def describe(keys: list[str]) -> str:
    """Return keys as text for a message, at most 5 of them."""
    return repr(keys) if len(keys) <= 5 else f"{keys[:5]!r} and {len(keys) - 5} more"


def check_batch_meta(value: object) -> None:
    """Check that a value is the metadata of samples."""
    if not isinstance(value, BatchMeta):
        raise InvalidArgumentError(
            f"metadata must be a BatchMeta, as get_meta and put return it, got a {type(value).__name__}"
        )


@dataclass(frozen=True)
class ConsumedBy:
    """A sample is freed as soon as each of these tasks has consumed and finished it.

    Example:
        >>> tq.consumed_by["reward", "update"].tasks
        ('reward', 'update')
    """

    tasks: tuple[str, ...]
    """The names of the tasks."""


class _ConsumedBy:
    """The type of `consumed_by`: makes a condition from `consumed_by["a", "b"]` or `consumed_by("a", "b")`."""

    def __getitem__(self, tasks: str | tuple[str, ...]) -> ConsumedBy:
        return ConsumedBy(tasks if isinstance(tasks, tuple) else (tasks,))

    def __call__(self, *tasks: str) -> ConsumedBy:
        return ConsumedBy(tasks)


consumed_by = _ConsumedBy()
"""Makes the condition for `create_partition(free_when=consumed_by["reward", "update"])`."""

# ---------------------------------------------------------------- data parsers
# A data_parser replaces references (URLs, paths) by content. It takes a dict of columns and returns a dict of columns
# with the same keys, lengths and order of rows. It runs in the process of the put, before the write.


def parser_columns(fields: TensorDictBase | Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the columns for a data_parser.

    These are tensors for dense columns, lists for nested and non-tensor columns, and numpy arrays for arrays.
    """
    items = ((name, fields.get(name)) for name in list(fields.keys()))
    return {name: _parser_column(name, value, rows) for name, value in items}


def _parser_column(name: str, value: Any, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return value
        check_lengths(name, value)
        return list(value.unbind(0))
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, NonTensorData):
        held = value.data
        if isinstance(held, list) and len(held) == rows:
            return list(held)
        if isinstance(held, np.ndarray | torch.Tensor) and held.ndim and len(held) == rows:
            return held
        return [held] * rows
    return value


def checked_parser_result(before: Mapping[str, Any], after: Any, rows: int) -> dict[str, Any]:
    """Return the result of a data_parser as a dict in the order of its argument.

    Raises:
        InvalidArgumentError: The result has another type, other keys or lengths, or a value that is not a column.
    """
    if not isinstance(after, Mapping):
        raise InvalidArgumentError(f"data_parser must return a dict of columns, got a {type(after).__name__}")
    if set(after) != set(before):
        raise InvalidArgumentError(
            f"data_parser must return the columns it was given, {sorted(before)}, got {sorted(map(str, after))}"
        )
    for name in before:
        length = rows_of_column(after[name])
        if length is None:
            raise InvalidArgumentError(
                f"data_parser must return a tensor, list or array of {rows} rows as column {name!r}, got a "
                f"{type(after[name]).__name__}"
            )
        if length != rows:
            raise InvalidArgumentError(f"data_parser must return {rows} rows of column {name!r}, got {length}")
    return {name: after[name] for name in before}
