"""Remembers the fields that a client puts: which ones contain tensors, and which warnings were logged."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from transfer_queue.messages.descriptors import FieldType
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.blocks.encode import EncodedBlock

MOST_REMEMBERED = 1024
"""The number of (partition, field) that a client remembers. A put of a forgotten one is refused once and repeated."""


class FieldKinds:
    """The known fields of one client. It logs each warning once for each field name, for all partitions together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        """Attributes and names of fields."""
        self._tensors: dict[tuple[str, str], list[str]] = {}
        """(partition, field) -> dtypes, for fields that took values of this client as tensors. May be out of date."""

    def expect(self, partition: str, encoded: EncodedBlock) -> None:
        """Encode values as tensors that were taken as tensors in the last put. The controller refuses a wrong guess."""
        if self._tensors:
            names = [spec.name for spec in encoded.schema if spec.kind == "object"]
            known = {name: dtypes for name in names if (dtypes := self._tensors.get((partition, name))) is not None}
            if known:
                encoded.hold_as_tensors(known)

    def learn(self, partition: str, encoded: EncodedBlock) -> None:
        """Remember which fields took the values of a put as tensors."""
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
        """Log that rows of these fields differ in dtype. `dtypes` maps a field to the dtypes of its live rows."""
        for name, several in dtypes.items():
            if self._is_first("dtype", name):
                get_logger(__name__).warning(
                    f"field {name!r} of partition {partition!r} has rows of {', '.join(several[:-1])} and "
                    f"{several[-1]}: a get over rows of several dtypes returns the dtype of torch.promote_types. To "
                    f"prevent this, convert the values before the put. (This client logs this once for each field.)"
                )

    def warn_of_ranks(self, partition: str, types: Sequence[FieldType]) -> None:
        """Log which fields of a get are no tensors because its rows differ in rank."""
        for field in types:
            if field.mixed_rank and self._is_first("rank", field.name):
                get_logger(__name__).warning(
                    f"field {field.name!r} of partition {partition!r}: the rows of a get differ in their number of "
                    f"dimensions, so the get returned them as a NonTensorStack, one tensor for each row. Gets of rows "
                    f"of one rank return a tensor. To prevent this, put rows of one rank: in the dict of a kv_put a "
                    f"tensor is the row itself, without a batch dimension. (This client logs this once for each field.)"
                )

    def _is_first(self, attribute: str, name: str) -> bool:
        """Return whether nothing was logged about this attribute of the field yet."""
        if (attribute, name) in self._warned:
            return False
        self._warned.add((attribute, name))
        return True
