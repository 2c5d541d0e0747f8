"""The messages between clients, controller and storage units: requests, replies and descriptors.

There is one module for each topic. It has the requests and their replies: `from transfer_queue.messages.claims import
Claim`. Every message is a `msgspec.Struct` that is encoded as a msgpack array. Its tag is the name of its class, unless
the class was renamed. Columns of numbers are sent as the bytes of little-endian numpy arrays (`i8`, `i4`, `u8`), so
that a batch needs a few buffers instead of an object for each row. Records, which only the core writes and replays, are
in `core/events/records.py`.

The messages do not depend on sockets, files, torch or clocks. Durations are in seconds.
"""
