"""After requests of every kind with one field changed, the state is sound, so that its checkpoint can be loaded.

`make fuzz` runs many more of these lives, and longer ones.
"""

import random

import msgspec
import mutations
import pytest

from transfer_queue.messages.descriptors import BlockLocation, EqualField, FieldSpec, NewBlock
from transfer_queue.messages.puts import Publish

LIVES = 12


@pytest.mark.parametrize("number", range(LIVES))
def test_changed_requests_leave_the_state_sound(number: int) -> None:
    mutations.run(f"a life of {number}", 40)


@pytest.mark.parametrize("number", range(LIVES))
def test_changed_requests_of_a_client_never_let_the_places_of_others_be_refused(number: int) -> None:
    mutations.run(f"a life of {number} beside a liar", 40, key=b"key")


def test_lives_contain_every_kind_of_request_that_changes_the_state() -> None:
    kinds: set[type] = set()
    for number in range(8):
        kinds |= mutations.run(f"kinds {number}", 200, share=0.0).kinds
    assert not mutations.KINDS - kinds


def test_every_field_of_every_request_is_changed_in_some_life() -> None:
    rng = random.Random(1)
    block = NewBlock(
        0,
        1,
        64,
        1,
        64,
        1,
        [FieldSpec("x", "tensor", "float32", 1, False)],
        bytes(8),
        4096,
        [BlockLocation(1, 5, 64, 1)],
        parts=[b"part"],
        slots=bytes(4),
    )
    request = Publish(
        "p", 1, None, ["k"], block, [{"a": 1}], False, ["g"], [(0, 2)], 1, 2.0, 3, ["x"], bytes(8), 9,
        further=[block], equal=[EqualField("x", bytes(16), bytes(4), bytes(1))],
        puts=[1],
    )  # fmt: skip
    changed: set[str] = set()
    for _ in range(2000):
        other = mutations.mutated(rng, request, [7])
        if isinstance(other, Publish):
            for field in msgspec.structs.fields(Publish):
                if getattr(other, field.name) != getattr(request, field.name):
                    changed.add(field.name)
            if other.block is not None:
                for field in msgspec.structs.fields(NewBlock):
                    if getattr(other.block, field.name) != getattr(block, field.name):
                        changed.add(f"block.{field.name}")
    assert changed >= {field.name for field in msgspec.structs.fields(Publish)}
    assert changed >= {f"block.{field.name}" for field in msgspec.structs.fields(NewBlock)}
