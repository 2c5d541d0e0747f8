"""Define every exception that this package raises deliberately.

    TransferQueueError
    |-- NotInitializedError         (RuntimeError, AssertionError)  no system is running or attached
    |-- StartError                  (RuntimeError)                  a system could not be started
    |-- JournalError                (RuntimeError)                  the journal is damaged or used by another system
    |-- AttachError                 (RuntimeError)                  the named system cannot be reached
    |-- AuthenticationError         (RuntimeError)                  the peer does not have the system's key
    |-- ProtocolError               (RuntimeError)                  the peer uses another protocol version
    |-- ConnectionLostError         (RuntimeError, ConnectionError) the system stopped during a call
    |-- InvalidArgumentError        (ValueError)                    an argument is not valid
    |   |-- FieldTypeError          (ValueError)                    the values do not match those of the field
    |   |-- DuplicateError          (ValueError)                    keys, fields or positions are repeated
    |   |-- OutOfRangeError         (ValueError, IndexError)        a position is outside the batch
    |   `-- BalanceInputError       (ValueError, AssertionError)    a list cannot be divided as requested
    |-- CheckpointError             (ValueError)                    a checkpoint is damaged or cannot be saved
    |-- UncarriableValueError       (TypeError)                     a value cannot be stored
    |-- UnknownKeyError             (RuntimeError)                  a key is not in this batch
    |-- UnknownPartitionError       (RuntimeError)                  a partition does not exist
    |-- StorageKeyNotFoundError     (KeyError)                      a row or value was cleared or never produced
    |   |-- EqualValueGoneError     (KeyError)                      a value to which a put refers was freed
    |   `-- StaleMetadataError      (KeyError)                      the metadata is older than a loaded checkpoint
    |-- CheckpointNotFoundError     (FileNotFoundError)             a checkpoint or a part of it does not exist
    |-- CapacityError               (RuntimeError)                  there is no space for more rows or bytes
    |   |-- StalenessError          (RuntimeError)                  new rows would be too far ahead of the policy
    |   |-- PartitionFullError      (RuntimeError)                  a partition has as many rows as it may have
    |   `-- DeadlockError           (RuntimeError)                  puts and claims wait for each other
    |-- UnitLostError               (RuntimeError)                  a storage unit was lost permanently
    |-- WaitTimeoutError            (TimeoutError, RuntimeError)    a wait ended without success
    |-- LockLostError               (RuntimeError)                  a lock of keys is not in force any more
    |-- VersionConflictError        (RuntimeError)                  a sample changed after it was read
    |-- SealedError                 (RuntimeError)                  a sealed partition accepts no new rows
    |   `-- QueueShutDownError      (queue.ShutDown)                a queue was shut down
    |-- QueueEmptyError             (queue.Empty)                   a queue has no item
    |-- QueueFullError              (queue.Full)                    a queue has as many items as it may have
    |-- BatchGoneError              (RuntimeError)                  a dealt batch cannot be returned again
    `-- SamplerError                (RuntimeError)                  a user's sampler failed
        `-- SamplerValueError       (InvalidArgumentError)          a user's sampler raised a ValueError

A message says what was wrong, what was found, and what to do. An error is sent to a client as its class name and
message (`messages.base.Failure`), never as a pickled object.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import sys

if sys.version_info >= (3, 13):
    _ShutDown = queue.ShutDown
else:

    class _ShutDown(Exception):
        """Stands for `queue.ShutDown`, which older versions of Python do not have."""


class TransferQueueError(Exception):
    """Base class of all errors that this package raises.

    A message longer than `longest` characters is shortened in the middle.

    Example:
        >>> try:
        ...     tq.kv_batch_get(["unknown"], "train_0")
        ... except tq.TransferQueueError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        InvalidArgumentError True
    """

    longest = 8000
    """The maximum number of characters of a message."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_cut(arg, self.longest) if isinstance(arg, str) else arg for arg in args))


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept} characters ...] {text[-kept:]}"


class NotInitializedError(TransferQueueError, RuntimeError, AssertionError):
    """No system is running, or this process is not attached to one. Call `tq.init()`."""


class StartError(TransferQueueError, RuntimeError):
    """A system could not be started. The message contains the traceback of the server."""

    longest = 200_000


class JournalError(TransferQueueError, RuntimeError):
    """The journal cannot be used: it is damaged, has another version, or is in use by another system."""


class AttachError(TransferQueueError, RuntimeError):
    """The named system cannot be reached."""


class AuthenticationError(TransferQueueError, RuntimeError):
    """The peer does not have the key of the system."""


class ProtocolError(TransferQueueError, RuntimeError):
    """The peer uses another protocol version, or sent data that is not a message."""


class ConnectionLostError(TransferQueueError, RuntimeError, ConnectionError):
    """The system stopped during a call."""


class InvalidArgumentError(TransferQueueError, ValueError):
    """An argument is not valid. Nothing was changed."""


