"""What a client has learned of the fields that it puts: which hold tensors, and of which it has warned already."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.encode import EncodedBlock

MOST_REMEMBERED = 1024  # fields of partitions; one that is forgotten costs a put that is refused and repeated


class FieldKinds:
    """Owned by one client. Of each field it warns once, in whatever partition it meets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._tensors: dict[tuple[str, str], list[str]] = {}
        """(partition, field) -> dtypes, of fields that took values of this client as tensors. It may be out of date."""

    def expect(self, partition: str, encoded: EncodedBlock) -> None:
        """Has the values that were taken as tensors the last time be tensors again; the controller refuses an error."""
        if self._tensors:
            names = [spec.name for spec in encoded.schema if spec.kind == "object"]
            known = {name: dtypes for name in names if (dtypes := self._tensors.get((partition, name))) is not None}
            if known:
                encoded.hold_as_tensors(known)

    def learn(self, partition: str, encoded: EncodedBlock) -> None:
        """Remembers in which form a put was taken."""
        if not self._tensors and not encoded.converted:
            return
        with self._lock:
            for spec in encoded.schema:
                if spec.name in encoded.converted:
                    self._tensors[partition, spec.name] = encoded.converted[spec.name]
                elif spec.kind == "object":
                    self._tensors.pop((partition, spec.name), None)
            while len(self._tensors) > MOST_REMEMBERED:
                self._tensors.pop(next(iter(self._tensors)))

    def warn_of_dtypes(self, partition: str, dtypes: Mapping[str, Sequence[str]]) -> None:
        """Logs that rows of these fields differ in dtype. dtypes: field -> those of its live rows."""
        for name, several in dtypes.items():
            if name in self._warned:
                continue
            self._warned.add(name)
            get_logger(__name__).warning(
                f"field {name!r} of partition {partition!r} has rows of {', '.join(several[:-1])} and {several[-1]}: "
                f"a get over rows of several dtypes returns the dtype of torch.promote_types. If that is not wanted, "
                f"convert the values before the put. (This client says it once for each field.)"
            )
