"""Requests about locks of keys: take and release them, and list their holders and waiting clients."""

from __future__ import annotations

from transfer_queue.messages.base import Message, Natural, Reply, RequestBody, Seconds, Small


class TakeLock(RequestBody, frozen=True):
    """Lock keys of a partition, all of them at once. The keys and the partition need not exist."""

    partition: str
    keys: list[str]
    lease: Seconds
    """The time after which the lock ends if it is not renewed."""
    wait: Seconds | None = None
    """Seconds to wait while another client holds a lock of one of the keys; None fails at once."""


class ReleaseLock(RequestBody, frozen=True):
    """Release a lock. The reply is `Done(True)` if the lock was in force and this client held it."""

    partition: str
    token: Natural


class ListLocks(RequestBody, frozen=True):
    """Ask for a page of the locks, and of the requests that wait for one."""

    partitions: list[str] | None = None
    """None for all partitions."""
    start: Small = 0
    """`LocksReply.following` of the previous page."""


class LockReply(Reply, frozen=True):
    """The lock was granted."""

    token: int
    """The fencing token. Tokens only grow, and are never used again."""


class LockEntry(Message, frozen=True):
    """A lock of keys, or a request that waits for one. `kv_lock_list` returns them.

    Example:
        >>> with client.kv_lock(["a", "b"], "train_0"):
        ...     [(entry.keys, entry.held) for entry in client.kv_lock_list("train_0")]
        [(['a', 'b'], True)]
    """

    partition: str
    """The name of the partition."""
    keys: list[str]
    """The locked keys, or those for which the request waits."""
    token: int
    """The fencing token; 0 for a request that waits."""
    client: str
    """The id of the client (`TransferQueueClient.client_id`)."""
    seconds: float
    """The time since the lock was granted, or since the request began to wait."""
    lease: float
    """The time in seconds after which the lock ends if its client does not renew it."""
    task: str = ""
    """The task of the client; "" if it is not known."""
    rank: int = -1
    """Its rank; -1 if it is not known."""
    host: str = ""
    """The host of its process; "" if it is not known."""
    pid: int = 0
    """The pid of its process; 0 if it is not known."""

    @property
    def held(self) -> bool:
        """Whether the lock is held. False: the request waits for it."""
        return self.token > 0


class LocksReply(Reply, frozen=True):
    """A page of the locks."""

    locks: list[LockEntry]
    """First the locks in the order in which they were granted, then the requests in the order in which they arrived."""
    following: int | None = None
    """The start of the next page; None if this is the last one."""


class LockSummary(Message, frozen=True):
    """The locks of the whole system in a few numbers, for its status."""

    held: int = 0
    """The number of locks."""
    waiting: int = 0
    """The number of requests that wait for a lock."""
    longest: str = ""
    """A sentence about the request that waits longest; "" if none waits."""
