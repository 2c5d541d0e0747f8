"""The types of the numbers in messages, with their ranges: a number outside of its range is refused when it arrives.

msgspec checks them while it decodes, which costs nothing measurable. A message that is made in this process is not
checked. NaN and the infinities are outside of every range.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LONGEST_SECONDS = 1e9

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count, a global index, a version, a token, a sequence: what fits into a column of i8."""
AnyIndex = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What a person takes for a global index."""
Version = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""A version of a partition; -1: from before it was made."""
Position = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""A place in a file; -1: no place."""
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A number of bytes, or an offset in an arena."""
Unit = Annotated[int, Meta(ge=0, le=(1 << 23) - 1)]
"""The number of a storage unit. Together with an `ExtentNumber` it fits into a column of i8 (`core.moves`)."""
AnyUnit = Annotated[int, Meta(ge=-1, le=(1 << 23) - 1)]
"""The number of a storage unit; -1: whichever answers."""
ExtentNumber = Annotated[int, Meta(ge=0, le=(1 << 40) - 1)]
"""The number of an extent of a unit."""
Small = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""What fits into a column of i4: the rows of a block, the number of a slot."""
Dimensions = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""Dimensions of a row; -1: see `FieldSpec`."""
Seconds = Annotated[float, Meta(ge=-LONGEST_SECONDS, le=LONGEST_SECONDS)]
"""How long something may take; less than 0 is the same as 0."""
Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""Something that was measured."""
