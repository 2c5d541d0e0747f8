"""Defines the operation that reads, changes and writes a sample atomically, as a generator of calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.arguments import Fence
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.reader import FetchOptions
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.display import short_repr
from transfer_queue.errors import InvalidArgumentError, StaleMetadataError, VersionConflictError, WaitTimeoutError
from transfer_queue.messages import queries
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.tag_table import SentTags
from transfer_queue.metadata.tag_values import deep_copy
from transfer_queue.net.calls import Operation, Pause
from transfer_queue.wire.blocks.encode import encode_row

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two attempts of an update: up to the first, and after many attempts up to the second."""


class UpdateOperations(Topic):
    """The operation of one client that changes a sample depending on its values."""

    def kv_update(
        self,
        key: str,
        partition_id: str,
        fields: Sequence[str] | str,
        fn: Callable[[dict[str, Any]], Mapping[str, Any] | None],
        *,
        empty: Mapping[str, Any] | None = None,
        tag: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
        timeout: float | None = None,
    ) -> Operation[dict[str, Any] | None]:
        """Read fields of one sample, let a function change them, and write the result, as one atomic step.

        No other put to this key happens between the read and the write: if there was one, the update reads the sample
        again and calls `fn` again. Several updates of one key never overwrite each other's results. `fn` runs in this
        process; it should be fast, and have no side effects, because it may run several times.

        If the reply to the write is lost (ConnectionLostError, WaitTimeoutError), the update happened once or not at
        all, as with every put.

        Args:
            key: The key.
            partition_id: The partition.
            fields: The fields that `fn` gets (one str for one field); [] for none.
            fn: A function of a dict with the values of these fields, in the form in which `kv_put` takes them: a tensor
                is the row of this sample. It returns a dict of the fields to write, which may be other fields than
                those it got, or None to write nothing.
            empty: The values that `fn` gets for fields that have no value, because the key is new or was put without
                them; one entry for each of `fields`. The key is created if it does not exist. Default: such a key is an
                error.
            tag: Entries to merge into the tag together with the write, as in `kv_put`. Default: none.
            fence: See `kv_batch_put`.
            timeout: Seconds in which an attempt must succeed. Default: the setting `timeouts.call` (60 s).

        Returns:
            What `fn` returned: the fields that were written; None if nothing was written.

        Raises:
            InvalidArgumentError: The key does not exist or lacks a field, and there is no `empty`; or `fn` returned
                something other than a dict or None.
            WaitTimeoutError: Other clients changed the sample in each attempt: nothing was written, and `__cause__` is
                a VersionConflictError. Or a server did not reply in time.
            LockLostError: The lock of `fence` is not in force any more.
            FieldTypeError: See `kv_batch_put`.
            CapacityError: See `kv_batch_put`.
            SealedError: See `kv_batch_put`.
            UncarriableValueError: See `kv_batch_put`.

        Example:
            >>> put = client.kv_put("steps", "train_0", {"n": 1})
            >>> client.kv_update("steps", "train_0", "n", lambda old: {"n": old["n"] + 1})
            {'n': 2}
            >>> client.kv_update("new", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0})
            {'n': 1}
        """
        yield from self.attachment.learn()
        name = arguments.validated_text(key, "key")
        names = arguments.validated_names(fields, "fields", least=0)
        token = arguments.validated_fence(fence)
        _check_function(fn, names, empty)
        tags = self._writer.encode_tags(arguments.validated_tags(None if tag is None else [tag], 1, "keys"))
        clock, limit = self.attachment.session.clock, arguments.validated_seconds(timeout)
        if limit is not None and limit <= 0:
            raise InvalidArgumentError(f"timeout must be a positive number of seconds, or None, got {timeout!r}")
        deadline = clock() + (self.attachment.settings.call_timeout if limit is None else limit)
        attempts = 0
        while True:
            attempts += 1
            values, located = yield from self._read_sample(name, partition_id, names, empty, deadline - clock())
            changed = _checked_result(fn(values))
            if changed is None or not (changed or tag):
                return changed
            try:
                yield from self._write_sample(name, partition_id, changed, tags, located, token, deadline - clock())
            except (VersionConflictError, StaleMetadataError) as conflict:
                seconds = self.attachment.jitter.uniform(0.0, longest_pause(attempts))
                if clock() + seconds >= deadline:
                    raise WaitTimeoutError(
                        f"Timeout: other clients changed the sample {name!r} of partition {partition_id!r} in each of "
                        f"{attempts} attempts to update it, until the timeout. Pass a longer timeout=, or let the "
                        f"clients take turns with kv_lock."
                    ) from conflict
                yield Pause(seconds)
            else:
                return changed

    def _read_sample(
        self, key: str, partition_id: str, names: list[str], empty: Mapping[str, Any] | None, within: float
    ) -> Operation[tuple[dict[str, Any], LookupReply]]:
        """Return the values of these fields, and the reply that has their version."""
        located: LookupReply | None = None
        request = queries.Lookup(partition_id, None, [key], names, versions=True)

        def look() -> Operation[LookupReply]:
            nonlocal located
            located = yield from self.attachment.look_up(request, max(within, 0.0))
            if empty is None:
                _check_located(key, partition_id, names, located)
            return located

        read = yield from self._reader.read(look, FetchOptions(layout="list"), partition_id)
        assert located is not None
        present = set(read.keys())
        values = {name: read[name][0] for name in names if name in present}
        if empty is not None:
            values = {name: values[name] if name in values else deep_copy(empty[name]) for name in names}
        return values, located

    def _write_sample(
        self,
        key: str,
        partition_id: str,
        changed: dict[str, Any],
        tags: SentTags | None,
        located: LookupReply,
        token: int | None,
        within: float,
    ) -> Operation[None]:
        """Write fields of a sample, which must still be as it was found."""
        encoded = encode_row(changed, allow_pickle=self.attachment.settings.allow_pickle) if changed else None
        put = Publish(
            partition_id, 1, keys=[key], tags=tags, pre_allocate=pre_alloc_sample_num(), epoch=located.epoch,
            expected=located.versions or NEW_KEY, fence=token,
        )  # fmt: skip
        yield from self._writer.publish(encoded, put, max(within, 0.0))


