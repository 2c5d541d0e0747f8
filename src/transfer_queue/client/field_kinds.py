"""What a client has learned of the fields that it puts: which hold tensors, and of which it has warned already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfer_queue.utils.logging_utils import get_logger


class FieldKinds:
    """Owned by one client. Of each field it warns once, in whatever partition it meets it."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

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
