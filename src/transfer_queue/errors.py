"""Every exception that this package raises on purpose, and nothing else.

    TransferQueueError
    |-- NotInitializedError         (RuntimeError, AssertionError)  no system is running or attached
    |-- StartError                  (RuntimeError)                  a system could not be started
    |-- JournalError                (RuntimeError)                  a journal that is damaged, or used by another system
    |-- AttachError                 (RuntimeError)                  a system is named but cannot be reached
    |-- AuthenticationError         (RuntimeError)                  the peer does not hold the system's key
    |-- ProtocolError               (RuntimeError)                  the peer speaks another version, or nonsense
    |-- ConnectionLostError         (RuntimeError, ConnectionError) the system went away during a call
    |-- InvalidArgumentError        (ValueError)                    an argument cannot be right
    |   |-- FieldTypeError          (ValueError)                    a put of another kind than a field's values
    |   |-- DuplicateError          (ValueError)                    keys, fields or positions that are not distinct
    |   |-- OutOfRangeError         (ValueError, IndexError)        a position outside the batch
    |   `-- BalanceInputError       (ValueError, AssertionError)    a list that cannot be partitioned as asked
    |-- CheckpointError             (ValueError)                    one that is damaged, foreign or cannot be saved
    |-- UncarriableValueError       (TypeError)                     a value that cannot be stored
    |-- UnknownKeyError             (RuntimeError)                  a key that is not in this batch
    |-- UnknownPartitionError       (RuntimeError)                  a partition that does not exist
    |-- StorageKeyNotFoundError     (KeyError)                      a row or value that was cleared or never produced
    |   `-- StaleMetadataError      (KeyError)                      metadata of before a checkpoint was loaded
    |-- CheckpointNotFoundError     (FileNotFoundError)             no checkpoint there, or not all of it
    |-- CapacityError               (RuntimeError)                  no room for more rows or bytes
    |   |-- StalenessError          (RuntimeError)                  new rows too far ahead of the policy
    |   `-- DeadlockError           (RuntimeError)                  full, and all who could make room wait for rows
    |-- UnitLostError               (RuntimeError)                  a storage unit that will not come back
    |-- WaitTimeoutError            (TimeoutError, RuntimeError)    a wait ended before what it waited for
    |-- SealedError                 (RuntimeError)                  a sealed partition takes no new rows
    |-- BatchGoneError              (RuntimeError)                  a dealt batch whose rows are cleared
    `-- SamplerError                (RuntimeError)                  a user's sampler raised or returned nonsense
        `-- SamplerValueError       (InvalidArgumentError)          a user's sampler raised a ValueError

Messages say what was wanted, what was there and what to do. Over the wire an error travels as its
class name and message (`messages.Failure`), never as a pickled object.
"""

from __future__ import annotations


class TransferQueueError(Exception):
    """Base of every error raised by this package. A message that quotes something very long is cut in the middle."""

    longest = 8000  # characters of a message

    def __init__(self, *args: object) -> None:
        super().__init__(*(_cut(arg, self.longest) if isinstance(arg, str) else arg for arg in args))


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept} characters ...] {text[-kept:]}"


class NotInitializedError(TransferQueueError, RuntimeError, AssertionError):
    """No system is running or attached in this process."""


class StartError(TransferQueueError, RuntimeError):
    """A system could not be started; the message carries the server's traceback."""

    longest = 200_000


class JournalError(TransferQueueError, RuntimeError):
    """A journal cannot be used: it is damaged, of another version, or another system writes it."""


class AttachError(TransferQueueError, RuntimeError):
    """A system is named but cannot be reached."""


class AuthenticationError(TransferQueueError, RuntimeError):
    """The peer does not hold the system's key."""


class ProtocolError(TransferQueueError, RuntimeError):
    """The peer speaks another protocol version, or sent something that is no message."""


class ConnectionLostError(TransferQueueError, RuntimeError, ConnectionError):
    """The system went away during a call."""


class InvalidArgumentError(TransferQueueError, ValueError):
    """An argument cannot be right; nothing was changed."""


class FieldTypeError(InvalidArgumentError):
    """The values of a put do not match the live ones of a field: another kind, or dtypes that torch does not promote.

    Nothing was changed.

    Attributes:
        tensors: The dtypes of the live rows of those fields that hold tensors and that the put gives other values.
    """

    def __init__(self, *args: object, tensors: dict[str, list[str]] | None = None) -> None:
        super().__init__(*args)
        self.tensors = tensors or {}


class DuplicateError(InvalidArgumentError):
    """Keys, fields or positions that must be distinct are not."""


class OutOfRangeError(InvalidArgumentError, IndexError):
    """A position outside the batch."""


class BalanceInputError(InvalidArgumentError, AssertionError):
    """A list of lengths that cannot be partitioned as asked."""


class CheckpointError(TransferQueueError, ValueError):
    """A checkpoint or saved state is damaged, foreign, of another version, or cannot be saved; nothing was changed."""


class UncarriableValueError(TransferQueueError, TypeError):
    """A value that cannot be stored; the message names field, row and type."""


class UnknownKeyError(TransferQueueError, RuntimeError):
    """A key that is not in this batch."""


class UnknownPartitionError(TransferQueueError, RuntimeError):
    """A partition that does not exist."""


class StorageKeyNotFoundError(TransferQueueError, KeyError):
    """A row was cleared, or lacks a wanted field."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a sentence reads better without quotes
        return str(self.args[0]) if self.args else ""


class StaleMetadataError(StorageKeyNotFoundError):
    """Metadata that was made before a checkpoint was loaded names rows of the time before; nothing was changed."""


class CheckpointNotFoundError(TransferQueueError, FileNotFoundError):
    """There is no checkpoint, or a file of it is missing; nothing was changed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CapacityError(TransferQueueError, RuntimeError):
    """No room for more rows or bytes; the put left nothing."""


class StalenessError(CapacityError):
    """A partition with `max_staleness` takes no more new rows until the policy has advanced; nothing was put."""


class DeadlockError(CapacityError):
    """A put waits for space while everybody who could make space waits for rows; nothing was put."""


class UnitLostError(TransferQueueError, RuntimeError):
    """A storage unit will not come back; what was to be done there was not done."""


class WaitTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """A wait ended before what it waited for."""


class SealedError(TransferQueueError, RuntimeError):
    """A sealed partition takes no new rows."""


class BatchGoneError(TransferQueueError, RuntimeError):
    """A dealt batch that is asked for again after its rows were cleared."""


class SamplerError(TransferQueueError, RuntimeError):
    """A user's sampler raised, or returned rows that it was not offered."""


class SamplerValueError(SamplerError, InvalidArgumentError):
    """A user's sampler raised a ValueError. For the caller this error is a ValueError, too."""


def by_name(name: str) -> type[TransferQueueError]:
    """The class of the tree with this name; the base for a name that is not in it."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, TransferQueueError):
        return found
    return TransferQueueError
