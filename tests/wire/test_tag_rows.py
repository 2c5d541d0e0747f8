"""Tags that travel as columns come back as those that travel as a dict for each row."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from carried_values import Colour, Point, Word, same
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.client.conversion import replies
from transfer_queue.client.conversion.arguments import encoded_tag, encoded_tags
from transfer_queue.errors import InvalidArgumentError, UncarriableValueError
from transfer_queue.messages.puts import PublishReply
from transfer_queue.messages.tag_table import COLUMNS_FROM, SentTags, StoredTags, TagTable
from transfer_queue.wire.objects.object_values import DELETE, decode_tag_value
from transfer_queue.wire.objects.tag_rows import TagRows, empty_tags, table_of_tags

# what almost meets the condition of a column of one type
NEW_ROWS = PublishReply(b"")
"""The reply to a put of new rows."""
ODD = [
    True, 0, 1, -1, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), -(2**63) - 1, 0.0, -0.0, 1.0, float("nan"), float("inf"),
    None, "", "a", "b", "\ud800", b"a", Word("a"), Colour.RED, np.int64(1), np.float32(0.5), torch.tensor(2), (1, 2),
    [1, (2,)], {"a": {"b": None}}, {1: 2}, Point(1), DELETE,
]  # fmt: skip
odd = st.sampled_from(ODD)
plain = st.sampled_from([
    st.integers(-3, 3), st.floats(), st.booleans(), st.none(), st.sampled_from("abc"), st.text(max_size=2), odd,
])  # fmt: skip


@st.composite
def lists_of_tags(draw: st.DrawFn) -> list[Any]:
    """Draw tags that have the same names and types, and often one that differs in something."""
    count = draw(st.integers(COLUMNS_FROM, COLUMNS_FROM + 4))
    names = draw(st.lists(st.sampled_from(["n", "m", "", "ü", "\ud800"]), max_size=3, unique=True))
    kinds = {name: draw(draw(st.just(plain))) for name in names}
    tags: list[Any] = [{name: draw(kind) for name, kind in kinds.items()} for _ in range(count)]
    one = draw(st.integers(0, count - 1))
    match draw(st.sampled_from(["", "", "value", "name", "less", "other", "none", "mapping", "order"])):
        case "value" if names:
            tags[one][names[0]] = draw(odd)
        case "name":
            tags[one]["another"] = 1
        case "less" if names:
            del tags[one][names[-1]]
        case "other" if names:
            tags[one]["other"] = tags[one].pop(names[0])
        case "none":
            tags[one] = None
        case "mapping":
            tags[one] = type("Tag", (dict,), {})(tags[one])
        case "order":
            tags[one] = dict(reversed(tags[one].items()))
    return tags


def outcome(function: Any) -> Any:
    """Return the result of a function, or the type and text of its error."""
    try:
        return function()
    except (InvalidArgumentError, UncarriableValueError, UnicodeEncodeError) as error:
        return type(error), str(error)


def one_by_one(tags: list[Any]) -> list[dict[str, Any]]:
    """Encode and decode tags as a list with a dict for each row."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode([encoded_tag(tag, True) for tag in tags]))
    kept = replies.merged_tags(NEW_ROWS, sent)
    assert isinstance(kept, list)
    return [decode_tag_value(tag) for tag in kept]


def together(tags: list[Any]) -> list[dict[str, Any]]:
    """Encode and decode tags as clients do."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(encoded_tags(tags, True)), type=SentTags)
    if isinstance(sent, TagTable):
        sent.check()
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(replies.merged_tags(NEW_ROWS, sent)), type=StoredTags)
    return replies.tag_list(kept, len(tags), True)


@differential(examples=300)
@given(lists_of_tags())
def test_columns_carry_what_dicts_carry(tags: list[Any]) -> None:
    wanted, found = outcome(lambda: one_by_one(tags)), outcome(lambda: together(tags))
    if isinstance(wanted, tuple):
        assert found == wanted
        return
    assert [set(tag) for tag in found] == [set(tag) for tag in wanted]
    for tag, expected in zip(found, wanted, strict=True):
        for name, value in expected.items():
            assert same(tag[name], value)


@pytest.mark.parametrize("tags", [
    [{"n": 1}, {"m": 1}], [{"n": 1}, {}], [{"n": 1}, None], [{1: 1}, {1: 1}], [{Word("n"): 1}], [], [{"\ud800": 1}],
    [{"n": object}, {"n": lambda: 1}],
])  # fmt: skip
def test_other_tags_are_no_table(tags: list[Any]) -> None:
    assert table_of_tags(tags, True) is None


def test_what_homogeneous_tags_take_on_the_wire() -> None:
    table = table_of_tags([{"n": i, "status": "running"} for i in range(1000)], True)
    assert len(msgspec.msgpack.encode(table)) < 8100
    assert len(msgspec.msgpack.encode(table_of_tags([{}] * 1000, True))) < 30


class TestTagRows:
    def rows(self) -> TagRows:
        table = table_of_tags([{"n": i, "list": [i // 2], "t": (i,)} for i in range(6)], True)
        assert table is not None
        return TagRows.checked(table, True)

    def test_no_two_reads_or_rows_share_a_value(self) -> None:
        rows = self.rows()
        first, second = rows.to_list(), rows.to_list()
        first[0]["list"].append(1)
        first[1]["n"] = 7
        assert second == [{"n": i, "list": [i // 2], "t": (i,)} for i in range(6)] == rows.to_list()
        assert first[1]["list"] == [0]

    def test_selections_and_pickles(self) -> None:
        wanted = self.rows().to_list()
        assert self.rows().take(slice(1, 3)).to_list() == wanted[1:3]
        taken = self.rows().take(np.array([4, 0, 2])).take(np.array([2, 0]))
        assert taken.to_list() == [wanted[2], wanted[4]]
        assert len(taken) == 2
        assert pickle.loads(pickle.dumps(taken)).to_list() == [wanted[2], wanted[4]]
        assert empty_tags(3).take(slice(0, 2)).to_list() == [{}, {}]

    def test_values_that_cannot_be_decoded_are_found_at_once(self) -> None:
        table = table_of_tags([{"p": Point(1)}] * 8, True)
        assert table is not None
        with pytest.raises(UncarriableValueError):
            TagRows.checked(table, False)
