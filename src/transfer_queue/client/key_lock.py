"""KVLock: a lock of keys as a context manager, also in an event loop; and the methods of a client that return it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.conversion import arguments
from transfer_queue.client.data.lease_renewal import LockLease
from transfer_queue.errors import InvalidArgumentError, LockLostError, TransferQueueError
from transfer_queue.net.calls import Operation

LEASE_SECONDS = 30.0
"""The default duration of the lease of a lock."""


class KVLock:
    """A lock of keys, which is held in a `with` or an `async with` block. `kv_lock` returns it.

    The object can be used for several blocks, one after the other. Each of them takes the lock again.

    Args:
        client: The client that holds the lock.
        keys: See `TransferQueueClient.kv_lock`.
        partition_id: See `TransferQueueClient.kv_lock`.
        timeout: See `TransferQueueClient.kv_lock`.
        lease: See `TransferQueueClient.kv_lock`.

    Example:
        >>> with client.kv_lock(["a", "b"], "train_0") as lock:
        ...     meta = client.kv_put("a", "train_0", {"reward": torch.tensor(1.0)}, fence=lock)
        >>> lock.held
        False
    """

    def __init__(
        self,
        client: GeneratedMethods,
        keys: Sequence[str] | str,
        partition_id: str,
        timeout: float | None,
        lease: float,
    ) -> None:
        arguments.check_partition_id(partition_id)
        self._client = client
        self._keys = list(dict.fromkeys(arguments.validated_keys(keys)))
        if not self._keys:
            raise InvalidArgumentError("keys must name at least one key to lock, got none")
        self._partition_id = partition_id
        self._timeout = arguments.validated_seconds(timeout)
        if self._timeout is not None and self._timeout < 0:
            raise InvalidArgumentError(f"timeout must be a non-negative number of seconds, or None, got {timeout!r}")
        self._seconds = arguments.validated_seconds(lease, "lease")
        if not self._seconds or self._seconds < 0:
            raise InvalidArgumentError(f"lease must be a positive number of seconds, got {lease!r}")
        self._lease: LockLease | None = None
        self._token = 0

    @property
    def keys(self) -> list[str]:
        """The locked keys, without repetitions.

        Example:
            >>> client.kv_lock(["a", "b", "a"], "train_0").keys
            ['a', 'b']
        """
        return list(self._keys)

    @property
    def partition_id(self) -> str:
        """The partition of the keys.

        Example:
            >>> client.kv_lock("a", "train_0").partition_id
            'train_0'
        """
        return self._partition_id

    @property
    def token(self) -> int:
        """The fencing token of the last block. It is greater than that of every lock that was granted before.

        A put with `fence=token` is refused if the lock is not in force any more, in whichever process the put is made.

        Example:
            >>> with client.kv_lock("a", "train_0") as first:
            ...     pass
            >>> with client.kv_lock("a", "train_0") as second:
            ...     second.token > first.token
            True
        """
        if not self._token:
            raise InvalidArgumentError("this lock has no token yet: read it inside of its `with` block")
        return self._token

    @property
    def held(self) -> bool:
        """Whether the lock is held, as far as this process knows. The controller checks only puts with `fence=`.

        Example:
            >>> with client.kv_lock("a", "train_0") as lock:
            ...     lock.held
            True
        """
        lease = self._lease
        return lease is not None and self._client._operations.attachment.renewals.is_renewed(lease)

    def __enter__(self) -> KVLock:
        return self._begin(self._client._run(self._take()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lease = self._end()
        with contextlib.suppress(*_hidden(error)):
            self._check(self._client._run(self._client._operations._release_lock(lease)))

    async def __aenter__(self) -> KVLock:
        return self._begin(await self._client._run_async(self._take()))

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lease = self._end()
        with contextlib.suppress(*_hidden(error)):
            self._check(await self._client._run_async(self._client._operations._release_lock(lease)))

    def _take(self) -> Operation[LockLease]:
        if self._lease is not None:
            raise InvalidArgumentError(
                "this lock object is in use: another `with` block has it. Make one with kv_lock for each block; a lock "
                "is not reentrant"
            )
        assert self._seconds is not None
        operations = self._client._operations
        return operations._take_lock(self._keys, self._partition_id, self._timeout, self._seconds)

    def _begin(self, lease: LockLease) -> KVLock:
        self._lease, self._token = lease, lease.token
        return self

    def _end(self) -> LockLease:
        lease, self._lease = self._lease, None
        if lease is None:
            raise InvalidArgumentError("this lock is not held: use it as `with lock:`, which takes and releases it")
        return lease

    def _check(self, was_in_force: bool) -> None:
        if not was_in_force:
            raise LockLostError(
                f"the lock of {arguments.describe(self.keys)} of partition {self._partition_id!r} (token "
                f"{self._token}) ended before its block did: its lease of {self._seconds:g} s was not renewed in time, "
                f"or a checkpoint was loaded. Other clients may have had the lock meanwhile. Pass fence= to the puts "
                f"of the block, so that they are refused in this case, or a longer lease="
            )

    def __repr__(self) -> str:
        state = f"token {self._token}" if self._lease is not None else "not held"
        return f"KVLock({arguments.describe(self.keys)} of {self._partition_id!r}, {state})"


def _hidden(error: BaseException | None) -> tuple[type[BaseException], ...]:
    """Return the errors of a release that must not hide the error of the block."""
    return () if error is None else (TransferQueueError,)


class LockMethods(GeneratedMethods):
    """The methods of a client that return locks."""

    def kv_lock(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        *,
        timeout: float | None = None,
        lease: float = LEASE_SECONDS,
    ) -> KVLock:
        """Return a lock of keys, which is held in a `with` or an `async with` block.

        While a client holds the lock, no other lock of any of these keys is granted. The keys are locked together, so
        two clients never wait for each other, and in the order in which clients requested them. The keys need not
        exist. A lock restricts only other locks: puts without `fence=` are accepted from everyone.

        The client renews the lease of the lock in the background. The lock ends with its block. It also ends if the
        process is dead, or is stopped for longer than the lease, or if a checkpoint is loaded. A lock is not reentrant:
        a block inside of it that locks the same key waits until its timeout.

        Args:
            keys: The keys (one str for one key).
            partition_id: The partition.
            timeout: Seconds to wait for the lock. Default: the setting `timeouts.call` (60 s). 0 does not wait.
            lease: Seconds after which the lock ends if this process cannot renew it. Default: 30.

        Returns:
            The lock. It is taken at the beginning of the block, which raises WaitTimeoutError if other clients held a
            lock of a key all the time. If the lock was lost during the block, its end raises LockLostError, unless the
            block raises an error itself.

        Raises:
            InvalidArgumentError: There is no key, or a number is not valid.

        Example:
            >>> with client.kv_lock(["a", "b"], "train_0", timeout=10, lease=30) as lock:
            ...     meta = client.kv_put("a", "train_0", {"reward": torch.tensor(1.0)}, fence=lock)
        """
        return KVLock(self, keys, partition_id, timeout, lease)

    def async_kv_lock(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        *,
        timeout: float | None = None,
        lease: float = LEASE_SECONDS,
    ) -> KVLock:
        """Return a lock of keys for an `async with` block; see `kv_lock`, which returns the same.

        Args:
            keys: See `kv_lock`.
            partition_id: See `kv_lock`.
            timeout: See `kv_lock`.
            lease: See `kv_lock`.

        Returns:
            See `kv_lock`.

        Raises:
            InvalidArgumentError: See `kv_lock`.

        Example:
            >>> async with client.async_kv_lock("a", "train_0") as lock:
            ...     meta = await client.async_kv_put("a", "train_0", {"reward": torch.tensor(1.0)}, fence=lock)
        """
        return KVLock(self, keys, partition_id, timeout, lease)
