"""Groups of fields that are put together. A group has one pair of columns in each chunk, and counts its values once.

Which fields are in groups has no meaning: it is saved, but not compared, and a replay may find other groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transfer_queue.core.columns.joined_columns import JoinedBytes, pack_texts, unpack_texts
from transfer_queue.core.columns.schema import Column, Count, Persisted, custom_column, dict_form, require
from transfer_queue.core.tables.field_types import FieldGroup, FieldParts, FieldStats, PreparedTypes
from transfer_queue.core.tables.row_table import RowTable
from transfer_queue.messages.descriptors import FieldSpec

MANY_FIELDS = 64
"""At least this many fields of one block that no row has begin a group."""


class _Members(Column):
    """The fields of each group."""

    def __init__(self) -> None:
        super().__init__(dict_form(Count, JoinedBytes), None, missing={}, compared=False)

    def save(self, table: FieldGroups, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree[self.key] = {number: pack_texts(list(names)) for number, names in table.names_by_number().items()}

    def load(self, table: FieldGroups, loaded: Any) -> None:
        """See `Column`."""
        for number, packed in loaded.members.items():
            table.restore_group(number, [name for some in unpack_texts(packed) for name in some])


Parts = tuple[Sequence[FieldStats], Sequence[FieldGroup]]
"""The fields of a put that are in no group, and the groups of the others, which have no other fields."""


class FieldGroups(Persisted, bare=True):
    """The groups of the fields of one partition. The fields themselves are in `RowTable.fields`."""

    members: Any = custom_column(_Members())

    def __init__(self, rows: RowTable) -> None:
        super().__init__()
        self._rows = rows
        self.by_number: dict[int, FieldGroup] = {}
        self.changes = 0
        """How often the type or the group of a field has changed since this process has the state."""
        self._listed: tuple[Sequence[FieldSpec], Parts] | None = None
        """The last result of `parts_of`."""

    # ------------------------------------------------------------ reading

    def names_by_number(self) -> dict[int, list[str]]:
        """Return the fields of each group. This looks at all fields."""
        found: dict[int, list[str]] = {number: [] for number in self.by_number}
        for name, field in self._rows.fields.items() if found else ():
            if field.group is not None:
                found[field.group.number].append(name)
        return found

    def names_together(self) -> list[list[str]]:
        """Return the fields of each group, and each field that is in none. This looks at all fields."""
        alone = [[name] for name, field in self._rows.fields.items() if field.group is None]
        return [*alone, *self.names_by_number().values()]

    def knows(self, specs: Sequence[FieldSpec]) -> bool:
        """Return whether `parts_of` has its result for this schema already."""
        return self._listed is not None and self._listed[0] is specs

    # ------------------------------------------------------------ changing

    def parts_of(self, specs: Sequence[FieldSpec]) -> Parts:
        """Return the fields with these names, which must exist, for a put that has values of all of them.

        Groups that have other fields, too, are divided. Many fields that no row has begin a group.
        """
        if self._listed is not None and self._listed[0] is specs:
            return self._listed[1]
        fields = self._rows.fields
        if not self.by_number and len(specs) < MANY_FIELDS:
            found = [fields[spec.name] for spec in specs], ()
            self._listed = specs, found
            return found
        parts = FieldParts()
        for spec in specs:
            parts.add(fields[spec.name])
        if len(parts.singles) >= MANY_FIELDS:
            self._begin_group(parts)
        return self._complete(specs, parts)

    def install(self, types: PreparedTypes, schemas: Sequence[Sequence[FieldSpec]]) -> None:
        """Use the groups of the fields of a put, which were just installed."""
        for group, count in types.left.items():
            group.width -= count
            self._remove_if_empty(group)
        for name in types.emptied:
            self._forget_columns(name)
        for specs, parts in zip(schemas, types.parts):
            self._complete(specs, parts)
        self.changes += 1

    def divide(self, group: FieldGroup, fields: Sequence[FieldStats]) -> FieldGroup:
        """Return a group of only these fields of a group."""
        if len(fields) == group.width:
            return group
        made = self._add(FieldGroup())
        made.live, made.ever, made.width = group.live, group.ever, len(fields)
        group.width -= len(fields)
        for field in fields:
            field.group = made
        for chunk in self._rows.chunks.values():
            there = chunk.shared.get(group.number)
            if there is not None:
                chunk.shared[made.number] = (there[0].copy(), there[1].copy())
        self._note_change()
        return made

    def leave(self, names: Iterable[str]) -> None:
        """Give these fields columns of their own."""
        for name in names:
            field = self._rows.fields.get(name)
            group = None if field is None else field.group
            if field is None or group is None:
                continue
            for chunk in self._rows.chunks.values():
                there = chunk.shared.get(group.number)
                if there is not None and group.live:
                    chunk.field[name] = (there[0].copy(), there[1].copy())
            field.leave_group()
            self._remove_if_empty(group)
            self._note_change()

    def add_group(self, fields: Sequence[FieldStats]) -> FieldGroup:
        """Return a new group of fields that have no columns in this partition yet."""
        made = self._add(FieldGroup())
        made.width = len(fields)
        for field in fields:
            field.group = made
        self._note_change()
        return made

    def restore_group(self, number: int, names: Sequence[str]) -> None:
        """Restore a saved group, after the fields."""
        require(names, f"the group {number} of fields has no fields")
        fields = self._rows.fields
        group = self.by_number[number] = FieldGroup()
        group.number, group.width, group.live = number, len(names), fields[names[0]].own_live
        for name in names:
            field = fields[name]
            require(field.group is None, f"field {name!r} is in two groups")
            require(field.own_live == group.live, f"field {name!r} has not as many values as others of its group")
            field.group, field.own_live = group, 0

    def _begin_group(self, parts: FieldParts) -> None:
        """Make a group of those of the fields that no row has, if they are many."""
        new = [field for field in parts.singles if not field.own_live]
        if len(new) < MANY_FIELDS:
            return
        for field in new:
            if field.own_ever:
                self._forget_columns(field.name)
        parts.counts[self.add_group(new)] = len(new)
        parts.singles = [field for field in parts.singles if field.own_live]

    def _complete(self, specs: Sequence[FieldSpec], parts: FieldParts) -> Parts:
        """Divide the groups that have other fields, too. Note the result, and return it."""
        groups = []
        for group, count in parts.counts.items():
            if not group.number:
                self._add(group)
            if count < group.width:
                fields = [self._rows.fields[spec.name] for spec in specs]
                group = self.divide(group, [field for field in fields if field.group is group])
            groups.append(group)
        found = parts.singles, groups
        self._listed = specs, found
        return found

    def _add(self, group: FieldGroup) -> FieldGroup:
        group.number = max(self.by_number, default=0) + 1
        self.by_number[group.number] = group
        return group

    def _remove_if_empty(self, group: FieldGroup) -> None:
        if not group.width:
            del self.by_number[group.number]
            for chunk in self._rows.chunks.values():
                chunk.shared.pop(group.number, None)

    def _forget_columns(self, name: str) -> None:
        """Remove the columns of a field that no row has."""
        for chunk in self._rows.chunks.values():
            chunk.field.pop(name, None)

    def _note_change(self) -> None:
        self.changes += 1
        self._listed = None