class FieldTypeError(InvalidArgumentError):
    """The values of a put do not match the live values of a field. Nothing was changed.

    The field holds values of another kind (tensors or objects), or of a dtype that torch cannot promote with that of
    the new values.

    Args:
        *args: The message.
        tensors: See the attribute.
        field: See the attribute.
    """

    def __init__(self, *args: object, tensors: dict[str, list[str]] | None = None, field: str = "") -> None:
        super().__init__(*args)
        self.field = field
        """The field whose values do not match; "" if no value of the put is at fault."""
        self.tensors = tensors or {}
        """The dtypes of the live rows, for each field that holds tensors and that the put gives other values."""


class DuplicateError(InvalidArgumentError):
    """Keys, fields or positions that must be distinct are repeated."""


class OutOfRangeError(InvalidArgumentError, IndexError):
    """A position is outside the batch."""


class BalanceInputError(InvalidArgumentError, AssertionError):
    """A list of lengths cannot be divided as requested."""


class CheckpointError(TransferQueueError, ValueError):
    """A checkpoint cannot be saved or loaded. Nothing was changed.

    It is damaged, was written by another program or version, or the folder is in use.
    """


class UncarriableValueError(TransferQueueError, TypeError):
    """A value cannot be stored. The message names the field, the row and the type."""


class UnknownKeyError(TransferQueueError, RuntimeError):
    """A key is not in this batch."""


class UnknownPartitionError(TransferQueueError, RuntimeError):
    """A partition does not exist."""


class StorageKeyNotFoundError(TransferQueueError, KeyError):
    """A row was cleared, or does not have a requested field."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a sentence reads better without quotes
        return str(self.args[0]) if self.args else ""


class EqualValueGoneError(StorageKeyNotFoundError):
    """A put refers to a value that was freed meanwhile. The client then writes all values by itself."""


class StaleMetadataError(StorageKeyNotFoundError):
    """The metadata is older than the checkpoint that was loaded since. Fetch it again."""


class CheckpointNotFoundError(TransferQueueError, FileNotFoundError):
    """The checkpoint, or a part of it, does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CapacityError(TransferQueueError, RuntimeError):
    """There is no space for more rows or bytes, or the journal's disk is full. Nothing was put."""


class StalenessError(CapacityError):
    """A partition with `max_staleness` accepts no new rows until the policy version advances. Nothing was put."""


class PartitionFullError(CapacityError):
    """A partition with `max_rows` accepts no new rows until tasks have consumed some. Nothing was put."""


class DeadlockError(CapacityError):
    """A put waits for space, and every client that could free space waits for rows. Nothing was put."""


class UnitLostError(TransferQueueError, RuntimeError):
    """A storage unit was lost permanently. The operation on it was not done."""


class WaitTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """A wait ended before the condition that it waited for was met."""


class LockLostError(TransferQueueError, RuntimeError):
    """A lock of keys has ended: it was released, or its lease was not renewed. A put with its token put nothing."""


class VersionConflictError(TransferQueueError, RuntimeError):
    """A sample changed after it was read, so a put that depends on it put nothing. `kv_update` reads it again."""


class SealedError(TransferQueueError, RuntimeError):
    """A sealed partition accepts no new rows."""


class QueueShutDownError(SealedError, _ShutDown):
    """A queue was shut down: it accepts no items, and no item is left."""


class QueueEmptyError(TransferQueueError, queue.Empty):
    """A queue has no item, or not as many as were requested. If Ray's queue is loaded, it is also Ray's `Empty`."""


class QueueFullError(TransferQueueError, queue.Full):
    """A queue has no space for the items. Nothing was put. If Ray's queue is loaded, it is also Ray's `Full`."""


class BatchGoneError(TransferQueueError, RuntimeError):
    """A dealt batch was requested again, and its rows were cleared, or the sampler keeps no batches."""


class SamplerError(TransferQueueError, RuntimeError):
    """A user's sampler raised an exception, or returned rows that were not offered to it."""


class SamplerValueError(SamplerError, InvalidArgumentError):
    """A user's sampler raised a ValueError. The caller can catch this error as a ValueError, too."""


def by_name(name: str) -> type[TransferQueueError]:
    """Return the exception class of this name; `TransferQueueError` if there is none."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, TransferQueueError):
        return kind
    return TransferQueueError


def advice_on_open_files(error: OSError) -> str | None:
    """Return what to do about an error if it says that no more files can be opened; None for any other error."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"process {os.getpid()} has reached its open-file limit of {limit}: raise `ulimit -n` where it is started, "
            "or let it open fewer connections and files"
        )
    if error.errno == errno.ENFILE:
        return (
            "this machine has reached its open-file limit: raise fs.file-max, or stop processes that have many files "
            "open"
        )
    return None


def with_advice(error: OSError, otherwise: str) -> str:
    """Return an error of the operating system, and what to do about it. `otherwise`: if it is not about open files."""
    return f"{error}; {advice_on_open_files(error) or otherwise}"
