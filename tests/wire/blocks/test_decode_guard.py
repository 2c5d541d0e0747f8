"""The errors that data which is not valid causes while it is decoded."""

import pytest

from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.wire.blocks.row_addressing import DecodeGuard

GUARD = DecodeGuard("the data")


@pytest.mark.parametrize("error", [IndexError("no row"), ValueError("no row"), StopIteration("no row")], ids=repr)
def test_an_error_of_decoding_becomes_one_that_names_the_data_and_its_cause(error):
    with (
        pytest.raises(ProtocolError, match=rf"^the data is not valid: {type(error).__name__}: no row$") as raised,
        GUARD,
    ):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [InvalidArgumentError("an argument"), KeyboardInterrupt()], ids=repr)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as raised, GUARD:
        raise error
    assert raised.value is error


def test_a_guarded_function_returns_its_result_and_may_call_itself():
    @GUARD
    def factorial(number):
        return 1 if number < 2 else number * factorial(number - 1)

    assert factorial(5) == 120
