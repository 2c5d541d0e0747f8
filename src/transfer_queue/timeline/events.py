"""The events of the timeline, as the controller writes them and as readers get them."""

from __future__ import annotations

import enum

import numpy as np


class EventKind(enum.IntEnum):
    """What happened."""

    WAIT = 1
    """A parked claim has ended, with rows or without. `since` is when it was parked."""
    CLAIM = 2
    """A claim was answered with rows."""
    END = 3
    """A claim was answered with the end of its partition."""
    PUT = 4
    """A put was published. `block` is the number of its block."""
    HOLD = 5
    """A producer does not wait any more: with a put or reservation for capacity or a policy version, or for group
    demand. `since` is when it was parked."""
    ACK = 6
    """Rows of a lease were acknowledged."""
    POLICY = 7
    """A policy version was set; `rows` is the version."""
    GONE = 8
    """The last connection of the lane's client has ended, because the client closed (CLOSED) or its process died.
    It is CLOSED as well if the lane's last claim was answered with END."""
    CLEAR = 9
    """Rows were cleared, by the lane's client or by a rule of the partition."""
    RETURN = 10
    """Rows of a lease were returned without an acknowledgement, or the lease ended."""
    READ = 11
    """A client has read values, as it reports with a later request, which is when `time` is. `since` is when the get
    began, and `age` the seconds from its end to `time`."""


AHEAD = 1
"""A flag: the claim was ahead of the batch that its rank needed, so that its rank did not wait."""
TIMED_OUT = 2
"""A flag of WAIT and HOLD: the wait ended without what it waited for."""
NEW_ROWS = 4
"""A flag of PUT: its rows did not exist before."""
WHOLE = 8
"""A flag of CLEAR: the partition was cleared with all its remaining rows; `rows` is then 0."""
DEMAND = 16
"""A flag of HOLD: the producer waited for group demand; `rows` is the number of groups that it would make."""
CLOSED = 32
"""A flag of GONE: the end is not a failure, because the client had announced that it closes, or because its last claim
of the lane's task was answered with the end of the partition."""

EVENT = np.dtype(
    [
        ("time", "<f8"),  # the controller's time
        ("since", "<f8"),  # when the request arrived or was parked; equal to `time` if it was answered immediately
        ("kind", "u1"),  # an EventKind
        ("flags", "u1"),  # AHEAD, TIMED_OUT, NEW_ROWS, WHOLE, DEMAND, CLOSED
        ("_unused", "<u2"),
        ("lane", "<u4"),
        ("partition", "<u4"),
        ("fields", "<u4"),
        ("rows", "<u4"),
        ("_reserved", "<u4"),
        ("bytes", "<u8"),
        ("block", "<u8"),  # PUT: the number of the block; CLAIM: that of a block of one of its rows; 0: none
        ("age", "<f4"),  # CLAIM: the seconds for which this row was ready before; READ: see there; -1: not known
        ("staleness", "<i4"),  # CLAIM: the policy version minus that of this row; -1: not known
    ]
)
"""An event as an array element."""
NO_FIELDS = 0
"""The number of the empty tuple of fields."""