NEW_KEY = np.zeros(1, "<i8").tobytes()
"""The expected version of a key that must not exist."""


def longest_pause(attempts: int) -> float:
    """Return the longest pause in seconds after this number of attempts."""
    return min(FIRST_PAUSE * 2.0 ** min(attempts, 30), LONGEST_PAUSE)


def _check_function(fn: object, names: list[str], empty: object) -> None:
    """Raise InvalidArgumentError if the function cannot be called, or `empty` has other fields than these."""
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        raise InvalidArgumentError(f"fn must be an ordinary function of a dict of values, got {fn!r}")
    if empty is not None and (not isinstance(empty, Mapping) or set(empty) != set(names)):
        raise InvalidArgumentError(f"empty must be a dict with a value for each of the fields {names}, got {empty!r}")


def _checked_result(changed: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what the function of an update returned, as a dict."""
    if changed is not None and not isinstance(changed, Mapping):
        raise InvalidArgumentError(
            f"fn must return a dict of the fields to write, or None, got {short_repr(changed)} of type "
            f"{type(changed).__name__}"
        )
    return None if changed is None else dict(changed)


def _check_located(key: str, partition_id: str, names: list[str], reply: LookupReply) -> None:
    """Raise InvalidArgumentError if a key was not found, or lacks a field."""
    if not reply.count:
        raise InvalidArgumentError(
            f"key {key!r} was not found in partition {partition_id!r}; pass empty= with the values to begin with"
        )
    lacking = [name for name in names if name in reply.lacking]
    if lacking:
        raise InvalidArgumentError(
            f"key {key!r} of partition {partition_id!r} is not ready: it lacks the fields {lacking}; pass empty= with "
            f"the values to begin with"
        )
